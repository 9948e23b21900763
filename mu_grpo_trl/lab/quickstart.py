"""
`mu-grpo quickstart`: train the shipped tiny policy on three-number sums in four stages, and show what came of it.

Ends with a table and figures, and writes `summary.json` into the output folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report.figures import plot_run
from ..stage.reader import StageReader
from ..train import make_trainer, parse, recipe_path
from .arithmetic import MAX_RESPONSE_TOKENS, greedy_accuracy, make_problems
from .warm_start import warm_start_path

NUM_HELD_OUT = 500


def run(engine: str, seed: int, output_dir: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """
    Train once and return the summary: accuracies before and after, updates, stages, seconds, vetoed share.

    Args:
        engine (`str`): `"transformers"` (in this process) or `"vllm"` (a managed server).
        seed (`int`): of data order, sampling and training; the held-out problems are the same for all seeds.
        output_dir (`Path`): what a former quickstart left there is replaced by this run's.
        overrides (`Sequence[str]`): more `--key value` arguments.
    """
    argv = ["--config", str(recipe_path("quickstart.yaml")), "--model_name_or_path", str(warm_start_path())]
    argv += ["--rollout_engine", engine, "--seed", str(seed), "--output_dir", str(output_dir), *overrides]
    if engine == "vllm" and "MU_GRPO_VLLM_PYTHON" in os.environ:
        argv += ["--vllm_python", os.environ["MU_GRPO_VLLM_PYTHON"]]
    shutil.rmtree(output_dir / "stages", ignore_errors=True)  # else the same seed would reuse its first stage
    trainer = make_trainer(*parse(argv))
    held_out = make_problems(NUM_HELD_OUT, seed=0, split="held_out")

    def accuracy() -> float:
        return greedy_accuracy(trainer.model, trainer.processing_class, held_out, MAX_RESPONSE_TOKENS)

    before = accuracy()
    trainer.train()
    after = accuracy()
    trainer.save_model(str(output_dir))
    history = trainer.state.log_history
    summary = json.loads((output_dir / "summary.json").read_text()) | {
        "engine": engine,
        "seed": seed,
        "accuracy_before": before,
        "accuracy_after": after,
        "stage_rewards": [
            StageReader(trainer.stage_maker.folder(stage)).summary().mean_reward
            for stage in range(trainer.schedule.num_stages)
        ],
        "vetoed_token_share": _mean([entry.get("veto/token_fraction") for entry in history]),
    }
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=1))
    plot_run(history, trainer.args.stage_updates, output_dir / "run.png")
    return summary


def show(summary: dict[str, Any], output_dir: Path) -> None:
    """Print the table."""
    rewards = " → ".join(f"{reward:.2f}" for reward in summary["stage_rewards"])
    rows = {
        "accuracy before": f"{summary['accuracy_before']:.3f}",
        "accuracy after": f"{summary['accuracy_after']:.3f}   ({NUM_HELD_OUT} held-out problems, greedy)",
        "reward by stage": rewards,
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


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="mu-grpo quickstart", description=__doc__)
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    arguments, overrides = parser.parse_known_args(argv)
    show(run(arguments.engine, arguments.seed, arguments.output, overrides), arguments.output)


if __name__ == "__main__":
    main()
