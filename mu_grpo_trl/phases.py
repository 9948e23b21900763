"""Between optimization and rollout: publish the weights of β, and hand the device over and back."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

MAX_SHARD_BYTES = 4 * 2**30
POLICY_HASH_FILE = "policy_hash.json"


def _gathered(parameters: list[nn.Parameter], zero3: bool) -> AbstractContextManager:
    if not zero3:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Adapted layers by the name of the weight they replace in the base model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


def merged_weights(model: nn.Module, zero3: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """
    Yield `(name, whole tensor)` of the policy under the names of the plain model, one parameter at a time.

    Collective: every rank must consume it to its end. Tied weights come once. A LoRA layer comes as
    `W + scaling · B @ A`, computed out of place, so that the base weights keep every bit.

    Raises:
        `ValueError`: for an adapter without an out-of-place merge (anything but plain LoRA).
    """
    is_peft = hasattr(model, "peft_config")
    layers = _lora_layers(model) if is_peft else {}
    for name, parameter in model.named_parameters():
        layer_name = name.rpartition(".base_layer.")[0]
        if is_peft and _belongs_to_adapter(name):
            continue
        if layer_name in layers and name.endswith(".base_layer.weight"):
            layer = layers[layer_name]
            with _gathered([p for p in layer.parameters()], zero3):
                yield _plain_name(name), _merge(layer, layer_name, parameter)
        else:
            with _gathered([parameter], zero3):
                yield _plain_name(name) if is_peft else name, _full(parameter.detach())


def _belongs_to_adapter(name: str) -> bool:
    return ".lora_" in name or ".original_module." in name or (".modules_to_save." in name and ".default." not in name)


def _plain_name(name: str) -> str:
    name = name.removeprefix("base_model.model.")
    return name.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")


@torch.no_grad()
def _merge(layer: nn.Module, name: str, weight: nn.Parameter) -> torch.Tensor:
    merged = _full(weight.detach())
    for adapter in layer.active_adapters:
        if adapter not in layer.lora_A or layer.use_dora.get(adapter, False):
            raise ValueError(
                f"Adapter {adapter!r} of layer {name!r} is not plain LoRA on a linear layer, so its weights cannot be "
                "merged for the engine without touching the base. Use plain LoRA (no DoRA) on linear layers."
            )
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

    The folder appears atomically; one that already holds the same weights is left as it is.

    Args:
        accelerator (`Accelerator`): the trainer's.
        model (`nn.Module`): the unwrapped training model (also ZeRO-3, FSDP2, PEFT).
        tokenizer (`PreTrainedTokenizerBase`): saved beside the weights.
        folder (`Path`): where the policy goes; only the main process writes.
        untie (`bool`): write a tied LM head as a tensor of its own: the CPU build of vLLM keeps a stale head otherwise.

    Returns:
        `str`: hash of all weights (names, dtypes, shapes, bits), the same on every rank.
    """
    main = accelerator.is_main_process
    temporary = folder.with_name(folder.name + ".tmp")
    digest = hashlib.blake2b(digest_size=16)
    writer = None
    if main:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        writer = _ShardedSafetensors(temporary)
    zero3 = is_zero3(accelerator)
    tied = tied_lm_head(model) if untie else None
    for name, tensor in merged_weights(model, zero3):
        if writer is None:
            continue
        tensor = tensor.detach().to("cpu", copy=True).contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy())
        writer.add(name, tensor)
        if tied is not None and name == tied[0]:
            writer.add(tied[1], tensor.clone())
    policy_hash = digest.hexdigest() if main else ""
    if writer is not None:
        writer.finish()
        _save_config(model, temporary, untied=tied is not None)
        tokenizer.save_pretrained(temporary)
        (temporary / POLICY_HASH_FILE).write_text(json.dumps({"policy_hash": policy_hash}))
        _replace_folder(temporary, folder)
    return broadcast_string(accelerator, policy_hash)


def _save_config(model: nn.Module, folder: Path, untied: bool) -> None:
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    config = base.config.to_dict()
    if untied:
        config["tie_word_embeddings"] = False
    config = type(base.config).from_dict(config)
    config.architectures = [type(base).__name__.removeprefix("FSDP")]
    config.dtype = base.dtype
    config.save_pretrained(folder)
    if base.generation_config is not None:
        base.generation_config.save_pretrained(folder)


def tied_lm_head(model: nn.Module) -> tuple[str, str] | None:
    """`(input embedding's name, LM head's name)` where the two share one tensor, else None."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    if not getattr(base.config.get_text_config(), "tie_word_embeddings", False):
        return None
    names = {module: name for name, module in base.named_modules()}
    return f"{names[base.get_input_embeddings()]}.weight", f"{names[base.get_output_embeddings()]}.weight"


def _replace_folder(temporary: Path, folder: Path) -> None:
    for path in temporary.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if folder.exists():
        shutil.rmtree(folder)
    temporary.rename(folder)


def is_zero3(accelerator: Accelerator) -> bool:
    """Whether DeepSpeed shards the parameters."""
    plugin = accelerator.state.deepspeed_plugin
    return plugin is not None and plugin.zero_stage == 3


def is_sharded(accelerator: Accelerator) -> bool:
    """Whether a rank holds only a part of the parameters (ZeRO-3 or FSDP)."""
    return is_zero3(accelerator) or accelerator.distributed_type == DistributedType.FSDP


def broadcast_string(accelerator: Accelerator, text: str) -> str:
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


def register_fused_head(model: nn.Module) -> None:
    """
    Tell ZeRO-3 that the model itself reads its LM head's weight, as TRL's fused head does.

    DeepSpeed finds that out by itself only when the weight happens to be partitioned at that moment; its trace of the
    modules, recorded before, then is wrong and the next backward pass fails.
    """
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    head = base.get_output_embeddings()
    if hasattr(head.weight, "ds_id"):
        import deepspeed

        deepspeed.zero.register_external_parameter(base, head.weight)


class DeviceHandover:
    """
    Moves parameters and optimizer state to host memory for the rollout, and back for the optimization phase.

    DeepSpeed ZeRO-3 by its own `offload_states`; one device, DDP and FSDP2 tensor by tensor, in place, so that every
    reference (DDP's, the optimizer's) stays valid. On CPU there is nothing to move; ZeRO-1 and -2 keep their flat buffers.
    """

    def __init__(self, accelerator: Accelerator, enabled: bool) -> None:
        self._accelerator = accelerator
        self._device = accelerator.device
        movable = is_zero3(accelerator) or accelerator.distributed_type != DistributedType.DEEPSPEED
        self._enabled = enabled and movable and self._device.type != "cpu"

    def offload(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Take the training state off the device; `model` is the wrapped model."""
        if not self._enabled:
            return
        if is_zero3(self._accelerator):
            model.offload_states()
        else:
            self._move(model, optimizer, torch.device("cpu"))
        torch.accelerator.empty_cache()

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
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
