"""Between optimization and rollout: publish the weights of β, and hand the device over and back."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from .ranks import broadcast_string
from .stage.schema import StageError

MAX_SHARD_BYTES = 4 * 2**30
WEIGHT_FILES = "*.safetensors*"
"""Of a policy folder, its index among them."""

_ONLY_LORA = (
    "Its weights cannot be merged for the engine without touching the base. Use plain LoRA on linear layers (no DoRA, "
    "`lora_bias`, `target_parameters` or `trainable_token_indices`)."
)


def _gathered(parameters: list[nn.Parameter], zero3: bool) -> AbstractContextManager:
    if not zero3:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _lora_layers(model: nn.Module) -> dict[str, Any]:
    """Adapted layers by the name of the weight they replace in the base model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def check_publishable(model: Any) -> None:
    """
    Raises:
        `ValueError`: the model has adapters that cannot be merged out of place: all but plain LoRA on linear layers.
    """
    if not hasattr(model, "peft_config"):
        return
    from peft.tuners.lora import Linear

    for adapter, config in model.peft_config.items():
        if config.peft_type != "LORA" or config.trainable_token_indices is not None:
            raise ValueError(f"Adapter {adapter!r} ({config.peft_type}) is no plain LoRA. {_ONLY_LORA}")
    for name, layer in _lora_layers(model).items():
        with_bias = any(module.bias is not None for module in layer.lora_B.values())
        if type(layer) is not Linear or with_bias or any(layer.use_dora.values()):
            raise ValueError(
                f"Layer {name!r} is adapted by {type(layer).__module__}.{type(layer).__name__}"
                f"{' with lora_bias' if with_bias else ''}{' with DoRA' if any(layer.use_dora.values()) else ''}. "
                f"{_ONLY_LORA}"
            )


