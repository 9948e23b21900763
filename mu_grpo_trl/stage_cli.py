"""`mu-grpo stage check|push|repair|show PATH`: look at a stage on disk, mend it by hand, share it."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .stage import StageError, StageReader
from .stage.repair import StageCheck, check_stage, find_stage, repair_stage

DESCRIPTION = """look at a stage on disk, mend it, share it

  mu-grpo stage show PATH     what it is, its rewards and lengths, a few responses
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
    if missing and not (after.path / "policy").is_dir():
        print(
            "Its policy/ is gone: start again from the checkpoint at this stage's beginning, which publishes it anew."
        )
    return 1 if after.problems else 0


def show(options: argparse.Namespace) -> int:
    """Print manifest, totals and a few responses."""
    reader = StageReader(find_stage(options.path), allow_filling=True)
    manifest = reader.manifest
    print(f"{reader.path}: stage {manifest.stage}, {manifest.status}")
    print(f"  {len(reader)} of {manifest.num_groups} groups × {manifest.num_generations} responses,", end=" ")
    print(f"{manifest.num_updates} updates of {manifest.prompts_per_update} groups")
    print(f"  {manifest.engine} {manifest.engine_version}, sampling {manifest.sampling}")
    print(f"  policy {manifest.policy_hash} published at update {manifest.published_step}, run {manifest.run_id}")
    print(f"  dataset {manifest.dataset_hash}, tokenizer {manifest.tokenizer_hash}, seed {manifest.seed}")
    if len(reader):
        _print_totals(reader)
        _print_responses(reader, options)
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
            command.add_argument("--responses", type=int, default=3, help="how many to print (3)")
            command.add_argument(
                "--group", type=int, help="print this group's responses instead of a spread of groups'"
            )
            command.add_argument("--tokenizer", help="for the text; the stage's own policy/ if it is still there")
    return parser


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


def _print_totals(reader: StageReader) -> None:
    totals = reader.summary()
    lengths = reader.lengths(reader.groups)[1]
    quantiles = np.quantile(lengths, [0, 0.5, 0.9, 1]).round().astype(int).tolist()
    print(f"  {totals.num_responses} responses of {totals.num_tokens} tokens,", end=" ")
    print(f"{totals.tokens_without_logp} tokens without a log-prob")
    print(f"  lengths: mean {totals.mean_length:.1f}, min/median/90%/max {'/'.join(map(str, quantiles))},", end=" ")
    print(f"cut at the limit {totals.truncated_share:.1%}")
    each = ", ".join(f"{name} {mean:.3f}" for name, mean in totals.mean_rewards.items())
    print(f"  reward: mean {totals.mean_reward:.3f} ({each}), unscorable {totals.unscorable_responses},", end=" ")
    print(f"groups without signal {totals.zero_advantage_group_share:.1%}")


def _print_responses(reader: StageReader, options: argparse.Namespace) -> None:
    size = reader.manifest.num_generations
    if options.group is not None:
        chosen = [(options.group, sample) for sample in range(min(size, options.responses))]
    else:
        spread = np.linspace(0, len(reader) - 1, max(0, min(options.responses, len(reader)))).astype(int)
        chosen = [(int(group), 0) for group in reader.groups[spread]]
    tokenizer = _tokenizer(reader.path, options.tokenizer) if chosen else None
    for group, sample in chosen:
        response = reader.response(group, sample)
        reward = reader.rewards([group])[0, sample]
        print(f"\n--- group {group} sample {sample}: {len(response.completion_ids)} tokens,", end=" ")
        print(f"reward {reward:.3f}, advantage {response.advantage:.3f}")
        print(_text(tokenizer, response.prompt_ids))
        print(f">>> {_text(tokenizer, response.completion_ids)}")


def _tokenizer(stage: Path, wanted: str | None) -> Any:
    """The tokenizer, or None (with a hint) where there is none."""
    folder = wanted or str(stage / "policy")
    if wanted is None and not (stage / "policy" / "tokenizer_config.json").exists():
        print("\n(The stage's policy/ with its tokenizer is gone: token ids are shown. Name one by --tokenizer.)")
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _text(tokenizer: Any, token_ids: np.ndarray) -> str:
    return str(token_ids.tolist()) if tokenizer is None else tokenizer.decode(token_ids.tolist())
