"""The command: run the table, check every outcome, write `docs/reliability.md`."""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import subprocess
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

from . import host, kills, learning, report, rewards, rollout, settings, soak  # noqa: E402
from .case import Fault, Lab, Recovers, Result, Unexpected  # noqa: E402
from .servers import VLLM_PYTHON  # noqa: E402

TABLES = {
    "Kills": kills.FAULTS,
    "Soak": soak.FAULTS,
    "Random kills": kills.RANDOM,
    "Rollout": rollout.FAULTS,
    "Rewards": rewards.FAULTS,
    "Host": host.FAULTS,
    "Learning": learning.FAULTS,
    "Settings": settings.FAULTS,
    "Kills under ZeRO-3": kills.ZERO3_RANDOM,
}


def run_fault(lab: Lab, kind: str, fault: Fault) -> Result:
    """Inject one fault, and check its outcome."""
    started = time.monotonic()
    lacking = _lacking(fault.needs)
    if lacking:
        return Result(kind, fault, f"skipped: {lacking}", 0.0, skipped=True)
    case = lab.case(f"{kind}-{fault.name}-{fault.moment}", fault.setting)
    seen = problem = ""
    try:
        recovers = fault.required if isinstance(fault.required, Recovers) else fault.required.then
        reference = lab.undisturbed(fault.undisturbed or fault.setting) if recovers and recovers.bitwise else None
        fault.run(case)
        seen = case.check(fault.required, reference)
    except Unexpected as error:
        problem = str(error)
    except Exception:
        problem = traceback.format_exc()
    finally:
        case.close()
    if not problem:
        shutil.rmtree(case.folder, ignore_errors=True)
    return Result(kind, fault, seen, time.monotonic() - started, problem)


def _lacking(needs: str) -> str:
    """Why this machine cannot inject a fault; empty if it can."""
    if needs == "vllm" and not Path(VLLM_PYTHON).exists():
        return f"no vLLM at {VLLM_PYTHON}"
    if needs == "mount" and not _can_mount():
        return "this user may not mount a file system"
    return ""


@functools.cache
def _can_mount() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True)
        return mount.returncode == 0 and subprocess.run(["umount", folder]).returncode == 0


def run_all(lab: Lab, faults: Sequence[tuple[str, Fault]], workers: int) -> list[Result]:
    """Run faults side by side, those of real servers first, telling of each as it ends."""

    def one(number: int) -> Result:
        kind, fault = faults[number]
        result = run_fault(lab, kind, fault)
        state = "FAILED" if result.problem else "ok"
        print(
            f"[{number + 1}/{len(faults)}] {state} {result.seconds:5.1f} s  {kind}: {fault.name}, {fault.moment}: "
            f"{result.problem or result.seen}",
            flush=True,
        )
        return result

    slowest_first = sorted(range(len(faults)), key=lambda number: faults[number][1].needs != "vllm")
    with ThreadPoolExecutor(workers) as pool:
        results = dict(zip(slowest_first, pool.map(one, slowest_first), strict=True))
    return [results[number] for number in range(len(faults))]


def chosen(only: str, quick: bool) -> list[tuple[str, Fault]]:
    """The faults whose kind, name and moment contain `only`."""
    return [
        (kind, fault)
        for kind, faults in TABLES.items()
        for fault in faults
        if only.lower() in f"{kind}: {fault.name}, {fault.moment}".lower() and (fault.quick or not quick)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 if an outcome is not the required one."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", default="", help="run what contains this text, and write no report")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--workers", type=int, default=2, help="faults side by side")
    parser.add_argument("--quick", action="store_true", help="the few that `make test` runs")
    parser.add_argument("--keep", type=Path, help="folder for the runs; those that failed stay there")
    options = parser.parse_args(argv)
    root = options.keep or Path(tempfile.mkdtemp(prefix="mu-grpo-faults-"))
    started = time.monotonic()
    faults = chosen(options.only, options.quick)
    results = run_all(Lab(root, options.seed), faults, options.workers)
    failed = [result for result in results if result.problem]
    seconds = time.monotonic() - started
    print(f"{len(results) - len(failed)} of {len(results)} as required, {seconds:.0f} s")
    if failed:
        print(f"the runs that failed are in {root}")
    elif options.keep is None:
        shutil.rmtree(root, ignore_errors=True)
    if not options.only and not options.quick:
        report.write(results, options.seed, seconds)
    return 1 if failed else 0
