"""What a stage on disk is made of: the manifest, the rows, and the Arrow schema of a shard.

    <output_dir>/stages/stage-000/
      manifest.json      what generated the rows, and whether they are all there
      policy/            weights of the behavior policy (not handled here)
      groups/*.arrow     shards, `r<rank>-<number>-<digest>.arrow`: one row a response, a group's rows side by side

A shard is an Arrow IPC stream of one record batch, so that `datasets.Dataset.from_file` memory-maps it. Its name
carries the digest of its bytes, and its schema the fingerprint of the manifest it was written under: a truncated,
altered or foreign shard is recognized without a second file.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
GROUPS_NAME = "groups"
FINGERPRINT_KEY = b"mu_grpo_trl.stage"
FINISH_REASONS = ("stop", "length")
LOGP_FLOOR = -1000.0

IntArray: TypeAlias = "np.ndarray | Sequence[int]"
LogpArray: TypeAlias = "np.ndarray | Sequence[float | None]"
Status = Literal["filling", "complete"]

_SHARD_NAME = re.compile(r"r(?P<rank>\d+)-(?P<number>\d{6,})-(?P<digest>[0-9a-f]{32})\.arrow")
_COUNTS = {
    "schema_version": 1,
    "stage": 0,
    "seed": None,
    "num_updates": 1,
    "num_generations": 1,
    "prompts_per_update": 1,
    "published_step": 0,
}
_TEXTS = ("dataset_hash", "tokenizer_hash", "engine", "engine_version", "policy_hash", "policy_version", "run_id")


class StageError(ValueError):
    """A stage cannot be written, read or trusted; the message says what, why and how to mend it."""


class ManifestLostError(StageError):
    """A stage folder has no manifest, or one that is not even JSON."""


@dataclass(frozen=True, slots=True)
class ResponseRow:
    """One scored response, as the writer takes it.

    Args:
        completion_ids (int array `(T,)`): generated tokens, the sampled EOS included, T ≥ 1.
        behavior_logps (float array `(T,)`): log-probs of `completion_ids` under the behavior policy after temperature;
            None or NaN where the engine gave none.
        rewards (`Mapping[str, float | None]`): one entry per reward function; None, NaN or inf where it could not
            score.
        reward (`float` or `None`): the rewards combined; None, NaN or inf for an unscorable response.
        advantage (`float`): finite; 0 for an unscorable response.
        finish_reason (`"stop"` or `"length"`): `"length"` only when the token limit cut the response.
    """

    completion_ids: IntArray
    behavior_logps: LogpArray
    rewards: Mapping[str, float | None]
    reward: float | None
    advantage: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class GroupRollout:
    """One finished prompt group, as the writer takes it.

    Args:
        group (`int`): position of the group in the stage.
        prompt_index (`int`): row of the prompt in the dataset.
        prompt_ids (int array `(P,)`): the very ids the engine was given, P ≥ 1.
        policy_version (`str`): the weights that generated the responses, as the engine was told.
        responses (`Sequence[ResponseRow]`): exactly G of them, in sample order.
    """

    group: int
    prompt_index: int
    prompt_ids: IntArray
    policy_version: str
    responses: Sequence[ResponseRow]


@dataclass(frozen=True)
class Manifest:
    """What generated a stage.

    Every field but `status` has meaning for the rows: manifests that differ in one describe two stages.

    Args:
        stage (`int`): number of the stage in its run, from 0.
        seed (`int`): the run's seed.
        num_updates (`int`): μ of this stage (the last stage of a run may be shorter).
        num_generations (`int`): G, responses per prompt group.
        prompts_per_update (`int`): prompt groups per update.
        prompt_indices (`tuple[int, ...]`): row in the dataset of each group; `num_updates * prompts_per_update` of
            them.
        dataset_hash (`str`): hash of the prompts' dataset.
        tokenizer_hash (`str`): hash of the tokenizer.
        sampling (`dict`): the full sampling parameters, JSON values only.
        engine (`str`), engine_version (`str`): what generated.
        policy_hash (`str`): hash of the behavior policy's weights.
        policy_version (`str`): name of those weights, repeated in every row.
        published_step (`int`): the update whose weights they are; a stage newer than the checkpoint resumed from is
            stale.
        run_id (`str`): the run that owns the stage.
        reward_names (`tuple[str, ...]`): the reward functions, at least one.
        scoring (`dict` or None): what else turned responses into rewards and advantages, JSON values only; None in a
            stage that was written before this was kept, which agrees with any.
        status (`"filling"` or `"complete"`): complete once every group is there exactly once.
        schema_version (`int`): version of this layout.

    Raises:
        StageError: a field has a wrong type, is out of range, or contradicts another.
    """

    stage: int
    seed: int
    num_updates: int
    num_generations: int
    prompts_per_update: int
    prompt_indices: tuple[int, ...]
    dataset_hash: str
    tokenizer_hash: str
    sampling: dict[str, Any]
    engine: str
    engine_version: str
    policy_hash: str
    policy_version: str
    published_step: int
    run_id: str
    reward_names: tuple[str, ...]
    scoring: dict[str, Any] | None = None
    status: Status = "filling"
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        for name, least in _COUNTS.items():
            self._set(name, _checked_int(name, getattr(self, name), least))
        _check_version(self.schema_version)
        for name in _TEXTS:
            if not isinstance(getattr(self, name), str):
                raise StageError(f"manifest {name}={getattr(self, name)!r} must be a string.")
        if self.status not in ("filling", "complete"):
            raise StageError(f"manifest status={self.status!r} must be 'filling' or 'complete'.")
        indices = _items("prompt_indices", self.prompt_indices)
        self._set("prompt_indices", tuple(_checked_int("prompt_indices", index, 0) for index in indices))
        self._set("reward_names", tuple(_items("reward_names", self.reward_names)))
        self._set("sampling", _plain_json("sampling", self.sampling))
        if self.scoring is not None:
            self._set("scoring", _plain_json("scoring", self.scoring))
        self._check_counts()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_counts(self) -> None:
        expected = self.num_updates * self.prompts_per_update
        if len(self.prompt_indices) != expected:
            raise StageError(
                f"manifest has {len(self.prompt_indices)} prompt_indices, but num_updates {self.num_updates} × "
                f"prompts_per_update {self.prompts_per_update} = {expected}. Give one dataset row per group."
            )
        names = self.reward_names
        if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) != len(names):
            raise StageError(f"manifest reward_names={names!r} must be one or more distinct, non-empty strings.")

    @property
    def num_groups(self) -> int:
        """Prompt groups in the stage."""
        return len(self.prompt_indices)

    def with_status(self, status: Status) -> Manifest:
        """This manifest with another status."""
        return replace(self, status=status)

    def fingerprint(self) -> str:
        """Digest of all fields that have meaning for the rows (all but `status`), 32 hex digits."""
        return digest(self.with_status("filling").to_json().encode())

    def first_difference(self, other: Manifest) -> str | None:
        """The first field in which `other` differs, `status` aside, as "name: mine → other's"; None if they agree."""
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name == "scoring" and None in (mine, theirs):
                continue
            if field.name != "status" and mine != theirs:
                return _describe_difference(field.name, mine, theirs)
        return None

    def to_json(self) -> str:
        """The manifest as JSON text; `from_json` gives back an equal one."""
        values = asdict(self)
        if self.scoring is None:
            del values["scoring"]  # as it was written: the fingerprint of its shards depends on it
        return json.dumps(values, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Parse what `to_json` wrote.

        Raises:
            ManifestLostError: not JSON.
            StageError: a field is missing or unknown, or the constructor refuses a value.
        """
        try:
            values = json.loads(text, parse_constant=_refuse_constant)
        except StageError:
            raise
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number or nesting beyond all bounds
            raise ManifestLostError(f"manifest is not JSON ({error}); it was truncated or edited.") from error
        if not isinstance(values, dict):
            raise StageError(f"manifest holds a {type(values).__name__}, not an object; it was replaced or edited.")
        _check_version(values.get("schema_version"))
        known = {field.name for field in fields(cls)}
        lacking, unknown = known - set(values) - {"scoring"}, set(values) - known
        if lacking or unknown:
            raise StageError(
                f"manifest lacks {sorted(lacking)} and has unknown {sorted(unknown)}; "
                "it was edited, or another program wrote it."
            )
        manifest = cls(**values)
        try:
            manifest.to_json().encode()
        except UnicodeEncodeError as error:
            raise StageError(f"manifest holds text that is not Unicode ({error}); it was edited.") from error
        return manifest


