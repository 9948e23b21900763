"""Figures of the laboratory's page, in the form of the paper's: the mean over seeds in bold, seeds as thin lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .comparison import Point, mark
from .results import Result
from .selection import LOW_STALENESS, Lab, Regime, Selection, number
from .statistics import Estimate, estimate

# Okabe and Ito's palette, told apart by people with any colour vision; one colour a method on every figure.
COLORS = {
    "mu_grpo": "#0072B2",
    "grpo_low": "#000000",
    "grpo_high": "#E69F00",
    "m2po": "#009E73",
    "no_veto": "#D55E00",
    "trigger": "#CC79A7",
    "non_trigger_suffix": "#56B4E9",
    "suffix": "#8C6D00",
}
NAMES = {
    "mu_grpo": "μ-GRPO (S_seq)",
    "grpo_low": f"GRPO, μ = {LOW_STALENESS}",
    "grpo_high": "GRPO, high μ",
    "m2po": "M2PO, high μ",
    "no_veto": "relaxed clip, no veto",
    "trigger": "veto of triggers (T)",
    "non_trigger_suffix": "veto of H_κ",
    "suffix": "veto of S_κ",
}
MAIN_METHODS = ("grpo_low", "grpo_high", "m2po", "mu_grpo")
DILEMMA_METHODS = ("grpo_high", "no_veto", "mu_grpo")
SCOPE_METHODS = ("no_veto", "trigger", "non_trigger_suffix", "suffix", "mu_grpo")
VETOING_METHODS = ("non_trigger_suffix", "suffix", "mu_grpo")

Curve = Callable[[Result], tuple[Sequence[float], Sequence[float]]]


@dataclass(frozen=True)
class Figure:
    """
    A drawn figure.

    Args:
        name (`str`): of its files.
        caption (`str`): what it shows.
        canvas (`matplotlib.figure.Figure`): to be saved.
    """

    name: str
    caption: str
    canvas: Any

    def save(self, folder: Path) -> bytes:
        """Write `<name>.png` and `<name>.svg`, the same bytes for the same numbers; returns the SVG."""
        import matplotlib

        folder.mkdir(parents=True, exist_ok=True)
        self.canvas.savefig(folder / f"{self.name}.png", dpi=110, metadata={"Software": None})
        with matplotlib.rc_context({"svg.hashsalt": self.name}):
            self.canvas.savefig(folder / f"{self.name}.svg", metadata={"Date": None, "Creator": None})
        return (folder / f"{self.name}.svg").read_bytes()


def name_of(method: str) -> str:
    """What a method is called on the page."""
    return NAMES.get(method, method.replace("_", " "))


def draw_all(lab: Lab, task: str, points: Mapping[str, Sequence[Point]]) -> list[Figure]:
    """Every figure of a task that there are cells for; `points` are the grid's, by what they are compared to."""
    main = Regime(task, lab.main_mu(task))
    figures = [draw_main(lab, main)]
    for learning_rate in lab.learning_rates(task):
        shared = Regime(task, main.stage_updates, learning_rate)
        figures += [
            draw_pair(
                lab, shared, "dilemma", DILEMMA_METHODS, _metric_curve("clip/token_fraction"),
                "clipped tokens (%)",
                "The clipping dilemma (paper Fig. 2): clipped share of tokens, and accuracy.",
                scale=100.0,
            ),
            draw_pair(
                lab, shared, "scopes", SCOPE_METHODS, _metric_curve("ratio/negative_mean"),
                "E[ρ | A<0]",
                "Veto scopes under the relaxed clip (paper Fig. 3): E[ρ | A<0], cut at 2, and accuracy.",
                limits=(0.0, 2.0),
            ),
            draw_vetoed_shares(lab, shared),
        ]  # fmt: skip
    figures += [draw_sweeps(lab, main), draw_grid(lab, task, points)]
    return [figure for figure in figures if figure is not None]


