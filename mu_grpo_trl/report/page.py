"""The report on one or several runs: figures (PNG, SVG), a Markdown file, and one HTML page that needs no network."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .figures import PANELS, color_of, draw_panel, draw_sheet, save
from .runs import Run

OWN_TO_EACH_RUN = {
    "output_dir",
    "stage_dir",
    "run_name",
    "logging_dir",
    "vllm_server_port",
    "hub_token",
    "vllm_api_key",
}
"""Settings that say nothing when they differ."""

MAIN_SETTINGS = (
    "model", "objective", "anchor", "stage_updates", "prompts_per_update", "num_generations", "max_steps",
    "epsilon", "epsilon_high", "veto_scope", "veto_threshold", "m2po_threshold", "beta",
    "learning_rate", "lr_scheduler_type", "weight_decay", "max_grad_norm", "temperature", "max_completion_length",
    "max_context_length", "rollout_engine", "num_processes", "bf16", "seed",
)  # fmt: skip
"""Settings shown even where the runs agree."""

Table = list[list[str]]

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1500px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
th { font-weight: 600; max-width: 22rem; overflow-wrap: anywhere; }
td { font-variant-numeric: tabular-nums; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
tbody th { white-space: nowrap; }
.figures { display: flex; flex-wrap: wrap; gap: 1.2rem; }
figure { margin: 0; flex: 1 1 430px; max-width: 640px; }
figure img { width: 100%; }
figcaption { color: #555; font-size: .85rem; }
"""


def write_report(runs: Sequence[Run], output: Path) -> Path:
    """
    Write `report.html`, `report.md`, `report.png`, `report.svg` and each panel below `figures/` into `output`.

    Returns:
        `Path`: the HTML page.
    """
    svgs = {}
    for panel in PANELS:
        figure = draw_panel(panel, runs)
        save(figure, output / "figures" / f"{panel.name}.png")
        svgs[panel.name] = save(figure, output / "figures" / f"{panel.name}.svg").read_bytes()
    sheet = draw_sheet(runs)
    save(sheet, output / "report.svg")
    save(sheet, output / "report.png")
    (output / "report.md").write_text(markdown(runs), encoding="utf-8")
    page = output / "report.html"
    page.write_text(html_page(runs, svgs), encoding="utf-8")
    return page


def markdown(runs: Sequence[Run]) -> str:
    """The tables as Markdown, and the sheet beside them."""
    parts = [f"# {_title(runs)}", _markdown_table(summary_table(runs))]
    for title, table in _further_tables(runs):
        parts += [f"## {title}", _markdown_table(table)]
    return "\n\n".join([*parts, "![all panels](report.png)"]) + "\n"


def html_page(runs: Sequence[Run], svgs: dict[str, bytes]) -> str:
    """The page, its figures inlined; `svgs` by name of the panel."""
    figures = "".join(
        f'<figure><img alt="{html.escape(panel.title)}" src="data:image/svg+xml;base64,'
        f'{base64.b64encode(svgs[panel.name]).decode()}"><figcaption>{html.escape(panel.note)}</figcaption></figure>'
        for panel in PANELS
    )
    tables = "".join(
        f"<h2>{html.escape(title)}</h2>{_html_table(table, runs)}" for title, table in _further_tables(runs)
    )
    title = html.escape(_title(runs))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body><h1>{title}</h1>'
        f'{_html_table(summary_table(runs), runs)}<h2>Figures</h2><div class="figures">{figures}</div>{tables}'
        "</body></html>\n"
    )


def summary_table(runs: Sequence[Run]) -> Table:
    """What came of each run: names in the first column, a column a run, the labels on top."""
    rows: dict[str, Callable[[Run], str]] = {
        "updates": _progress,
        "accuracy, first → last": lambda run: _accuracy(run, lambda values: (values[0], values[-1])),
        "accuracy, best": _best_accuracy,
        "accuracy is": lambda run: run.accuracy.source if run.accuracy else "–",
        "reward, first → last stage": _stage_rewards,
        "E[ρ | A<0], lowest": lambda run: _number(run.series("ratio/negative_mean")[1], np.min, "{:.3f}"),
        "vetoed tokens, mean": lambda run: _number(run.series("veto/token_fraction")[1], np.mean, "{:.2%}"),
        "clipped tokens, mean": lambda run: _number(run.series("clip/token_fraction")[1], np.mean, "{:.2%}"),
        "tokens per response, last": lambda run: _last(run.series("completions/mean_length")[1], "{:.1f}"),
        "entropy, last": lambda run: _last(run.series("policy/entropy")[1], "{:.3f}"),
        "T_rollout": lambda run: _duration(run.rollout_seconds()) if run.seconds() else "–",
        "T_total": lambda run: _duration(run.seconds()["total"]) if run.seconds() else "–",
    }
    return [["", *(run.label for run in runs)], *([name, *map(row, runs)] for name, row in rows.items())]


