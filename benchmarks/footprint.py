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


def planned(argv: Sequence[str], response_tokens: float) -> dict[str, int]:
    """What `mu-grpo plan` says of the same run, in the parts that [`main`] measures."""
    command = [sys.executable, "-c", "from mu_grpo_trl.cli import main; main()", "plan", "--json", *argv]
    command += ["--response-tokens", str(response_tokens)]
    plan = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    disk, host = plan["disk"], plan["host"]
    return {
        "disk": disk["stages"] + disk["policies"] + disk["checkpoints"],
        "stages": disk["stages"],
        "policies": disk["policies"],
        "checkpoints": disk["checkpoints"],
        "host": host["total"],
        "trainer": host["libraries"] + host["training"],
        "reward_workers": host["reward workers"],
        "vllm": host["vLLM servers"],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table of bytes measured and planned, and the same as one JSON object."""
    argv = list(sys.argv[1:] if argv is None else argv)
    _, config, _ = parse(argv)
    memory = watch([sys.executable, "-m", "mu_grpo_trl.train", *argv])
    stages = sorted(config.stages_path.glob("stage-*"))
    summaries = [StageReader(stage).summary() for stage in stages]
    tokens = sum(s.num_tokens for s in summaries) / sum(s.num_responses for s in summaries)
    policies = size_of(*(stage / "policy" for stage in stages))
    checkpoints = size_of(*config.output_path.glob("checkpoint-*"))
    rows = size_of(*stages) - policies
    measured = {
        "disk": rows + policies + checkpoints,
        "stages": rows,
        "policies": policies,
        "checkpoints": checkpoints,
        "host": memory.pop("total"),
        **memory,
    }
    plan = planned(argv, tokens)
    for name, size in measured.items():
        print(f"{name:<16}{size / 2**20:10.2f} MiB measured{plan[name] / 2**20:10.2f} planned{plan[name] / size:7.3f}")
    print(json.dumps({"measured": measured, "planned": plan, "response_tokens": tokens}))


if __name__ == "__main__":
    main()
