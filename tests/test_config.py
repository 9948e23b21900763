"""`MuGRPOConfig`: the paper's defaults, what is converted, what is refused and why, and that no secret leaves it."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from mu_grpo_trl import MuGRPOConfig
from mu_grpo_trl.config import REFUSED
from mu_grpo_trl.options import as_declared, nearest

KEY = "sk-very-secret"
OTHER_VALUES: dict[str, Any] = {
    "generation_batch_size": 64,
    "importance_sampling_level": "sequence",
    "include_num_input_tokens_seen": "all",
    "liger_kernel_config": {"rope": True},
    "loss_type": "dapo",
    "min_p": 0.1,
    "multi_objective_aggregation": "normalize_then_sum",
    "pad_to_multiple_of": 8,
    "top_p": 0.9,
    "train_sampling_strategy": "group_by_length",
    "transformers_continuous_batching_config": {"max_batch_tokens": 8},
    "vllm_importance_sampling_mode": "token_mask",
    "vllm_structured_outputs_regex": "[0-9]+",
}


def make_config(folder: Path | str = "out", **options: Any) -> MuGRPOConfig:
    return MuGRPOConfig(**{"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none", **options})


def other_value(name: str) -> Any:
    """A value of the right type that is not the option's default."""
    default = next(f.default for f in fields(MuGRPOConfig) if f.name == name)
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    return not default if isinstance(default, bool) else 3 if default is None else default + 1


# Defaults


def test_defaults_are_the_papers():
    config = make_config()
    assert (config.objective, config.anchor, config.clip_range) == ("mu_grpo", "engine", (0.0, 5.0))
    assert (config.veto_scope, config.veto_threshold) == ("sequence", 1e-4)
    assert (config.prompts_per_update, config.stage_updates, config.num_generations) == (32, 1024, 8)
    assert (config.learning_rate, config.lr_scheduler_type, config.warmup_steps) == (1e-6, "constant", 0)
    assert (config.adam_beta1, config.adam_beta2, config.weight_decay) == (0.9, 0.999, 0.01)
    assert (config.beta, config.temperature, config.loss_type) == (0.0, 1.0, "grpo")
    assert "adamw" in config.optim


def test_the_options_of_the_design_have_their_names():
    names = [
        "objective", "anchor", "prompts_per_update", "stage_updates", "epsilon", "epsilon_high", "veto_scope",
        "veto_threshold", "m2po_threshold", "m2po_scope", "advantage_eps", "rollout_engine", "vllm_mode",
        "vllm_server_urls", "vllm_release", "vllm_python", "stage_dir", "keep_stages", "keep_policies", "offload",
        "max_tokens_per_microbatch", "reward_workers", "reward_timeout_s", "rollout_concurrency", "probe_tolerance",
    ]  # fmt: skip
    assert set(names) <= {f.name for f in fields(MuGRPOConfig)}


@pytest.mark.parametrize(
    ("options", "clip_range", "veto_scope"),
    [
        ({"objective": "mu_grpo"}, (0.0, 5.0), "sequence"),
        ({"objective": "grpo"}, (0.8, 1.2), "none"),
        ({"objective": "m2po"}, (0.8, 1.2), "none"),
        ({"objective": "grpo", "epsilon": 0.25}, (0.75, 1.25), "none"),
        ({"objective": "grpo", "epsilon_high": 0.28, "veto_scope": "suffix"}, (0.8, 1.28), "suffix"),
        ({"epsilon": 0.5, "epsilon_high": math.inf}, (0.5, math.inf), "sequence"),
    ],
)
def test_clip_and_veto_default_to_what_the_objective_uses(options, clip_range, veto_scope):
    config = make_config(**options)
    assert config.clip_range == pytest.approx(clip_range, abs=1e-15)
    assert config.veto_scope == veto_scope


def test_folders_and_addresses_follow_trls_options(tmp_path: Path):
    config = make_config(tmp_path)
    assert config.stages_path == tmp_path / "stages"
    apart = make_config(tmp_path, stage_dir="elsewhere")
    assert apart.stages_path == apart.meetings_path == Path("elsewhere")
    assert make_config(tmp_path, stage_dir="elsewhere", replicate_stages=True).meetings_path == tmp_path
    assert config.server_urls == ["http://127.0.0.1:8000"]
    server = {"vllm_mode": "server", "vllm_server_base_url": "http://a:1/"}
    assert make_config(**server).server_urls == ["http://a:1"]
    assert make_config(vllm_mode="server", vllm_server_urls="http://b:2/").server_urls == ["http://b:2"]


