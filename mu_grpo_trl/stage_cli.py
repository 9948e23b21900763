"""`mu-grpo stage check|push|repair|show PATH`: look at a stage on disk, mend it by hand, share it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from .report import stage_text
from .report.stage_view import view_stage
from .stage import StageError, StageReader
from .stage.repair import StageCheck, check_stage, find_stage, repair_stage

DESCRIPTION = """look at a stage on disk, mend it, share it

  mu-grpo stage show PATH     what it is, its rewards, solve rates and lengths, its best and worst responses;
                              with --checkpoint DIR the tokens whose ratio triggers the veto under those weights
  mu-grpo stage check PATH    compare every shard and row with what they must be; exit code 1 if something is wrong
  mu-grpo stage repair PATH   set bad shards aside, so that the next start of the run generates only their groups
  mu-grpo stage push PATH REPO   upload a complete stage to the Hub as a dataset with a card, private unless --public

PATH is a stage's folder, such as runs/NAME/stages/stage-000."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the subcommands. Exit code 1: the stage has something wrong; 2: there is no stage to look
    at, or it could not be pushed."""
    options = make_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s")
    try:
        code = options.run(options)
    except (StageError, ValueError, OSError) as error:
        print(f"mu-grpo stage: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def check(options: argparse.Namespace) -> int:
    """Print what is wrong; 1 if anything is."""
    found = check_stage(options.path)
    _print_check(found)
    if found.problems:
        print(f"Run `mu-grpo stage repair {options.path}`, then start the run again with --resume auto.")
    return 1 if found.problems else 0


def repair(options: argparse.Namespace) -> int:
    """Set aside what is wrong, or with `--dry-run` say what would be; 1 if something stays wrong."""
    before = check_stage(options.path) if options.dry_run else repair_stage(options.path)
    _print_check(before)
    temporary = [path.name for path in before.leftovers if path.suffix == ".tmp"]
    if not before.problems and not temporary:
        print("Nothing to repair.")
        return 0
    would = "would be " if options.dry_run else ""
    for path in before.bad_shards:
        print(f"{path.name}: {would}renamed to *.rejected.")
    for name in temporary:
        print(f"{name}: {would}removed.")
    if options.dry_run:
        print("Nothing was changed (--dry-run).")
        return 0
    after = check_stage(options.path)
    missing = after.missing_groups
    print(f"{len(after.good_groups)} groups are kept, {len(missing)} are to be generated: --resume auto does.")
    if missing and not any((after.path / "policy").glob("*.safetensors")):
        print(
            "Its policy's weights are gone: start again from the checkpoint at this stage's beginning, which "
            "publishes them anew."
        )
    return 1 if after.problems else 0


def show(options: argparse.Namespace) -> int:
    """Print what the stage is, its rewards, solve rates and lengths, and responses; its ratios under a checkpoint."""
    reader = StageReader(find_stage(options.path), allow_filling=True)
    if not len(reader):
        print("\n".join(stage_text.identity(reader)) if not options.json else stage_text.as_json(reader))
        return 0
    view = view_stage(reader, options.right_at, 0 if options.group is not None else options.responses)
    ratios = None
    if options.checkpoint is not None:
        from transformers.utils.logging import disable_progress_bar

        from .report.ratios import score_stage  # takes TRL

        disable_progress_bar()
        ratios = score_stage(reader, options.checkpoint, options.sample, options.veto_threshold)
    decode = _decoder(reader.path, options)
    if options.json:
        print(stage_text.as_json(reader, view, ratios, decode))
        return 0
    lines = [*stage_text.identity(reader), *stage_text.totals(view)]
    if options.group is not None:
        chosen = range(min(reader.manifest.num_generations, options.responses))
        lines += stage_text.group(reader, options.group, chosen, decode)
    else:
        lines += stage_text.examples(reader, view, decode)
    lines += stage_text.ratios(ratios, decode, options.tokens) if ratios is not None else []
    print("\n".join(lines))
    return 0


def push(options: argparse.Namespace) -> int:
    """Upload a complete, verified stage to the Hub as a dataset: shards, manifest and card, no policy."""
    reader = StageReader(find_stage(options.path), verify=True)
    from .hub import push_stage  # what is above needs no Hub

    print(push_stage(reader, options.repo, private=not options.public))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="mu-grpo stage", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="{check,push,repair,show}")
    for run in (check, push, repair, show):
        command = commands.add_parser(run.__name__, help=str(run.__doc__).partition(".")[0], description=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("path", metavar="PATH", help="the stage's folder")
        if run is push:
            command.add_argument("repo", metavar="REPO", help="name or organization/name on the Hub")
            command.add_argument(
                "--public", action="store_true", help="make the repository public, or accept that it is"
            )
        if run is repair:
            command.add_argument("--dry-run", action="store_true", help="say what would be done, and change nothing")
        if run is show:
            _add_show_options(command)
    return parser


def _add_show_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--responses", type=int, default=2, help="how many of the best and of the worst to print (2)")
    command.add_argument("--group", type=int, help="print this group's first responses instead")
    command.add_argument("--right-at", type=float, default=1.0, help="reward from which a response is right (1)")
    command.add_argument("--tokenizer", help="for the text; the stage's own policy/ if it is still there")
    command.add_argument("--checkpoint", help="show the ratios of a sample under this policy, such as checkpoint-16")
    command.add_argument("--sample", type=int, default=64, help="responses that it scores (64)")
    command.add_argument(
        "--veto-threshold", type=float, default=1e-4, help="ratio below which a token triggers (1e-4)"
    )
    command.add_argument("--tokens", type=int, default=10, help="how many tokens of the lowest ratio to print (10)")
    command.add_argument("--json", action="store_true", help="print all of it as one JSON object")


def _print_check(found: StageCheck) -> None:
    manifest = found.manifest
    print(f"{found.path}: stage {manifest.stage}, {manifest.status}; {len(found.good_groups)} of", end=" ")
    print(f"{manifest.num_groups} groups are sound.")
    for problem in found.problems:
        print(f"  wrong: {problem}")
    for leftover in found.leftovers:
        print(f"  left over, harmless: {leftover.relative_to(found.path)}")
    if not found.problems and found.missing_groups:
        print(f"  {len(found.missing_groups)} groups are still to be generated.")


def _decoder(stage: Path, options: argparse.Namespace) -> stage_text.Decode:
    """Token ids as text: by the tokenizer asked for, the stage's or the checkpoint's own; else as numbers."""
    own = (stage / "policy", options.checkpoint)
    found = next((folder for folder in own if folder and (Path(folder) / "tokenizer_config.json").exists()), None)
    if options.tokenizer is None and found is None:
        print("(The stage's policy/ with its tokenizer is gone: token ids are shown. Name one by --tokenizer.)",
              file=sys.stderr)  # fmt: skip
        return lambda token_ids: str(token_ids.tolist())
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or found)
    return lambda token_ids: tokenizer.decode(token_ids.tolist())
