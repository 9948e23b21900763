"""
Run cells side by side, each in a process of its own: cached, resumable, and going on where one fails.

The processes are forked from a server that has imported everything once (`multiprocessing`'s forkserver), has started
no thread, and has trained nothing. They end with the process that asked for them.
"""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..locks import RunLock
from .cell import RESULT_NAME, cell_folder, run_cell, write_result
from .grid import SCHEMA, Cell
from .tasks import make_warm_start, warm_start_folder

ERROR_NAME = "error.txt"
MS_PER_RESPONSE = 3.5
"""First guess of CPU milliseconds per response, evaluation included, until there are results."""


@dataclass(frozen=True)
class Job:
    """
    What a process does.

    Args:
        title (`str`): for progress lines.
        work (`Callable`), arguments (`tuple`): the call.
        folder (`Path`): gets `error.txt` if it fails.
        needs (`Path` or None): a folder that has to be there before.
        cell (`Cell` or None): that it runs, if any.
    """

    title: str
    work: Callable[..., None]
    arguments: tuple[Any, ...]
    folder: Path
    needs: Path | None = None
    cell: Cell | None = None


def is_finished(cell: Cell, root: Path) -> bool:
    """Whether the cell's result is there."""
    return (cell_folder(cell, root) / RESULT_NAME).exists()


def seconds_left(cells: Iterable[Cell], root: Path) -> float:
    """CPU seconds that the unfinished ones of `cells` will take, by what finished ones of the same task took."""
    left = []
    spent: dict[str, float] = {}
    responses: dict[str, int] = {}
    for cell in cells:
        path = cell_folder(cell, root) / RESULT_NAME
        if path.exists():
            spent[cell.task] = spent.get(cell.task, 0.0) + _cpu_seconds(path)
            responses[cell.task] = responses.get(cell.task, 0) + cell.num_responses
        else:
            left.append(cell)
    rates = {task: spent[task] / responses[task] for task in spent}
    usual = sum(rates.values()) / len(rates) if rates else MS_PER_RESPONSE / 1000
    return sum(cell.num_responses * rates.get(cell.task, usual) for cell in left)


@cache
def _cpu_seconds(result: Path) -> float:
    times = json.loads(result.read_text(encoding="utf-8"))["times"]
    return times["total_cpu_s"] + times["evaluation_cpu_s"]


def reuse(path: Path, cells: Iterable[Cell], root: Path) -> int:
    """
    Take the results of unfinished `cells` from a published file: one `result.json` a line, plain or gzipped.

    Returns:
        `int`: how many were taken.
    """
    wanted = {cell.id: cell for cell in cells if not is_finished(cell, root)}
    taken = 0
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for result in map(json.loads, lines):
            cell = wanted.pop(result["cell"]["id"], None) if result["schema"] == SCHEMA else None
            if cell is not None:
                write_result(result | {"cell": cell.to_dict()}, root)
                taken += 1
    return taken


def run_cells(cells: Sequence[Cell], root: Path, num_workers: int, say: Callable[[str], None] = print) -> list[Cell]:
    """
    Run all unfinished cells, in their order, `num_workers` at a time.

    Args:
        cells (`Sequence[Cell]`): finished ones are left as they are.
        root (`Path`): folder of the laboratory.
        num_workers (`int`): processes side by side.
        say (`Callable`, *optional*): takes a progress line.

    Returns:
        `list[Cell]`: those that failed. Their folders hold `error.txt`.

    Raises:
        `FolderInUseError`: another process runs cells in `root`.
    """
    root.mkdir(parents=True, exist_ok=True)
    lock = RunLock([root])
    lock.acquire()
    _refresh_experiments(cells, root)
    todo = [cell for cell in cells if not is_finished(cell, root)]
    say(f"{len(todo)} of {len(cells)} cells to run, {num_workers} side by side, in {root}")
    try:
        return _Pool(cells, root, num_workers, say).run(_jobs(todo, root))
    finally:
        lock.release()


