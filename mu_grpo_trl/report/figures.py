"""Figures of one or several runs, one color a run: each panel by itself, or all of them on one sheet."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""Okabe and Ito's, told apart by color-blind readers too; more runs take them again with another line style."""
LINE_STYLES = ("-", "--", ":", "-.")

MOST_LABEL_CHARACTERS = 40
MOST_BOUNDARIES = 40
POINTS_OF_A_LINE = 100
"""A series twice as long is drawn faintly, below its mean over windows of this part of it, never over two stages."""
SECONDS_OF = {"s": 1, "min": 60, "h": 3600}


@dataclass(frozen=True)
class Panel:
    """
    One figure.

    Args:
        name (`str`): its file name.
        title (`str`), ylabel (`str`): above and beside it.
        draw (`Callable[[Axes, Sequence[Run]], bool]`): draws the runs, and says whether there was anything to draw.
        note (`str`): what it shows, for the page.
    """

    name: str
    title: str
    ylabel: str
    draw: Callable[[Axes, Sequence[Run]], bool]
    note: str


def color_of(number: int) -> str:
    """Color of the run of that number."""
    return COLORS[number % len(COLORS)]


def style_of(number: int) -> dict[str, Any]:
    """Color and line style of the run of that number, the same in every panel."""
    return {"color": color_of(number), "linestyle": LINE_STYLES[number // len(COLORS) % len(LINE_STYLES)]}


def short_labels(labels: Sequence[str]) -> list[str]:
    """Labels that fit a legend and still differ: long ones lose what they have in common, then their middle."""
    if max(map(len, labels)) > MOST_LABEL_CHARACTERS and len(labels) > 1:
        start = len(re.sub(r"[^-_/ ]*$", "", os.path.commonprefix(labels)))
        end = len(re.sub(r"[^-_/ ]*$", "", os.path.commonprefix([label[::-1] for label in labels])))
        labels = [f"{'…' * (start > 0)}{label[start : len(label) - end]}{'…' * (end > 0)}" for label in labels]
    half = (MOST_LABEL_CHARACTERS - 1) // 2
    short = [label if len(label) <= MOST_LABEL_CHARACTERS else f"{label[:half]}…{label[-half:]}" for label in labels]
    return short if len(set(short)) == len(short) else [f"{number}: {label}" for number, label in enumerate(short, 1)]


def draw_panel(panel: Panel, runs: Sequence[Run]) -> Figure:
    """One panel with its legend below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.8 + 0.2 * (len(runs) if len(runs) > 1 else 1)), layout="constrained")
    _fill(figure.subplots(), panel, runs)
    _legend(figure, runs, most_columns=2)
    return figure


def draw_sheet(runs: Sequence[Run]) -> Figure:
    """All panels, with one legend for them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 11), layout="constrained")
    for axes, panel in zip(figure.subplots(3, 3).flatten(), PANELS, strict=True):
        _fill(axes, panel, runs)
    _legend(figure, runs, most_columns=4)
    return figure


def save(figure: Figure, path: Path) -> Path:
    """Write `figure` to `path` (png, pdf or svg by its ending), the same bytes for the same figure."""
    import matplotlib

    path.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "mu-grpo"}):
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _fill(axes: Axes, panel: Panel, runs: Sequence[Run]) -> None:
    axes.set_title(panel.title)
    axes.spines[["top", "right"]].set_visible(False)
    if not panel.draw(axes, runs):
        axes.text(0.5, 0.5, "not logged", ha="center", va="center", color="0.5", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
    elif panel.ylabel:
        axes.set_ylabel(panel.ylabel)


def _legend(figure: Figure, runs: Sequence[Run], most_columns: int) -> None:
    from matplotlib.lines import Line2D

    labels = short_labels([run.label for run in runs])
    if len(runs) > 1:
        lines = [Line2D([], [], linewidth=2.5, **style_of(number)) for number in range(len(runs))]
        columns = min(len(runs), most_columns if max(map(len, labels)) < 30 else most_columns // 2)
        figure.legend(lines, labels, loc="outside lower center", ncols=columns, frameon=False)
    else:
        figure.suptitle(labels[0])


def _share_over_updates(key: str) -> Callable[[Axes, Sequence[Run]], bool]:
    """In percent, from 0 up."""
    draw_line = _over_updates(key, 100)

    def draw(axes: Axes, runs: Sequence[Run]) -> bool:
        drawn = draw_line(axes, runs)
        axes.set_ylim(0, max(axes.get_ylim()[1], 0.1))
        return drawn

    return draw


def _over_updates(key: str, scale: float = 1.0) -> Callable[[Axes, Sequence[Run]], bool]:
    def draw(axes: Axes, runs: Sequence[Run]) -> bool:
        from matplotlib.ticker import MaxNLocator

        lines = [(number, *run.series(key)) for number, run in enumerate(runs)]
        lines = [(number, steps, values * scale) for number, steps, values in lines if len(steps)]
        for number, steps, values in lines:
            window = len(values) // POINTS_OF_A_LINE
            if window > 1:
                axes.plot(steps, values, linewidth=0.6, alpha=0.25, **style_of(number))
            marker = "o" if len(steps) < 8 else None
            stages = np.split(values, np.searchsorted(steps, runs[number].boundaries(), side="right"))
            smooth = np.concatenate([moving_mean(stage, window) for stage in stages])
            axes.plot(steps, smooth, linewidth=1.5, marker=marker, markersize=4, **style_of(number))
        if lines:
            _mark_boundaries(axes, runs)
            axes.set_xlabel("update")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True))
        return bool(lines)

    return draw


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of `values` `(n,)` over up to `window` entries around each, fewer at the ends; shape `(n,)`."""
    if window < 2:
        return values
    sums = np.append(0.0, np.cumsum(values))
    at = np.arange(len(values))
    first, last = np.maximum(0, at - window // 2), np.minimum(len(values), at + (window + 1) // 2)
    return (sums[last] - sums[first]) / (last - first)


def _mark_boundaries(axes: Axes, runs: Sequence[Run]) -> None:
    """Where stages begin: gray if all runs agree, else in each run's color; none where they would hide the lines."""
    boundaries = [run.boundaries() for run in runs]
    longest = max(boundaries, key=len)
    agree = all(own == longest[: len(own)] for own in boundaries)
    for number, own in [(0, longest)] if agree else enumerate(boundaries):
        if len(own) <= MOST_BOUNDARIES:
            color, alpha = ("0.8", 1.0) if agree else (color_of(number), 0.35)
            for boundary in own:
                axes.axvline(boundary + 0.5, color=color, alpha=alpha, linewidth=0.8, zorder=0)


