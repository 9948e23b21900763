"""What can be found wrong before a model is loaded: folders, datasets, rewards, adapters, servers, interpreters."""

from __future__ import annotations

import importlib
import inspect
import os
import tempfile
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.trainer_utils import IntervalStrategy
from trl.trainer.utils import get_config_model_id

from .config import MuGRPOConfig
from .data import PromptReport, check_prompts, materialize_stream
from .options import nearest
from .rewards.math import MathReward
from .rollout.vllm_client import ClientOptions, VLLMEngine
from .rollout.vllm_process import ManagedServer, ServerOptions, device_sets
from .schedule import Schedule
from .stage.schema import MANIFEST_NAME, ManifestLostError, read_manifest
from .stored import stored_schedule
from .telemetry import peak_flops

_REWARD_ARGUMENTS = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}


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


def check_run(config: MuGRPOConfig, eval_dataset: Any, peft_config: Any) -> None:
    """
    Raises:
        `TypeError`: `config` is another class.
        `ValueError`: nothing to evaluate on, an adapter that cannot be merged, or a folder that cannot be written to.
        `StageError`: a stage is there that cannot be read.
    """
    if not isinstance(config, MuGRPOConfig):
        raise TypeError(
            f"`args` is a {type(config).__name__}. Use `MuGRPOConfig`: it takes the same options and more."
        )
    check_evaluation(config, eval_dataset)
    named = eval_dataset if isinstance(eval_dataset, dict) else {"eval_dataset": eval_dataset}
    for name, dataset in named.items():
        if dataset is not None and "prompt" not in (dataset.column_names or ("prompt",)):
            raise ValueError(f"{name!r} has no column 'prompt'. Its columns: {', '.join(dataset.column_names)}.")
    if peft_config is not None:
        check_adapter(peft_config)
    _check_folders(config)


def check_evaluation(config: MuGRPOConfig, eval_dataset: Any) -> None:
    """
    Raises:
        `ValueError`: evaluation is asked for, and there is nothing to evaluate on.
    """
    if config.eval_strategy != "no" and eval_dataset is None:
        raise ValueError(
            f"`eval_strategy={IntervalStrategy(config.eval_strategy).value!r}` needs an `eval_dataset`. Pass one, or "
            "set it to 'no'."
        )
    if config.eval_stage_ends:
        _check_stage_evaluation(config, eval_dataset)


def _check_stage_evaluation(config: MuGRPOConfig, eval_dataset: Any) -> None:
    if eval_dataset is None:
        raise ValueError("`eval_stage_ends=True` needs an `eval_dataset` (in a recipe: `eval_benchmark`). Pass one.")
    samples = config.num_generations_eval or config.num_generations or 1
    rows = config.per_device_eval_batch_size * config.world_size
    if rows % samples:
        raise ValueError(
            f"`per_device_eval_batch_size={config.per_device_eval_batch_size}` on {config.world_size} processes gives "
            f"{rows} rows, no multiple of the {samples} responses to a prompt. Set `num_generations_eval`, or another "
            "`per_device_eval_batch_size`."
        )


def check_adapter(peft_config: Any) -> None:
    """
    Raises:
        `ValueError`: the adapter is none that can be merged for the engine.
    """
    kind = getattr(peft_config.peft_type, "value", peft_config.peft_type)
    if kind != "LORA":
        raise ValueError(f"A {kind} adapter cannot be merged into the weights the engine loads. Use a `LoraConfig`.")
    for name in ("use_dora", "target_parameters", "trainable_token_indices", "alora_invocation_tokens", "lora_bias"):
        if value := getattr(peft_config, name, None):
            raise ValueError(
                f"`{name}={value!r}` in the `LoraConfig`: such weights cannot be merged for the engine "
                "without touching the base. Use plain LoRA on linear layers."
            )


