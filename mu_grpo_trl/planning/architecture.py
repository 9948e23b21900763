"""The sizes of a model, from its configuration alone: built on PyTorch's meta device, which holds no numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

_QWEN2_7B = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 32768}

KNOWN_MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-Math-7B": {**_QWEN2_7B, "max_position_embeddings": 4096},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": {**_QWEN2_7B, "max_position_embeddings": 131072},
    "Qwen/Qwen3-1.7B-Base": {
        **_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "Qwen/Qwen3-8B-Base": {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.2-3B-Instruct": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "head_dim": 128,
        "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
}  # fmt: skip
"""The paper's models by their Hub ids, so that a machine without a network can plan them."""


@dataclass(frozen=True)
class Architecture:
    """
    Sizes of a decoder-only transformer.

    Args:
        num_parameters (`int`): tied ones once.
        layer_parameters (`int`): of the largest repeated layer.
        outer_parameters (`int`): of all that is in no layer: embeddings, LM head, last norm.
        head_parameters (`int`): of the LM head's weight, tied or not.
        tied (`bool`): whether it is the embeddings' as well.
        layers (`int`), hidden (`int`), intermediate (`int`), vocabulary (`int`): as in the configuration.
        query (`int`), key_value (`int`): widths of the queries, and of the keys, of one token in one layer.
        dtype_bytes (`int` or None): of a stored weight, where the configuration says.
    """

    num_parameters: int
    layer_parameters: int
    outer_parameters: int
    head_parameters: int
    tied: bool
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    query: int
    key_value: int
    dtype_bytes: int | None

    @classmethod
    def of(cls, config: PretrainedConfig) -> Architecture:
        """
        The sizes that a configuration gives.

        Raises:
            `ValueError`: it is of no dense decoder with the usual fields.
        """
        fields = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        lacking = [name for name in fields if not isinstance(getattr(config, name, None), int)]
        if lacking:
            raise ValueError(f"The model type {config.model_type!r} has no {lacking[0]!r}: its memory is not planned.")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        total = sum(parameter.numel() for parameter in model.parameters())
        lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
        layers = max(lists, key=len, default=torch.nn.ModuleList())
        per_layer = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dtype = config.dtype
        return cls(
            num_parameters=total,
            layer_parameters=max(per_layer, default=0),
            outer_parameters=total - sum(per_layer),
            head_parameters=config.vocab_size * config.hidden_size,
            tied=bool(getattr(config, "tie_word_embeddings", False)),
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
            query=config.num_attention_heads * head_size,
            key_value=(getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head_size,
            dtype_bytes=dtype.itemsize if isinstance(dtype, torch.dtype) else None,
        )


def find_config(name: str, file: Path | None, trust_remote_code: bool = False) -> PretrainedConfig | None:
    """
    Configuration of a model, without a network: from `file`, the model's folder, the Hub's cache, or `KNOWN_MODELS`;
    None where none of them has it.

    Raises:
        `ValueError`: a file is named that is no configuration, or a folder that has none.
    """
    if file is not None:
        return _from_file(file)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _from_file(folder / "config.json")
    try:
        return AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        if name in KNOWN_MODELS:
            return _from_values(KNOWN_MODELS[name])
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise ValueError(
                f"`model_name_or_path={name!r}` is no folder with a model and no Hub id (owner/name). Name one."
            ) from error
    return None


def _from_file(file: Path) -> PretrainedConfig:
    try:
        return _from_values(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{str(file)!r} is no model's configuration ({error}). Name a model's folder, or its config.json by "
            "--model-config."
        ) from error


def _from_values(values: dict[str, Any]) -> PretrainedConfig:
    values = dict(values)
    return AutoConfig.for_model(values.pop("model_type"), **values)
