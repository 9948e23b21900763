"""`mu-grpo plan`: what it refuses and how it mends that, what it counts, and that it loads nothing."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen2Config

from mu_grpo_trl.cli import main
from mu_grpo_trl.planning import disk, memory
from mu_grpo_trl.planning.architecture import KNOWN_MODELS, Architecture, find_config
from mu_grpo_trl.planning.launch import Launch, read_launch
from mu_grpo_trl.planning.memory import Workload
from mu_grpo_trl.stage.schema import GroupRollout, Manifest, ResponseRow
from mu_grpo_trl.stage.writer import StageWriter

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(
    path
    for path in (ROOT / "recipes").rglob("*.yaml")
    if path.relative_to(ROOT / "recipes").parts[0] not in ("accelerate", "bases", "eval", "lab")
)
MISSING = object()


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    """Weights that are opened, and a device that is asked for, fail the test."""

    def fail(*_, **__):
        pytest.fail("A model was loaded, or a GPU initialized.")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", fail)
    monkeypatch.setattr(torch, "load", fail)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr("safetensors.safe_open", fail)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder with a config.json and nothing else."""
    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(
        vocab_size=1000, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128,
    ).save_pretrained(folder)  # fmt: skip
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    return folder


@pytest.fixture
def write(tmp_path: Path, model: Path):
    """Writes a recipe that nothing is wrong with, but for the options given; `MISSING` leaves one out."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"problem": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(12)))

    def write(**options: Any) -> Path:
        values = {
            "model_name_or_path": str(model),
            "dataset_name": str(data),
            "conversational": False,
            "output_dir": str(tmp_path / "out"),
            "prompts_per_update": 4,
            "num_generations": 4,
            "stage_updates": 4,
            "max_steps": 8,
            "max_completion_length": 32,
            "report_to": "none",
            **options,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({name: value for name, value in values.items() if value is not MISSING}))
        return path

    return write


def plan(capsys, recipe: Path, *arguments: str) -> dict[str, Any]:
    """The plan as JSON; the exit code under `"exit_code"`."""
    code = 0
    try:
        main(["plan", "--config", str(recipe), "--json", *arguments])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return json.loads(capsys.readouterr().out) | {"exit_code": code}


# What is wrong


MISCONFIGURED: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"stage_update": 8}, [], ["'stage_update'", "Did you mean 'stage_updates'"]),
    ({}, ["--stage_updatez", "8"], ["'--stage_updatez'", "Did you mean '--stage_updates'"]),
    ({"stage_updates": "many"}, [], ["'many'", "is not a whole number"]),
    ({}, ["--max_steps", "few"], ["'few'", "--max_steps"]),
    ({"save_strategy": False}, [], ["`save_strategy=False`", 'put the word in quotes, such as "no"']),
    ({"objective": "mugrpo"}, [], ["'mugrpo'", "Did you mean 'mu_grpo'"]),
    ({"num_iterations": 4}, [], ["`num_iterations=4`", "is `stage_updates` here"]),
    ({"top_p": 0.9}, [], ["`top_p=0.9`", "leave it at its default"]),
    ({"gradient_accumulation_steps": 8}, [], ["`gradient_accumulation_steps=8`", "set `prompts_per_update`"]),
    ({"loss_type": "dapo"}, [], ["`loss_type='dapo'`", "which is 'grpo'"]),
    ({"num_generations": 1}, [], ["`num_generations=1`", "must be at least 2"]),
    ({"prompts_per_update": 0}, [], ["`prompts_per_update=0`", "must be at least 1"]),
    ({"veto_threshold": 2.0}, [], ["`veto_threshold=2.0`", "must be between 0 and 1"]),
    ({"objective": "m2po", "veto_scope": "suffix"}, [], ["`veto_scope='suffix'`", "Leave it out"]),
    ({"vllm_mode": "colocate"}, [], ["'colocate'", "is called 'managed' here"]),
    ({"vllm_server_urls": ["http://a:1"]}, [], ["['http://a:1']", "Set `vllm_mode: server`"]),
    ({"vllm_server_args": ["--host", "0.0.0.0"]}, [], ["`--host`", "use `vllm_mode: server`"]),
    ({"vllm_mode": "server", "vllm_server_urls": ["a:1"]}, [], ["'a:1'", "such as http://localhost:8000"]),
    (
        {"rollout_engine": "transformers", "generation_kwargs": {"stop": ["x"]}},
        [],
        ["{'stop': ['x']}", "needs `rollout_engine='vllm'`"],
    ),
    ({"share_prompts": True, "padding_free": True}, [], ["`share_prompts=True`", "Leave one out"]),
    ({"share_prompts": True, "attn_implementation": "eager"}, [], ["'eager'", "Leave one out"]),
    ({"model_name_or_path": MISSING}, [], ["`model_name_or_path` is not set", "Give a Hub id or a local folder"]),
    ({"model_name_or_path": "./nowhere"}, [], ["'./nowhere'", "Name one"]),
    ({"max_context_length": 4096}, [], ["4096", "Lower `max_context_length`", "at most 128"]),
    ({"dataset_name": MISSING}, [], ["`dataset_name` is not set", "or `lab:arithmetic`"]),
    ({"dataset_name": "nowhere.jsonl"}, [], ["'nowhere.jsonl'", "Name one"]),
    ({"dataset_name": "lab:arithmetics"}, [], ["'arithmetics'", "Choose one of arithmetic"]),
    ({"answer_column": "anser"}, [], ["'anser'", "'answer'"]),
    ({"reward_funcs": ["mth"]}, [], ["'mth'", "Did you mean 'math'"]),
    ({"reward_funcs": ["no_such_module:score"]}, [], ["'no_such_module:score'", "add that folder to PYTHONPATH"]),
    ({"reward_funcs": ["math", "json:dump"]}, [], ["'obj'", "Rename the argument or the column"]),
    ({"reward_weights": [1.0, 2.0]}, [], ["[1.0, 2.0]", "Give one weight for each"]),
    ({"eval_strategy": "steps"}, [], ["'steps'", "set it to 'no'"]),
    ({"prompts_per_update": 13}, [], ["`prompts_per_update=13`", "Lower `prompts_per_update`"]),
    ({"prompts_per_update": 1}, ["--num-processes", "8"], ["`prompts_per_update=1`", "to at least 2"]),
    ({"vllm_tensor_parallel_size": 4}, [], ["`vllm_tensor_parallel_size=4`", "Use one of 1, 2"]),
    ({"vllm_num_servers": 8}, [], ["8 server(s)", "Lower `vllm_num_servers`"]),
    ({"use_peft": True, "use_dora": True}, [], ["`use_dora=True`", "Use plain LoRA"]),
    ({"resume": "latest"}, [], ["'latest'", "use 'auto'"]),
    ({"max_steps": -1, "num_train_epochs": 0}, [], ["num_train_epochs 0", "set one of them to a positive number"]),
    ({"train_on_stage": "somewhere", "anchor": "trainer"}, [], ["'somewhere'", "Use `anchor: engine`"]),
    (
        {"model_name_or_path": "Qwen/Qwen3-8B-Base", "dtype": "float32", "bf16": True},
        ["--num-processes", "4", "--sharding", "ddp"],
        ["GiB a device", "Shard it over 4 devices (recipes/accelerate/zero3.yaml)"],
    ),
    (
        {"model_name_or_path": "Qwen/Qwen3-8B-Base", "dtype": "float32", "bf16": True, "offload": False},
        [],
        ["`offload=False`", "Set `offload: true`"],
    ),
    (
        {"model_name_or_path": "Qwen/Qwen3-8B-Base", "bf16": True},
        ["--device", "L4", "--num-processes", "16", "--sharding", "zero3"],
        ["`vllm_tensor_parallel_size=1`", "Raise it"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "arguments", "expected"), MISCONFIGURED, ids=lambda value: str(value)[:40])
def test_a_misconfiguration_is_refused_with_its_value_and_its_mend(capsys, write, options, arguments, expected):
    found = plan(capsys, write(**options), *arguments)
    assert found["exit_code"] == 2
    fitting = [error for error in found["errors"] if all(part in error for part in expected)]
    assert len(fitting) == 1, found["errors"]


def test_a_recipe_with_nothing_wrong_is_accepted(capsys, write):
    found = plan(capsys, write())
    assert (found["errors"], found["exit_code"]) == ([], 0)


def test_everything_that_is_wrong_is_told_at_once_and_the_rest_is_planned(capsys, write):
    recipe = write(top_p=0.5, stage_update=3, veto_scope="all", reward_funcs=["mth"], eval_strategy="steps")
    found = plan(capsys, recipe, "--learning_rate", "-1", "--num_generations", "1")
    values = ["top_p=0.5", "'stage_update'", "veto_scope='all'", "'mth'", "'steps'"]
    values += ["learning_rate=-1", "num_generations=1"]
    assert [sum(value in error for error in found["errors"]) for value in values] == [1] * len(values)
    assert len(found["errors"]) == len(values)
    assert found["schedule"]["updates"] == 8


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3, "zero3_save_16bit_model": False}},
            "`zero3_save_16bit_model: False` .* Set it to true",
        ),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}, "`fsdp_version: 1` .* Set it to 2"),
        (
            {
                "distributed_type": "FSDP",
                "fsdp_config": {"fsdp_version": 2, "fsdp_state_dict_type": "SHARDED_STATE_DICT"},
            },
            "SHARDED_STATE_DICT` .* Set it to FULL_STATE_DICT",
        ),
        ({"distributed_type": "MULTI_GPU", "use_cpu": True}, "`use_cpu: True` .* contradicts `use_cpu: False`"),
        (
            {"distributed_type": "MULTI_GPU", "num_processes": 3, "num_machines": 2},
            "`num_processes: 3` .*`num_machines: 2`.* Set it",
        ),
        ({"distributed_type": "MULTI_GPU", "mixed_precision": "fp16"}, "`mixed_precision: fp16` .* Make them agree"),
    ],
)
def test_a_launcher_configuration_that_damages_a_run_is_refused(capsys, write, tmp_path, settings, expected):
    file = tmp_path / "accelerate.yaml"
    file.write_text(yaml.safe_dump({"num_processes": 2, **settings}))
    found = plan(capsys, write(bf16=True), "--accelerate-config", str(file))
    assert found["exit_code"] == 2
    assert any(re.search(expected, error) for error in found["errors"]), found["errors"]


def test_arguments_of_plan_itself_end_it_with_exit_code_2(capsys, write, tmp_path):
    (tmp_path / "other.yaml").write_text("a: 1")
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--config", str(write()), "--accelerate-config", str(tmp_path / "other.yaml")])
    assert "no `distributed_type`" in capsys.readouterr().err


# Every recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_can_be_planned_and_has_nothing_wrong(capsys, tmp_path, model, path):
    arguments = ["--output_dir", str(tmp_path), "--max_rows", "1500"]
    if path.stem == "quickstart":
        arguments += ["--model_name_or_path", str(model)]
    found = plan(capsys, path, *arguments)
    assert (found["errors"], found["exit_code"]) == ([], 0)
    schedule, tokens = found["schedule"], found["tokens"]
    recipe = yaml.safe_load(path.read_text())
    if "max_steps" in recipe:
        assert schedule["updates"] == recipe["max_steps"]
    assert schedule["stages"] == math.ceil(schedule["updates"] / schedule["updates_per_stage"])
    before_last = (schedule["stages"] - 1) * schedule["updates_per_stage"]
    assert schedule["updates_in_last_stage"] == schedule["updates"] - before_last
    assert schedule["responses"] == schedule["updates"] * schedule["responses_per_update"]
    assert schedule["responses_per_update"] % found["launch"]["processes"] == 0
    assert 0 < tokens["generated"] <= tokens["generated_at_most"]
    assert found["disk"]["stages"] > 0
    if "qwen" in path.stem or path.parent.name in ("ablations", "fixed-budget"):
        assert found["disk"]["checkpoints"] <= 2 * found["disk"]["one checkpoint"]
        assert found["hours"]["total"] > 0


# Counting


def test_parameters_are_those_of_the_models(model):
    expected = {  # as their cards say
        "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
        "Qwen/Qwen3-1.7B-Base": 1_720_574_976,
        "Qwen/Qwen3-8B-Base": 8_190_735_360,
        "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    }
    for name, count in expected.items():
        config = find_config(name, None)
        assert config is not None
        a = Architecture.of(config)
        assert a.num_parameters == count
        assert a.layers * a.layer_parameters + a.outer_parameters == count
    assert set(expected) == set(KNOWN_MODELS)


def test_a_configuration_comes_from_a_file_before_the_model(model, tmp_path):
    config = find_config("owner/unknown", model / "config.json")
    assert config is not None and config.vocab_size == 1000
    assert find_config("owner/unknown", None) is None
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is no model's configuration .*--model-config"):
        find_config(str(tmp_path), None)


ONE = Workload(weight_bytes=4, compute_bytes=4, microbatch_tokens=100, checkpointing=False, trainable=1000)


def sizes(**changes: Any) -> Architecture:
    values = {
        "num_parameters": 1000, "layer_parameters": 300, "outer_parameters": 400, "head_parameters": 200,
        "tied": False, "layers": 2, "hidden": 10, "intermediate": 30, "vocabulary": 20, "query": 12, "key_value": 4,
        "dtype_bytes": 4,
    }  # fmt: skip
    return Architecture(**(values | changes))


@pytest.mark.parametrize(
    ("sharding", "state", "gradients"),
    [
        ("none", {"parameters": 4000, "optimizer": 8000}, 4000),
        ("ddp", {"parameters": 4000, "optimizer": 8000}, 8000),
        ("fsdp2", {"parameters": 1000, "optimizer": 2000}, 1000 + 4000),
        ("zero3", {"parameters": 1000, "optimizer": 2000}, 1000 + 2000),
    ],
)
def test_training_state_is_shared_as_the_backend_shares_it(sharding, state, gradients):
    launch = Launch(4, 1, sharding) if sharding != "none" else Launch()
    assert memory.training_state(sizes(), ONE, launch) == state
    assert memory.gradients(ONE, launch) == gradients


def test_deepspeed_in_half_precision_keeps_masters_and_two_moments():
    half = Workload(weight_bytes=4, compute_bytes=2, microbatch_tokens=100, checkpointing=True, trainable=1000)
    assert memory.training_state(sizes(), half, Launch(4, 1, "zero3")) == {"parameters": 500, "optimizer": 3000}


def test_activations_of_a_layer_by_hand():
    # float32: 4 · (residual 2·10, normalized 2·10, read 2·10, attention 3·12 + 2·4, MLP 4·30)
    assert memory.layer_activations(sizes(), ONE) == 4 * (60 + 44 + 120)
    assert memory.activations_per_token(sizes(), ONE) == 2 * 4 * 224
    checkpointed = Workload(4, 4, 100, True, 1000)
    assert memory.activations_per_token(sizes(), checkpointed) == 2 * 10 * 4 + 4 * 224


def test_activations_are_what_autograd_keeps():
    """The bytes of all tensors saved for the backward pass of a real model's layers, weights aside."""
    config = AutoConfig.for_model(
        "llama", vocab_size=50, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="sdpa",
    )  # fmt: skip
    net = AutoModelForCausalLM.from_config(config)
    a, tokens = Architecture.of(config), 200
    weights = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net.model(torch.randint(0, 50, (2, 100)), use_cache=False).last_hidden_state.sum()
    work = Workload(4, 4, tokens, False, a.num_parameters)
    assert sum(saved.values()) == pytest.approx(tokens * memory.activations_per_token(a, work), rel=0.05)