def draw_main(lab: Lab, regime: Regime) -> Figure | None:
    """Accuracy against updates and against time (paper Fig. 1)."""
    chosen = _chosen(lab, regime, MAIN_METHODS)
    if not chosen:
        return None
    canvas, (left, right) = _canvas(1, 2)
    for method, selection in chosen.items():
        _draw_curves(left, method, selection, _accuracy_curve, 100.0)
        _draw_curves(right, method, selection, _accuracy_by_time, 100.0)
    left.set(xlabel="updates", ylabel="accuracy (%)", title="at equal updates")
    right.set(xlabel="training time (CPU seconds)", ylabel="accuracy (%)", title="at equal time")
    _legend(canvas, left)
    return Figure(
        f"{regime.task}-main",
        "The main comparison (paper Fig. 1): each method at its tuned learning rate; bold is the mean over seeds, "
        "thin lines are seeds.",
        canvas,
    )


def draw_pair(
    lab: Lab,
    regime: Regime,
    name: str,
    methods: Sequence[str],
    curve: Curve,
    label: str,
    caption: str,
    scale: float = 1.0,
    limits: tuple[float, float] | None = None,
) -> Figure | None:
    """A logged metric on the left, its axis within `limits`, accuracy on the right."""
    chosen = _chosen(lab, regime, methods)
    if len(chosen) < 2:
        return None
    canvas, (left, right) = _canvas(1, 2)
    for method, selection in chosen.items():
        _draw_curves(left, method, selection, curve, scale, seeds=False)
        _draw_curves(right, method, selection, _accuracy_curve, 100.0)
    for axis in (left, right):
        _mark_stages(axis, lab, regime)
    left.set(xlabel="updates", ylabel=label, title=f"{label}, mean and range of seeds", ylim=limits)
    right.set(xlabel="updates", ylabel="accuracy (%)", title="accuracy")
    _legend(canvas, right)
    return Figure(_file_name(regime, name), f"{caption} Dotted lines are stage boundaries. {regime}.", canvas)


def _file_name(regime: Regime, name: str) -> str:
    rate = "" if regime.learning_rate is None else f"-lr{number(regime.learning_rate)}"
    return f"{regime.task}-{name}{rate}"


def draw_vetoed_shares(lab: Lab, regime: Regime) -> Figure | None:
    """Vetoed share of tokens by stage (paper Tables 5 and 6)."""
    chosen = {
        method: [run.vetoed_shares for run in selection.runs if run.vetoed_shares]
        for method, selection in _chosen(lab, regime, VETOING_METHODS).items()
    }
    chosen = {method: shares for method, shares in chosen.items() if shares}
    if not chosen:
        return None
    canvas, (axis,) = _canvas(1, 1)
    width = 0.8 / len(chosen)
    num_stages = max(len(run) for shares in chosen.values() for run in shares)
    for position, (method, shares) in enumerate(chosen.items()):
        stages = [estimate(column) for column in zip(*shares, strict=False)]
        at = np.arange(len(stages)) + (position - (len(chosen) - 1) / 2) * width
        heights = [100 * stage.mean for stage in stages]
        axis.bar(at, heights, width * 0.92, color=COLORS[method], label=name_of(method))
        if len(shares) > 1:
            # A share is never negative: the lower whisker ends at 0.
            below = [min(100 * stage.half_width, height) for stage, height in zip(stages, heights, strict=True)]
            above = [100 * stage.half_width for stage in stages]
            axis.errorbar(at, heights, [below, above], fmt="none", ecolor="0.3", capsize=2, linewidth=1)
    axis.set_xticks(range(num_stages), [str(stage) for stage in range(num_stages)])
    axis.set(xlabel="stage", ylabel="vetoed tokens (%)")
    axis.set_ylim(bottom=0)
    _legend(canvas, axis)
    caption = "Share of tokens the veto masks, by stage (paper Tables 5 and 6); mean and 95% interval over seeds."
    return Figure(_file_name(regime, "vetoed-shares"), f"{caption} {regime}.", canvas)


