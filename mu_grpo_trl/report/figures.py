"""Figures of a run from its log: reward, ratios, veto and clip, and where the wall-clock went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..telemetry import KINDS

PANELS = (
    ("reward", {"reward": "mean reward"}),
    ("importance ratio", {"ratio/negative_mean": "E[ρ | A<0]", "ratio/positive_mean": "E[ρ | A>0]"}),
    ("share of tokens", {"veto/token_fraction": "vetoed", "clip/token_fraction": "clipped"}),
)


def plot_run(log_history: Sequence[Mapping[str, Any]], stage_updates: int, path: Path) -> Path:
    """
    Draw a run's log to `path` (png, pdf or svg by its ending).

    Args:
        log_history (`Sequence[Mapping]`): `trainer.state.log_history`.
        stage_updates (`int`): μ; a line marks each stage boundary.
        path (`Path`): the file to write.
    """
    from matplotlib.figure import Figure

    logs = [entry for entry in log_history if "loss" in entry]
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 2).flatten()
    for axis, (title, series) in zip(axes, PANELS, strict=False):
        for key, label in series.items():
            points = [(entry["step"], entry[key]) for entry in logs if entry.get(key) is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=label)
        last = logs[-1]["step"] if logs else 0
        for boundary in range(stage_updates, last, stage_updates):
            axis.axvline(boundary, color="0.8", linewidth=1, zorder=0)
        axis.set_xlabel("update")
        axis.set_title(title)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False)
    _plot_times(axes[-1], log_history)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def _plot_times(axis: Any, log_history: Sequence[Mapping[str, Any]]) -> None:
    final = next((entry for entry in reversed(log_history) if "time/total_s" in entry), {})
    seconds = {kind: final.get(f"time/{kind}_s", 0.0) for kind in KINDS}
    shown = {kind: value for kind, value in seconds.items() if value > 0}
    axis.barh(list(shown), list(shown.values()))
    axis.invert_yaxis()
    axis.set_xlabel("seconds")
    axis.set_title("wall-clock")
