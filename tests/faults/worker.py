"""
One training process as a child of the fork server: the command line's `main` on a recipe, with data, reward and faults
from the harness.

Every place a fault can be injected at is noted in `<output_dir>/journal.jsonl` as the run passes it, and so is what
was asked of the engine and what was flushed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed
from datasets import Dataset
from transformers import Trainer, TrainerState
from workers.train_worker import digit_share, skip_compiling_deepspeed_ops

from mu_grpo_trl import MuGRPOTrainer, phases, train
from mu_grpo_trl.callbacks import StageCallback
from mu_grpo_trl.rollout import fill, vllm_wire
from mu_grpo_trl.rollout.transformers_engine import TransformersEngine
from mu_grpo_trl.rollout.vllm_client import VLLMEngine
from mu_grpo_trl.stage import writer
from mu_grpo_trl.stage.writer import StageWriter
from mu_grpo_trl.staging import StageMaker

JOURNAL = "journal.jsonl"
FLUSH_GROUPS = 4

PLACES: dict[str, list[tuple[Any, str]]] = {
    "writing β": [(phases, "save_file")],
    "moving β into place": [(phases, "_replace_folder")],
    "opening the engine": [(TransformersEngine, "open"), (VLLMEngine, "open")],
    "generating": [(TransformersEngine, "generate"), (vllm_wire, "generation_body")],
    "scoring": [(StageMaker, "_score")],
    "flushing": [(StageWriter, "append")],
    "writing a file of the stage": [(writer, "write_atomically")],
    "a file of the stage renamed": [(writer, "_sync_folder")],
    "completing the stage": [(StageWriter, "complete")],
    "beginning an update": [(StageCallback, "on_step_begin")],
    "forward and backward": [(MuGRPOTrainer, "compute_loss")],
    "after an optimizer step": [(StageCallback, "on_optimizer_step")],
    "checkpoint": [(MuGRPOTrainer, "_save_checkpoint")],
    "checkpoint: weights written": [(Trainer, "_save_optimizer_and_scheduler")],
    "checkpoint: optimizer written": [(MuGRPOTrainer, "_save_rng_state")],
    "checkpoint: all but its state": [(TrainerState, "save_to_json")],
    "end of training": [(MuGRPOTrainer, "_end_engines")],
    "saving a model": [(MuGRPOTrainer, "save_model")],
}
"""Names of moments, and the functions whose calls they are."""


@dataclass(frozen=True)
class At:
    """
    Calls `action` with the arguments of the `call`-th call (from 1) of a place, before it goes on.

    Args:
        place (`str`): a key of `PLACES`.
        call (`int`): which call, counted in one process.
        action (`Callable`): what happens there.
        rank (`int`): where.
        onward (`bool`): at every later call too.
    """

    place: str
    call: int
    action: Callable[..., Any]
    rank: int = 0
    onward: bool = False

    def __call__(self) -> None:
        if int(os.environ.get("RANK", 0)) == self.rank:
            _planned.append(self)


_planned: list[At] = []


def die(*_: Any, **__: Any) -> None:
    """`kill -9` of this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_: Any, **__: Any) -> None:
    raise ZeroDivisionError("injected")


def flush_each_batch() -> None:
    """Score each batch before the next is generated: calls of a place then do not depend on the clock."""
    collect = fill._Fill.collect
    fill._Fill.collect = lambda self, until: collect(self, 0)


def use_one_arena() -> None:
    """One arena of malloc's: memory then tells of what is kept, not of which threads happened to allocate it."""
    m_arena_max = -8
    ctypes.CDLL(None).mallopt(m_arena_max, 1)


@dataclass(frozen=True)
class Signal:
    """Sends a signal to this process, and goes on."""

    number: int
    times: int = 1

    def __call__(self, *_: Any, **__: Any) -> None:
        for _time in range(self.times):
            os.kill(os.getpid(), self.number)
            time.sleep(0.05)


@dataclass(frozen=True)
class Call:
    """Calls `module:function` with arguments of its own, and goes on."""

    function: str
    argument: Any

    def __call__(self, *_: Any, **__: Any) -> None:
        module, _colon, name = self.function.partition(":")
        getattr(importlib.import_module(module), name)(self.argument)


@dataclass(frozen=True)
class FillDisk:
    """Writes a file until not a byte more fits on its disk."""

    path: str

    def __call__(self, *_: Any, **__: Any) -> None:
        with open(self.path, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))


