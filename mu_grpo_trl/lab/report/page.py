"""The page of the laboratory: blocks of text, tables and figures, once as Markdown and once as HTML of one file."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .claims import CLAIMS, Judged, points, times
from .comparison import Point, Setting, all_settings, compare_grid, mark, speedup_in_region
from .figures import Figure, name_of
from .results import Failure
from .selection import LOW_STALENESS, Lab, number
from .statistics import Estimate, estimate
from .verdicts import MARGIN, MIN_SEEDS

VERDICTS = {"seen": "seen", "not_seen": "not seen", "unclear": "unclear"}
SWEPT_NAMES = {"veto_threshold": "τ_c", "epsilon_high": "ε_high", "prompts_per_update": "prompts per update"}
STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1200px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; } h3 { font-size: 1.05rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: left; vertical-align: top; }
th { font-weight: 600; border-bottom-color: #999; }
td.seen, td.not_seen, td.unclear { font-weight: 600; white-space: nowrap; }
td.seen { color: #005a8c; } td.not_seen { color: #a34700; } td.unclear { color: #666; }
figure { margin: 1.2rem 0; } figure img { max-width: 100%; } figcaption { color: #444; font-size: .88rem; }
code { background: #f3f3f3; padding: 0 .25em; }
"""


@dataclass(frozen=True)
class Heading:
    """A heading of level 1 to 3."""

    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph of plain text."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table of plain text; its first row is the head."""

    rows: list[list[str]]


Block = Heading | Text | Table | Figure


def to_markdown(blocks: Sequence[Block]) -> str:
    """The blocks as Markdown; a figure is the PNG of its name in `figures/`, linked to the SVG."""
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"{'#' * block.level} {block.text}")
        elif isinstance(block, Text):
            parts.append(block.text)
        elif isinstance(block, Table):
            head, *rows = ([cell.replace("|", "\\|") for cell in row] for row in block.rows)
            lines = [head, ["---"] * len(head), *rows]
            parts.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
        else:
            link = f"[![{block.name}](figures/{block.name}.png)](figures/{block.name}.svg)"
            parts.append(f"{link}\n\n*{block.caption}*")
    return "\n\n".join(parts) + "\n"


def to_html(title: str, blocks: Sequence[Block], svgs: Mapping[str, bytes]) -> str:
    """The blocks as one HTML file that loads nothing; `svgs` are the figures by name."""
    classes = {text: name for name, text in VERDICTS.items()}
    parts = []
    for block in blocks:
        if isinstance(block, Heading):
            parts.append(f"<h{block.level}>{html.escape(block.text)}</h{block.level}>")
        elif isinstance(block, Text):
            # Inline code is the only markup of a paragraph.
            pieces = block.text.split("`")
            spans = (f"<code>{html.escape(p)}</code>" if i % 2 else html.escape(p) for i, p in enumerate(pieces))
            parts.append(f"<p>{''.join(spans)}</p>")
        elif isinstance(block, Table):
            head, *rows = block.rows
            lines = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in head) + "</tr>"]
            for row in rows:
                cells = (
                    f'<td class="{classes[cell]}">{cell}</td>' if cell in classes else f"<td>{html.escape(cell)}</td>"
                    for cell in row
                )
                lines.append(f"<tr>{''.join(cells)}</tr>")
            parts.append(f'<div class="scroll"><table>{"".join(lines)}</table></div>')
        else:
            data = base64.b64encode(svgs[block.name]).decode()
            caption = html.escape(block.caption)
            parts.append(
                f'<figure><img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
                f"<figcaption>{caption}</figcaption></figure>"
            )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        + "\n".join(parts)
        + "</body></html>\n"
    )


