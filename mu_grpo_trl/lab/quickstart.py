"""
`mu-grpo quickstart`: train on sums in a few large stages, and show what came of it.

`--task arithmetic` (the default) trains the shipped 0.34 M-parameter policy on three-number sums with worked steps;
`--task smollm2` trains SmolLM2-135M-Instruct on two-number sums. Each evaluates greedily on held-out problems before
and after, ends with a table and a figure, and writes `summary.json` into the output folder. What is not an option of
this command is passed on to the recipe: `--learning_rate 5e-5`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from ..report.figures import draw_sheet, save
from ..report.runs import load_run
from ..stage.reader import StageReader
from ..train import make_trainer, parse, recipe_path
from . import arithmetic
from .rewards import arithmetic_reward, sum_reward
from .warm_start import warm_start_path


@dataclass(frozen=True)
class Task:
    """
    A learning setup with its evaluation.

    Args:
        recipe (`str`): file name of its recipe.
        model (`Callable[[], Path]`): gives the folder of the starting policy.
        held_out (`Callable[[], Dataset]`): gives the held-out problems, the same for all seeds.
        reward (`Callable`): judges the greedy responses.
        max_new_tokens (`int`): limit on one of those.
        num_threads (`int` or None): torch's threads; None leaves them.
    """

    recipe: str
    model: Callable[[], Path]
    held_out: Callable[[], Dataset]
    reward: arithmetic.RewardFunction
    max_new_tokens: int
    num_threads: int | None = None


def _arithmetic() -> Task:
    return Task(
        recipe="quickstart.yaml",
        model=warm_start_path,
        held_out=lambda: arithmetic.make_problems(500, split="held_out"),
        reward=arithmetic_reward,
        max_new_tokens=arithmetic.MAX_RESPONSE_TOKENS,
        num_threads=1,  # so small a model computes no faster on two, and much slower when one of them is busy
    )


def _smollm2() -> Task:
    from . import smollm2  # needs gguf

    folder = Path("runs/smollm2-135m-instruct")
    return Task(
        recipe="smollm2-135m-cpu.yaml",
        model=lambda: folder if (folder / "config.json").exists() else smollm2.convert(folder),
        held_out=lambda: smollm2.make_sums(400, split="held_out"),
        reward=sum_reward,
        max_new_tokens=smollm2.MAX_RESPONSE_TOKENS,
    )


TASKS = {"arithmetic": _arithmetic, "smollm2": _smollm2}


def run(name: str, engine: str | None, seed: int, output_dir: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """
    Train once and return the summary: accuracies before and after with a paired test, updates, stages, seconds.

    Args:
        name (`str`): of the task.
        engine (`str` or None): `"transformers"` (in process) or `"vllm"` (a managed server); None for the recipe's.
        seed (`int`): of data order, sampling and training; the held-out problems are the same for all seeds.
        output_dir (`Path`): stages that a former run left there are removed.
        overrides (`Sequence[str]`): more `--key value` arguments.
    """
    task = TASKS[name]()
    if task.num_threads is not None:
        torch.set_num_threads(task.num_threads)
    argv = ["--config", str(recipe_path(task.recipe)), "--model_name_or_path", str(task.model())]
    argv += ["--seed", str(seed), "--output_dir", str(output_dir)]
    argv += ["--rollout_engine", engine] if engine else []
    argv += ["--vllm_python", os.environ["MU_GRPO_VLLM_PYTHON"]] if "MU_GRPO_VLLM_PYTHON" in os.environ else []
    shutil.rmtree(output_dir / "stages", ignore_errors=True)  # else the same seed would reuse its first stage
    trainer = make_trainer(*parse([*argv, *overrides]))
    held_out = task.held_out()

    def evaluate() -> list[float]:
        tokenizer = trainer.processing_class
        return arithmetic.greedy_rewards(trainer.model, tokenizer, held_out, task.max_new_tokens, task.reward)

    before = evaluate()
    trainer.train()
    after = evaluate()
    trainer.save_model(str(output_dir))
    history = trainer.state.log_history
    stages = [StageReader(trainer.stage_maker.folder(stage)) for stage in range(trainer.schedule.num_stages)]
    summary = json.loads((output_dir / "summary.json").read_text()) | {
        "task": name,
        "engine": trainer.args.rollout_engine,
        "seed": seed,
        "num_held_out": len(held_out),
        "accuracy_before": sum(before) / len(before),
        "accuracy_after": sum(after) / len(after),
        "p_value": paired_p_value(before, after),
        "stage_rewards": [stage.summary().mean_reward for stage in stages],
        "vetoed_token_share": _mean([entry.get("veto/token_fraction") for entry in history]),
    }
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=1))
    save(draw_sheet([load_run(output_dir)]), output_dir / "run.png")
    return summary


def paired_p_value(before: Sequence[float], after: Sequence[float]) -> float:
    """Two-sided exact McNemar test of binary verdicts on the same problems."""
    gained = sum(b < a for b, a in zip(before, after, strict=True))
    lost = sum(b > a for b, a in zip(before, after, strict=True))
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1)) / 2**changed
    return min(1.0, 2 * tail)


def show(summary: dict[str, Any], output_dir: Path) -> None:
    """Print the table."""
    rows = {
        "accuracy before": f"{summary['accuracy_before']:.3f}",
        "accuracy after": f"{summary['accuracy_after']:.3f}   ({summary['num_held_out']} held-out problems, greedy; "
        f"paired test p = {summary['p_value']:.1g})",
        "reward by stage": " → ".join(f"{reward:.2f}" for reward in summary["stage_rewards"]),
        "updates, stages": f"{summary['num_updates']:.0f} in {summary['num_stages']:.0f}",
        "T_rollout": f"{summary['rollout_s']:.1f} s",
        "T_total": f"{summary['total_s']:.1f} s",
        "vetoed tokens": f"{summary['vetoed_token_share']:.2%}",
        "engine": summary["engine"],
    }
    width = max(map(len, rows))
    print("\n" + "\n".join(f"  {name:<{width}}   {value}" for name, value in rows.items()))
    print(f"\n  {output_dir}/summary.json, run.png, stages/ (open one with `mu_grpo_trl.load_stage`)\n")


def _mean(values: Sequence[float | None]) -> float:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else 0.0


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="mu-grpo quickstart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", choices=tuple(TASKS), default="arithmetic")
    parser.add_argument("--engine", choices=("transformers", "vllm"), help="by default the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="by default runs/quickstart or runs/smollm2")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    arguments, overrides = make_parser().parse_known_args(argv)
    output = arguments.output or Path("runs", "quickstart" if arguments.task == "arithmetic" else arguments.task)
    show(run(arguments.task, arguments.engine, arguments.seed, output, overrides), output)


if __name__ == "__main__":
    main()
