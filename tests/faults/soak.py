"""Many stages in one process: memory, open files and threads stay what they were after the second."""

from __future__ import annotations

import json
import statistics
from typing import Any

from workers.train_worker import digit_share

from .case import FLUSHED, MANAGED, Case, Fault, Setting, Unexpected
from .worker import At, Measure, use_one_arena

NUM_STAGES = 40
MAX_RSS_GROWTH = 0.03
"""Of the median of the last five stages over that of stages 2 to 6."""

_OPTIONS = {
    "stage_updates": 1,
    "max_steps": NUM_STAGES,
    "prompts_per_update": 4,
    "save_steps": 1,
    "save_total_limit": 2,
    "keep_stages": 2,
    "logging_steps": 8,
}


def _flat(case: Case) -> None:
    path = case.folder / "soak.jsonl"
    case.go(use_one_arena, At("beginning an update", 1, Measure(str(path)), onward=True))
    samples = [json.loads(line) for line in path.read_text().splitlines()]  # each while a stage's update begins
    if len(samples) != NUM_STAGES:
        raise Unexpected(f"{len(samples)} samples of {NUM_STAGES} stages")
    later = samples[2:]
    rss = [sample["rss"] / 2**20 for sample in later]
    growth = statistics.median(rss[-5:]) / statistics.median(rss[:5]) - 1
    figures = "; ".join(
        f"stage {stage}: {samples[stage]['rss'] / 2**20:.1f} MiB ({samples[stage]['own'] / 2**20:.1f} without mapped "
        f"files), {samples[stage]['files']} files, "
        f"{samples[stage]['threads']} threads"
        for stage in (0, 2, 10, 20, 30, NUM_STAGES - 1)
    )
    case.notes.append(f"RSS {growth:+.2%} after stage 2; {figures}")
    for kind in ("files", "threads"):
        if max(sample[kind] for sample in later) > later[0][kind]:
            raise Unexpected(f"{kind} after stage 2: {[sample[kind] for sample in later]}; {figures}")
    if growth > MAX_RSS_GROWTH:
        raise Unexpected(f"RSS grew by {growth:.1%}: {figures}")


def _soaked(what: str, setting: Setting, **options: Any) -> Fault:
    required = f"{NUM_STAGES} stages, a checkpoint each"
    return Fault(f"many stages in one process, {what}", required, FLUSHED, _flat, setting.but(options=options))


FAULTS = [
    _soaked("in-process engine, rewards in processes",
            Setting(reward="faults.scoring:score", options={**_OPTIONS, "reward_workers": 2})),
    _soaked("a managed stub server", MANAGED.but(reward=digit_share, options=_OPTIONS)),
]  # fmt: skip
