"""Where the wall-clock goes: exclusive intervals per kind of work, and counters of tokens."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from .schedule import Schedule

METRICS_NAME = "metrics.jsonl"
"""In `output_dir`, the log of a run: one entry a line, as in `trainer.state.log_history`."""
RUN_NAME = "run.json"
"""In `output_dir`, what the run is: `model`, `num_processes`, `settings`."""

KINDS = ("rollout", "reward", "sync", "handover", "optimize", "checkpoint", "evaluation", "other")
"""Kinds of interval. `rollout` includes rewards scored while generating; `reward` is only the wait for the rest.
`sync` is publishing and loading weights and the probe; `evaluation` is outside T_total, as in the paper (App. B.1)."""


PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A10G": 70e12,
    "L4": 121e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
"""Dense half-precision operations per second by device name (the vendors' data sheets, without sparsity)."""


def peak_flops(device_name: str) -> float | None:
    """
    Dense half-precision peak of a device in operations per second, None if it is not known.

    >>> peak_flops("NVIDIA H100 80GB HBM3")
    989000000000000.0
    """
    words = device_name.replace("-", " ").split()
    matching = [name for name in PEAK_FLOPS if set(name.split()) <= set(words)]
    return PEAK_FLOPS[max(matching, key=len)] if matching else None


class Telemetry:
    """
    Exclusive wall-clock intervals of one process: at any moment exactly one kind runs, so that the kinds add up to the
    time since [`start`]. Entering a kind inside another pauses the outer one. `cpu_seconds` has the same in CPU
    seconds of this process (all of its threads, none of its children, and not across a resume).

    ```python
    telemetry.start()
    with telemetry.interval("optimize"):
        with telemetry.interval("checkpoint"):   # pauses "optimize"
            ...
    telemetry.total_s()                          # all of it but evaluation
    ```

    Args:
        peak_flops (`float` or None): operations per second of all devices together, for the MFU; None leaves it out.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        self._peak_flops = peak_flops
        self.seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self.cpu_seconds: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        self.counts: dict[str, float] = defaultdict(float)
        self._stack = ["other"]
        self._since: float | None = None
        self._cpu_since = 0.0

    def start(self) -> None:
        """Begin (or go on) measuring; time outside every interval is `other` (see [`base`])."""
        self._since, self._cpu_since = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        """Stop measuring, keeping what was measured."""
        self._charge()
        self._since = None

    @contextmanager
    def interval(self, kind: str) -> Iterator[None]:
        """Charge the time inside the block to `kind`, one of `KINDS`."""
        assert kind in self.seconds, kind
        self._charge()
        self._stack.append(kind)
        try:
            yield
        finally:
            self._charge()
            self._stack.pop()

    def base(self, kind: str) -> None:
        """Charge the time outside every interval to `kind` from now on."""
        assert kind in self.seconds, kind
        self._charge()
        self._stack[0] = kind

    def state(self) -> dict[str, dict[str, float]]:
        """What was measured so far, for a checkpoint."""
        self._charge()
        return {"seconds": dict(self.seconds), "counts": dict(self.counts)}

    def restore(self, state: dict[str, dict[str, float]]) -> None:
        """Go on from what [`state`] gave, so that a resumed run reports all of its time."""
        self.seconds = {kind: float(state["seconds"].get(kind, 0.0)) for kind in KINDS}
        self.counts = defaultdict(float, state["counts"])

    def count(self, name: str, amount: float) -> None:
        """Add `amount` to the counter `name`."""
        self.counts[name] += amount

    def total_s(self) -> float:
        """T_total in seconds: everything since [`start`] but evaluation."""
        self._charge()
        return sum(seconds for kind, seconds in self.seconds.items() if kind != "evaluation")

    @property
    def rollout_s(self) -> float:
        """T_rollout in seconds: generation and rewards."""
        return self.seconds["rollout"] + self.seconds["reward"]

    def remaining_s(self, schedule: Schedule, updates: int, groups: int, added: int = 0) -> float | None:
        """
        Seconds until the end of the run: rollouts at the pace of those so far (the counter `generated_groups`), all
        else at that of the updates so far. None while there is no pace to go by.

        Args:
            schedule (`Schedule`): of the run.
            updates (`int`): taken so far.
            groups (`int`): generated so far, of the whole run.
            added (`int`): groups of the rollout that runs now, which the counter does not have yet.
        """
        total_s, counted = self.total_s(), self.counts["generated_groups"] + added
        updates_left = schedule.num_updates - updates
        groups_left = schedule.num_updates * schedule.prompts_per_update - groups
        if (groups_left and not counted) or (updates_left and not self.counts["updates"]):
            return None
        rollout_s = groups_left * self.rollout_s / counted if groups_left else 0.0
        rest_s = updates_left * (total_s - self.rollout_s) / self.counts["updates"] if updates_left else 0.0
        return rollout_s + rest_s

    def metrics(self) -> dict[str, float]:
        """
        Cumulative `time/<kind>_s`, `time/total_s`, rates and shares where there is something to divide, and `mfu`:
        6 · parameters · forwarded tokens over what the devices could do in the time of the optimization phase.
        """
        total_s = self.total_s()
        values = {f"time/{kind}_s": seconds for kind, seconds in self.seconds.items() if seconds}
        values["time/total_s"] = total_s
        counts = self.counts
        for rate, count, kind in (
            ("generated_tokens_per_s", "generated_tokens", "rollout"),
            ("forwarded_tokens_per_s", "forwarded_tokens", "optimize"),
            ("trained_tokens_per_s", "trained_tokens", "optimize"),
        ):
            if self.seconds[kind]:
                values[f"tokens/{rate}"] = counts[count] / self.seconds[kind]
        if self._peak_flops and self.seconds["optimize"]:
            values["mfu"] = counts["flops"] / (self.seconds["optimize"] * self._peak_flops)
        if counts["forwarded_tokens"]:
            values["tokens/padding_share"] = counts["padding_tokens"] / counts["forwarded_tokens"]
        if counts["responses"]:
            values["tokens/skipped_response_share"] = counts["skipped_responses"] / counts["responses"]
        return values

    def _charge(self) -> None:
        if self._since is not None:
            now, cpu_now = time.perf_counter(), time.process_time()
            self.seconds[self._stack[-1]] += now - self._since
            self.cpu_seconds[self._stack[-1]] += cpu_now - self._cpu_since
            self._since, self._cpu_since = now, cpu_now


def in_words(remaining_s: float | None) -> str:
    """
    When a run will end, to be put behind other figures of a progress bar; empty where it is not known.

    >>> in_words(8130.2)
    ', run ends in 2:15:30'
    """
    return "" if remaining_s is None else f", run ends in {timedelta(seconds=round(remaining_s))}"


def write_summary(path: Path, telemetry: Telemetry, schedule: Schedule, num_updates: int) -> dict[str, float]:
    """Write what a run took to `path` as JSON, and return it: updates, stages, seconds by kind, tokens, rates."""
    summary: dict[str, float] = {
        "num_updates": num_updates,
        "num_stages": schedule.num_stages,
        "rollout_s": telemetry.rollout_s,
        "total_s": telemetry.total_s(),
        **{f"{kind}_s": telemetry.seconds[kind] for kind in KINDS if kind != "rollout"},
        **telemetry.counts,
        **{name: value for name, value in telemetry.metrics().items() if not name.startswith("time/")},
    }
    path.write_text(json.dumps(summary, indent=1))
    return summary
