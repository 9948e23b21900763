"""`mu-grpo report RUN…`: figures and tables of runs, side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from .page import markdown, write_report
from .runs import ReportError, load_runs

DESCRIPTION = """figures and tables of runs, side by side

  mu-grpo report runs/a                       one run: into runs/a/report/
  mu-grpo report runs/a runs/b --label A B    several, overlaid: into report/

A run is an output_dir, whether it has ended, goes on, or was killed. Written are report.html (one file that opens
without a network), report.md, report.png, report.svg, and each figure as PNG and SVG in figures/.

Accuracies are those of `mu-grpo eval` (with `--output_dir RUN/evaluation`, or named by --eval), else of evaluation
during training."""


def main(argv: Sequence[str] | None = None) -> None:
    """Write the report and print its tables. Exit code 2: there is nothing to report on."""
    parser = argparse.ArgumentParser(
        prog="mu-grpo report", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's output_dir")
    parser.add_argument("--label", nargs="+", help="names of the runs, in their order; by default their folders'")
    parser.add_argument(
        "--eval", nargs="+", type=Path, metavar="DIR", help="output_dir of `mu-grpo eval` for each run, in their order"
    )
    parser.add_argument("--output", type=Path, help="folder to write to")
    options = parser.parse_args(argv)
    try:
        if find_spec("matplotlib") is None:
            raise ReportError("matplotlib is not installed. Run `pip install 'mu-grpo-trl[quickstart]'`.")
        runs = load_runs(options.runs, options.label, options.eval)
        output = options.output or (options.runs[0] / "report" if len(runs) == 1 else Path("report"))
        page = write_report(runs, output)
    except (ReportError, OSError) as error:
        print(f"mu-grpo report: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    print(markdown(runs).rpartition("\n\n![")[0])
    print(f"\n{page}")