def test_the_shorter_of_two_context_limits_counts():
    assert make_config().context_limit is None
    assert make_config(max_context_length=4096, vllm_max_model_length=2048).context_limit == 2048


def test_half_precision_gets_more_tolerance_unless_one_is_set():
    config = make_config()
    assert config.probe_tolerance_for(torch.float32) == 0.002
    assert config.probe_tolerance_for(torch.bfloat16) == 0.05
    assert make_config(probe_tolerance=0.3).probe_tolerance_for(torch.bfloat16) == 0.3


# Copies and secrets


def test_a_config_can_be_built_again_from_its_own_values():
    config = make_config(generation_kwargs='{"stop": ["User:"]}', top_k=-1, scale_rewards=False, epsilon_high=math.inf)
    as_written = config.to_dict()
    for again in (
        dataclasses.replace(config),
        MuGRPOConfig(**as_written),
        MuGRPOConfig(**dataclasses.asdict(config)),
        pickle.loads(pickle.dumps(config)),
    ):
        assert again.to_dict() == as_written


def test_a_replaced_config_is_checked_as_well():
    with pytest.raises(ValueError, match=r"`stage_updates=0` must be at least 1"):
        dataclasses.replace(make_config(), stage_updates=0)


def test_the_key_of_the_servers_leaves_the_config_nowhere():
    config = make_config(vllm_api_key=KEY, hub_token="hf_secret")
    shown = [str(config), repr(config), config.to_json_string(), str(config.to_sanitized_dict())]
    assert not [text for text in shown if KEY in text or "hf_secret" in text]
    pickled = pickle.dumps(config)  # every checkpoint holds the config, and may go to the Hub
    assert KEY.encode() not in pickled and b"hf_secret" not in pickled
    assert config.vllm_api_key == dataclasses.replace(config).vllm_api_key == KEY


def test_what_stands_for_the_key_is_not_taken_for_one():
    assert MuGRPOConfig(**make_config(vllm_api_key=KEY).to_dict()).vllm_api_key is None
    assert copy.copy(make_config(vllm_api_key=KEY)).vllm_api_key is None


@pytest.mark.parametrize(
    "options",
    [
        {"vllm_server_args": ["--api-key", KEY]},
        {"vllm_mode": "server", "vllm_server_urls": [f"http://user:{KEY}@a:1"]},
    ],
)
def test_a_refused_secret_is_not_repeated(options):
    with pytest.raises(ValueError) as error:
        make_config(**options)
    assert KEY not in str(error.value)


def test_code_of_the_hub_is_not_run_unless_allowed():
    assert make_config().trust_remote_code is False


# Types


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        ("1e-6", float, 1e-6),
        (".inf", float | None, math.inf),
        (3, float, 3),
        ("8", int, 8),
        (8.0, int | None, 8),
        ("1e3", int, 1000),
        ("off", bool, False),
        (1, bool | None, True),
        (7, str, "7"),
        ("one", list[str] | None, ["one"]),
        (["--max-num-seqs", 8], list[str], ["--max-num-seqs", "8"]),
        (["1e-1", 2], list[float] | None, [0.1, 2]),
        (None, int | None, None),
        ({"a": 1}, dict | str | None, {"a": 1}),
        (Path("x"), str, Path("x")),
    ],
)
def test_values_become_their_declared_type(value, annotation, expected):
    converted = as_declared("option", value, annotation)
    assert (converted, type(converted)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        ("fast", float, "`option='fast'` is not a number"),
        (float("nan"), float, "`option=nan` is not a number"),
        (True, float, "`option=True` is not a number"),
        (1.5, int | None, "`option=1.5` is not a whole number"),
        (math.inf, int, "`option=inf` is not a whole number"),
        (True, int, "`option=True` is not a whole number"),
        ("maybe", bool, "`option='maybe'` is not true or false"),
        (2, bool, "`option=2` is not true or false"),
        ([1], int, r"`option=\[1\]` is not a whole number"),
        ({"a": 1}, str | None, "`option={'a': 1}` is not a text"),
        (False, str, "is not a text. YAML reads unquoted yes, no, on and off as truth values"),
        (False, str | list[str] | None, "is not a text. YAML"),
        (["a", True], list[str], r"`option\[1\]=True` is not a text"),
    ],
)
def test_values_of_another_type_are_refused(value, annotation, message):
    with pytest.raises(ValueError, match=message):
        as_declared("option", value, annotation)