@dataclass(frozen=True)
class Measure:
    """Appends the resident memory of this process in bytes (all, and what is no mapped file), files and threads."""

    path: str

    def __call__(self, *_: Any, **__: Any) -> None:
        process = psutil.Process()
        gc.collect()
        memory = process.memory_info()
        sample = {
            "rss": memory.rss,
            "own": memory.rss - memory.shared,
            "files": process.num_fds(),
            "threads": process.num_threads(),
        }
        with open(self.path, "a") as file:
            file.write(json.dumps(sample) + "\n")


@dataclass(frozen=True)
class Run:
    """
    What one process is to do.

    Args:
        recipe (`str`): path of the YAML with the options.
        log (`str`): where its output goes.
        model (`str`): folder of the policy.
        prompts (`dict[str, list]`): columns of the dataset.
        reward (`Any`): as `MuGRPOTrainer` takes it; picklable.
        injections (`tuple`): called before anything else.
        env (`Mapping[str, str]`): more environment variables.
    """

    recipe: str
    log: str
    journal: str
    model: str
    prompts: dict[str, list[Any]]
    reward: Any = digit_share
    injections: tuple[Callable[[], None], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


class Journal:
    """Appends lines that a reader sees whole, whatever ends the process."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, **entry: Any) -> None:
        os.write(self._file, (json.dumps(entry) + "\n").encode())


def child(run: Run) -> None:
    """Body of the process; ends with the exit code of the command line, or with the harness."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    os.environ.update(run.env)
    output = os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # As at a prompt: what a shell starts in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    gc.freeze()  # what the fork server imported need not be searched for garbage
    skip_compiling_deepspeed_ops()
    fill.FLUSH_GROUPS = FLUSH_GROUPS
    journal = Journal(run.journal)
    journal.note(at="start", pid=os.getpid(), time=time.time())
    for inject in run.injections:
        inject()
    _watch_places(journal)
    _note_work(journal)
    train.make_trainer = functools.partial(_make_trainer, run, journal)
    try:
        train.main(["--config", run.recipe, "--resume", "auto"])
    except KeyboardInterrupt:  # ends a program by the signal itself, but not a child of `multiprocessing`
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    journal.note(at="end", time=time.time())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _make_trainer(run: Run, journal: Journal, script: Any, config: Any, model: Any) -> MuGRPOTrainer:
    trainer = MuGRPOTrainer(
        model=run.model, reward_funcs=run.reward, args=config, train_dataset=Dataset.from_dict(run.prompts)
    )
    journal.note(at="trainer made", pid=os.getpid(), time=time.time())
    return trainer


def _watch_places(journal: Journal) -> None:
    calls: Counter[str] = Counter()
    for place, functions in PLACES.items():
        for owner, name in functions:
            setattr(owner, name, _watched(place, getattr(owner, name), calls, journal))


def _watched(place: str, function: Callable[..., Any], calls: Counter[str], journal: Journal) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[place] += 1
        journal.note(at=place, call=calls[place], pid=os.getpid(), time=time.time())
        for plan in _planned:
            if plan.place == place and (calls[place] == plan.call or (plan.onward and calls[place] > plan.call)):
                plan.action(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapped


def _note_work(journal: Journal) -> None:
    """Note each group asked of an engine, and each group flushed, by the seed of its stage."""
    generate, body, append = TransformersEngine.generate, vllm_wire.generation_body, StageWriter.append

    def noted_generate(engine: Any, requests: Any, sampling: Any) -> Any:
        requests = list(requests)
        journal.note(ask=sampling.seed, groups=[request.group for request in requests], batch=True)
        return generate(engine, requests, sampling)

    def noted_body(request: Any, sampling: Any, *args: Any) -> Any:
        journal.note(ask=sampling.seed, groups=[request.group], batch=False)
        return body(request, sampling, *args)

    def noted_append(self: StageWriter, groups: Any) -> None:
        append(self, groups)
        journal.note(flushed=self.manifest.sampling["seed"], groups=[group.group for group in groups])

    TransformersEngine.generate, vllm_wire.generation_body, StageWriter.append = (
        noted_generate, noted_body, noted_append,
    )  # fmt: skip


def last_moment(folder: Path, pid: int | None) -> str:
    """The last place that a process of the run in `folder` noted."""
    entries = [entry for entry in read_journal(folder) if entry.get("pid") == pid]
    last = entries[-1] if entries else {"at": "nothing noted yet"}
    return last["at"] + (f" ({last['call']})" if "call" in last else "")


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """All whole lines of the journal."""
    path = folder / JOURNAL
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