def read_manifest(path: str | Path) -> Manifest:
    """Read the manifest of the stage folder `path`.

    Raises:
        ManifestLostError: there is no manifest, or it is not JSON.
        StageError: the manifest is not valid.
    """
    file = Path(path) / MANIFEST_NAME
    try:
        return Manifest.from_json(file.read_bytes())
    except FileNotFoundError as error:
        raise ManifestLostError(
            f"{file} does not exist: there is no stage here, or its folder is not shared with this machine. "
            "Fill the stage first, and put output_dir on storage that all nodes see."
        ) from error
    except StageError as error:
        raise type(error)(f"{file}: {error}") from error


def digest(data: bytes | memoryview | pa.Buffer) -> str:
    """BLAKE2b of `data`, 32 hex digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()  # type: ignore[arg-type]  # pa.Buffer is a buffer


def file_digest(path: Path) -> str:
    """BLAKE2b of a file, read 1 MiB at a time."""
    state, chunk = hashlib.blake2b(digest_size=16), bytearray(1 << 20)
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(chunk):
            state.update(memoryview(chunk)[:size])
    return state.hexdigest()


@dataclass(frozen=True, slots=True)
class ShardName:
    """The parts of a shard's file name, `r<rank>-<number>-<digest>.arrow`."""

    rank: int
    number: int
    digest: str

    def __str__(self) -> str:
        return f"r{self.rank}-{self.number:06d}-{self.digest}.arrow"

    @classmethod
    def parse(cls, name: str) -> ShardName | None:
        """The parts of `name`, or None if it is no shard's."""
        match = _SHARD_NAME.fullmatch(name)
        return cls(int(match["rank"]), int(match["number"]), match["digest"]) if match else None


