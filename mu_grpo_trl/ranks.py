"""What all ranks must agree on: a string of the main process, and a folder that they share."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState

SEEN_WITHIN_S = 5.0
"""A network file system may show a new file late."""


def broadcast_string(accelerator: Accelerator | PartialState, text: str) -> str:
    """The main process's `text` (of any length) on every rank. Collective."""
    if accelerator.num_processes == 1:
        return text
    payload = torch.tensor(list(text.encode()), dtype=torch.uint8, device=accelerator.device)
    size = torch.tensor([payload.numel()], device=accelerator.device)
    torch.distributed.broadcast(size, 0)
    if not accelerator.is_main_process:
        payload = torch.zeros(int(size), dtype=torch.uint8, device=accelerator.device)
    torch.distributed.broadcast(payload, 0)
    return bytes(payload.tolist()).decode()


def check_shared_folder(accelerator: Accelerator, folder: Path) -> None:
    """
    Make `folder` on the main process and see on every rank what it wrote there. Collective.

    Raises:
        `OSError`: on all ranks, if the main process cannot write there, or another rank does not see it.
    """
    name, error = f".shared-{uuid.uuid4().hex}", ""
    if accelerator.is_main_process:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        except OSError as reason:
            error = str(reason)
    name, _, error = broadcast_string(accelerator, f"{name}\n{error}").partition("\n")
    if error:
        raise OSError(f"Stages cannot be written to {folder}: {error}. Set `stage_dir` (or `output_dir`) elsewhere.")
    missed = torch.tensor([not _appears(folder / name)], device=accelerator.device)
    blind = torch.as_tensor(accelerator.gather(missed)).nonzero()[:, 0].tolist()
    if accelerator.is_main_process:
        os.unlink(folder / name)
    if blind:
        raise OSError(
            f"The folder {folder} is not shared by all ranks: {blind} do not see what rank 0 wrote there. "
            "Set `stage_dir` to the same folder on storage that every node mounts, or `replicate_stages: true` to "
            "have finished stages copied (`output_dir` is shared all the same)."
        )


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