def _jobs(cells: Sequence[Cell], root: Path) -> list[Job]:
    """The cells, and before the first of each task the making of its policy, where that is not there."""
    jobs: list[Job] = []
    tasks: set[str] = set()
    for cell in cells:
        policy = warm_start_folder(cell.task, root)
        if cell.task not in tasks and not policy.exists():
            folder = root / "warm_starts"
            jobs.append(Job(f"warm start of {cell.task}", make_warm_start, (cell.task, root), folder))
        tasks.add(cell.task)
        jobs.append(Job(str(cell), run_cell, (cell, root), cell_folder(cell, root), policy, cell))
    return jobs


class _Pool:
    def __init__(self, cells: Sequence[Cell], root: Path, num_workers: int, say: Callable[[str], None]) -> None:
        self._cells, self._root, self._num_workers, self._say = cells, root, num_workers, say
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(name, "1")  # read by the libraries when the server imports them
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([run_cell.__module__])
        self._running: dict[BaseProcess, tuple[Job, float]] = {}
        self._failed: list[Job] = []

    def run(self, jobs: list[Job]) -> list[Cell]:
        """Run all jobs; returns the cells whose job failed."""
        try:
            while jobs or self._running:
                while len(self._running) < self._num_workers and (job := self._next(jobs)):
                    self._start(job)
                if not self._running:
                    self._fail_rest(jobs)
                    break
                ready = wait([process.sentinel for process in self._running])
                for process in [process for process in self._running if process.sentinel in ready]:
                    self._end(process)
        finally:
            for process in self._running:
                process.terminate()
            for process in self._running:
                process.join()
        return [job.cell for job in self._failed if job.cell is not None]

    def _next(self, jobs: list[Job]) -> Job | None:
        """Take the first job that has what it needs."""
        for number, job in enumerate(jobs):
            if job.needs is None or job.needs.exists():
                return jobs.pop(number)
        return None

    def _start(self, job: Job) -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / ERROR_NAME).unlink(missing_ok=True)
        process = self._context.Process(target=_work, args=(job.work, job.arguments, job.folder))
        process.start()
        self._running[process] = job, time.perf_counter()

    def _end(self, process: BaseProcess) -> None:
        job, since = self._running.pop(process)
        process.join()
        took = f"in {time.perf_counter() - since:.0f} s"
        error = job.folder / ERROR_NAME
        if process.exitcode:
            if not error.exists():
                error.write_text(f"The process ended with exit code {process.exitcode}.\n", encoding="utf-8")
            self._failed.append(job)
            last = error.read_text(encoding="utf-8").strip().splitlines()[-1]
            self._say(f"FAILED {took}: {job.title}: {last} ({error})")
        elif job.cell is None:
            self._say(f"{job.title} {took}")
        else:
            done = sum(is_finished(cell, self._root) for cell in self._cells)
            left = seconds_left(self._cells, self._root) / self._num_workers
            accuracy = _final_accuracy(job.cell, self._root)
            self._say(
                f"[{done}/{len(self._cells)}] {job.title}: {accuracy:.3f} {took}; about {left / 60:.0f} min left"
            )

    def _fail_rest(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.folder.mkdir(parents=True, exist_ok=True)
            (job.folder / ERROR_NAME).write_text(f"{job.needs} could not be made.\n", encoding="utf-8")
        self._failed += jobs


def _work(work: Callable[..., None], arguments: tuple[Any, ...], folder: Path) -> None:
    """In the new process: what it prints goes to a log, of which the end is kept if it fails."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log = folder / "log.txt"
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        work(*arguments)
    except BaseException:
        (folder / ERROR_NAME).write_text(traceback.format_exc(), encoding="utf-8")
        sys.exit(1)
    log.unlink()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _final_accuracy(cell: Cell, root: Path) -> float:
    result = json.loads((cell_folder(cell, root) / RESULT_NAME).read_text(encoding="utf-8"))
    return result["evaluations"][-1]["accuracy"]


def _refresh_experiments(cells: Iterable[Cell], root: Path) -> None:
    """Results name the experiments as they are now, also where one was added after the cell had run."""
    for cell in cells:
        if is_finished(cell, root):
            result = json.loads((cell_folder(cell, root) / RESULT_NAME).read_text(encoding="utf-8"))
            if result["cell"] != cell.to_dict():
                write_result(result | {"cell": cell.to_dict()}, root)
