"""
Whole training runs: μ-GRPO in a few large stages against GRPO at μ = 4, from equal models, prompts, G and updates.

    python -m benchmarks.end_to_end --case quickstart                   # generation in process
    python -m benchmarks.end_to_end --case quickstart --engine vllm     # one vLLM server for both, started before
    python -m benchmarks.end_to_end --case smollm2

The other side is the faster of

- `trl`: stock `trl.GRPOTrainer`, generation in process, `steps_per_generation = 4 × gradient_accumulation_steps`, its
  micro-batch the fastest of a few in short runs before;
- `mu4`: this trainer with `objective: grpo` and μ = 4 on the same engine, which keeps running. Stock TRL cannot use a
  vLLM server without a GPU, so with `--engine vllm` it is the only other side unless `--against` says otherwise.

`--against trl` or `--against mu4` compares with that one alone. The ratio is of T_total, the wall-clock of `train()`;
T_rollout (generation, rewards) has one of its own, and each side's greedy accuracy on held-out problems stands beside.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import set_seed
from trl import GRPOConfig, GRPOTrainer

from mu_grpo_trl.lab import arithmetic
from mu_grpo_trl.lab.quickstart import TASKS, Task
from mu_grpo_trl.preflight import managed_servers
from mu_grpo_trl.train import load_dataset, make_trainer, parse, recipe_path

from .common import make_parser, num_pairs, report, seconds

BASELINE_STAGE_UPDATES = 4
TUNING_UPDATES = 4


@dataclass(frozen=True)
class Case:
    """
    What both sides train.

    Args:
        task (`str`): of `mu-grpo quickstart`.
        num_updates (`int`), stage_updates (`int`): of a run, and μ of this side.
        num_threads (`int`): torch's.
        microbatches (`tuple[int, ...]`): rows that TRL's side is tried with.
    """

    task: str
    num_updates: int
    stage_updates: int
    num_threads: int
    microbatches: tuple[int, ...]


CASES = {
    "quickstart": Case("arithmetic", num_updates=64, stage_updates=16, num_threads=1, microbatches=(32, 64, 128, 256)),
    "smollm2": Case("smollm2", num_updates=4, stage_updates=4, num_threads=1, microbatches=(16, 64)),
}


@dataclass(frozen=True)
class Outcome:
    """One run: T_total and T_rollout in seconds, and greedy accuracy after it (NaN if it was not asked for)."""

    total_s: float
    rollout_s: float
    accuracy: float


@dataclass(frozen=True)
class Setup:
    """A case with what the command line chose."""

    case: Case
    engine: str
    num_updates: int
    stage_updates: int
    folder: Path
    server_url: str | None = None

    @property
    def task(self) -> Task:
        return TASKS[self.case.task]()


def run_ours(setup: Setup, seed: int, *, baseline: bool) -> Outcome:
    """This trainer: μ-GRPO, or GRPO at μ = 4 (`baseline`)."""
    stage_updates = BASELINE_STAGE_UPDATES if baseline else setup.stage_updates
    options: dict[str, Any] = {
        "model_name_or_path": setup.task.model(),
        "output_dir": tempfile.mkdtemp(dir=setup.folder),
        "seed": seed,
        "max_steps": setup.num_updates,
        "stage_updates": stage_updates,
        "rollout_engine": setup.engine,
        "keep_stages": 0,
        "disable_tqdm": True,
    }
    if baseline:
        options["objective"] = "grpo"
    if setup.server_url is not None:
        options |= {"vllm_mode": "server", "vllm_server_urls": setup.server_url}
    trainer = make_trainer(*parse(_arguments(setup, options)))
    total_s = seconds(trainer.train)
    return Outcome(total_s, trainer.telemetry.rollout_s, _accuracy(trainer, setup.task))


def run_trl(setup: Setup, seed: int, microbatch: int, *, num_updates: int | None = None) -> Outcome:
    """Stock TRL at μ = 4, generating in process; with `num_updates`, a short run without evaluation, for tuning."""
    script, ours, _ = parse(_arguments(setup, {"rollout_engine": "transformers", "seed": seed}))
    rows = ours.prompts_per_update * (ours.num_generations or 0)
    microbatch = min(microbatch, rows)
    accumulation = rows // microbatch
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=setup.folder),
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=BASELINE_STAGE_UPDATES * accumulation,
        max_steps=num_updates or setup.num_updates,
        loss_type="grpo",
        disable_tqdm=True,
        **{name: getattr(ours, name) for name in _SHARED},
    )
    set_seed(seed)
    trainer = GRPOTrainer(
        model=str(setup.task.model()),
        reward_funcs=setup.task.reward,
        args=config,
        train_dataset=load_dataset(script),
    )
    with _accumulating(trainer, "_generate", "_calculate_rewards") as parts:
        total_s = seconds(trainer.train)
    accuracy = float("nan") if num_updates else _accuracy(trainer, setup.task)
    return Outcome(total_s, sum(parts), accuracy)


_SHARED = (
    "num_generations", "max_completion_length", "temperature", "beta", "seed", "learning_rate", "lr_scheduler_type",
    "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "bf16", "use_cpu",
    "gradient_checkpointing", "logging_steps", "save_strategy", "report_to",
)  # fmt: skip
"""Options that mean the same to TRL and take the recipe's value."""