def _draw_accuracy(against_time: bool) -> Callable[[Axes, Sequence[Run]], bool]:
    def draw(axes: Axes, runs: Sequence[Run]) -> bool:
        from matplotlib.ticker import MaxNLocator

        lines = []
        for number, run in enumerate(runs):
            if run.accuracy is not None:
                x = run.seconds_at(run.accuracy.steps) if against_time else run.accuracy.steps
                lines.append((number, x, run.accuracy.mean * 100))
        known = [(number, x, y) for number, x, y in lines if np.isfinite(x).any() and np.isfinite(y).any()]
        if not known:
            return False
        unit = _time_unit(max(float(np.nanmax(x)) for _, x, _ in known)) if against_time else ""
        for number, x, y in known:
            axes.plot(x / SECONDS_OF.get(unit, 1), y, marker="o", markersize=4, linewidth=1.5, **style_of(number))
        axes.set_xlabel(f"T_total ({unit}), evaluation not counted" if against_time else "update")
        if not against_time:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10], integer=True))
        sources = {run.accuracy.source for run in runs if run.accuracy is not None}
        axes.set_ylabel(f"{sources.pop() if len(sources) == 1 else 'accuracy (kinds differ: see the table)'} (%)")
        return True

    return draw


def _draw_times(axes: Axes, runs: Sequence[Run]) -> bool:
    """One bar a run: rollout in its color, optimization lighter, the rest lightest."""
    from matplotlib.patches import Patch

    timed = [(number, run) for number, run in enumerate(runs) if run.seconds()]
    if not timed:
        return False
    unit = _time_unit(max(run.seconds()["total"] for _, run in timed))
    shades = {"rollout and rewards": 1.0, "optimization": 0.55, "other": 0.2}
    for number, run in timed:
        total, rollout = run.seconds()["total"], run.rollout_seconds()
        optimize = run.seconds().get("optimize", 0.0)
        left = 0.0
        for alpha, seconds in zip(shades.values(), (rollout, optimize, total - rollout - optimize), strict=True):
            width = seconds / SECONDS_OF[unit]
            axes.barh(number, width, left=left, height=0.6, color=color_of(number), alpha=alpha)
            left += width
        share = f"{rollout / total:.0%} rollout" if total else ""
        axes.text(left, number, f" {left:.3g} {unit}, {share}", va="center", fontsize="small")
    axes.set_xlim(0, 1.45 * axes.get_xlim()[1] / 1.05)
    axes.set_ylim(len(runs) + 0.45 * len(runs), -0.6)  # room for the legend below the bars
    axes.set_yticks([])
    axes.set_xlabel(f"T_total ({unit})")
    patches = [Patch(color="0.3", alpha=alpha, label=kind) for kind, alpha in shades.items()]
    axes.legend(handles=patches, loc="lower right", frameon=False, fontsize="small")
    return True


def _time_unit(seconds: float) -> str:
    return "s" if seconds < 300 else "min" if seconds < 3 * 3600 else "h"


PANELS = (
    Panel(
        "accuracy_by_time", "Accuracy against wall-clock", "", _draw_accuracy(against_time=True),
        "Mean over benchmarks of the checkpoints, when their updates were done.",
    ),
    Panel(
        "accuracy_by_update", "Accuracy against updates", "", _draw_accuracy(against_time=False),
        "The same at equal numbers of updates.",
    ),
    Panel(
        "time", "Where the wall-clock went", "", _draw_times,
        "T_rollout (generation and rewards), optimization, and the rest of T_total.",
    ),
    Panel(
        "reward", "Reward", "mean reward", _over_updates("reward"),
        "Of the responses of each update; they were generated when their stage began, which the lines mark.",
    ),
    Panel(
        "negative_ratio", "Ratio of bad responses", "E[ρ | A<0]", _over_updates("ratio/negative_mean"),
        "Near 1 is healthy; sinking means that the policy is only suppressing.",
    ),
    Panel(
        "clip", "Clipped tokens", "share of tokens (%)", _share_over_updates("clip/token_fraction"),
        "Tokens at which min() selects the clipped constant.",
    ),
    Panel(
        "veto", "Vetoed tokens", "share of tokens (%)", _share_over_updates("veto/token_fraction"),
        "Tokens that the negative-advantage veto masks.",
    ),
    Panel(
        "length", "Response length", "tokens per response", _over_updates("completions/mean_length"),
        "Mean over the responses of each update, the EOS included.",
    ),
    Panel(
        "entropy", "Entropy", "nats per token", _over_updates("policy/entropy"),
        "Of the policy at the generated tokens; logged with `lean_head: false`.",
    ),
)  # fmt: skip
"""Top to bottom and left to right on the sheet."""
