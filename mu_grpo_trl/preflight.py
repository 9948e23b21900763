"""What can be found wrong before a model is loaded: datasets, options that contradict them, servers, interpreters."""

from __future__ import annotations

import os
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from .config import MuGRPOConfig
from .data import PromptReport, check_prompts, materialize_stream
from .rollout.vllm_client import ClientOptions, VLLMEngine
from .rollout.vllm_process import ManagedServer, ServerOptions, device_sets


def refuse_unsupported(tools: Any, rollout_func: Any, environment_factory: Any, quantization_config: Any) -> None:
    """
    Raises:
        `ValueError`: for an argument of `GRPOTrainer` that `MuGRPOTrainer` does not support yet.
    """
    for name, value, reason in (
        ("tools", tools, "responses with tool calls are not generated in stages yet"),
        ("rollout_func", rollout_func, "the stage buffer takes its place; implement an engine instead"),
        ("environment_factory", environment_factory, "environments are not supported yet"),
        ("quantization_config", quantization_config, "a quantized policy cannot be published without loss yet"),
    ):
        if value:
            raise ValueError(
                f"`{name}` cannot be honored by MuGRPOTrainer: {reason}. Use GRPOTrainer, or leave it out."
            )


def text_config(model: Any, trust_remote_code: bool, revision: str | None = None) -> PretrainedConfig:
    """Configuration of the policy, from a loaded model or by its name, without loading weights."""
    config = model.config if hasattr(model, "config") else None
    if config is None:
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, revision=revision)
    if hasattr(config, "vision_config"):
        raise ValueError(
            f"{config.model_type!r} is a vision-language model; MuGRPOTrainer supports text policies only yet."
        )
    return config.get_text_config()


def context_length(config: MuGRPOConfig, model_config: PretrainedConfig) -> int:
    """Limit on prompt and response together: the configured one, within what the model supports."""
    supported = getattr(model_config, "max_position_embeddings", None)
    limit = config.context_limit
    if limit is None:
        if supported is None:
            raise ValueError(
                f"Model type {model_config.model_type!r} does not say how long its context is. Set `max_context_length`."
            )
        return supported
    if supported is not None and limit > supported:
        raise ValueError(
            f"A context of {limit} tokens is configured, but the model supports {supported}. Lower `max_context_length` "
            f"(or `vllm_max_model_length`) to at most {supported}."
        )
    return limit


def check_dataset(
    dataset: Any, config: MuGRPOConfig, tokenizer: PreTrainedTokenizerBase, context_length: int
) -> tuple[Dataset, PromptReport]:
    """
    The training prompts as a map-style dataset, every row of it usable.

    Raises:
        `TypeError`, `ValueError`: naming rows and columns that are not.
    """
    if dataset is None:
        raise ValueError("`train_dataset` is None. Pass a dataset with a `prompt` column.")
    if isinstance(dataset, IterableDataset):
        dataset = materialize_stream(dataset, max_steps=config.max_steps, prompts_per_update=config.prompts_per_update)
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"`train_dataset` is a {type(dataset).__name__}, not a `datasets.Dataset` or `IterableDataset`. A `DatasetDict` "
            "holds several splits: pass one, such as dataset['train']."
        )
    for column in ("image", "images", "environment"):
        if column in dataset.column_names:
            raise ValueError(f"Column {column!r}: {column}s are not supported yet. Remove the column.")
    dataset, report = check_prompts(
        dataset,
        tokenizer,
        context_length,
        config.max_completion_length or 1,
        "drop" if config.overlong_prompts == "drop" else "error",
        chat_template_kwargs=config.chat_template_kwargs,
    )
    if len(dataset) < config.prompts_per_update:
        raise ValueError(
            f"The dataset has {len(dataset)} usable prompts, fewer than one update takes (`prompts_per_update="
            f"{config.prompts_per_update}`). Lower `prompts_per_update`, or add prompts."
        )
    return dataset, report


def make_vllm_engine(config: MuGRPOConfig, model_config: PretrainedConfig, context_length: int) -> VLLMEngine:
    """
    The vLLM engine of the run, checked: managed servers' interpreter, external servers' health and settings.

    Raises:
        `EngineError`, `ConnectionError`: what is wrong with which server.
    """
    options = ClientOptions(
        vocab_size=model_config.vocab_size,
        context_length=context_length,
        concurrency=config.rollout_concurrency or ClientOptions.concurrency,
        release=config.vllm_release,
        progress_timeout_s=config.rollout_timeout_s,
        connection_timeout_s=config.vllm_server_timeout,
        api_key=config.vllm_api_key or os.environ.get("VLLM_API_KEY"),
    )
    if config.vllm_mode == "server":
        engine = VLLMEngine(config.server_urls, options)
    else:
        engine = VLLMEngine(_managed_servers(config, context_length), options, python=config.vllm_interpreter)
    engine.check()
    return engine


def _managed_servers(config: MuGRPOConfig, context_length: int) -> list[ManagedServer]:
    devices = _visible_devices()
    server_args = list(config.vllm_server_args or ())
    if config.vllm_model_impl != "vllm":
        server_args += ["--model-impl", config.vllm_model_impl]
    options = ServerOptions(
        log_dir=config.stages_path.parent / "vllm",
        python=config.vllm_interpreter,
        tensor_parallel_size=config.vllm_tensor_parallel_size,
        gpu_memory_utilization=config.vllm_gpu_memory_utilization if devices else None,
        max_model_len=context_length,
        dtype="bfloat16" if config.bf16 else "float16" if config.fp16 else "float32",
        enable_sleep_mode=config.vllm_release == "sleep" and bool(devices),
        extra_args=tuple(server_args),
    )
    sets = device_sets(config.vllm_num_servers, config.vllm_tensor_parallel_size, devices)
    return [ManagedServer(options, number, ids) for number, ids in enumerate(sets)]


def _visible_devices() -> list[str]:
    """Names of the CUDA devices this node may use, as `CUDA_VISIBLE_DEVICES` gives them; none on CPU."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]