def draw_sweeps(lab: Lab, regime: Regime) -> Figure | None:
    """
    μ, τ_c, the upper bound, and prompts per update on one stage (paper Tables 3, 4, 7, 8), each at the learning
    rate it was swept at that is nearest to the tuned one.
    """
    rates = lab.learning_rates(regime.task)
    tuned = lab.tuned_lr(regime.task, "mu_grpo") or rates[0]
    nearest_first = sorted(rates, key=lambda rate: (abs(math.log(rate / tuned)), rate))
    panels: dict[str, dict[str, Estimate]] = {}
    for title in SWEEPS:
        for rate in nearest_first:
            parts = _swept(lab, replace(regime, learning_rate=rate), title)
            done = {label: estimate(list(part.finals.values())) for label, part in parts.items() if part.by_seed}
            if len(done) > 1:
                panels[f"{title} (lr {number(rate)})"] = done
                break
    if not panels:
        return None
    canvas, axes = _canvas(1, len(panels), width=3.4)
    for axis, (title, parts) in zip(axes, panels.items(), strict=True):
        _draw_sweep(axis, list(parts), list(parts.values()))
        axis.set(xlabel=title)
    _share_limits(axes)
    axes[0].set_ylabel("final accuracy (%)")
    caption = "Sweeps of μ-GRPO (paper Tables 3, 4, 7, 8): mean and 95% interval over seeds."
    return Figure(f"{regime.task}-sweeps", caption, canvas)


SWEEPS = ("μ", "veto threshold τ_c", "upper bound of the ratio", "prompts per update, one stage")


def _swept(lab: Lab, regime: Regime, title: str) -> dict[str, Selection]:
    """The points of one of `SWEEPS` in a regime, by label."""
    task = regime.task
    if title == "μ":
        return {str(mu): lab.select("mu_grpo", replace(regime, stage_updates=mu)) for mu in lab.staleness(task)}
    if title == "veto threshold τ_c":
        values = lab.swept_values(task, "veto_threshold")
        return {number(value): lab.select("mu_grpo", regime, veto_threshold=value) for value in values}
    if title == "upper bound of the ratio":
        values = lab.swept_values(task, "epsilon_high")
        labels = ["∞" if math.isinf(value) else f"{1 + value:g}" for value in values]
        return {
            label: lab.select("mu_grpo", regime, epsilon_high=value)
            for label, value in zip(labels, values, strict=True)
        }
    assert regime.learning_rate is not None
    return {f"{size:g}": part for size, part in lab.budget(task, regime.learning_rate).items()}


def draw_grid(lab: Lab, task: str, points: Mapping[str, Sequence[Point]]) -> Figure | None:
    """Differences of accuracy over learning rates and μ, at equal updates and at equal time."""
    rows = [(name, values) for name, values in points.items() if values]
    if not rows or len({(p.regime.learning_rate, p.regime.stage_updates) for _, ps in rows for p in ps}) < 2:
        return None
    rates = sorted({point.regime.learning_rate or 0.0 for _, values in rows for point in values})
    mus = sorted({point.regime.stage_updates for _, values in rows for point in values})
    # Two heat maps side by side need room for a cell's two lines of text.
    height = 1.2 + 0.62 * len(rates)
    canvas, axes = _canvas(len(rows), 2, width=max(5.0, 1.5 + 1.05 * len(mus)), height=height)
    differences = [d for _, ps in rows for p in ps for d in (p.equal_updates, p.equal_time)]
    limit = max(0.05, *(abs(difference.mean) for difference in differences))
    image = None
    for row, (name, values) in enumerate(rows):
        for column, clock in enumerate(("updates", "time")):
            axis = axes[2 * row + column]
            image = _draw_heatmap(axis, values, rates, mus, clock, limit)
            axis.set(xlabel="μ", ylabel="learning rate", title=f"equal {clock}, against GRPO at {name}")
    bar = canvas.colorbar(image, ax=list(axes), shrink=0.8)
    bar.set_label("difference of accuracy (points)")
    caption = (
        f"μ-GRPO minus GRPO at μ = {LOW_STALENESS} in points of accuracy, ± half the paired 95% interval. "
        "Framed: the accuracies match; blank: not run."
    )
    return Figure(f"{task}-grid", caption, canvas)


