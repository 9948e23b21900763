"""Read a stage without loading it: memory-mapped shards behind an index of two small integers per group."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from .schema import (
    FINGERPRINT_KEY,
    LOGP_FLOOR,
    Manifest,
    ShardName,
    StageError,
    arrow_schema,
    file_digest,
    read_manifest,
    shard_paths,
)

if TYPE_CHECKING:
    from datasets import Dataset

_OPEN_SHARDS = 512
_NULLABLE = ("rewards", "reward")
_REPAIR = "StageWriter.resume sets it aside, so that only its groups are generated again."


@dataclass(frozen=True, slots=True)
class Response:
    """What an update needs of one response: read-only views into the mapped shard, which they keep open.

    Args:
        prompt_ids (`np.ndarray` int32 `(P,)`): the prompt.
        completion_ids (`np.ndarray` int32 `(T,)`): the generated tokens.
        behavior_logps (`np.ndarray` float32 `(T,)`): b_t, NaN where the engine gave none.
        advantage (`float`): A of the response.
    """

    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    behavior_logps: np.ndarray
    advantage: float


@dataclass(frozen=True, slots=True)
class StageSummary:
    """Totals over the groups that are there. Means are over scored responses, NaN if there are none.

    Args:
        num_groups (`int`), num_responses (`int`), num_tokens (`int`): groups, responses, generated tokens.
        tokens_without_logp (`int`): tokens whose behavior log-prob is missing or at the engine's floor (≤ −1000).
        mean_length (`float`): generated tokens per response.
        mean_reward (`float`), mean_rewards (`dict[str, float]`): combined, and per reward function.
        unscorable_responses (`int`): responses without a reward.
        truncated_share (`float`): responses that the token limit cut (`finish_reason` is `"length"`), of all.
        zero_advantage_group_share (`float`): groups whose advantages are all 0, of all: no signal for the gradient.
    """

    num_groups: int
    num_responses: int
    num_tokens: int
    tokens_without_logp: int
    mean_length: float
    mean_reward: float
    mean_rewards: dict[str, float]
    unscorable_responses: int
    truncated_share: float
    zero_advantage_group_share: float


class Shard:
    """One mapped shard and numpy views of its columns.

    Args:
        path (`Path`): the file.
        schema (`pa.Schema`): `arrow_schema` of the stage it must belong to, the fingerprint included.

    Raises:
        StageError: the file is truncated or of another stage.
    """

    def __init__(self, path: Path, schema: pa.Schema):
        self.path = path
        self.batch = _read_batch(path)
        if not self.batch.schema.equals(schema, check_metadata=True):
            raise StageError(
                f"{path}: written for the stage with fingerprint {_fingerprint(self.batch.schema)}, but the manifest "
                f"has {_fingerprint(schema)}: the shard was copied in from another stage, or the manifest was edited. "
                "Restore the manifest, or let StageWriter.resume set the shard aside and generate its groups again."
            )
        _check_arrays(path, self.batch)
        self.num_rows = self.batch.num_rows
        self.prompt_offsets, self.prompt_ids = self._lists("prompt_ids")
        self.completion_offsets, self.completion_ids = self._lists("completion_ids")
        self.logp_offsets, self.behavior_logps = self._lists("behavior_logps")
        self.advantages = self._numbers("advantage")

    def groups(self, manifest: Manifest) -> np.ndarray:
        """The shard's groups in the order of its rows, int64 `(n,)`, after checking every row.

        Raises:
            StageError: the rows are not whole groups of the stage, or break the invariants on lengths.
        """
        size = manifest.num_generations
        rows, samples = self._numbers("group"), self._numbers("sample")
        groups = rows[::size]
        if self.num_rows % size or np.any(samples != np.arange(self.num_rows) % size):
            raise StageError(f"{self.path}: its rows are not whole groups of {size} samples in order. {_REPAIR}")
        if np.any(rows != np.repeat(groups, size)) or len(np.unique(groups)) < len(groups):
            raise StageError(f"{self.path}: its groups are mixed, or one is there twice. {_REPAIR}")
        if np.any(groups < 0) or np.any(groups >= manifest.num_groups):
            raise StageError(f"{self.path}: holds a group outside 0…{manifest.num_groups - 1}. {_REPAIR}")
        unequal = self.completion_offsets != self.logp_offsets
        if np.any(unequal):
            row = int(np.argmax(unequal)) - 1
            raise StageError(f"{self.path}: row {row} has not as many behavior_logps as completion_ids. {_REPAIR}")
        if np.any(np.diff(self.prompt_offsets) < 1) or np.any(np.diff(self.completion_offsets) < 1):
            raise StageError(f"{self.path}: holds an empty prompt or response. {_REPAIR}")
        return groups

    def _numbers(self, name: str) -> np.ndarray:
        return self.batch.column(name).to_numpy()

    def _lists(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Offsets int32 `(rows + 1,)` and values of a list column, without a copy."""
        column = self.batch.column(name)
        return column.offsets.to_numpy(), column.values.to_numpy()


