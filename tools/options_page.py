"""
Write docs/options.md: every option of a recipe, from the dataclasses that declare them.

    python -m tools.options_page
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from trl import GRPOConfig, ModelConfig

from mu_grpo_trl.config import REFUSED, MuGRPOConfig
from mu_grpo_trl.train import ScriptArguments

PAGE = Path(__file__).parent.parent / "docs" / "options.md"

GROUPS = {
    "The method": (
        "objective", "stage_updates", "prompts_per_update", "num_generations", "epsilon", "epsilon_high",
        "veto_scope", "veto_threshold", "advantage_eps", "anchor", "m2po_threshold", "m2po_scope", "shuffle_stage",
    ),
    "Generation": (
        "rollout_engine", "rollout_concurrency", "rollout_timeout_s", "max_context_length", "overlong_prompts",
        "probe_tolerance",
    ),
    "vLLM": (
        "vllm_mode", "vllm_server_urls", "vllm_num_servers", "vllm_release", "vllm_python", "vllm_server_args",
        "vllm_api_key", "vllm_gpu_memory_utilization",
    ),
    "Rewards": ("reward_workers", "reward_timeout_s", "reward_error", "no_signal"),
    "Stages on disk, and the device": (
        "stage_dir", "replicate_stages", "keep_stages", "keep_policies", "save_at_stage_end",
        "train_on_stage", "offload",
    ),
    "Optimizer": ("learning_rate", "lr_scheduler_type", "weight_decay"),
    "Memory and speed": (
        "max_tokens_per_microbatch", "per_device_train_batch_size", "skip_zero_advantage", "sort_by_length",
        "share_prompts", "padding_free", "read_ahead", "lean_head", "sync_once",
    ),
    "When learning goes wrong": (
        "nonfinite", "max_nonfinite_skips", "collapse_watch", "collapse_window", "collapse_negative_ratio",
        "collapse_veto_share", "collapse_entropy",
    ),
}  # fmt: skip
"""Options that this package adds or gives another default; one that is named nowhere comes under *Other*."""

UNITS = {
    "stage_updates": "updates",
    "prompts_per_update": "prompt groups, all ranks",
    "num_generations": "responses",
    "rollout_concurrency": "responses",
    "max_context_length": "tokens",
    "probe_tolerance": "nats",
    "vllm_num_servers": "servers",
    "vllm_gpu_memory_utilization": "share of the device",
    "reward_workers": "processes",
    "keep_stages": "stages",
    "keep_policies": "policies",
    "max_tokens_per_microbatch": "tokens, each rank",
    "per_device_train_batch_size": "responses",
    "max_nonfinite_skips": "updates",
    "collapse_window": "updates",
    "collapse_veto_share": "share of responses",
    "collapse_entropy": "nats per token",
    "m2po_threshold": "nats²",
    "max_completion_length": "tokens",
    "max_rows": "rows",
    "vllm_server_timeout": "seconds",
    "vllm_max_model_length": "tokens",
    "vllm_tensor_parallel_size": "devices",
}

HERE = {
    "beta": "KL coefficient (k3 estimate against the reference policy); the term is outside the veto.",
    "cache_implementation": "In evaluation only.",
    "disable_dropout": "No effect: dropout is always off in training.",
    "ds3_gather_for_generation": "In evaluation only.",
    "generation_kwargs": "Only `stop`: strings that end a response (with vLLM).",
    "log_completions": "Whether to log a table of some of a stage's responses, once a stage.",
    "max_completion_length": "Most tokens of a response; a long prompt may leave fewer.",
    "scale_rewards": "Whether to divide advantages by the group's standard deviation: `group` or `none`.",
    "use_vllm": "No effect: `rollout_engine` decides. Refused beside `rollout_engine: transformers`.",
    "vllm_enable_sleep_mode": "No effect: `vllm_release` decides. Refused beside another one than `sleep`.",
    "vllm_max_model_length": "As `max_context_length`; the smaller one counts.",
    "vllm_model_impl": "Of managed servers: `vllm` or `transformers`.",
    "vllm_server_base_url": "Address of the one external server, where `vllm_server_urls` is unset.",
    "vllm_server_host": "Its host, where that is unset too.",
    "vllm_server_port": "Its port.",
    "vllm_server_timeout": "Time in which an external server must be healthy; one silent for longer is cut off.",
    "vllm_tensor_parallel_size": "Devices of each managed server.",
    "dataloader_drop_last": "In evaluation only.",
    "dataloader_in_order": "In evaluation only.",
    "dataloader_num_workers": "In evaluation only: in training each rank reads its rows from the stage.",
    "dataloader_persistent_workers": "In evaluation only.",
    "dataloader_pin_memory": "In evaluation only.",
    "dataloader_prefetch_factor": "In evaluation only.",
}
"""What inherited options do, where it is not what the libraries below say."""

_HEAD = """# Every option

Written by `python -m tools.options_page` from the classes that declare the options. Do not edit it.

