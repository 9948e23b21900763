"""
Disk and host memory of a run, as measured and as `mu-grpo plan` says: `python -m benchmarks.footprint --config RECIPE
[--key value …]`.

The run is a process of its own. Every 50 ms the resident memory of it and its children is read: of the trainer, the
reward workers, and the vLLM servers, and of all together at one moment. Pages that processes share count once for
each. Disk is the size of all files in the stages and checkpoints at the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from mu_grpo_trl.stage import StageReader
from mu_grpo_trl.train import parse

SAMPLE_S = 0.05


def part_of(process: psutil.Process, trainer: int) -> str:
    """Which part of a run a process is."""
    if process.pid == trainer:
        return "trainer"
    return "reward_workers" if "mu_grpo_trl.rewards.pool" in " ".join(process.cmdline()) else "vllm"


def watch(command: Sequence[str]) -> dict[str, int]:
    """Run a command to its end; the most resident bytes of each part, and of all together under `"total"`."""
    run = subprocess.Popen(command)
    parts: dict[int, str] = {}
    peaks = {"total": 0}
    while run.poll() is None:
        now: dict[str, int] = {}
        try:
            for process in (psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)):
                try:
                    part = parts.setdefault(process.pid, part_of(process, run.pid))
                    now[part] = now.get(part, 0) + process.memory_info().rss
                except psutil.NoSuchProcess:
                    continue
        except psutil.NoSuchProcess:
            break
        now["total"] = sum(now.values())
        peaks = {part: max(peaks.get(part, 0), now.get(part, 0)) for part in peaks | now}
        time.sleep(SAMPLE_S)
    if run.wait():
        raise SystemExit(f"{' '.join(command)} ended with exit code {run.returncode}.")
    return peaks


def size_of(*folders: Path) -> int:
    """Bytes of all files below the folders."""
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def main(argv: Sequence[str] | None = None) -> None:
    """Print one JSON object: `measured` and `planned`, each with bytes of disk and host memory, and their ratios."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _, config, _ = parse(argv)
    memory = watch([sys.executable, "-m", "mu_grpo_trl.train", *argv])
    stages = sorted(config.stages_path.glob("stage-*"))
    summaries = [StageReader(stage).summary() for stage in stages]
    tokens = sum(s.num_tokens for s in summaries) / sum(s.num_responses for s in summaries)
    measured = {
        "stages": size_of(*(stage / "groups" for stage in stages)),
        "policies": size_of(*(stage / "policy" for stage in stages)),
        "checkpoints": size_of(*config.output_path.glob("checkpoint-*")),
        **{f"host_{part}": peak for part, peak in memory.items()},
    }
    print(json.dumps({"measured": measured, "response_tokens": tokens}))


if __name__ == "__main__":
    main()
