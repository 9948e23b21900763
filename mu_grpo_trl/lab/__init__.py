"""Learning setups that need no hub: tasks by name for recipes (`dataset_name: lab:NAME`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

TASKS = ("arithmetic", "long-sums", "smollm2-sums", "sorting")
DEFAULT_ROWS = {"arithmetic": 20_000, "long-sums": 20_000, "smollm2-sums": 6_000, "sorting": 10_000}


def load_task(name: str, num_rows: int | None = None) -> Dataset:
    """
    Training problems of a built-in task, with the columns `prompt` and `answer`.

    Raises:
        `ValueError`: there is no task of that name.
    """
    if name not in TASKS:
        raise ValueError(f"There is no built-in task {name!r}. Choose one of {', '.join(TASKS)}.")
    num_rows = num_rows or DEFAULT_ROWS[name]
    if name in ("arithmetic", "long-sums"):
        from .arithmetic import LONG_OPERANDS, make_problems

        return make_problems(num_rows, num_operands=LONG_OPERANDS if name == "long-sums" else 3)
    if name == "sorting":
        from .sorting import make_lists

        return make_lists(num_rows)
    from .smollm2 import make_sums

    return make_sums(num_rows)