A recipe is a flat YAML file of these keys. Each can be given behind it too, and wins: `--stage_updates 256`. In Python
those of `MuGRPOConfig` are its arguments; those of the recipe's data and model are arguments of `load_prompts`,
`MuGRPOTrainer` and `LoraConfig`. An unknown key, a key given twice and a value of a wrong type stop the run, with the
nearest valid name. Two more keys: `base` names recipes that this one is written on top of, and `env` is a mapping of
environment variables that are set before anything is loaded.

*unset* means `None`.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD, "## Data, rewards and resume\n", "Keys of a recipe, beside the trainer's and the model's.\n"]
    parts.append(_table(fields(ScriptArguments), documented(ScriptArguments)))
    own = {option.name: option for option in own_options()}
    texts, inherited = documented(MuGRPOConfig), {option.name: option for option in fields(GRPOConfig)}
    grouped = {name for names in GROUPS.values() for name in names}
    rest = {"Other": tuple(name for name in own if name not in grouped)}
    for title, names in (GROUPS | rest).items():
        if names:
            parts += [f"## {title}\n", _table([own[name] for name in names], texts, inherited)]
    parts += ["## From TRL's `GRPOConfig`\n", "Honored as there, or as the table says.\n"]
    parts.append(_table(_inherited(GRPOConfig, TrainingArguments), HERE))
    parts += ["## The model, and LoRA\n", "TRL's `ModelConfig`, in recipes. `load_in_8bit` and `load_in_4bit` are"]
    parts += [
        "refused: a quantized policy cannot be published without loss yet. `lora_dropout` is 0.0 here unless you"
    ]
    parts += ["set it: the trainer turns dropout off.\n", _table(fields(ModelConfig))]
    parts += ["## From transformers' `TrainingArguments`\n", "Honored as there, or as the table says.\n"]
    parts.append(_table(_inherited(TrainingArguments), HERE))
    parts += [
        "## Refused\n",
        "Options of the two classes above that cannot be honored. A value other than the default",
    ]
    parts += ["is an error with this reason.\n", "| option | reason |\n|---|---|"]
    parts += [f"| `{name}` | {_cell(reason)} |" for name, reason in REFUSED.items()]
    parts += ["| `scale_rewards='batch'` | advantages are computed as each group finishes, from that group alone |"]
    return "\n".join(parts) + "\n"


def own_options() -> list[Field[Any]]:
    """Options that `MuGRPOConfig` declares itself and does not refuse."""
    return [option for option in fields(MuGRPOConfig) if option.name in MuGRPOConfig.__annotations__.keys() - REFUSED]


def documented(options: type) -> dict[str, str]:
    """Texts of the options in the docstring of their class, by name."""
    doc = inspect.getdoc(options) or ""
    entries = re.finditer(r"^    (\w+) \(`.*?\):\s*(.*?)(?=^    \w+ \(`|\Z)", doc, re.MULTILINE | re.DOTALL)
    return {entry[1]: " ".join(entry[2].split()) for entry in entries}


def _inherited(options: type, *ancestors: type) -> list[Field[Any]]:
    """Options that are `options`' own, neither declared again by `MuGRPOConfig` nor refused."""
    elsewhere = {field.name for ancestor in ancestors for field in fields(ancestor)}
    elsewhere |= REFUSED.keys() | MuGRPOConfig.__annotations__.keys()
    return [option for option in fields(MuGRPOConfig) if option.name in _names(options) - elsewhere]


def _names(options: type) -> set[str]:
    return {option.name for option in fields(options)}


def _table(
    options: Iterable[Field[Any]], texts: dict[str, str] | None = None, former: dict[str, Field[Any]] | None = None
) -> str:
    rows = ["| option | default | unit | effect |", "|---|---|---|---|"]
    for option in options:
        text = (texts or {}).get(option.name) or _first_sentence(option.metadata.get("help", ""))
        default = _default(option)
        if former and option.name in former and (trls := _default(former[option.name])) != default:
            default += f" (TRL: {trls})"
        rows.append(f"| `{option.name}` | {default} | {_unit(option)} | {_cell(text)} |")
    return "\n".join(rows) + "\n"


def _unit(option: Field[Any]) -> str:
    return UNITS.get(option.name) or ("seconds" if option.name.endswith("_s") else "")


def _default(option: Field[Any]) -> str:
    value = option.default_factory() if option.default_factory is not MISSING else option.default
    if value is None or value is MISSING:
        return "unset"
    return f"`{_cell(str(getattr(value, 'value', value)))}`"


def _first_sentence(text: str) -> str:
    """Of a help text of TRL or transformers, some of which are pages long."""
    found = re.match(r".*?[.!](?=\s+[A-Z`])", " ".join(str(text).split()))
    return found[0] if found else " ".join(str(text).split())


def _cell(text: str) -> str:
    return text.replace("%%", "%").replace("|", "\\|").replace("\n", "\\n")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
