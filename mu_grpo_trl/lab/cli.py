"""
`mu-grpo lab`: the paper's experiments on tiny tasks, on the CPU.

    mu-grpo lab list                     experiments, their cells, how many are done, and the time left
    mu-grpo lab run [NAME … | all]       run what is missing of the named experiments (by default the main comparison)
    mu-grpo lab report                   tables, figures and verdicts from what is done
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ..locks import FolderInUseError
from .grid import MAIN_COMPARISON, GridError, load_experiments, load_grid

PUBLISHED = Path("docs/lab/cells.jsonl.gz")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line. Exit code 1 if a cell failed, 2 for what the user can mend."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["report"]:
        from .report import main as report

        return report(argv[1:])
    parser = argparse.ArgumentParser(
        prog="mu-grpo lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run what is missing")
    run.add_argument("experiments", nargs="*", default=[*MAIN_COMPARISON], help="names, or all")
    run.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cells side by side (cores)")
    run.add_argument(
        "--reuse", type=Path, default=PUBLISHED, help=f"published cells to take results from ({PUBLISHED})"
    )
    listing = commands.add_parser("list", help="experiments and what is left of them")
    commands.add_parser("report", help="tables, figures and verdicts (see `mu-grpo lab report --help`)")
    for command in (run, listing):
        command.add_argument("--runs", type=Path, default=Path("runs"), help="folder that holds lab/ (runs)")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "run":
            _run(arguments)
        else:
            _list(arguments.runs / "lab")
    except (FolderInUseError, GridError) as error:
        print(f"mu-grpo: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def _run(arguments: argparse.Namespace) -> None:
    from .runner import ERROR_NAME, reuse, run_cells

    root = arguments.runs / "lab"
    cells = load_grid(() if arguments.experiments == ["all"] else arguments.experiments)
    if arguments.reuse.exists():
        print(f"{reuse(arguments.reuse, cells, root)} results taken from {arguments.reuse}", flush=True)
    failed = run_cells(cells, root, arguments.jobs, lambda line: print(line, flush=True))
    if failed:
        print(f"{len(failed)} cells failed; see {root}/cells/*/{ERROR_NAME}", file=sys.stderr)
        raise SystemExit(1)


def _list(root: Path) -> None:
    from .runner import is_finished, seconds_left

    print(f"{'experiment':<26}{'cells':>6}{'done':>6}{'core-min left':>15}   shows")
    for name, experiment in load_experiments().items():
        cells = load_grid([name])
        done = sum(is_finished(cell, root) for cell in cells)
        left = seconds_left(cells, root) / 60
        print(f"{name:<26}{len(cells):>6}{done:>6}{left:>15.0f}   {experiment.title} ({experiment.paper})")
    cells = load_grid()
    done = sum(is_finished(cell, root) for cell in cells)
    print(f"{'all, shared cells once':<26}{len(cells):>6}{done:>6}{seconds_left(cells, root) / 60:>15.0f}")
