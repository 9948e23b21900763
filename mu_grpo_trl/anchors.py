"""`anchor: trainer`: behavior log-probs recomputed by the trainer at the start of a stage, not the engine's."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from accelerate import Accelerator
from torch import Tensor

from .stage.schema import StageError, digest, file_digest
from .stage.writer import write_atomically

if TYPE_CHECKING:
    from .update import StageBatches

_WAY_OUT = "Resume from a checkpoint at a stage boundary: they are computed anew there."


class AnchorStore:
    """
    Recomputed log-probs of a stage's forwarded responses: one file per update and rank,
    `<stage>/anchors/<update>-<rank>-<digest>.npy`. A flat int32 array holds the number of responses, then `group,
    sample, length` of each, then the bits of their float32 log-probs, one after the other. Memory-mapped when read.

    Args:
        folder (`Path`): of the stage.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "anchors"
        self._rows: dict[tuple[int, int], tuple[Path, int, int]] = {}

    def clear(self) -> None:
        """Forget what was stored, on disk too."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    def write(self, update: int, rank: int, rows: list[tuple[int, int]], logps: list[np.ndarray]) -> None:
        """Store the log-probs `(T,)` of each `(group, sample)` of one update; the file appears whole or not at all."""
        index = [(*row, len(values)) for row, values in zip(rows, logps, strict=True)]
        head = np.array([len(index), *chain.from_iterable(index)], np.int32)
        bits = [np.asarray(values, np.float32).view(np.int32) for values in logps]
        buffer = io.BytesIO()
        np.save(buffer, np.concatenate([head, *bits]), allow_pickle=False)
        data = buffer.getvalue()
        write_atomically(self._folder / f"{update}-{rank}-{digest(data)}.npy", data)

    def load(self) -> None:
        """
        Index all that was stored.

        Raises:
            `StageError`: a file is not what was written.
        """
        for path in sorted(self._folder.glob("*.npy")):
            if file_digest(path) != path.stem.rpartition("-")[2]:
                raise StageError(
                    f"{path}: its bytes do not match the digest in its name (truncated or altered). {_WAY_OUT}"
                )
            values = np.load(path, mmap_mode="r", allow_pickle=False)
            start = 1 + 3 * int(values[0])
            for group, sample, length in values[1:start].reshape(-1, 3).tolist():
                self._rows[group, sample] = path, start, start + length
                start += length

    def logps(self, group: int, sample: int) -> np.ndarray:
        """
        Recomputed log-probs float32 `(T,)` of one response.

        Raises:
            `StageError`: they are not stored.
        """
        if (group, sample) not in self._rows:
            raise StageError(
                f"{self._folder} has no log-probs of group {group}, sample {sample}: files are gone. {_WAY_OUT}"
            )
        path, start, stop = self._rows[group, sample]
        return np.load(path, mmap_mode="r", allow_pickle=False)[start:stop].view(np.float32)


def recompute_anchors(
    batches: StageBatches,
    updates: Iterable[int],
    accelerator: Accelerator,
    logps_of: Callable[[dict[str, Tensor]], Tensor],
) -> None:
    """
    Store the current policy's log-probs of every row the `updates` will forward. Collective.

    Args:
        batches (`StageBatches`): of the stage, still without anchors; what was stored for it is replaced.
        updates (`Iterable[int]`): all updates of the stage.
        accelerator (`Accelerator`): the trainer's.
        logps_of (`Callable`): log-probs `(B, T)` of a micro-batch, without gradient.
    """
    store = AnchorStore(batches.reader.path)
    if accelerator.is_main_process:
        store.clear()
    accelerator.wait_for_everyone()
    for update in updates:
        batch = batches.build(update)
        rows, logps = [], []
        for names, microbatch in zip(batch.rows, batch.microbatches, strict=True):
            values = logps_of(microbatch).float().cpu().numpy()
            lengths = microbatch["completion_mask"].sum(1).tolist()
            rows += names
            logps += [values[i, : lengths[i]] for i in range(len(names))]
        store.write(update, accelerator.process_index, rows, logps)
    accelerator.wait_for_everyone()