def test_a_stage_takes_what_the_writer_writes(tmp_path):
    groups, size, prompt, response, per_shard = 64, 8, 40, 300, 16
    digest = "0" * 32
    manifest = Manifest(
        stage=0, seed=0, num_updates=16, num_generations=size, prompts_per_update=4,
        prompt_indices=tuple(range(groups)), dataset_hash=digest, tokenizer_hash=digest, sampling={}, engine="vllm",
        engine_version="0", policy_hash=digest, policy_version=digest, published_step=0, run_id=digest,
        reward_names=("math",),
    )  # fmt: skip
    row = ResponseRow(
        completion_ids=[1] * response, behavior_logps=[-1.0] * response, rewards={"math": 1.0}, reward=1.0,
        advantage=0.5, finish_reason="stop",
    )  # fmt: skip
    writer = StageWriter.resume(tmp_path, manifest)
    for start in range(0, groups, per_shard):
        shard = range(start, start + per_shard)
        writer.append([GroupRollout(group, group, [1] * prompt, digest, [row] * size) for group in shard])
    writer.complete()
    writer.close()
    written = sum(path.stat().st_size for path in (tmp_path / "groups").iterdir())
    assert disk.stage_rows(groups * size, prompt, response, 1, per_shard * size) == pytest.approx(written, rel=0.02)