def _draw_heatmap(axis, points: Sequence[Point], rates: Sequence[float], mus: Sequence[int], clock: str, limit: float):
    from matplotlib.patches import Rectangle

    table = np.full((len(rates), len(mus)), np.nan)
    for point in points:
        row, column = rates.index(point.regime.learning_rate or 0.0), mus.index(point.regime.stage_updates)
        difference = point.equal_updates if clock == "updates" else point.equal_time
        table[row, column] = 100 * difference.mean
        width = f" ± {100 * difference.half_width:.1f}" if difference.num > 1 else ", 1 seed"
        text = f"{100 * difference.mean:+.1f}{width}\n{mark(difference)}"
        dark = abs(difference.mean) > 0.6 * limit
        axis.text(column, row, text, ha="center", va="center", fontsize=8.5, color="white" if dark else "black")
        if mark(difference) == "match":
            frame = Rectangle((column - 0.46, row - 0.46), 0.92, 0.92, fill=False, edgecolor="black", linewidth=1.8)
            axis.add_patch(frame)
    axis.set_xticks(range(len(mus)), [str(mu) for mu in mus])
    axis.set_yticks(range(len(rates)), [number(rate) for rate in rates])
    axis.grid(False)
    return axis.imshow(table, cmap="PuOr", vmin=-100 * limit, vmax=100 * limit, aspect="auto")


def _draw_sweep(axis, labels: Sequence[str], values: Sequence[Estimate]) -> None:
    at = np.arange(len(values))
    heights = np.array([100 * value.mean for value in values])
    widths = [100 * value.half_width if value.num > 1 else 0.0 for value in values]
    axis.errorbar(at, heights, widths, color=COLORS["mu_grpo"], marker="o", capsize=3, linewidth=1.5)
    axis.set_xticks(at, labels)
    axis.margins(x=0.12)


def _share_limits(axes: Sequence[Any]) -> None:
    low = min(axis.get_ylim()[0] for axis in axes)
    high = max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(low, high)


def _draw_curves(axis: Any, method: str, selection: Selection, curve: Curve, scale: float, seeds: bool = True) -> None:
    """The mean over seeds in bold; the seeds as thin lines, or the range they span as a band."""
    curves = [curve(run) for run in selection.runs]
    curves = [(np.asarray(x, float), scale * np.asarray(y, float)) for x, y in curves if len(x)]
    if not curves:
        return
    color = COLORS.get(method, "0.4")
    # Runs of different length (in seconds) share the span that all of them cover.
    start, stop = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    common = np.unique(np.concatenate([x for x, _ in curves]))
    common = common[(common >= start) & (common <= stop)]
    stacked = np.stack([np.interp(common, x, y) for x, y in curves])
    if seeds and len(curves) > 1:
        for x, y in curves:
            axis.plot(x, y, color=color, linewidth=0.7, alpha=0.3, zorder=2)
    elif len(curves) > 1:
        axis.fill_between(common, stacked.min(axis=0), stacked.max(axis=0), color=color, alpha=0.15, linewidth=0)
    axis.plot(common, stacked.mean(axis=0), color=color, linewidth=2.2, label=name_of(method), zorder=3)


def _accuracy_curve(run: Result) -> tuple[list[float], list[float]]:
    return [float(e.update) for e in run.evaluations], [e.accuracy for e in run.evaluations]


def _accuracy_by_time(run: Result) -> tuple[list[float], list[float]]:
    return [e.cpu_s for e in run.evaluations], [e.accuracy for e in run.evaluations]


def _metric_curve(name: str) -> Curve:
    def curve(run: Result) -> tuple[list[float], list[float]]:
        points = run.metric(name)
        return [float(step) for step, _ in points], [value for _, value in points]

    return curve


def _mark_stages(axis: Any, lab: Lab, regime: Regime) -> None:
    for boundary in range(regime.stage_updates, lab.num_updates(regime.task), regime.stage_updates):
        axis.axvline(boundary, color="0.6", linewidth=0.9, linestyle=":", zorder=1)


def _chosen(lab: Lab, regime: Regime, methods: Sequence[str]) -> dict[str, Selection]:
    """Methods with finished cells in the regime."""
    selections = {method: lab.select(method, regime) for method in methods}
    return {method: selection for method, selection in selections.items() if selection.by_seed}


def _canvas(rows: int, columns: int, width: float = 5.0, height: float = 3.4) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=(width * columns, height * rows + 0.3), layout="constrained")
    axes = list(np.ravel(canvas.subplots(rows, columns, squeeze=False)))
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="0.92", linewidth=0.8)
        axis.set_axisbelow(True)
    return canvas, axes


def _legend(canvas: Any, axis: Any) -> None:
    """One legend for all panels, outside of them, so that it covers no line."""
    handles, labels = axis.get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False)
