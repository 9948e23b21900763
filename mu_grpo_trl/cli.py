"""The console script `mu-grpo`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train from a recipe: mu-grpo train --config recipes/NAME.yaml [--key value …]",
    "stage": "look at a stage on disk, or mend it: mu-grpo stage show|check|repair PATH",
    "report": "figures and tables of runs, side by side: mu-grpo report RUN… [--label NAME …]",
    "quickstart": "train a small model on sums, show what came of it [--task arithmetic|smollm2] [--engine vllm]",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of `COMMANDS`. What the user can mend ends with its message and exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    lines = "\n".join(f"  {name:<12}{text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="mu-grpo", description=f"commands:\n{lines}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=COMMANDS)
    command = parser.parse_args(argv[:1]).command
    sys.path.insert(0, os.getcwd())  # as with `python -m`: `module:function` rewards may lie in the working directory
    if command == "train":
        from .train import main as run
    elif command == "stage":
        from .stage_cli import main as run
    elif command == "report":
        from .report.cli import main as run
    else:
        from .lab.quickstart import main as run
    run(argv[1:])
