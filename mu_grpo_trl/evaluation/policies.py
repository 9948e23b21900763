"""What is evaluated: checkpoints, finished runs, Hub models and LoRA adapters, as folders an engine can load."""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from huggingface_hub import snapshot_download
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..checkpoints import FILES_NAME
from ..phases import check_publishable, publish, tied_lm_head
from ..rollout.transformers_engine import load_unsharded, sequence_logps, whole_models

ADAPTER_CONFIG = "adapter_config.json"
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin", "adapter_model.*")
_CHUNK_BYTES = 2**24


@dataclass(frozen=True)
class Checkpoint:
    """
    One model to evaluate.

    Args:
        label (`str`): its folder and the one around it, or its Hub id; unique in an evaluation.
        folder (`Path`): weights, configuration and tokenizer.
        step (`int` or None): updates it was trained for, where its name says so.
        weights_hash (`str`): of the weight files' bytes.
    """

    label: str
    folder: Path
    step: int | None
    weights_hash: str

    @property
    def is_adapter(self) -> bool:
        return (self.folder / ADAPTER_CONFIG).exists()

    @property
    def file_name(self) -> str:
        """The label as a folder's name."""
        return self.label.replace("/", "--")


def find_checkpoints(names: Sequence[str]) -> list[Checkpoint]:
    """
    The models named, each once: checkpoints by their step, after them what has none (a finished run, a Hub model).

    Args:
        names (`Sequence[str]`): folders, patterns of folders (`runs/x/checkpoint-*`), Hub ids.

    Raises:
        `ValueError`: nothing is there, it is no whole model, or two would have one label.
    """
    folders: dict[Path, str] = {}
    for name in names:
        for folder, label in _folders(name):
            folders.setdefault(folder.resolve(), label)
    if not folders:
        raise ValueError("`checkpoints` is empty. Name folders such as runs/x/checkpoint-*, or Hub ids.")
    found = [_checkpoint(folder, label) for folder, label in folders.items()]
    for checkpoint in found:
        others = [other.folder for other in found if other.label == checkpoint.label]
        if len(others) > 1:
            raise ValueError(
                f"{others[0]} and {others[1]} would both be called {checkpoint.label!r}. Evaluate them in two calls "
                "with an `output_dir` each."
            )
    return sorted(found, key=lambda checkpoint: (checkpoint.step is None, checkpoint.step or 0))


def _folders(name: str) -> list[tuple[Path, str]]:
    path = Path(name).expanduser()
    if path.is_dir():
        return [(path, _label(path))]
    if glob.has_magic(name):
        matching = [Path(match) for match in sorted(glob.glob(str(path))) if Path(match).is_dir()]
        if not matching:
            raise ValueError(f"No folder matches {name!r}. Check the path.")
        return [(match, _label(match)) for match in matching]
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"{name!r} is no folder. Name a checkpoint's folder, a pattern of them, or a Hub id.")
    try:
        return [(Path(snapshot_download(name, ignore_patterns=["*.gguf", "*.pth", "*.onnx"])), name)]
    except (OSError, ValueError) as error:
        raise ValueError(f"{name!r} is no folder, and could not be loaded from the Hub: {error}") from error


def _label(folder: Path) -> str:
    return "/".join(folder.resolve().parts[-2:]).lstrip("/")


