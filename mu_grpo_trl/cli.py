"""The console script `mu-grpo`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "train": "train from a recipe: mu-grpo train --config recipes/NAME.yaml [--key value …]",
    "plan": "what a run will need, and what is wrong with it: mu-grpo plan --config recipes/NAME.yaml",
    "doctor": "whether this machine is ready: mu-grpo doctor [--config recipes/NAME.yaml]",
    "eval": "checkpoints on benchmarks: mu-grpo eval --config recipes/NAME.yaml --checkpoints runs/NAME/checkpoint-*",
    "stage": "look at a stage on disk, mend it, share it: mu-grpo stage show|check|repair|push PATH",
    "lab": "the paper's experiments on tiny tasks: mu-grpo lab list|run|report",
    "report": "figures and tables of runs, side by side: mu-grpo report RUN… [--label NAME …]",
    "merge": "write a LoRA run as a model without adapter: mu-grpo merge RUN OUT",
    "push": "upload the model of a finished run to the Hub: mu-grpo push RUN REPO",
    "quickstart": "train a small model on sums, show what came of it [--task arithmetic|smollm2] [--engine vllm]",
    "completion": "print the completion of a shell: mu-grpo completion bash|zsh",
}
MODULES = {
    "train": "train",
    "plan": "planning.command",
    "doctor": "planning.doctor",
    "eval": "evaluation.command",
    "stage": "stage_cli",
    "lab": "lab.cli",
    "report": "report.cli",
    "merge": "export",
    "push": "export",
    "quickstart": "lab.quickstart",
    "completion": "completion",
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
    with contextlib.redirect_stdout(sys.stderr):  # some libraries print when they are imported
        module = importlib.import_module(f".{MODULES[command]}", __package__)
    module.main(argv if MODULES[command] == "export" else argv[1:])