def build(
    lab: Lab, judged: Sequence[Judged], failures: Sequence[Failure], figures: Mapping[str, Sequence[Figure]]
) -> list[Block]:
    """
    All blocks of the page: claims first, then the regimes and the grid, then the figures.

    Args:
        lab (`Lab`): the cells.
        judged (`Sequence[Judged]`): every claim in every regime.
        failures (`Sequence[Failure]`): cells that ended with an error.
        figures (`Mapping[str, Sequence[Figure]]`): by task.
    """
    run = {cell.task for cell in lab.results}
    judged = [entry for entry in judged if entry.regime.task in run]
    blocks: list[Block] = [Heading(1, "The laboratory"), Text(_what_was_run(lab, failures))]
    if waiting := [task for task in lab.tasks if task not in run]:
        blocks.append(Text(f"No cell of the tasks {', '.join(waiting)} is finished yet: they are left out below."))
    blocks += [Heading(2, "What was seen of the paper's claims"), _claims_table(judged), Text(_how_judged(judged))]
    blocks += [Heading(2, "The rules"), _rules_table()]
    others = [entry for entry in judged if not entry.main]
    if others:
        blocks += [Heading(2, "The same claims at other learning rates and μ"), _regimes_table(others)]
    for task in filter(run.__contains__, lab.tasks):
        blocks += [Heading(2, f"Task {task}"), *_task_tables(lab, task)]
    if any(figures.values()):
        blocks.append(Heading(2, "Figures"))
    for task in lab.tasks:
        if figures.get(task):
            blocks += [Heading(3, f"Task {task}"), *figures[task]]
    if failures:
        rows = [["cell", "error"], *([failure.cell_id, failure.error] for failure in failures)]
        blocks += [Heading(2, "Cells that failed"), Table(rows)]
    return blocks


def _what_was_run(lab: Lab, failures: Sequence[Failure]) -> str:
    done = len(lab.results)
    planned = max(len(lab.planned), done)
    seeds = sorted({cell.seed for cell in lab.results} - lab.tuning_seeds)
    reporting = ", ".join(map(str, seeds)) or "none yet"
    tuning = ", ".join(map(str, sorted(lab.tuning_seeds))) or "none"
    failed = f" {len(failures)} failed (listed at the end)." if failures else ""
    return (
        f"{done} of {planned} cells are finished.{failed} Each is one training run by `MuGRPOTrainer` on the CPU; all "
        "of them are in `cells.jsonl.gz`, and `mu-grpo lab report --cells cells.jsonl.gz` makes this page from them "
        f"again. Seeds {reporting} are reported; seeds {tuning} chose the learning rates and take no part in anything "
        "below but the tuning tables. Accuracy is greedy, on held-out problems. Intervals are 95%, by Student's t "
        "over seeds; differences and ratios are paired by seed (same data order, same starting policy); "
        "shares of runs have exact binomial intervals. Time is CPU seconds of training on one thread, rollouts "
        "included and evaluation not, since cells ran side by side. GRPO at μ = 4 is this trainer too "
        "(`objective: grpo`), the faster of the two baselines of `benchmarks/end_to_end.py`."
    )


def _claims_table(judged: Sequence[Judged]) -> Table:
    rows = [["", "claim", "regime", "verdict", "seeds", "numbers"]]
    for claim in CLAIMS:
        found = [entry for entry in judged if entry.claim is claim and entry.main]
        for entry in found:
            rows.append([claim.key, claim.text, str(entry.regime), *_verdict_cells(entry)])
        if not found:
            rows.append([claim.key, claim.text, "–", "unclear", "0", "no cell was run for it"])
    return Table(rows)


def _verdict_cells(entry: Judged) -> list[str]:
    finding = entry.finding
    numbers = f"{finding.numbers} ({finding.reason})" if finding.reason else finding.numbers
    return [VERDICTS[finding.verdict], str(finding.num_seeds), numbers]


def _how_judged(judged: Sequence[Judged]) -> str:
    main = [entry for entry in judged if entry.main]
    return (
        "Here μ is that of four stages. Comparisons of methods (a, e, g, h, k) give each its tuned learning rate; "
        "ablations (all others) have μ-GRPO's for all methods, as the paper has one for all, or the nearest they were "
        "run at. The grid was fixed before the cells were run, and the rules below before any result was looked at. "
        f"These are {len(main)} verdicts, and {len(judged) - len(main)} more in other regimes further down; every "
        "interval is 95% for itself, with no correction for their number, so that about one in forty intervals that "
        f"should touch 0 lies above it by chance. Fewer than {MIN_SEEDS} seeds, or a missing cell, is always unclear."
    )


def _rules_table() -> Table:
    return Table(
        [["", "claim", "paper", "rule"], *([claim.key, claim.text, claim.source, claim.rule] for claim in CLAIMS)]
    )