def test_a_policy_and_a_checkpoint_take_their_weights_and_moments():
    tied = sizes(tied=True)
    assert disk.policy(tied, 4, 50, untied=False) == 4050
    assert disk.policy(tied, 4, 50, untied=True) == 4050 + 800
    assert disk.policy(sizes(), 4, 50, untied=True) == 4050
    assert disk.checkpoint(sizes(), 4, 1000, 50, with_optimizer=True, masters=False) == 4000 + 8000 + 50
    assert disk.checkpoint(sizes(), 2, 1000, 50, with_optimizer=True, masters=True) == 2000 + 12000 + 50
    assert disk.checkpoint(sizes(), 4, 1000, 50, with_optimizer=False, masters=False) == 4050


@pytest.mark.parametrize(
    ("options", "checkpoints", "policies"),
    [
        ({"save_strategy": "no"}, 0, 1),
        ({"save_steps": 3}, 6, 1),  # 3, 4, 6, 8, 9, and the end
        ({"save_steps": 3, "save_at_stage_end": False}, 4, 1),  # 3, 6, 9, and the end
        ({"save_steps": 3, "save_total_limit": 2, "keep_policies": 2}, 2, 2),
    ],
)
def test_checkpoints_and_policies_that_stay_are_counted(capsys, write, options, checkpoints, policies):
    found = plan(capsys, write(**options, max_steps=10))["disk"]
    assert found["checkpoints"] == checkpoints * found["one checkpoint"]
    assert found["policies"] == policies * found["final model"]
    held_back = found["one checkpoint"] if "save_total_limit" in options else 0
    assert found["at most"] - found["total"] == found["stages at most"] - found["stages"] + held_back