def shard_paths(path: Path) -> list[Path]:
    """The files in the stage's `groups/` that end in `.arrow`, by name, without [`cache_paths`]."""
    return sorted(set((path / GROUPS_NAME).glob("*.arrow")) - set(cache_paths(path)))


def cache_paths(path: Path) -> list[Path]:
    """What `datasets` keeps beside the shards of an opened stage: the results of `map`, `filter` and the like."""
    return sorted((path / GROUPS_NAME).glob("cache-*.arrow"))


def arrow_schema(reward_names: Sequence[str], fingerprint: str) -> pa.Schema:
    """Schema of a shard, one row a response: an unscorable reward is null, a missing log-prob NaN, never null or 0."""
    columns = {
        "prompt_index": pa.int64(),
        "group": pa.int64(),
        "sample": pa.int32(),
        "prompt_ids": pa.list_(pa.int32()),
        "completion_ids": pa.list_(pa.int32()),
        "behavior_logps": pa.list_(pa.float32()),
        "rewards": pa.struct([(name, pa.float64()) for name in reward_names]),
        "reward": pa.float64(),
        "advantage": pa.float32(),
        "finish_reason": pa.string(),
        "policy_version": pa.string(),
    }
    return pa.schema(list(columns.items()), metadata={FINGERPRINT_KEY: fingerprint.encode()})


def score_or_nan(value: float | None) -> float:
    """A reward as a number: NaN for every way to say "unscorable" (None, NaN, inf)."""
    return float(value) if value is not None and math.isfinite(value) else math.nan


def _check_version(version: Any) -> None:
    if version != SCHEMA_VERSION:
        raise StageError(
            f"manifest schema_version {version!r}: this version of mu_grpo_trl reads {SCHEMA_VERSION} only. Use the "
            "version that wrote the stage, or generate it again."
        )


def _checked_int(name: str, value: Any, least: int | None) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or (least is not None and number < least):
        bound = "" if least is None else f" of at least {least}"
        raise StageError(f"manifest {name}: {value!r} must be an integer{bound}.")
    return number


def _items(name: str, value: Any) -> list[Any]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
        raise StageError(f"manifest {name}={value!r} must be a list.")
    return list(value)


def _plain_json(name: str, values: Any) -> dict[str, Any]:
    """A copy of `values` as JSON gives it back, so that a manifest equals its own round trip."""
    try:
        copy = json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise StageError(f"manifest {name}={values!r} must hold JSON values only: {error}.") from error
    if not isinstance(copy, dict):
        raise StageError(f"manifest {name}={values!r} must be a dict.")
    return copy


def _refuse_constant(name: str) -> float:
    raise StageError(f"manifest holds {name}, which is not JSON; it was edited.")


def _describe_difference(name: str, mine: Any, theirs: Any) -> str:
    """Narrow a difference of two fields down to the first differing entry."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        key = next(k for k in sorted({*mine, *theirs}) if mine.get(k) != theirs.get(k) or (k in mine) != (k in theirs))
        return f"{name}[{key!r}]: {mine.get(key, 'absent')!r} → {theirs.get(key, 'absent')!r}"
    if isinstance(mine, tuple) and len(mine) == len(theirs):
        position = next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)
        return f"{name}[{position}]: {mine[position]!r} → {theirs[position]!r}"
    if isinstance(mine, tuple):
        return f"{name}: {len(mine)} entries → {len(theirs)}"
    return f"{name}: {mine!r} → {theirs!r}"