@contextmanager
def serving(setup: Setup) -> Iterator[Setup]:
    """The setup with a vLLM server on the starting policy, stopped at the end; the setup itself without the engine."""
    if setup.engine != "vllm":
        yield setup
        return
    python = os.environ.get("MU_GRPO_VLLM_PYTHON", ".venv-vllm/bin/python")
    _, config, _ = parse(_arguments(setup, {"rollout_engine": "vllm", "vllm_python": python}))
    assert config.max_context_length is not None
    [server] = managed_servers(config, config.max_context_length)
    server.start(setup.task.model().resolve())
    try:
        yield replace(setup, server_url=server.url)
    finally:
        server.stop()


def _arguments(setup: Setup, options: dict[str, Any]) -> list[str]:
    arguments = ["--config", str(recipe_path(setup.task.recipe))]
    if setup.server_url is not None:
        arguments = ["--config", str(_without_server_options(setup))]
    for name, value in options.items():
        values = value if isinstance(value, list) else [value]
        arguments += [f"--{name}", *map(str, values)]
    return arguments


def _without_server_options(setup: Setup) -> Path:
    """The recipe without what only managed servers take."""
    lines = recipe_path(setup.task.recipe).read_text().splitlines()
    path = setup.folder / "recipe.yaml"
    path.write_text("\n".join(line for line in lines if not line.startswith(("vllm_server_args", "vllm_release"))))
    return path


@contextmanager
def _accumulating(trainer: Any, *methods: str) -> Iterator[list[float]]:
    """The seconds of every call of those methods, which must not call each other."""
    parts: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                parts.append(time.perf_counter() - start)

        return call

    for name in methods:
        setattr(trainer, name, timed(getattr(trainer, name)))
    yield parts


def _accuracy(trainer: Any, task: Task) -> float:
    rewards = arithmetic.greedy_rewards(
        trainer.model, trainer.processing_class, task.held_out(), task.max_new_tokens, task.reward
    )
    return statistics.mean(rewards)


def _fastest_microbatch(setup: Setup) -> int:
    times = {size: run_trl(setup, 0, size, num_updates=TUNING_UPDATES).total_s for size in setup.case.microbatches}
    print(f"trl: seconds for {TUNING_UPDATES} updates by micro-batch: {json.dumps(times)}", flush=True)
    return min(times, key=times.__getitem__)


def compare(setup: Setup, against: str, pairs: int) -> dict[str, Any]:
    """Run all sides `pairs` times, alternately, each time with another seed, and report."""
    sides: dict[str, Callable[[int], Outcome]] = {"ours": lambda seed: run_ours(setup, seed, baseline=False)}
    if against in ("mu4", "faster"):
        sides["mu4"] = lambda seed: run_ours(setup, seed, baseline=True)
    if against == "trl" or (against == "faster" and setup.engine != "vllm"):
        microbatch = _fastest_microbatch(setup)
        sides["trl"] = lambda seed: run_trl(setup, seed, microbatch)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in sides}
    for seed in range(pairs):
        for name in list(sides) if seed % 2 == 0 else reversed(list(sides)):
            outcome = sides[name](seed)
            outcomes[name].append(outcome)
            print(f"seed {seed} {name}: {outcome}", flush=True)

    def ratios(other: str, kind: str) -> list[float]:
        return [getattr(o, kind) / getattr(u, kind) for o, u in zip(outcomes[other], outcomes["ours"], strict=True)]

    others = [name for name in sides if name != "ours"]
    faster = min(others, key=lambda name: statistics.median(o.total_s for o in outcomes[name]))
    extra: dict[str, Any] = {"against": faster, "stage_updates": setup.stage_updates, "updates": setup.num_updates}
    for name in others:
        extra[f"total_ratio_{name}"] = _spread(ratios(name, "total_s"))
        extra[f"rollout_ratio_{name}"] = _spread(ratios(name, "rollout_s"))
    for name, runs in outcomes.items():
        extra[f"accuracy_{name}"] = _spread([run.accuracy for run in runs])
    return report(f"end_to_end/{setup.case.task}/{setup.engine}", ratios(faster, "total_s"), **extra)


def _spread(values: list[float]) -> list[float]:
    """Median, lowest and highest."""
    return [round(value, 4) for value in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = make_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--case", choices=tuple(CASES), default="quickstart")
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--against", choices=("faster", "trl", "mu4"), default="faster")
    parser.add_argument("--updates", type=int, help="of one run; by default the case's")
    parser.add_argument("--stage-updates", type=int, help="μ of this side; by default the case's")
    parser.add_argument("--threads", type=int, help="torch's; by default the case's")
    options = parser.parse_args()
    case = CASES[options.case]
    torch.set_num_threads(options.threads or case.num_threads)
    with tempfile.TemporaryDirectory() as folder:
        updates = options.updates or case.num_updates
        setup = Setup(case, options.engine, updates, options.stage_updates or case.stage_updates, Path(folder))
        with serving(setup) as served:
            compare(served, options.against, num_pairs(options))


if __name__ == "__main__":
    main()