def test_a_stored_stage_is_planned_from_its_manifest(capsys, write, tmp_path):
    (tmp_path / "stage").mkdir()
    manifest = Manifest(
        stage=0, seed=0, num_updates=5, num_generations=4, prompts_per_update=4, prompt_indices=tuple(range(20)),
        dataset_hash="", tokenizer_hash="", sampling={}, engine="vllm", engine_version="0", policy_hash="",
        policy_version="", published_step=0, run_id="", reward_names=("math",), status="complete",
    )  # fmt: skip
    (tmp_path / "stage" / "manifest.json").write_text(manifest.to_json())
    found = plan(capsys, write(train_on_stage=str(tmp_path / "stage"), prompts_per_update=6, max_steps=-1))
    assert (found["errors"], found["schedule"]["updates"], found["schedule"]["stages"]) == ([], 3, 1)
    assert (found["tokens"]["generated"], found["rollout"], found["hours"]["rollout"]) == (0, {}, 0)


def test_tokens_are_measured_where_data_and_tokenizer_are_here(capsys, write, tmp_path):
    folder = tmp_path / "policy"
    make_tokenizer().save_pretrained(folder)
    Qwen2Config(
        vocab_size=60, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128,
    ).save_pretrained(folder)  # fmt: skip
    found = plan(capsys, write(model_name_or_path=str(folder), prompt_template="none"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lengths = [len(tokenizer(f"{n} + 1?").input_ids) for n in range(12)]
    assert found["assumptions"]["prompt_tokens"] == pytest.approx(sum(lengths) / 12)
    assert found["assumptions"]["response_tokens"] == 16
    assert found["tokens"]["generated"] == 8 * 4 * 4 * 16


def test_the_launch_is_read_from_accelerates_configuration():
    folder = ROOT / "recipes" / "accelerate"
    expected = {
        "cpu": (1, 1, "none"), "cpu_ddp": (2, 1, "ddp"), "cpu_zero3": (2, 1, "zero3"), "single_gpu": (1, 1, "none"),
        "ddp": (4, 1, "ddp"), "fsdp2": (4, 1, "fsdp2"), "zero3": (4, 1, "zero3"), "zero3_2nodes": (8, 2, "zero3"),
    }  # fmt: skip
    for path in sorted(folder.glob("*.yaml")):
        launch = read_launch(path, None, None)
        assert (launch.num_processes, launch.num_nodes, launch.sharding) == expected.pop(path.stem)
        assert launch.problems(uses_cpu=path.stem.startswith("cpu")) == []
    assert not expected


def test_the_text_has_every_part_and_ends_with_what_is_wrong(capsys, write):
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(write(top_p=0.5))])
    lines = capsys.readouterr().out.splitlines()
    for title in ("Schedule", "Tokens", "Disk", "A device in an update", "Hours", "Host memory of a node"):
        assert title in lines
    assert lines[-2].startswith("wrong: `top_p=0.5` cannot be honored")
    assert lines[-1] == "1 thing(s) to mend."