def _regimes_table(judged: Sequence[Judged]) -> Table:
    rows = [["", "regime", "verdict", "seeds", "numbers"]]
    return Table(rows + [[entry.claim.key, str(entry.regime), *_verdict_cells(entry)] for entry in judged])


def _task_tables(lab: Lab, task: str) -> list[Block]:
    blocks: list[Block] = []
    tuning = _tuning_table(lab, task)
    if len(tuning.rows) > 1:
        blocks += [Heading(3, "Tuning of the learning rate"), tuning]
    for name, same_lr in (("at the same learning rate", True), ("at its tuned learning rate", False)):
        grid = compare_grid(lab, task, same_lr)
        if grid:
            blocks += [
                Heading(3, f"μ-GRPO against GRPO at μ = {LOW_STALENESS}, {name}"),
                _grid_table(grid),
                Text(_region_text(grid)),
            ]
    settings = [entry for entry in all_settings(lab) if entry.task == task]
    if settings:
        blocks += [Heading(3, "All settings"), _settings_table(settings)]
    return blocks


def _tuning_table(lab: Lab, task: str) -> Table:
    rates = lab.learning_rates(task)
    rows = [["method", *(f"lr {number(rate)}" for rate in rates), "chosen"]]
    for method in lab.methods(task):
        scores = lab.tuning(task, method)
        if scores:
            means = [points(estimate(scores[rate])) if rate in scores else "–" for rate in rates]
            rows.append([name_of(method), *means, number(lab.tuned_lr(task, method) or 0.0)])
    return Table(rows)


def _grid_table(grid: Sequence[Point]) -> Table:
    rows = [
        [
            "lr", "μ", "GRPO's lr", "seeds", "equal updates", "", "equal time", "", "T_total: speedup",
            "sooner at GRPO's final accuracy",
        ]
    ]  # fmt: skip
    for point in grid:
        reach = f"{times(point.to_baseline)}, {point.reached} of {point.num_seeds} seeds"
        rows.append(
            [
                number(point.regime.learning_rate or 0.0),
                str(point.regime.stage_updates),
                number(point.baseline_lr),
                str(point.equal_updates.num),
                points(point.equal_updates, signed=True),
                mark(point.equal_updates),
                points(point.equal_time, signed=True),
                mark(point.equal_time),
                times(point.speedup),
                reach,
            ]
        )
    return Table(rows)


def _region_text(grid: Sequence[Point]) -> str:
    number, speedup = speedup_in_region(grid)
    region = (
        f"The accuracies match or μ-GRPO is ahead at equal updates in {number} of {len(grid)} settings; over "
        f"these the speedup of T_total is {times(speedup)} (geometric mean of the settings, interval over seeds). The "
        "region was read off the same runs."
        if number
        else f"In none of the {len(grid)} settings do the accuracies match, nor is μ-GRPO ahead, at equal updates."
    )
    return (
        f"Differences are μ-GRPO minus GRPO. match: the interval lies within ±{100 * MARGIN:g} points; else ahead: it "
        f"lies above 0, behind: below 0, open: neither. {region}"
    )


def _settings_table(settings: Sequence[Setting]) -> Table:
    rows = [
        [
            "method",
            "μ",
            "lr",
            "other",
            "updates",
            "seeds",
            "final accuracy",
            "peak",
            "collapsed",
            "T_total",
            "T_rollout",
        ]
    ]
    for entry in settings:
        collapsed = entry.collapsed
        rows.append(
            [
                name_of(entry.method),
                str(entry.stage_updates),
                number(entry.learning_rate),
                ", ".join(f"{SWEPT_NAMES[name]} {value:g}" for name, value in entry.swept.items()) or "–",
                str(entry.num_updates),
                str(len(entry.runs)),
                points(entry.final),
                points(entry.peak),
                f"{collapsed.mean:.0%} ({collapsed.low:.0%}–{collapsed.high:.0%})",
                _seconds(entry.total_cpu_s),
                _seconds(entry.rollout_cpu_s),
            ]
        )
    return Table(rows)


def _seconds(value: Estimate) -> str:
    return f"{value.mean:.1f}" + (f" ± {value.half_width:.1f} s" if value.num > 1 else " s")