class StageReader:
    """Random access to a stage.

    Memory does not grow with it but for 8 bytes a group: rows stay on disk, and at most 512 shards are mapped at a
    time. Safe to share between threads.

    Args:
        path (`str` or `Path`): the stage folder.
        verify (`bool`, defaults to `False`): compare every shard's bytes with the digest in its name (about 1 GB/s a
            core).
        allow_filling (`bool`, defaults to `False`): open a stage that is not complete; only the groups there can be
            read.

    Raises:
        StageError: no manifest, a stage still filling, a shard that cannot be trusted, a group missing or there twice.

    Example:

    ```python
    stage = StageReader("runs/a/stages/stage-000", verify=True)
    groups = [7, 3]
    prompt_lengths, completion_lengths = stage.lengths(groups)  # (2, G) each
    response = stage.response(group=7, sample=0)
    ```
    """

    def __init__(self, path: str | Path, verify: bool = False, allow_filling: bool = False):
        self.path = Path(path).resolve()
        self.manifest = read_manifest(self.path)
        if self.manifest.status != "complete" and not allow_filling:
            raise StageError(
                f"{self.path} is still {self.manifest.status}: training on it would miss groups. Resume filling it, "
                "or pass allow_filling=True to look at what is there."
            )
        self._schema = arrow_schema(self.manifest.reward_names, self.manifest.fingerprint())
        self._paths = shard_paths(self.path)
        if verify:
            _raise_if_corrupt(self._paths)
        self._shard = functools.lru_cache(maxsize=_OPEN_SHARDS)(self._open)
        self._shard_of = np.full(self.manifest.num_groups, -1, dtype=np.int32)
        self._row_of = np.zeros(self.manifest.num_groups, dtype=np.int32)
        self._summary: StageSummary | None = None
        for number in range(len(self._paths)):
            self._index(number)
        if self.manifest.status == "complete":
            self._check_all_there()

    def __len__(self) -> int:
        """Prompt groups that can be read."""
        return int(np.count_nonzero(self._shard_of >= 0))

    @property
    def groups(self) -> np.ndarray:
        """The groups that can be read, ascending, int64 `(n,)`."""
        return np.flatnonzero(self._shard_of >= 0)

    def lengths(self, groups: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the prompts and of the completions of `groups`, each int64 `(n, G)`."""
        shape = (len(groups), self.manifest.num_generations)
        prompts, completions = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        for i, (shard, rows) in enumerate(self._locate_all(groups)):
            ends = slice(rows.start, rows.stop + 1)
            prompts[i] = np.diff(shard.prompt_offsets[ends])
            completions[i] = np.diff(shard.completion_offsets[ends])
        return prompts, completions

    def advantages(self, groups: Sequence[int] | np.ndarray) -> np.ndarray:
        """Advantages of the responses of `groups`, float32 `(n, G)`."""
        advantages = np.empty((len(groups), self.manifest.num_generations), dtype=np.float32)
        for i, (shard, rows) in enumerate(self._locate_all(groups)):
            advantages[i] = shard.advantages[rows]
        return advantages

    def truncated(self, groups: Sequence[int] | np.ndarray) -> np.ndarray:
        """Whether the token limit cut the responses of `groups` (`finish_reason` is `"length"`), bool `(n, G)`."""
        truncated = np.empty((len(groups), self.manifest.num_generations), dtype=np.bool_)
        for i, (shard, rows) in enumerate(self._locate_all(groups)):
            reasons = shard.batch.column("finish_reason").slice(rows.start, truncated.shape[1])
            truncated[i] = [reason == "length" for reason in reasons.to_pylist()]
        return truncated

    def rewards(self, groups: Sequence[int] | np.ndarray, name: str | None = None) -> np.ndarray:
        """Rewards of the responses of `groups`, combined or `name`'s, float64 `(n, G)`, NaN where unscorable."""
        if name is not None and name not in self.manifest.reward_names:
            raise StageError(f"reward {name!r} is not in this stage; it has {list(self.manifest.reward_names)}.")
        rewards = np.empty((len(groups), self.manifest.num_generations), dtype=np.float64)
        for i, (shard, rows) in enumerate(self._locate_all(groups)):
            rewards[i] = _rewards(shard.batch.slice(rows.start, len(rewards[i])), name)
        return rewards

    def response(self, group: int, sample: int) -> Response:
        """One response of the stage, without a copy."""
        if not 0 <= sample < self.manifest.num_generations:
            raise StageError(f"sample {sample}: the groups have samples 0…{self.manifest.num_generations - 1}.")
        shard, rows = self._locate(group)
        row = rows.start + sample
        prompt = slice(shard.prompt_offsets[row], shard.prompt_offsets[row + 1])
        completion = slice(shard.completion_offsets[row], shard.completion_offsets[row + 1])
        return Response(
            prompt_ids=shard.prompt_ids[prompt],
            completion_ids=shard.completion_ids[completion],
            behavior_logps=shard.behavior_logps[completion],
            advantage=float(shard.advantages[row]),
        )

    def summary(self) -> StageSummary:
        """Totals over the whole stage, read shard by shard, once."""
        if self._summary is None:
            totals = _Totals(self.manifest)
            for number in range(len(self._paths)):
                totals.add(self._open(number))
            self._summary = totals.summary()
        return self._summary

    def _open(self, number: int) -> Shard:
        return Shard(self._paths[number], self._schema)

    def _index(self, number: int) -> None:
        groups = self._shard(number).groups(self.manifest)
        twice = groups[self._shard_of[groups] >= 0]
        if twice.size:
            raise StageError(
                f"{self._paths[number]}: group {twice[0]} is in the stage twice: two writers filled it at once. "
                f"{_REPAIR}"
            )
        self._shard_of[groups] = number
        self._row_of[groups] = np.arange(len(groups), dtype=np.int32) * self.manifest.num_generations

    def _check_all_there(self) -> None:
        missing = np.flatnonzero(self._shard_of < 0)
        if missing.size:
            raise StageError(
                f"{self.path} is marked complete but lacks {missing.size} of {self.manifest.num_groups} groups, "
                f"{missing[0]} first: a shard was removed. StageWriter.resume reopens the stage, so that only those "
                "are generated again."
            )

    def _locate_all(self, groups: Iterable[int]) -> Iterator[tuple[Shard, slice]]:
        return (self._locate(int(group)) for group in groups)

    def _locate(self, group: int) -> tuple[Shard, slice]:
        if not 0 <= group < self.manifest.num_groups or self._shard_of[group] < 0:
            raise StageError(
                f"group {group} is not in {self.path}, which holds {len(self)} of {self.manifest.num_groups}."
            )
        row = int(self._row_of[group])
        return self._shard(int(self._shard_of[group])), slice(row, row + self.manifest.num_generations)


def load_stage(path: str | Path, verify: bool = False, allow_filling: bool = False) -> Dataset:
    """A stage as a memory-mapped `datasets.Dataset`, one row a response, ordered by (group, sample).

    What `map` or `filter` make of it, `datasets` keeps as `groups/cache-*.arrow`, which no stage reads.

    Args:
        path (`str` or `Path`): the stage folder.
        verify (`bool`, defaults to `False`): compare every shard's bytes with the digest in its name.
        allow_filling (`bool`, defaults to `False`): also open a stage that is not complete.

    Raises:
        StageError: as [`StageReader`]; also a stage without any group.
    """
    from datasets import Dataset, concatenate_datasets

    reader = StageReader(path, verify, allow_filling)
    if not len(reader):
        raise StageError(f"{reader.path} holds no group yet: fill it first.")
    shards = [Dataset.from_file(str(shard)) for shard in reader._paths]
    starts = np.cumsum([0] + [shard.num_rows for shard in shards])
    groups = reader.groups
    first_rows = starts[reader._shard_of[groups]] + reader._row_of[groups]
    rows = (first_rows[:, None] + np.arange(reader.manifest.num_generations)).ravel()
    return concatenate_datasets(shards).select(rows)


def corrupt_shards(paths: Sequence[Path]) -> list[Path]:
    """Those of `paths` whose bytes do not have the digest in their name, or whose name is no shard's."""

    def is_corrupt(path: Path) -> bool:
        name = ShardName.parse(path.name)
        return name is None or file_digest(path) != name.digest

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return [path for path, corrupt in zip(paths, pool.map(is_corrupt, paths), strict=True) if corrupt]


class _Totals:
    """Running sums of [`StageSummary`] over shards."""

    def __init__(self, manifest: Manifest):
        self._size = manifest.num_generations
        self._groups = self._zero_groups = self._responses = self._truncated = self._tokens = self._without_logp = 0
        names: tuple[str | None, ...] = (None, *manifest.reward_names)
        self._scores: dict[str | None, tuple[float, int]] = dict.fromkeys(names, (0.0, 0))

    def add(self, shard: Shard) -> None:
        self._groups += shard.num_rows // self._size
        self._responses += shard.num_rows
        self._tokens += len(shard.behavior_logps)
        self._without_logp += int(np.count_nonzero(~(shard.behavior_logps > LOGP_FLOOR)))
        self._zero_groups += int(np.count_nonzero(~shard.advantages.reshape(-1, self._size).any(axis=1)))
        self._truncated += shard.batch.column("finish_reason").to_pylist().count("length")
        for name, (total, count) in self._scores.items():
            rewards = _rewards(shard.batch, name)
            scored = ~np.isnan(rewards)
            self._scores[name] = (total + float(rewards[scored].sum()), count + int(scored.sum()))

    def summary(self) -> StageSummary:
        means = {name: _ratio(total, count) for name, (total, count) in self._scores.items()}
        return StageSummary(
            num_groups=self._groups,
            num_responses=self._responses,
            num_tokens=self._tokens,
            tokens_without_logp=self._without_logp,
            mean_length=_ratio(self._tokens, self._responses),
            mean_reward=means[None],
            mean_rewards={name: mean for name, mean in means.items() if name is not None},
            unscorable_responses=self._responses - self._scores[None][1],
            truncated_share=_ratio(self._truncated, self._responses),
            zero_advantage_group_share=_ratio(self._zero_groups, self._groups),
        )


def _read_batch(path: Path) -> pa.RecordBatch:
    try:
        with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as stream:
            batches = list(stream)
    except (pa.ArrowException, ValueError, MemoryError, OSError) as error:
        raise StageError(f"{path}: truncated or corrupt ({error}). {_REPAIR}") from error
    if len(batches) != 1:
        raise StageError(
            f"{path}: has {len(batches)} record batches instead of 1; another program wrote it. {_REPAIR}"
        )
    return batches[0]


def _check_arrays(path: Path, batch: pa.RecordBatch) -> None:
    """What reading the columns without a copy relies on: offsets in bounds, and nulls among the rewards alone.

    Raises:
        StageError: the shard was written by another program, or altered.
    """
    try:
        batch.validate(full=True)
    except pa.ArrowException as error:
        raise StageError(f"{path}: altered, or another program wrote it ({error}). {_REPAIR}") from error
    if batch.num_rows == 0:
        raise StageError(f"{path}: holds no rows; another program wrote it. {_REPAIR}")
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if name not in _NULLABLE and (column.null_count or _has_gaps(column)):
            raise StageError(f"{path}: nulls or gaps in its {name}; another program wrote it. {_REPAIR}")


def _has_gaps(column: pa.Array) -> bool:
    """Whether the values of a list column are not the concatenation of its rows, each value there."""
    if not pa.types.is_list(column.type):
        return False
    first, last = column.offsets[0].as_py(), column.offsets[-1].as_py()
    return (first, last, column.values.null_count) != (0, len(column.values), 0)


def _fingerprint(schema: pa.Schema) -> str:
    return (schema.metadata or {}).get(FINGERPRINT_KEY, b"none").decode(errors="replace")


def _rewards(batch: pa.RecordBatch, name: str | None) -> np.ndarray:
    column = batch.column("reward") if name is None else batch.column("rewards").field(name)
    return np.array(column.to_pylist(), dtype=np.float64)  # null → NaN


def _ratio(total: float, count: int) -> float:
    return total / count if count else math.nan


def _raise_if_corrupt(paths: Sequence[Path]) -> None:
    corrupt = corrupt_shards(paths)
    if corrupt:
        raise StageError(
            f"{corrupt[0]} ({len(corrupt)} of {len(paths)} shards): its bytes do not match the digest in its name. "
            f"{_REPAIR}"
        )
