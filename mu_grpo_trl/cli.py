"""The console script `mu-grpo`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train from a recipe: mu-grpo train --config recipes/NAME.yaml [--key value …]",
    "stage": "look at a stage on disk, mend it, share it: mu-grpo stage show|check|repair|push PATH",
    "merge": "write a LoRA run as a model without adapter: mu-grpo merge RUN OUT",
    "push": "upload the model of a finished run to the Hub: mu-grpo push RUN REPO",
    "quickstart": "train a small model on sums, show what came of it [--task arithmetic|smollm2] [--engine vllm]",
    "completion": "print the completion of a shell: mu-grpo completion bash|zsh",
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
    elif command in ("merge", "push"):
        from .export import main as run

        argv = ["", *argv]
    elif command == "completion":
        from .completion import main as run
    else:
        from .lab.quickstart import main as run
    run(argv[1:])
