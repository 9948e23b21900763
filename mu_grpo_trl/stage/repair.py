"""Look a stage over, shard by shard and row by row, and set aside what cannot be trusted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .reader import Shard, corrupt_shards
from .schema import (
    FINISH_REASONS,
    GROUPS_NAME,
    LOGP_FLOOR,
    MANIFEST_NAME,
    Manifest,
    ManifestLostError,
    StageError,
    arrow_schema,
    cache_paths,
    read_manifest,
    shard_paths,
)
from .writer import MAX_LOGP, StageWriter

logger = logging.getLogger(__name__)

_LEFTOVERS = ("*.tmp", f"{GROUPS_NAME}/*.tmp", "*/*.rejected")
_BETWEEN = ("", "*/", "*/*/")  # what may lie between a folder that was named and the stages below it


@dataclass(frozen=True)
class StageCheck:
    """What a look over a stage found.

    Args:
        path (`Path`): the stage folder.
        manifest (`Manifest`): its manifest.
        bad_shards (`dict[Path, str]`): shards that cannot be trusted, and why.
        good_groups (`frozenset[int]`): groups that are whole in trusted shards.
        leftovers (`tuple[Path, ...]`): temporary files of a killed write, shards set aside before, and caches of
            `datasets`; harmless.
    """

    path: Path
    manifest: Manifest
    bad_shards: dict[Path, str]
    good_groups: frozenset[int]
    leftovers: tuple[Path, ...]

    @property
    def missing_groups(self) -> list[int]:
        """Groups that a restart would generate, ascending."""
        return sorted(set(range(self.manifest.num_groups)) - self.good_groups)

    @property
    def problems(self) -> list[str]:
        """What is wrong, one sentence each; empty for a sound stage, also one that is still being filled."""
        found = [f"{path.name}: {reason}" for path, reason in self.bad_shards.items()]
        missing = self.missing_groups
        if missing and self.manifest.status == "complete":
            found.append(
                f"{MANIFEST_NAME} says complete, but {len(missing)} of {self.manifest.num_groups} groups are missing "
                f"or in a bad shard: {_listed(missing)}."
            )
        return found


def find_stage(path: str | Path) -> Path:
    """`path`, once it is a stage folder.

    Raises:
        StageError: it is none; the message names the stages below it, if there are any.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise StageError(f"{folder} is no folder. Give a stage's, such as runs/NAME/stages/stage-000.")
    if (folder / MANIFEST_NAME).exists() or (folder / GROUPS_NAME).is_dir():
        return folder
    below: list[Path] = []
    with suppress(OSError):  # a folder may vanish meanwhile
        below = sorted(found.parent for above in _BETWEEN for found in folder.glob(f"{above}stage-*/{GROUPS_NAME}"))
    hint = f"Give one of {', '.join(map(str, below))}" if below else "Give one such as runs/NAME/stages/stage-000"
    raise StageError(f"{folder} is no stage: it has neither {MANIFEST_NAME} nor {GROUPS_NAME}/. {hint}.")


def check_stage(path: str | Path) -> StageCheck:
    """Compare every shard with the digest in its name and the manifest, and look at every row. Changes nothing.

    Raises:
        ManifestLostError: the manifest is missing or not JSON, so that nothing can be compared with it.
        StageError: there is no stage in `path`, or its manifest was edited.
    """
    folder = find_stage(path)
    try:
        manifest = read_manifest(folder)
    except ManifestLostError as lost:
        raise ManifestLostError(
            f"{lost} Nothing tells a stage's good shards without its manifest. Start the run again with its own "
            "settings (--resume auto): it writes the manifest anew and keeps the shards that carry its fingerprint."
        ) from lost
    paths = shard_paths(folder)
    corrupt = set(corrupt_shards(paths))
    bad: dict[Path, str] = {}
    good: set[int] = set()
    for shard in paths:
        try:
            if shard in corrupt:
                raise StageError("its bytes do not match the digest in its name (truncated or altered).")
            good |= _checked_groups(shard, manifest, good)
        except StageError as error:
            bad[shard] = str(error).removeprefix(f"{shard}: ")
    leftovers = sorted(found for pattern in _LEFTOVERS for found in folder.glob(pattern))
    return StageCheck(folder, manifest, bad, frozenset(good), (*leftovers, *cache_paths(folder)))