def test_the_nearest_name_is_offered_only_if_one_is_near():
    assert nearest("stage_update", ["stage_updates", "seed"]) == " Did you mean 'stage_updates'?"
    assert nearest("xyz", ["stage_updates", "seed"]) == ""


def test_numbers_given_as_strings_are_numbers():
    config = make_config(learning_rate="3e-6", stage_updates="16", offload="false", vllm_server_args=["--swap", 4])
    assert (config.learning_rate, config.stage_updates, config.offload) == (3e-6, 16, False)
    assert config.vllm_server_args == ["--swap", "4"]


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_engine": "transformers", "stage_dir": "/local"}, "contradicts `rollout_engine='transformers'`"),
        ({}, "without `stage_dir`"),
    ],
)
def test_stages_are_replicated_only_from_one_writer_to_folders_of_their_own(options, message):
    with pytest.raises(ValueError, match=f"`replicate_stages=True` {message}"):
        make_config(replicate_stages=True, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honored_is_refused_by_name_with_the_reason(name: str):
    value = other_value(name)
    with pytest.raises(ValueError) as error:
        make_config(**{name: value})
    assert f"`{name}={value!r}`" in str(error.value)
    assert REFUSED[name] in str(error.value)


def test_every_refused_option_is_one_of_the_installed_trl():
    assert set(REFUSED) <= {f.name for f in fields(MuGRPOConfig)}


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"top_k": -1}, "top_k", 0),
        ({"min_p": 0.0}, "min_p", None),
        ({"scale_rewards": True}, "scale_rewards", "group"),
        ({"scale_rewards": "none"}, "scale_rewards", "none"),
        ({"router_aux_loss_coef": 0.0}, "router_aux_loss_coef", 0.0),
    ],
)
def test_values_that_ask_for_nothing_new_are_accepted(options, name, value):
    assert getattr(make_config(**options), name) == value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "mugrpo"}, "`objective='mugrpo'` is not one of .* Did you mean 'mu_grpo'"),
        ({"veto_scope": "sufix"}, "`veto_scope='sufix'` is not one of .* Did you mean 'suffix'"),
        ({"anchor": "server"}, "`anchor='server'` is not one of 'engine', 'trainer'"),
        ({"m2po_scope": "batch"}, "`m2po_scope='batch'` is not one of"),
        ({"rollout_engine": "vlm"}, "`rollout_engine='vlm'` is not one of .* Did you mean 'vllm'"),
        ({"vllm_mode": "colocate"}, "TRL's 'colocate' is called 'managed' here"),
        ({"vllm_release": "free"}, "`vllm_release='free'` is not one of"),
        ({"overlong_prompts": "cut"}, "`overlong_prompts='cut'` is not one of 'error', 'drop'"),
        ({"reward_error": "zero"}, "`reward_error='zero'` is not one of"),
        ({"no_signal": "ignore"}, "`no_signal='ignore'` is not one of"),
        ({"prompts_per_update": 0}, "`prompts_per_update=0` must be at least 1"),
        ({"stage_updates": -4}, "`stage_updates=-4` must be at least 1"),
        ({"max_tokens_per_microbatch": 0}, "`max_tokens_per_microbatch=0` must be at least 1"),
        ({"per_device_train_batch_size": 0}, "`per_device_train_batch_size=0` must be at least 1"),
        ({"max_completion_length": None}, "`max_completion_length=None` must be at least 1"),
        ({"num_generations": 1}, "`num_generations=1` must be at least 2"),
        ({"keep_stages": -1}, "`keep_stages=-1` must be 0 or more"),
        ({"reward_workers": -1}, "`reward_workers=-1` must be 0 or more"),
        ({"vllm_num_servers": 0}, "`vllm_num_servers=0` must be at least 1"),
        ({"max_context_length": 1}, "A context of 1 tokens leaves no room"),
        ({"reward_timeout_s": 0}, "`reward_timeout_s=0` must be a positive number"),
        ({"rollout_timeout_s": math.inf}, "`rollout_timeout_s=inf` must be a positive number"),
        ({"m2po_threshold": -0.1}, "`m2po_threshold=-0.1` must be a positive number"),
        ({"learning_rate": -1e-6}, "`learning_rate=-1e-06` must be 0 or more"),
        ({"beta": -0.1}, "`beta=-0.1` must be 0 or more"),
        ({"seed": -1}, "`seed=-1` must be 0 or more"),
        ({"adam_beta2": 1.0}, "`adam_beta2=1.0` must be at least 0 and below 1"),
        ({"temperature": 0.0}, "`temperature=0.0` must be positive"),
        ({"veto_threshold": 1.0}, "`veto_threshold=1.0` must be between 0 and 1"),
        ({"epsilon": 1.5}, "`epsilon=1.5` must be between 0 and 1"),
        ({"epsilon_high": -1.0}, "`epsilon_high=-1.0` must be 0 or more"),
        ({"probe_tolerance": 0.0}, "`probe_tolerance=0.0` must be positive"),
        ({"vllm_gpu_memory_utilization": 92}, "`vllm_gpu_memory_utilization=92` must be a share"),
        ({"objective": "m2po", "veto_scope": "sequence"}, "contradicts `objective='m2po'`"),
        ({"sync_ref_model": True}, "`sync_ref_model=True` needs a reference model"),
        ({"scale_rewards": "batch"}, "`scale_rewards='batch'` cannot be honored"),
        ({"generation_kwargs": {"top_p": 0.9}}, "`generation_kwargs` key 'top_p' cannot be honored"),
        ({"generation_kwargs": "stop"}, "`generation_kwargs='stop'` is not a mapping"),
        (
            {"rollout_engine": "transformers", "generation_kwargs": {"stop": ["x"]}},
            "needs `rollout_engine='vllm'`",
        ),
        ({"rollout_engine": "transformers", "use_vllm": True}, "`use_vllm=True` contradicts"),
        ({"vllm_server_urls": ["http://a:1"]}, "`vllm_server_urls=.* contradicts `vllm_mode='managed'`"),
        ({"vllm_server_base_url": "http://a:1"}, "`vllm_server_base_url=.* Set `vllm_mode: server`"),
        ({"vllm_mode": "server", "vllm_num_servers": 2}, "`vllm_num_servers=2` contradicts `vllm_mode='server'`"),
        ({"vllm_mode": "server", "vllm_server_urls": ["localhost:8000"]}, "'localhost:8000' .* is not an http"),
        ({"vllm_server_args": ["--host", "0.0.0.0"]}, "`--host` in `vllm_server_args` .* 127.0.0.1 alone"),
        ({"vllm_server_args": ["--api-key=sk-1"]}, "`--api-key` in `vllm_server_args` .* VLLM_API_KEY"),
        (
            {"vllm_mode": "server", "vllm_server_urls": ["http://me:sk-1@a:1"]},
            "address of 'a' in `vllm_server_urls` holds credentials",
        ),
        ({"nonfinite": "ignore"}, "`nonfinite='ignore'` is not one of 'stop', 'skip'"),
        ({"collapse_watch": "on"}, "`collapse_watch='on'` is not one of"),
        ({"collapse_window": 0}, "`collapse_window=0` must be at least 1"),
        ({"max_nonfinite_skips": 0}, "`max_nonfinite_skips=0` must be at least 1"),
        ({"collapse_veto_share": -0.1}, "`collapse_veto_share=-0.1` must be 0 or more"),
        ({"vllm_enable_sleep_mode": True, "vllm_release": "stop"}, "contradicts `vllm_release='stop'`"),
        ({"accelerator_config": {"split_batches": True}}, "`split_batches=True` in `accelerator_config`"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}}, "gradient_accumulation_kwargs"),
        ({"save_strategy": False}, "`save_strategy=False` is not a text. YAML reads unquoted yes, no"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_values_out_of_range_and_contradictions_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_config(**options)


def test_b32_an_update_with_fewer_responses_than_ranks_is_refused_with_the_least_that_works(monkeypatch):
    monkeypatch.setattr(MuGRPOConfig, "world_size", property(lambda self: 9))
    with pytest.raises(ValueError, match=r"gives 8 responses an update, fewer than the 9 ranks .* at least 3"):
        make_config(prompts_per_update=2, num_generations=4)
    assert make_config(prompts_per_update=3, num_generations=4).prompts_per_update == 3