def benchmark_table(runs: Sequence[Run]) -> Table:
    """Last accuracies by benchmark; only a head if no run has more than one."""
    names = dict.fromkeys(name for run in runs if run.accuracy is not None for name in run.accuracy.benchmarks)
    rows = []
    for name in names if len(names) > 1 else ():
        values = [run.accuracy.benchmarks.get(name, np.empty(0)) if run.accuracy else np.empty(0) for run in runs]
        rows.append([name, *(_last(value, "{:.1%}") for value in values)])
    return [["last checkpoint", *(run.label for run in runs)], *rows]


def settings_tables(runs: Sequence[Run]) -> tuple[Table, Table]:
    """The settings in which runs differ, and the main ones in which they agree."""
    head = ["", *(run.label for run in runs)]
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in OWN_TO_EACH_RUN)
    differing, agreeing = [], []
    for name in names:
        values = [_setting(run.settings.get(name)) if run.settings else "not recorded" for run in runs]
        if len(set(values)) > 1:
            differing.append([name, *values])
        elif name in MAIN_SETTINGS:
            agreeing.append([name, values[0]])
    order = {name: number for number, name in enumerate(MAIN_SETTINGS)}
    agreeing.sort(key=lambda row: order[row[0]])
    differing.sort(key=lambda row: order.get(row[0], len(order)))
    return [head, *differing], [["", "all runs" if len(runs) > 1 else runs[0].label], *agreeing]


def _further_tables(runs: Sequence[Run]) -> list[tuple[str, Table]]:
    differing, agreeing = settings_tables(runs)
    titled = (
        ("Benchmarks", benchmark_table(runs)),
        ("Settings that differ", differing),
        ("Settings in common" if len(runs) > 1 else "Settings", agreeing),
    )
    return [(title, table) for title, table in titled if len(table) > 1]


def _title(runs: Sequence[Run]) -> str:
    return f"Run {runs[0].label}" if len(runs) == 1 else f"{len(runs)} runs compared"


def _progress(run: Run) -> str:
    planned = run.settings.get("max_steps")
    count = len(run.boundaries()) + 1
    stages = f" in {count} stage{'s' * (count > 1)}" if run.settings.get("stage_updates") else ""
    return f"{run.num_updates}{f' of {planned}' if planned and planned != run.num_updates else ''}{stages}"


def _accuracy(run: Run, choose: Callable[[np.ndarray], Sequence[float]]) -> str:
    if run.accuracy is None:
        return "–"
    values = run.accuracy.mean[np.isfinite(run.accuracy.mean)]
    return " → ".join(f"{value:.1%}" for value in choose(values)) if len(values) else "–"


def _best_accuracy(run: Run) -> str:
    if run.accuracy is None or not np.isfinite(run.accuracy.mean).any():
        return "–"
    best = int(np.nanargmax(run.accuracy.mean))
    return f"{run.accuracy.mean[best]:.1%} at update {run.accuracy.steps[best]:.0f}"


def _stage_rewards(run: Run) -> str:
    steps, rewards = run.series("reward")
    if not len(steps):
        return "–"
    edges = [0, *run.boundaries(), math.inf]
    means = [rewards[(steps > low) & (steps <= high)] for low, high in zip(edges, edges[1:], strict=False)]
    shown = [f"{mean.mean():.3f}" for mean in means if len(mean)]
    return " → ".join(dict.fromkeys((shown[0], shown[-1])))


def _number(values: np.ndarray, reduce: Callable[[np.ndarray], Any], form: str) -> str:
    return form.format(reduce(values)) if len(values) else "–"


def _last(values: np.ndarray, form: str) -> str:
    return _number(values, lambda series: series[-1], form)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{seconds / 60:.1f} min"


def _setting(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _markdown_table(table: Table) -> str:
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    return "\n".join([lines[0], "|" + " --- |" * len(table[0]), *lines[1:]])


def _html_table(table: Table, runs: Sequence[Run]) -> str:
    colors = {run.label: color_of(number) for number, run in enumerate(runs)}

    def head(cell: str) -> str:
        swatch = f'<span class="swatch" style="background:{colors[cell]}"></span>' if cell in colors else ""
        return f"<th>{swatch}{html.escape(cell)}</th>"

    body = "".join(
        f"<tr><th>{html.escape(row[0])}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in table[1:]
    )
    first = "".join(map(head, table[0]))
    return f'<div class="scroll"><table><thead><tr>{first}</tr></thead><tbody>{body}</tbody></table></div>'