def _checkpoint(folder: Path, label: str) -> Checkpoint:
    weights = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
    if not weights:
        inside = sorted(path.name for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
        hint = f" It is a run without a final model; evaluate {folder}/{PREFIX_CHECKPOINT_DIR}-*." if inside else ""
        sharded = any(folder.glob("global_step*")) or any(folder.glob("pytorch_model_fsdp*"))
        hint += (
            " Its weights are sharded by the training backend: save whole ones (`zero3_save_16bit_model: true`, "
            "`fsdp_state_dict_type: FULL_STATE_DICT`), or convert it."
            if sharded
            else ""
        )
        raise ValueError(f"{folder} holds no model ({', '.join(_WEIGHTS)}).{hint}")
    prefix, _, step = folder.name.rpartition("-")
    is_checkpoint = prefix == PREFIX_CHECKPOINT_DIR and step.isdigit()
    if is_checkpoint:
        _check_whole(folder, weights)
    return Checkpoint(label, folder, int(step) if is_checkpoint else None, _hash(folder, weights))


def _check_whole(folder: Path, weights: list[Path]) -> None:
    """A checkpoint gets `trainer_state.json` last; the sizes in `files.json` tell whether a file was cut since."""
    listing = folder / FILES_NAME
    sizes = json.loads(listing.read_text()) if listing.exists() else {}
    cut = [path.name for path in weights if sizes.get(path.name, path.stat().st_size) != path.stat().st_size]
    if cut or not (folder / TRAINER_STATE_NAME).exists():
        what = f"{cut[0]} was cut" if cut else f"it has no {TRAINER_STATE_NAME}"
        raise ValueError(f"{folder} is no whole checkpoint ({what}). Leave it out, or wait until it is written.")


def _hash(folder: Path, weights: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in [*weights, *(folder / name for name in ("config.json", ADAPTER_CONFIG) if (folder / name).exists())]:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


@dataclass(frozen=True)
class ServedPolicy:
    """
    A folder that the engine loads.

    Args:
        folder (`Path`): a plain `from_pretrained` model.
        expected (`list[torch.Tensor]` or None): log-probs of the probe sequences by the model itself, where they were
            asked for.
        dtype (`torch.dtype` or None): of the weights, where the model was loaded.
    """

    folder: Path
    expected: list[torch.Tensor] | None = None
    dtype: torch.dtype | None = None


@contextmanager
def served(
    checkpoint: Checkpoint,
    tokenizer: PreTrainedTokenizerBase,
    probes: list[list[int]],
    scratch: Path,
    *,
    untie: bool,
) -> Iterator[ServedPolicy]:
    """
    A folder the engine can load, inside the block: the checkpoint's own, or a copy below `scratch` of an adapter
    merged into its base, or (with `untie`) of a model with a tied LM head, which the CPU build of vLLM keeps.

    Raises:
        `ValueError`: an adapter that cannot be merged, or whose base is not found.
    """
    if not probes and not checkpoint.is_adapter:
        yield ServedPolicy(checkpoint.folder)
        return
    model = _load(checkpoint)
    expected = sequence_logps(model, probes, torch.device("cpu")) if probes else None
    folder, dtype = checkpoint.folder, model.dtype
    if checkpoint.is_adapter or (untie and tied_lm_head(model) is not None):
        folder = scratch / checkpoint.file_name
        publish(Accelerator(), model, tokenizer, folder, untie)
    del model
    try:
        yield ServedPolicy(folder, expected, dtype)
    finally:
        if folder != checkpoint.folder:
            shutil.rmtree(folder, ignore_errors=True)


def _load(checkpoint: Checkpoint) -> Any:
    if not checkpoint.is_adapter:
        return load_unsharded(checkpoint.folder, torch.device("cpu"))
    from peft import AutoPeftModelForCausalLM

    try:
        with whole_models():
            model = AutoPeftModelForCausalLM.from_pretrained(checkpoint.folder, dtype="auto")
    except (OSError, ValueError) as error:
        base = json.loads((checkpoint.folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
        raise ValueError(
            f"{checkpoint.folder} is an adapter, which could not be put onto its base {base!r}: {error}. Make the "
            f"base available, or set its place in {ADAPTER_CONFIG}."
        ) from error
    check_publishable(model)
    return model


def eos_token_ids(folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a response, as the trainer has them: the generation configuration's and the tokenizer's."""
    listed: Any = config.eos_token_id
    if (folder / "generation_config.json").exists():
        listed = GenerationConfig.from_pretrained(folder).eos_token_id
    ids = [] if listed is None else [listed] if isinstance(listed, int) else list(listed)
    own: Any = tokenizer.eos_token_id
    return tuple(ids if own is None or own in ids else [own, *ids])