def merged_weights(model: Any, zero3: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yield `(name, whole tensor)` of the policy under the names of the plain model, one parameter at a time.

    Collective: every rank must consume it to its end. Tied weights come once. A LoRA layer comes as
    `W + scaling · B @ A`, computed out of place, so that the base weights keep every bit; no more than its tensors are
    gathered at once.
    """
    if not hasattr(model, "peft_config"):
        for name, parameter in model.named_parameters():
            with _gathered([parameter], zero3):
                yield name, _full(parameter.detach())
        return
    active, layers, yielded = model.active_adapters[0], _lora_layers(model), set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain = _plain_name(name, active)
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        if plain is None:
            continue
        if layer is not None:
            with _gathered(list(layer.parameters()), zero3):
                yield plain, _merge(layer, parameter)
        elif id(parameter) not in yielded:
            yielded.add(id(parameter))
            with _gathered([parameter], zero3):
                yield plain, _full(parameter.detach())


def _plain_name(name: str, adapter: str) -> str | None:
    """Name in the plain model of a PEFT model's parameter; None for what is not part of the merged model."""
    if ".lora_" in name or ".original_module." in name:
        return None
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    name = name.replace(f".modules_to_save.{adapter}.", ".")
    return None if ".modules_to_save." in name else name


@torch.no_grad()
def _merge(layer: Any, weight: nn.Parameter) -> torch.Tensor:
    merged = _full(weight.detach())
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            down, up = _full(layer.lora_A[adapter].weight), _full(layer.lora_B[adapter].weight)
            delta = (up.float() @ down.float()) * layer.scaling[adapter]
            merged = (merged.float() + (delta.T if layer.fan_in_fan_out else delta)).to(weight.dtype)
    return merged


class _ShardedSafetensors:
    """Writes tensors in order into shards of at most `MAX_SHARD_BYTES`, and the index that names them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = self._total_bytes = 0
        self._shards: list[list[str]] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > MAX_SHARD_BYTES:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += size
        self._total_bytes += size

    def _flush(self) -> None:
        save_file(self._pending, self._folder / f"part-{len(self._shards)}", metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def finish(self) -> None:
        self._flush()
        count, weight_map = len(self._shards), {}
        for number, names in enumerate(self._shards):
            name = "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / f"part-{number}").rename(self._folder / name)
            weight_map.update(dict.fromkeys(names, name))
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def publish(accelerator: Accelerator, model: nn.Module, tokenizer: Any, folder: Path, untie: bool) -> str:
    """
    Write the policy to `folder` as a plain `from_pretrained` model and return its hash. Collective.

    The folder appears whole or not at all; what it held before is replaced.

    Args:
        accelerator (`Accelerator`): the trainer's.
        model (`nn.Module`): the unwrapped training model (also ZeRO-3, FSDP2, PEFT).
        tokenizer (`PreTrainedTokenizerBase`): saved beside the weights.
        folder (`Path`): where the policy goes; only the main process writes.
        untie (`bool`): write a tied LM head as a tensor of its own; the CPU build of vLLM keeps a stale head without.

    Returns:
        `str`: hash of all weights (names, dtypes, shapes, bits), the same on every rank.

    Raises:
        `StageError`: the main process could not write (also on the other ranks).
    """
    writer = _PolicyWriter(folder, tied_lm_head(model) if untie else None) if accelerator.is_main_process else None
    for name, tensor in merged_weights(model, is_zero3(accelerator)):
        if writer is not None:
            writer.add(name, tensor.detach().to("cpu", copy=True).contiguous())
    if writer is not None:
        writer.finish(model, tokenizer)
    outcome = broadcast_string(accelerator, json.dumps(writer.outcome if writer is not None else None))
    policy_hash, error = json.loads(outcome)
    if error is not None:
        raise StageError(
            f"The policy could not be written to {folder}: {error}. Make room there, or move `stage_dir`; what is on "
            "the disk is safe."
        ) from (writer.error if writer is not None else None)
    return policy_hash


class _PolicyWriter:
    """
    The main process's side of [`publish`]. A disk that fails must not leave the other ranks alone in a collective, so
    the first error is kept until all parameters were gathered.
    """

    def __init__(self, folder: Path, tied: tuple[str, str] | None) -> None:
        self._folder = folder
        self._temporary = folder.with_name(folder.name + ".tmp")
        self._tied = tied
        self._digest = hashlib.blake2b(digest_size=16)
        self._shards = _ShardedSafetensors(self._temporary)
        self._names: set[str] = set()
        self.error: OSError | SafetensorError | None = None
        with self._keeping_error():
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir(parents=True)

    @property
    def outcome(self) -> tuple[str, str | None]:
        """`(hash of the policy, what went wrong)`."""
        return self._digest.hexdigest(), None if self.error is None else str(self.error)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if self.error is not None:
            return
        self._digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        self._digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
        self._names.add(name)
        with self._keeping_error():
            self._shards.add(name, tensor)
            if self._tied is not None and name == self._tied[0]:
                self._names.add(self._tied[1])
                self._shards.add(self._tied[1], tensor.clone())

    def finish(self, model: nn.Module, tokenizer: Any) -> None:
        if self.error is not None:
            return
        with self._keeping_error():
            self._shards.finish()
            _save_config(model, self._temporary, self._names)
            tokenizer.save_pretrained(self._temporary)
            _replace_folder(self._temporary, self._folder)

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            self.error = error


def _save_config(model: nn.Module, folder: Path, names: set[str]) -> None:
    base = _plain(model)
    config = base.config.to_dict()
    tied = tied_lm_head(model)
    if tied is not None and tied[1] in names:
        config["tie_word_embeddings"] = False
    config = type(base.config).from_dict(config)
    config.architectures = [type(base).__name__.removeprefix("FSDP")]
    config.dtype = base.dtype
    config.save_pretrained(folder)
    if base.generation_config is not None:
        base.generation_config.save_pretrained(folder)


def tied_lm_head(model: nn.Module) -> tuple[str, str] | None:
    """`(input embedding's name, LM head's name)` in the plain model where the two share one tensor, else None."""
    base = _plain(model)
    if not getattr(base.config.get_text_config(), "tie_word_embeddings", False):
        return None
    names = {module: name for name, module in base.named_modules()}
    return f"{names[base.get_input_embeddings()]}.weight", f"{names[base.get_output_embeddings()]}.weight"


def _plain(model: Any) -> PreTrainedModel:
    return model.get_base_model() if hasattr(model, "peft_config") else model


def _replace_folder(temporary: Path, folder: Path) -> None:
    for path in temporary.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)


def is_zero3(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed shards the parameters."""
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether a rank holds only a part of the parameters (ZeRO-3 or FSDP)."""
    return is_zero3(accelerator) or accelerator.distributed_type == DistributedType.FSDP


def register_fused_head(model: nn.Module) -> None:
    """
    Tell ZeRO-3 that the model itself reads its LM head's weight, as TRL's fused head does.

    DeepSpeed finds that out by itself only when the weight happens to be partitioned at that moment; its trace of the
    modules, recorded before, then is wrong and the next backward pass fails.
    """
    base = _plain(model)
    head: Any = base.get_output_embeddings()
    if hasattr(head.weight, "ds_id"):
        import deepspeed

        deepspeed.zero.register_external_parameter(base, head.weight)


class DeviceHandover:
    """
    Moves parameters and optimizer state to host memory for the rollout, and back for the optimization phase.

    DeepSpeed ZeRO-3 by its own `offload_states`; one device, DDP and FSDP2 tensor by tensor, in place, so that every
    reference (DDP's, the optimizer's) stays valid. Nothing moves on the CPU, nor the flat buffers of ZeRO-1 and -2.
    """

    def __init__(self, accelerator: Accelerator, enabled: bool) -> None:
        self._accelerator = accelerator
        self._device = accelerator.device
        movable = is_zero3(accelerator) or accelerator.distributed_type != DistributedType.DEEPSPEED
        self._enabled = enabled and movable and self._device.type != "cpu"

    def offload(self, model: Any, optimizer: torch.optim.Optimizer | None) -> None:
        """Take the training state off the device; `model` is the wrapped model."""
        if not self._enabled:
            return
        if is_zero3(self._accelerator):
            model.offload_states()
        else:
            self._move(model, optimizer, torch.device("cpu"))
        torch.accelerator.empty_cache()

    def restore(self, model: Any, optimizer: torch.optim.Optimizer | None) -> None:
        """Bring the training state back to the device."""
        if not self._enabled:
            return
        if is_zero3(self._accelerator):
            model.reload_states()
        else:
            self._move(model, optimizer, self._device)

    @staticmethod
    def _move(model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
        model.zero_grad(set_to_none=True)
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data = tensor.data.to(device)
        for state in optimizer.state.values() if optimizer is not None else ():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    state[key] = value.to(device)