def repair_stage(path: str | Path) -> StageCheck:
    """Rename bad shards to `*.rejected`, remove temporary files, and reopen the stage if groups are missing, so that
    the next start of the run generates just those. Good shards are not touched.

    Returns:
        [`StageCheck`]: of the stage before; a sound one is left as it is.

    Raises:
        StageError: as [`check_stage`]; also a stage that a run is filling just now.
    """
    before = check_stage(path)
    if not before.problems and not any(leftover.suffix == ".tmp" for leftover in before.leftovers):
        return before
    StageWriter.resume(before.path, before.manifest).close()
    unnoticed = [shard for shard in before.bad_shards if shard.exists()]  # whole, and of this stage, but wrong inside
    for shard in unnoticed:
        logger.warning("%s is set aside: %s", shard, before.bad_shards[shard])
        shard.rename(shard.with_name(shard.name + ".rejected"))
    if unnoticed:
        StageWriter.resume(before.path, before.manifest.with_status("filling")).close()
    return before


def _checked_groups(path: Path, manifest: Manifest, known: set[int]) -> set[int]:
    """The groups of a shard, each row of which keeps to the format.

    Raises:
        StageError: it does not, or repeats a group of `known`.
    """
    shard = Shard(path, arrow_schema(manifest.reward_names, manifest.fingerprint()))
    groups = shard.groups(manifest)
    repeated = known.intersection(groups.tolist())
    if repeated:
        raise StageError(f"group {min(repeated)} is in another shard too: two writers filled the stage.")
    for what, wrong in _wrong_rows(shard, groups, manifest):
        if wrong.any():
            row = int(np.argmax(wrong))
            size = manifest.num_generations
            raise StageError(f"group {groups[row // size]} sample {row % size}: {what}.")
    return set(groups.tolist())


def _wrong_rows(shard: Shard, groups: np.ndarray, manifest: Manifest) -> Iterator[tuple[str, np.ndarray]]:
    """Ways for a row to be wrong, each with the rows that are, bool `(rows,)`."""
    batch, size = shard.batch, manifest.num_generations
    starts = shard.completion_offsets[:-1]
    drawn = np.repeat(np.asarray(manifest.prompt_indices)[groups], size)
    yield "its prompt_index is not the manifest's", np.array(batch.column("prompt_index").to_pylist()) != drawn
    versions = batch.column("policy_version").to_pylist()
    yield "another policy_version than the manifest's", np.array([one != manifest.policy_version for one in versions])
    reasons = batch.column("finish_reason").to_pylist()
    yield f"its finish_reason is none of {FINISH_REASONS}", np.array([one not in FINISH_REASONS for one in reasons])
    yield "its advantage is not finite", ~np.isfinite(shard.advantages)
    unscored = np.array([reward is None for reward in batch.column("reward").to_pylist()])
    yield "an advantage without a reward", (shard.advantages != 0) & unscored
    yield "a negative token id in its prompt", np.minimum.reduceat(shard.prompt_ids, shard.prompt_offsets[:-1]) < 0
    yield "a negative token id", np.minimum.reduceat(shard.completion_ids, starts) < 0
    yield "a behavior log-prob above 0", np.logical_or.reduceat(shard.behavior_logps > MAX_LOGP, starts)
    usable = np.logical_or.reduceat(shard.behavior_logps > LOGP_FLOOR, starts)
    yield "none of its behavior log-probs is usable", ~usable
    yield "another prompt than the samples before it", _other_prompts(shard, size)


def _other_prompts(shard: Shard, size: int) -> np.ndarray:
    """Rows whose prompt is not that of their group's first sample."""
    prompts = np.split(shard.prompt_ids, shard.prompt_offsets[1:-1])
    return np.array([not np.array_equal(prompt, prompts[i - i % size]) for i, prompt in enumerate(prompts)])


def _listed(groups: list[int], most: int = 8) -> str:
    shown = ", ".join(map(str, groups[:most]))
    return shown if len(groups) <= most else f"{shown}, …"
