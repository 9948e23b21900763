"""`mu-grpo completion bash|zsh`: a shell's completion of all commands and their options."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import shtab

from . import export, stage_cli, train
from .lab import quickstart


def make_parser() -> argparse.ArgumentParser:
    """All commands of `mu-grpo` as one parser."""
    parser = argparse.ArgumentParser(prog="mu-grpo")
    commands = parser.add_subparsers()
    parsers = {
        "train": train.make_parser(),
        "stage": stage_cli.make_parser(),
        "quickstart": quickstart.make_parser(),
        **export.make_parsers(),
    }
    for name, command in parsers.items():
        commands.add_parser(name, help=name, parents=[command], add_help=False)  # without help, shtab hides it
    recipe = commands.choices["train"].add_argument("--config", metavar="RECIPE", help="a recipe, in YAML")
    recipe.complete = shtab.FILE  # type: ignore[attr-defined]  # what shtab reads
    commands.add_parser("completion", help="completion").add_argument("shell", choices=("bash", "zsh"))
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print the completion: `source <(mu-grpo completion bash)`."""
    parser = argparse.ArgumentParser(
        prog="mu-grpo completion",
        description="print a shell's completion; to use it: source <(mu-grpo completion bash)",
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    print(shtab.complete(make_parser(), parser.parse_args(argv).shell))
