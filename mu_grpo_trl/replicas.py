"""Copies of a finished stage on nodes that do not share the stages folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator

from .ranks import broadcast_string
from .stage.schema import GROUPS_NAME, MANIFEST_NAME, StageError, read_manifest, shard_paths

CHUNK_BYTES = 1 << 24


def replicate(accelerator: Accelerator, folder: Path) -> None:
    """
    Copy the manifest and the shards in the main process's `folder` to the same path on every other node that lacks
    them. A copy appears whole or not at all, and replaces another stage's. Collective.

    Args:
        accelerator (`Accelerator`): the trainer's; the first process of each node writes.
        folder (`Path`): of a stage; nothing happens unless the main process has a complete one there.

    Raises:
        `StageError`: on all ranks, when the main process could not read or another node could not write.
    """
    listing = json.loads(broadcast_string(accelerator, json.dumps(_listing(folder))))
    if not listing:
        return
    writes = accelerator.is_local_main_process and not accelerator.is_main_process and _listing(folder) != listing
    if not _any(accelerator, writes):
        return
    copy = _Copy(folder, accelerator, writes)
    for name, (size, _) in listing.items():
        copy.transfer(name, size)
    failed = _any(accelerator, bool(copy.error))
    if not failed:  # else a file that the main process could not read would appear as zeros
        copy.finish()
        failed = _any(accelerator, bool(copy.error))
    if failed:
        raise StageError(
            f"The stage {folder} could not be copied to every node: {copy.error or 'another rank says why'}. Make "
            "room there, or share `stage_dir`; the stage itself is complete, and a resumed run copies it again."
        )


def _listing(folder: Path) -> dict[str, list[int | str]]:
    """Size of each file, and of the manifest a hash: shards never change under the manifest that counts them."""
    try:
        if read_manifest(folder).status != "complete":
            return {}
    except StageError:
        return {}
    manifest = folder / MANIFEST_NAME
    digest = hashlib.blake2b(manifest.read_bytes(), digest_size=16).hexdigest()
    names = {f"{GROUPS_NAME}/{path.name}": [path.stat().st_size, ""] for path in shard_paths(folder)}
    return {**names, MANIFEST_NAME: [manifest.stat().st_size, digest]}


def _any(accelerator: Accelerator, flag: bool) -> bool:
    flags = accelerator.gather(torch.tensor([flag], device=accelerator.device))
    return bool(torch.as_tensor(flags).any())


class _Copy:
    """One rank's part in a copy: reading, writing, or passing on. After an error it still takes part to the end."""

    def __init__(self, folder: Path, accelerator: Accelerator, writes: bool) -> None:
        self._folder = folder
        self._temporary = folder.with_name(f"{folder.name}.copy")
        self._accelerator = accelerator
        self._writes = writes
        self.error = ""
        if writes:
            with self._keeping_error():
                shutil.rmtree(self._temporary, ignore_errors=True)
                (self._temporary / GROUPS_NAME).mkdir(parents=True)

    def transfer(self, name: str, size: int) -> None:
        """Send or receive one file of `size` bytes."""
        path = (self._folder if self._accelerator.is_main_process else self._temporary) / name
        for start in range(0, size, CHUNK_BYTES):
            chunk = torch.zeros(min(CHUNK_BYTES, size - start), dtype=torch.uint8)
            if self._accelerator.is_main_process:
                with self._keeping_error():
                    chunk.numpy()[:] = np.fromfile(path, np.uint8, chunk.numel(), offset=start)
            chunk = chunk.to(self._accelerator.device)
            torch.distributed.broadcast(chunk, 0)
            if self._writes and not self.error:
                with self._keeping_error(), path.open("ab") as file:
                    file.write(chunk.cpu().numpy().data)

    def finish(self) -> None:
        """Let the copy appear."""
        if self._writes:
            with self._keeping_error():
                shutil.rmtree(self._folder, ignore_errors=True)
                self._temporary.rename(self._folder)

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # numpy's, of a file that was cut
            self.error = str(error)
