"""The laboratory's tasks: held-out problems, and a policy to start from. Their settings are in `recipes/lab`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from datasets import Dataset

from . import arithmetic, sorting


@dataclass(frozen=True)
class LabTask:
    """
    A task of the laboratory.

    Args:
        held_out (`Callable[[int], Dataset]`): gives the first so many held-out problems.
        warm_start (`Callable[[Path], object]` or None): trains the starting policy into a folder, in a minute or two;
            None if it is shipped.
    """

    held_out: Callable[[int], Dataset]
    warm_start: Callable[[Path], object] | None = None


def _long_sums(output: Path) -> object:
    from .warm_start import make_solutions, make_warm_start

    solutions = partial(make_solutions, num_operands=arithmetic.LONG_OPERANDS)
    return make_warm_start(output, solutions, max_length=96)


def _sorting(output: Path) -> object:
    from .warm_start import make_warm_start

    return make_warm_start(output, sorting.make_solutions, sorting.VOCABULARY)


LAB_TASKS: dict[str, LabTask] = {
    "sums": LabTask(partial(arithmetic.make_problems, split="held_out")),
    "long_sums": LabTask(
        partial(arithmetic.make_problems, split="held_out", num_operands=arithmetic.LONG_OPERANDS), _long_sums
    ),
    "sorting": LabTask(partial(sorting.make_lists, split="held_out"), _sorting),
}


def warm_start_folder(task: str, root: Path) -> Path:
    """Folder of the policy that runs on `task` start from; below `root` if it has to be made."""
    if LAB_TASKS[task].warm_start is None:
        from .warm_start import warm_start_path

        return warm_start_path()
    return root / "warm_starts" / task


def make_warm_start(task: str, root: Path) -> None:
    """Make the policy of `task`, unless it is there; a folder of that name is whole."""
    folder, make = warm_start_folder(task, root), LAB_TASKS[task].warm_start
    if make is not None and not folder.exists():
        temporary = folder.with_name(f".{folder.name}.unfinished")
        shutil.rmtree(temporary, ignore_errors=True)
        make(temporary)
        temporary.rename(folder)
