"""Training runs in processes of their own, forked from a server that has imported everything: about a second each."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers import REPOSITORY, free_port

_CONTEXT = multiprocessing.get_context("forkserver")
_POLLING = threading.Lock()
_CONTEXT.set_forkserver_preload(["workers.training_run", "faults.worker"])

ZERO3 = {
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true",
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
}

FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (negative: the signal), when, and what it wrote."""

    exitcode: int
    ended_s: float
    log: str


def start_process(target: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """`target` (importable by its module) in a child of the fork server."""
    paths = [str(REPOSITORY), str(REPOSITORY / "tests")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # of the fork server, which starts with the first process
    process = _CONTEXT.Process(target=target, args=arguments, daemon=True)
    with _POLLING:
        process.start()
    return process


def exit_code(process: multiprocessing.process.BaseProcess) -> int | None:
    """As `process.exitcode`, which is 255 if two threads read it at once, or one does while another starts one."""
    with _POLLING:
        return process.exitcode


def rank_environments(num_ranks: int, zero3: bool = False) -> list[dict[str, str]]:
    """What a launcher would tell each rank; nothing for a single one without ZeRO-3."""
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ACCELERATE_MIXED_PRECISION": "no",
        **(ZERO3 if zero3 else {"ACCELERATE_USE_CPU": "true"}),
    }
    ranks = range(num_ranks) if num_ranks > 1 else ()
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks] or [{}]


def run_ranks(
    specs: list[dict[str, Any]],
    *,
    resume: Any = None,
    fault: dict[str, Any] | None = None,
    zero3: bool = False,
    fsdp2: bool = False,
    env: dict[str, str] | None = None,
    timeout_s: float = 120,
) -> list[Ended]:
    """One process a spec, together one distributed run if there are several; waits until all have ended."""
    from workers import training_run

    processes, logs = [], []
    for rank, launched in enumerate(rank_environments(len(specs), zero3)):
        rank_env = {**launched, **(FSDP2 if fsdp2 else {}), **(env or {})}
        folder = Path(specs[rank]["output_dir"])
        folder.mkdir(parents=True, exist_ok=True)
        logs.append(folder / f"rank{rank}.log")
        processes.append(start_process(training_run.child, rank_env, str(logs[-1]), specs[rank], resume, fault))
    ended_s: dict[int, float] = {}
    deadline = time.monotonic() + timeout_s
    while len(ended_s) < len(processes):
        for rank, process in enumerate(processes):
            if rank not in ended_s and process.exitcode is not None:
                ended_s[rank] = time.monotonic()
        if time.monotonic() > deadline:
            for process in processes:
                process.kill()
            raise TimeoutError("\n".join(log.read_text()[-3000:] for log in logs))
        time.sleep(0.05)
    return [
        Ended(process.exitcode or 0, ended_s[rank], logs[rank].read_text()) for rank, process in enumerate(processes)
    ]


def run_alone(spec: dict[str, Any], **options: Any) -> Ended:
    """One process."""
    return run_ranks([spec], **options)[0]
