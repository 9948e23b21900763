"""
`mu-grpo lab report`: what the finished cells of the laboratory say about each claim of the paper.

Writes into `docs/lab`: the page as Markdown (`README.md`) and as one HTML file that opens without a network
(`page.html`), its figures as PNG and SVG, `claims.json`, and every cell (`cells.jsonl.gz`, a `result.json` a line).
The report is made from the published numbers, five significant digits, so that `--cells docs/lab/cells.jsonl.gz`
gives the same files again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ..grid import load_experiments, load_grid
from .write import write_report


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="mu-grpo lab report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="cells are in RUNS/lab/cells (default: runs)")
    parser.add_argument("--cells", type=Path, help="a published cells.jsonl.gz instead of RUNS/lab/cells")
    parser.add_argument("--output", type=Path, default=Path("docs/lab"), help="folder to write (default: docs/lab)")
    arguments = parser.parse_args(argv)
    try:
        tuning = [experiment for name, experiment in load_experiments().items() if name.endswith("tuning")]
        tuning_seeds = frozenset(seed for experiment in tuning for seed in experiment.seeds)
        cells = arguments.cells or arguments.runs / "lab" / "cells"
        summary = write_report(cells, arguments.output, load_grid(), tuning_seeds)
    except (ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    print(summary)
