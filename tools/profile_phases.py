"""
Where the time of one fill and of one update goes, operator by operator (torch profiler), on the quickstart's model.

    python tools/profile_phases.py [--task smollm2] [--rows 12] [--key value of the recipe ...]

Generation is in process. The tables are in docs/performance.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mu_grpo_trl.lab.quickstart import TASKS
from mu_grpo_trl.train import make_trainer, parse, recipe_path

PROFILED_CALL = 3  # by then everything that happens once has happened


def profiled(method: Callable[..., Any], title: str, rows: int) -> Callable[..., Any]:
    """`method`, whose call number `PROFILED_CALL` is profiled and printed."""
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls != PROFILED_CALL:
            return method(*args, **kwargs)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(activities=activities) as recorded:
            result = method(*args, **kwargs)
        table = recorded.key_averages().table(
            sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=48, header=title
        )
        print(table, flush=True)
        return result

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=tuple(TASKS), default="arithmetic")
    parser.add_argument("--rows", type=int, default=12, help="of each table")
    options, overrides = parser.parse_known_args()
    task = TASKS[options.task]()
    if task.num_threads is not None:
        torch.set_num_threads(task.num_threads)
    with tempfile.TemporaryDirectory() as folder:
        argv = ["--config", str(recipe_path(task.recipe)), "--model_name_or_path", str(task.model())]
        argv += ["--output_dir", folder, "--rollout_engine", "transformers", "--disable_tqdm", "true"]
        argv += ["--max_steps", "4", "--stage_updates", "4", *overrides]
        trainer: Any = make_trainer(*parse(argv))
        engine = trainer.stage_maker.engine
        engine._sample = profiled(engine._sample, "one generation batch", options.rows)
        trainer._forward_backward = profiled(trainer._forward_backward, "one update", options.rows)
        trainer.train()


if __name__ == "__main__":
    main()