def _check_folders(config: MuGRPOConfig) -> None:
    for name, folder in (("output_dir", config.output_path), ("stage_dir", config.stages_path)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(
                f"Nothing can be written to {str(folder)!r} ({error.strerror or error}). Choose another `{name}`."
            ) from error
    for manifest in sorted(config.stages_path.glob(f"stage-*/{MANIFEST_NAME}")):
        with suppress(ManifestLostError):  # one that was cut is written again
            read_manifest(manifest.parent)


def check_rewards(reward_funcs: Any, columns: Collection[str]) -> None:
    """
    Whether every reward function can be called with the dataset's columns.

    Args:
        reward_funcs (`Any`): as [`MuGRPOTrainer`] takes them.
        columns (`Collection[str]`): the training dataset's.

    Raises:
        `ValueError`: a name that is no reward, a function that cannot be imported, or one whose arguments do not fit.
    """
    for reward in reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]:
        if reward == "math" or isinstance(reward, MathReward):
            column = "answer" if reward == "math" else reward.answer_column
            if column not in columns:
                raise ValueError(
                    f"The math reward reads the column {column!r}, which the dataset lacks.{nearest(column, columns)} "
                    f"Its columns: {', '.join(columns)}. Rename one, or use `MathReward(answer_column=...)`."
                )
        elif isinstance(reward, str) and ":" in reward:
            _check_signature(reward, _imported(reward), columns)
        elif isinstance(reward, str) and (hint := nearest(reward, ("math",))):
            raise ValueError(f"{reward!r} is no reward: use 'math', 'module:function' or a reward model's id.{hint}")
        elif callable(reward) and not isinstance(reward, torch.nn.Module):
            _check_signature(getattr(reward, "__name__", type(reward).__name__), reward, columns)


def _imported(reference: str) -> Callable[..., Any]:
    module_name, _, name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"Reward {reference!r}: module {module_name!r} cannot be imported ({type(error).__name__}: {error}). "
            "Start the run in the folder that holds it, or add that folder to PYTHONPATH."
        ) from error
    if not callable(getattr(module, name, None)):
        raise ValueError(
            f"Reward {reference!r}: {module.__file__} has no function {name!r}.{nearest(name, vars(module))}"
        )
    return getattr(module, name)


def _check_signature(name: str, function: Callable[..., Any], columns: Collection[str]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # compiled code may not tell
    given = _REWARD_ARGUMENTS | set(columns) - {"prompt", "completion"}
    lacking = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and parameter.default is parameter.empty
        and parameter.name not in given
    ]
    if lacking:
        raise ValueError(
            f"Reward function {name!r} takes {lacking[0]!r}, which is no column of the dataset."
            f"{nearest(lacking[0], columns)} Its columns: {', '.join(columns)}. Rename the argument or the column."
        )
    try:
        signature.bind(**dict.fromkeys(given))
    except TypeError as error:
        raise ValueError(
            f"Reward function {name!r} cannot be called with {sorted(given)}: {error}. Add `**kwargs` to its "
            "arguments."
        ) from error


def text_config(model: Any, config: MuGRPOConfig) -> PretrainedConfig:
    """Configuration of the policy, from a loaded model or by its name, without loading weights."""
    model_config = model.config if hasattr(model, "config") else None
    if model_config is None:
        try:
            model_config = AutoConfig.from_pretrained(
                model, trust_remote_code=config.trust_remote_code, revision=_revision(config)
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{model!r} is no folder with a model, and cannot be loaded from the Hub either: {error}"
            ) from error
    if hasattr(model_config, "vision_config"):
        raise ValueError(
            f"{model_config.model_type!r} is a vision-language model; MuGRPOTrainer supports text policies only yet."
        )
    return model_config.get_text_config()


def load_tokenizer(tokenizer: Any, model: Any, config: MuGRPOConfig) -> PreTrainedTokenizerBase:
    """
    `tokenizer` itself, or without one the policy's.

    Raises:
        `TypeError`: it is a processor of images or sounds.
    """
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(
            model if isinstance(model, str) else get_config_model_id(model.config),
            revision=_revision(config),
            padding_side="left",
            trust_remote_code=config.trust_remote_code,
        )
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"`processing_class` is a {type(tokenizer).__name__}, not a tokenizer: text only yet.")
    return tokenizer


def _revision(config: MuGRPOConfig) -> str | None:
    return config.model_kwargs.get("revision")


