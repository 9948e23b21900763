"""Fill a stage so that a kill, a full disk or a second writer at any moment costs work, never correctness."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from .reader import Shard, corrupt_shards
from .schema import (
    FINISH_REASONS,
    GROUPS_NAME,
    LOGP_FLOOR,
    MANIFEST_NAME,
    GroupRollout,
    IntArray,
    LogpArray,
    Manifest,
    ManifestLostError,
    ResponseRow,
    ShardName,
    StageError,
    Status,
    arrow_schema,
    digest,
    read_manifest,
    score_or_nan,
    shard_paths,
)

logger = logging.getLogger(__name__)

_MAX_TOKEN_ID = np.iinfo(np.int32).max
MAX_LOGP = 0.1
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class StageWriter:
    """The append-only writer of one stage folder; made by [`StageWriter.create`], [`StageWriter.resume`] or
    [`StageWriter.join`], never directly.

    Invariant: a file in `groups/` that ends in `.arrow` is whole, for it gets its name only once its bytes are on the
    disk; and the manifest says `complete` only when every group is there exactly once. So what `done_groups` lists
    need not be generated again, whatever killed the last writer.

    Rank 0 creates or resumes the stage and completes it, holding a lock on the folder; other ranks may join it once
    rank 0 has opened it, and write shards of their own beside it. Safe to share between threads. About 64 groups an
    `append` make shards of a good size.

    Attributes:
        done_groups (`set[int]`): groups that are on the disk, as far as this writer knows.

    Example:

    ```python
    writer = StageWriter.resume("runs/a/stages/stage-000", manifest)  # or starts it
    todo = [group for group in range(manifest.num_groups) if group not in writer.done_groups]
    for rollouts in generate(todo):
        writer.append(rollouts)
    writer.complete()
    ```
    """

    def __init__(self, path: str | Path, manifest: Manifest, rank: int):
        self._lock: int | None = None
        self._mutex = threading.Lock()
        self._next_number = 0
        self.path = Path(path).resolve()
        self.rank = rank
        self.manifest = manifest
        self.done_groups: set[int] = set()
        writer = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget_lock(writer()))

    @classmethod
    def create(cls, path: str | Path, manifest: Manifest) -> StageWriter:
        """Start a stage in `path`, which may exist (with the policy in it) but must not hold a stage.

        Raises:
            StageError: there is a stage already, another process is filling it, or the disk is full.
        """
        writer = cls(path, manifest.with_status("filling"), rank=0)
        writer._acquire()
        if (writer.path / MANIFEST_NAME).exists() or shard_paths(writer.path):
            writer.close()
            raise StageError(
                f"{writer.path} holds a stage already. Resume it, or remove the folder to generate it again."
            )
        writer._write_manifest("filling")
        return writer

    @classmethod
    def resume(cls, path: str | Path, manifest: Manifest) -> StageWriter:
        """Continue whatever there is of this stage in `path`, from nothing to all of it.

        Leftover temporary files are removed. Shards that are truncated, corrupt, of another stage, or that repeat a
        group are renamed to `*.rejected`, one warning each, and their groups are missing from `done_groups`. A lost
        manifest (missing, or not JSON) is written again: the shards carry its fingerprint, so only this very stage's
        are kept.

        Raises:
            StageError: the folder holds another stage (the message names the first differing field, its stored and its
                expected value), another process is filling it, or the disk is full.
        """
        writer = cls(path, manifest.with_status("filling"), rank=0)
        writer._acquire()
        try:
            writer._adopt_manifest()
            writer._recover()
        except BaseException:
            writer.close()
            raise
        return writer

    @classmethod
    def join(cls, path: str | Path, manifest: Manifest, rank: int) -> StageWriter:
        """Write beside rank 0, which has already created or resumed the stage: shards named after `rank` ≥ 1.

        Raises:
            StageError: no stage in `path` (also: a folder not shared between nodes), another stage, or a bad shard.
        """
        if rank < 1:
            raise StageError(
                f"rank {rank} cannot join a stage: rank 0 creates or resumes it, ranks from 1 on join it."
            )
        writer = cls(path, _agreeing_manifest(Path(path), manifest), rank)
        for shard in shard_paths(writer.path):
            writer._register(shard)
        return writer

    def append(self, groups: Sequence[GroupRollout]) -> None:
        """Write `groups` as one shard, all or nothing, and return when they are on the disk.

        Raises:
            StageError: a group breaks the format (nothing is written), or the disk is full.
        """
        if not groups:
            return
        with self._mutex:
            if self.manifest.status == "complete":
                raise StageError(f"{self.path} is complete: nothing can be appended. Start another stage.")
            self._check_open()
            counts = Counter(group.group for group in groups)
            repeated = [group for group, count in counts.items() if count > 1 or group in self.done_groups]
            if repeated:
                raise StageError(f"group {repeated[0]} is in {self.path} already. Append each group once.")
            data = _encode([_checked_group(group, self.manifest) for group in groups], self._schema)
            name = ShardName(self.rank, self._next_number, digest(data))
            write_atomically(self.path / GROUPS_NAME / str(name), data)
            self._next_number += 1
            self.done_groups.update(counts)

    def complete(self) -> None:
        """Check that every group is on the disk exactly once, mark the stage complete, and close; rank 0 only.

        Raises:
            StageError: groups are missing, or are there twice; or this is not rank 0's writer.
        """
        if self.rank != 0:
            raise StageError(
                f"rank {self.rank} cannot complete a stage. Let rank 0 do it when all ranks have written."
            )
        with self._mutex:
            self._check_open()
            on_disk: set[int] = set()
            for path in shard_paths(self.path):
                on_disk.update(self._new_groups(path, on_disk))
            missing = sorted(set(range(self.manifest.num_groups)) - on_disk)
            if missing:
                raise StageError(
                    f"{self.path} lacks {len(missing)} of {self.manifest.num_groups} groups, {missing[0]} first. "
                    "Append them before completing the stage."
                )
            if self.manifest.status != "complete":
                self._write_manifest("complete")
        self.close()

    def close(self) -> None:
        """Let another process fill the stage. Nothing is buffered, so nothing is lost without it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    __del__ = close

    def _acquire(self) -> None:
        """Make the folders and lock `groups/` until `close` or the end of the process, however it ends."""
        folder = self.path / GROUPS_NAME
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise StageError(
                f"{self.path} is being filled by another writer. Wait for it or end it, or give this run its own "
                "output_dir."
            ) from error
        except OSError as error:
            logger.warning("%s cannot be locked (%s): make sure that only one run writes there.", folder, error)

    def _check_open(self) -> None:
        if self.rank == 0 and self._lock is None:
            raise StageError(
                f"{self.path}: this writer was closed, or is a forked child's copy. Resume the stage instead."
            )

    def _adopt_manifest(self) -> None:
        """Take over the stored manifest if it agrees, or write the expected one if it was lost."""
        try:
            self.manifest = _agreeing_manifest(self.path, self.manifest)
        except ManifestLostError as lost:
            if shard_paths(self.path):
                logger.warning("%s It is written again; only shards that carry its fingerprint are kept.", lost)
            self._write_manifest("filling")

    def _recover(self) -> None:
        """Remove temporary files, set bad shards aside, and register the good ones."""
        for leftover in [*self.path.glob("*.tmp"), *(self.path / GROUPS_NAME).glob("*.tmp")]:
            leftover.unlink()
        paths = shard_paths(self.path)
        corrupt = set(corrupt_shards(paths))
        for path in paths:
            try:
                if path in corrupt:
                    raise StageError("its bytes do not match the digest in its name (truncated or corrupt).")
                self._register(path)
            except StageError as error:
                self._set_aside(path, str(error))
        if len(self.done_groups) < self.manifest.num_groups and self.manifest.status == "complete":
            self._write_manifest("filling")

    def _set_aside(self, path: Path, reason: str) -> None:
        logger.warning("%s is set aside and its groups are to be generated again: %s", path, reason)
        path.rename(path.with_name(path.name + ".rejected"))

    def _register(self, path: Path) -> None:
        """Take the groups of a shard on the disk for done."""
        self.done_groups.update(self._new_groups(path, self.done_groups))
        name = ShardName.parse(path.name)
        if name is not None and name.rank == self.rank:
            self._next_number = max(self._next_number, name.number + 1)

    def _new_groups(self, path: Path, known: set[int]) -> set[int]:
        """The groups of a shard, none of which may be in `known`."""
        groups = Shard(path, self._schema).groups(self.manifest).tolist()
        repeated = known.intersection(groups)
        if repeated:
            raise StageError(f"{path}: group {min(repeated)} is in another shard too: two writers filled the stage.")
        return set(groups)

    def _write_manifest(self, status: Status) -> None:
        manifest = self.manifest.with_status(status)
        write_atomically(self.path / MANIFEST_NAME, manifest.to_json().encode())
        self.manifest = manifest

    @property
    def manifest(self) -> Manifest:
        """The stage's manifest as it is on the disk."""
        return self._manifest

    @manifest.setter
    def manifest(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._schema = arrow_schema(manifest.reward_names, manifest.fingerprint())


def _agreeing_manifest(path: Path, expected: Manifest) -> Manifest:
    """The stored manifest, if it is the expected one up to its status."""
    stored = read_manifest(path)
    difference = stored.first_difference(expected)
    if difference:
        raise StageError(
            f"{path} holds another stage: {difference} (stored → expected). Restore the settings it was generated "
            "with, or remove the folder to generate it again."
        )
    return stored


def _forget_lock(writer: StageWriter | None) -> None:
    """In a forked child: drop the inherited descriptor, or an orphan would keep the lock after its parent's death."""
    if writer is not None:
        writer.close()


def write_atomically(path: Path, data: bytes | pa.Buffer) -> None:
    """Write `data` to `path` so that the name appears only with all the bytes, on the disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(memoryview(data))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if error.errno not in _NO_SPACE:
            raise StageError(
                f"{path} cannot be written ({error.strerror}). Mend the file system, or move output_dir; what is "
                "written is safe, and a restart continues from it."
            ) from error
        free = shutil.disk_usage(path.parent).free
        raise StageError(
            f"{path.parent} is full: {len(memoryview(data))} bytes needed, {free} free. Make room or move "
            "output_dir; what is written is safe, and a restart continues from it."
        ) from error
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _encode(groups: Sequence[GroupRollout], schema: pa.Schema) -> pa.Buffer:
    """Checked groups as one Arrow IPC stream of one record batch."""
    pairs = [(group, sample, row) for group in groups for sample, row in enumerate(group.responses)]
    rows = [row for _, _, row in pairs]
    names = schema.field("rewards").type.names
    scores = [_nullable([row.rewards[name] for row in rows]) for name in names]
    columns = [
        pa.array([group.prompt_index for group, _, _ in pairs], pa.int64()),
        pa.array([group.group for group, _, _ in pairs], pa.int64()),
        pa.array([sample for _, sample, _ in pairs], pa.int32()),
        _list_array([group.prompt_ids for group, _, _ in pairs]),
        _list_array([row.completion_ids for row in rows]),
        _list_array([row.behavior_logps for row in rows]),
        pa.StructArray.from_arrays(scores, names=names),
        _nullable([row.reward for row in rows]),
        pa.array([row.advantage for row in rows], pa.float32()),
        pa.array([row.finish_reason for row in rows], pa.string()),
        pa.array([group.policy_version for group, _, _ in pairs], pa.string()),
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(pa.record_batch(columns, schema=schema))
    return sink.getvalue()


def _nullable(scores: Sequence[float | None]) -> pa.Array:
    return pa.array(np.array([score_or_nan(score) for score in scores]), pa.float64(), from_pandas=True)


def _list_array(rows: Sequence[Any]) -> pa.ListArray:
    offsets = np.cumsum([0] + [len(row) for row in rows], dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(rows)))


def _checked_group(group: GroupRollout, manifest: Manifest) -> GroupRollout:
    """The group with its sequences as arrays of the stored types.

    Raises:
        StageError: naming the group, the sample and the value that breaks the format.
    """
    where = f"group {group.group}"
    if not 0 <= group.group < manifest.num_groups:
        raise StageError(f"{where}: this stage has groups 0…{manifest.num_groups - 1}.")
    if group.prompt_index != manifest.prompt_indices[group.group]:
        raise StageError(
            f"{where}: prompt_index {group.prompt_index}, but the manifest gives it row "
            f"{manifest.prompt_indices[group.group]} of the dataset. Answer the prompt that the schedule drew."
        )
    if group.policy_version != manifest.policy_version:
        raise StageError(
            f"{where}: generated by policy {group.policy_version!r}, but the stage's behavior policy is "
            f"{manifest.policy_version!r}. Load the published weights into the engine and generate the group again."
        )
    if len(group.responses) != manifest.num_generations:
        raise StageError(
            f"{where}: {len(group.responses)} responses instead of num_generations={manifest.num_generations}."
        )
    return GroupRollout(
        group=group.group,
        prompt_index=group.prompt_index,
        prompt_ids=_token_ids(group.prompt_ids, f"{where} prompt_ids"),
        policy_version=group.policy_version,
        responses=[_checked_row(row, manifest, f"{where} sample {i}") for i, row in enumerate(group.responses)],
    )


def _checked_row(row: ResponseRow, manifest: Manifest, where: str) -> ResponseRow:
    completion_ids = _token_ids(row.completion_ids, f"{where} completion_ids")
    behavior_logps = _logps(row.behavior_logps, len(completion_ids), where)
    if set(row.rewards) != set(manifest.reward_names):
        raise StageError(
            f"{where}: rewards of {sorted(row.rewards)}, but the stage has {sorted(manifest.reward_names)}."
        )
    if row.finish_reason not in FINISH_REASONS:
        raise StageError(f"{where}: finish_reason {row.finish_reason!r} must be one of {FINISH_REASONS}.")
    if row.advantage is None or not np.isfinite(row.advantage):
        raise StageError(
            f"{where}: advantage {row.advantage} would make the gradient NaN; an unscorable response has 0."
        )
    if row.advantage != 0 and np.isnan(score_or_nan(row.reward)):
        raise StageError(
            f"{where}: advantage {row.advantage} without a reward; an unscorable response has advantage 0."
        )
    return ResponseRow(completion_ids, behavior_logps, row.rewards, row.reward, row.advantage, row.finish_reason)


def _token_ids(ids: IntArray, where: str) -> np.ndarray:
    array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0:
        raise StageError(f"{where} has shape {array.shape}: it must be a non-empty list of token ids.")
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > _MAX_TOKEN_ID:
        raise StageError(
            f"{where} holds {array.dtype} from {array.min()} to {array.max()}: token ids are int32 from 0 on."
        )
    return array.astype(np.int32, copy=False)


def _logps(logps: LogpArray, num_tokens: int, where: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        array = np.asarray(logps, dtype=np.float32)
    if array.shape != (num_tokens,):
        raise StageError(
            f"{where}: {num_tokens} completion_ids, but behavior_logps of shape {array.shape}. There is one per "
            "token, NaN where the engine gave none."
        )
    if not np.any(array > LOGP_FLOOR):
        raise StageError(
            f"{where}: none of its {num_tokens} behavior_logps is usable: the engine returned garbage logits, or no "
            "log-probs. Check the engine, and generate the group again."
        )
    if np.any(array > MAX_LOGP):
        raise StageError(
            f"{where}: behavior_logps up to {np.nanmax(array)}, but a log-prob is never above 0: the engine returned "
            "logits. Set its log-prob mode to processed_logprobs."
        )
    return array