def context_length(config: MuGRPOConfig, model_config: PretrainedConfig) -> int:
    """Limit on prompt and response together: the configured one, within what the model supports."""
    supported = getattr(model_config, "max_position_embeddings", None)
    limit = config.context_limit
    if limit is None:
        if supported is None:
            raise ValueError(
                f"Model type {model_config.model_type!r} does not tell its context length. Set `max_context_length`."
            )
        return supported
    if supported is not None and limit > supported:
        raise ValueError(
            f"A context of {limit} tokens is configured, but the model supports {supported}. Lower "
            f"`max_context_length` (or `vllm_max_model_length`) to at most {supported}."
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
            f"`train_dataset` is a {type(dataset).__name__}, not a `datasets.Dataset` or `IterableDataset`. A "
            "`DatasetDict` holds several splits: pass one, such as dataset['train']."
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
        chat_template_kwargs=config.template_kwargs,
    )
    if len(dataset) < config.prompts_per_update:
        raise ValueError(
            f"The dataset has {len(dataset)} usable prompts, fewer than one update takes (`prompts_per_update="
            f"{config.prompts_per_update}`). Lower `prompts_per_update`, or add prompts."
        )
    return dataset, report


def make_schedule(config: MuGRPOConfig, num_prompts: int) -> Schedule:
    """The run's schedule; sets `max_steps` to its number of updates."""
    if config.train_on_stage:
        return stored_schedule(config, read_manifest(config.train_on_stage))
    config.max_steps = Schedule.num_updates_for(
        config.max_steps, config.num_train_epochs, num_prompts, config.prompts_per_update
    )
    return Schedule(
        num_prompts=num_prompts,
        prompts_per_update=config.prompts_per_update,
        stage_updates=min(config.stage_updates, config.max_steps),
        num_updates=config.max_steps,
        seed=config.seed,
        shuffle=config.shuffle_dataset is not False,
        shuffle_stage=config.shuffle_stage,
    )


def devices_peak(accelerator: Accelerator) -> float | None:
    """Half-precision operations per second of all ranks' devices together; None if not known, or not used."""
    if accelerator.device.type != "cuda" or accelerator.mixed_precision not in ("bf16", "fp16"):
        return None
    peak = peak_flops(torch.cuda.get_device_name(accelerator.device))
    return peak and peak * accelerator.num_processes


def refuse_aux_loss(model: Any, enabled: bool) -> None:
    """
    Raises:
        `ValueError`: the model adds a loss of its own.
    """
    if enabled:
        raise ValueError(
            f"{type(model).__name__} adds a load-balancing loss, which μ-GRPO does not support yet. Set "
            "`router_aux_loss_coef=0.0`."
        )


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
        release=config.vllm_release,  # type: ignore[arg-type]  # checked by the config
        progress_timeout_s=config.rollout_timeout_s,
        connection_timeout_s=config.vllm_server_timeout,
        api_key=_api_key(config),
    )
    if config.vllm_mode == "server":
        engine = VLLMEngine(config.server_urls, options)
    else:
        engine = VLLMEngine(managed_servers(config, context_length), options, python=config.vllm_interpreter)
    engine.check()
    return engine


def managed_servers(config: MuGRPOConfig, context_length: int) -> list[ManagedServer]:
    """The vLLM servers of a run, not started yet."""
    devices = _visible_devices()
    server_args = list(config.vllm_server_args or ())
    if config.rollout_concurrency:
        server_args += ["--max-num-seqs", str(config.rollout_concurrency)]
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
        env=({} if devices else cpu_server_env()) | ({"VLLM_API_KEY": key} if (key := _api_key(config)) else {}),
    )
    sets = device_sets(config.vllm_num_servers, config.vllm_tensor_parallel_size, devices)
    return [ManagedServer(options, number, ids) for number, ids in enumerate(sets)]


def _api_key(config: MuGRPOConfig) -> str | None:
    return config.vllm_api_key or os.environ.get("VLLM_API_KEY") or None


def cpu_server_env() -> dict[str, str]:
    """On the CPU a server's KV cache takes an eighth of the memory, unless the environment says otherwise."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
    defaults = {"VLLM_CPU_KVCACHE_SPACE": str(max(1, memory_gib // 8))}
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) <= 4:  # vLLM would keep one of them for its scheduler; the trainer is idle meanwhile
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    return defaults | {name: os.environ[name] for name in defaults if name in os.environ}


def _visible_devices() -> list[str]:
    """Names of the CUDA devices this node may use, as `CUDA_VISIBLE_DEVICES` gives them; none on CPU."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(number) for number in range(count)]
