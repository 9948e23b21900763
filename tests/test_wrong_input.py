"""Wrong input stops with what is wrong and how to mend it: before a model is loaded, or before the first stage."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
import trl.trainer.grpo_trainer as grpo_trainer
from aiohttp import web
from datasets import Dataset, DatasetDict, IterableDataset
from helpers import PROMPTS, REPOSITORY, config_options, free_port, save_tiny_policy
from peft import IA3Config, LoraConfig
from stub_vllm import StubVLLM, write_policy
from trl import GRPOConfig
from workers.train_worker import digit_share

from mu_grpo_trl import MathReward, MuGRPOConfig, MuGRPOTrainer
from mu_grpo_trl.cli import COMMANDS
from mu_grpo_trl.cli import main as cli
from mu_grpo_trl.rollout.engine import EngineError
from mu_grpo_trl.stage.schema import StageError
from mu_grpo_trl.train import adapter, check_recipe, make_trainer, parse, resume_point

SERVER_CONTEXT = 64


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def no_model(monkeypatch) -> None:
    """Fails the test as soon as weights are loaded."""

    def load(*args: Any, **kwargs: Any) -> None:
        pytest.fail("A model was loaded before the input was found wrong.")

    monkeypatch.setattr(grpo_trainer, "create_model_from_path", load)
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", load)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)


def make(
    folder: Path,
    policy: Path | str,
    dataset: Any = None,
    reward_funcs: Any = digit_share,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> MuGRPOTrainer:
    """A trainer on 64 prompts, in process, unless told otherwise."""
    return MuGRPOTrainer(
        model=str(policy),
        reward_funcs=reward_funcs,
        args=MuGRPOConfig(**config_options(folder, **options)),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}) if dataset is None else dataset,
        **(arguments or {}),
    )


def test_the_same_input_without_a_mistake_reaches_the_model(tmp_path, policy, no_model):
    with pytest.raises(pytest.fail.Exception, match="A model was loaded"):
        make(tmp_path, policy)


# Recipes


def write_recipe(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def recipe_for(folder: Path, policy: Path | str, **options: Any) -> Path:
    """A recipe that would train in process."""
    values = {
        **config_options(folder / "out"),
        "model_name_or_path": str(policy),
        "dataset_name": "lab:arithmetic",
        "conversational": False,
        "reward_funcs": ["mu_grpo_trl.lab.rewards:arithmetic_reward"],
        "max_rows": 16,
        **options,
    }
    return write_recipe(folder, json.dumps(values))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage_update: 8", "recipe.yaml: unknown key 'stage_update'. Did you mean 'stage_updates'"),
        ("veto_scop: none", "unknown key 'veto_scop'. Did you mean 'veto_scope'"),
        ("datasets: x", "unknown key 'datasets'"),
        ("seed: 1\nseed: 2", "given more than once"),
        ("- seed", "holds a list, not `key: value` lines"),
        ("", "holds a NoneType, not `key: value` lines"),
        ("seed: [1", "is not YAML"),
        ("stage_updates: many", "`stage_updates='many'` is not a whole number"),
        ("stage_updates: 1.5", "`stage_updates=1.5` is not a whole number"),
        ("stage_updates: [8]", r"`stage_updates=\[8\]` is not a whole number"),
        ("learning_rate: 1e-6x", "`learning_rate='1e-6x'` is not a number"),
        ("learning_rate: true", "`learning_rate=True` is not a number"),
        ("offload: maybe", "`offload='maybe'` is not true or false"),
        ("save_strategy: no", "`save_strategy=False` is not a text. YAML reads unquoted yes, no, on and off"),
        ("lora_r: big", "`lora_r='big'` is not a whole number"),
        ("reward_funcs: {math: 1}", r"`reward_funcs\[0\]={'math': 1}` is not a text"),
        ("env: 3", "`env=3` is not a mapping"),
    ],
)
def test_a_recipe_with_an_unknown_key_or_a_mistyped_value_is_refused(tmp_path, text, message):
    path = write_recipe(tmp_path, text)
    for _ in range(2):  # transformers' parser changes the classes it reads
        with pytest.raises(ValueError, match=message):
            parse(["--config", str(path)])


def test_values_that_yaml_takes_for_text_are_numbers_and_one_name_is_a_list(tmp_path):
    path = write_recipe(
        tmp_path,
        "use_cpu: true\nbf16: false\noutput_dir: out\nlearning_rate: 1e-6\nepsilon_high: .inf\nreward_funcs: math\n"
        "stage_updates: '16'\nreward_weights: [1e-1]\nenv: {MU_GRPO_TEST_VARIABLE: 3}\n",
    )
    script, config, model = parse(["--config", str(path), "--prompts_per_update=4", "--epsilon", "0.5"])
    assert (config.learning_rate, config.clip_range) == (1e-6, (0.5, float("inf")))
    assert (config.stage_updates, config.prompts_per_update, config.reward_weights) == (16, 4, [0.1])
    assert (script.reward_funcs, model.lora_dropout) == (["math"], 0.0)
    assert os.environ.pop("MU_GRPO_TEST_VARIABLE") == "3"


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ("q_proj", {"q_proj"}),
        ("[q_proj, v_proj]", {"q_proj", "v_proj"}),
        ("all-linear", "all-linear"),
        ("'.*o_proj'", ""),
    ],
)
def test_target_modules_of_a_recipe_are_names_and_patterns(tmp_path, targets, expected):
    text = f"use_cpu: true\nbf16: false\noutput_dir: out\nuse_peft: true\nlora_target_modules: {targets}\n"
    _, _, model = parse(["--config", str(write_recipe(tmp_path, text))])
    assert adapter(model).target_modules == (expected or ".*o_proj")
    assert adapter(dataclasses.replace(model, use_peft=False)) is None


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"The recipe '.*nowhere.yaml' cannot be read .* Recipes are in `recipes/`"):
        check_recipe(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lerning_rate", "3"], "Unknown option '--lerning_rate'. Did you mean '--learning_rate'"),
        (["--stage-update=3"], "Unknown option '--stage-update=3'. Did you mean '--stage-updates'"),
        (["--learning_rate", "fast"], "argument --learning_rate/--learning-rate: invalid float value: 'fast'"),
        (["--learning_rate"], "argument --learning_rate/--learning-rate: expected one argument"),
        (["--config"], "argument --config: expected one argument: give the recipe's path"),
        (["train.yaml"], "Unknown option 'train.yaml'"),
        (["--objective", "mugrpo"], "Did you mean 'mu_grpo'"),
    ],
)
def test_a_wrong_command_line_is_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        parse(["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", *arguments])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset_name": None}, "`dataset_name` is not set"),
        ({"dataset_name": "lab:arithmetics"}, "no built-in task 'arithmetics'"),
        ({"dataset_name": "./nowhere.jsonl"}, "nowhere.jsonl' does not exist"),
        ({"model_name_or_path": None}, "`model_name_or_path` is not set"),
        ({"model_name_or_path": "./nowhere"}, "'./nowhere' is no folder with a model, and cannot be loaded"),
        (
            {"load_in_4bit": True},
            "`load_in_4bit`/`load_in_8bit`: QLoRA is not supported .* Use LoRA on a base in half",
        ),
        ({"reward_funcs": "maths"}, "'maths' is no reward: .* Did you mean 'math'"),
        ({"reward_funcs": "no_such_module:f"}, "module 'no_such_module' cannot be imported .* PYTHONPATH"),
        (
            {"reward_funcs": "mu_grpo_trl.lab.rewards:arithmetic_rewards"},
            "has no function 'arithmetic_rewards'. Did you mean 'arithmetic_reward'",
        ),
        ({"reward_weights": [1.0, 2.0]}, "1 reward functions with 2 weights"),
        ({"use_peft": True, "use_dora": True}, "`use_dora=True` in the `LoraConfig`"),
        ({"eval_strategy": "steps", "eval_steps": 2}, "`eval_strategy='steps'` needs an `eval_dataset`"),
        ({"conversational": True, "dataset_name": "{rows}"}, "has no chat template"),
        ({"dataset_name": "{rows}", "answer_column": "anser"}, "no column 'anser' .* Did you mean 'answer'"),
        (
            {"dataset_name": "{rows}", "prompt_column": "prompt"},
            "no column 'prompt' .* Its columns: problem, answer.* `prompt_column`",
        ),
        ({"dataset_name": "{rows}", "answer_column": None, "reward_funcs": "math"}, "reads the column 'answer'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_recipe_that_cannot_train_stops_before_a_model_is_loaded(tmp_path, policy, no_model, options, message):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"problem": f"{i}+1", "answer": i + 1}) + "\n" for i in range(8)))
    options = {k: str(rows) if v == "{rows}" else v for k, v in options.items()}
    with pytest.raises((ValueError, OSError), match=message):
        make_trainer(*parse(["--config", str(recipe_for(tmp_path, policy, **options))]))


def test_b02_golds_that_no_response_can_match_are_refused_with_their_rows_or_dropped(
    tmp_path, policy, no_model, caplog
):
    rows = tmp_path / "rows.jsonl"
    golds = ["1", "42}", "3", "{", "5", "6"]
    rows.write_text("".join(json.dumps({"problem": "1+1", "answer": gold}) + "\n" for gold in golds))
    options = {"dataset_name": str(rows), "reward_funcs": "math", "prompt_template": "none"}
    with pytest.raises(ValueError, match=r"2 of 6 answers can be matched by no response \(row 1: '42}'; row 3: '{'\)"):
        make_trainer(*parse(["--config", str(recipe_for(tmp_path, policy, **options))]))
    path = recipe_for(tmp_path, policy, **options, bad_rows="drop", prompts_per_update=5)
    with pytest.raises(ValueError, match="The dataset has 4 usable prompts, fewer than one update takes"):
        make_trainer(*parse(["--config", str(path)]))
    assert "row 1: '42}'; row 3: '{'); these rows are dropped" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume": "yes"}, "`resume='yes'` is unknown: use 'auto'"),
        ({"resume_from_checkpoint": True}, "There is no checkpoint in"),
        ({"resume_from_checkpoint": "true"}, "There is no checkpoint in"),
        ({"resume_from_checkpoint": "runs/nowhere"}, "'runs/nowhere'` is no checkpoint: it has no `trainer_state"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_named(tmp_path, policy, options, message):
    script, config, _ = parse(["--config", str(recipe_for(tmp_path, policy, **options))])
    with pytest.raises(ValueError, match=message):
        resume_point(script, config)


def test_resuming_automatically_starts_anew_where_there_is_nothing(tmp_path, policy):
    script, config, _ = parse(["--config", str(recipe_for(tmp_path, policy, resume="auto"))])
    assert resume_point(script, config) is None


# The command


def test_the_command_ends_with_the_message_alone_and_exit_code_2(tmp_path, policy, monkeypatch, capsys):
    path = recipe_for(tmp_path, policy, stage_updates=0)
    with pytest.raises(SystemExit) as end:
        cli(["train", "--config", str(path)])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("mu-grpo: `stage_updates=0` must be at least 1.\n")
    monkeypatch.setenv("MU_GRPO_DEBUG", "1")
    with pytest.raises(ValueError, match="`stage_updates=0` must be at least 1"):
        cli(["train", "--config", str(path)])


def test_a_launched_process_prints_no_traceback_either(tmp_path, policy):
    path = recipe_for(tmp_path, policy)
    command = [sys.executable, "-m", "mu_grpo_trl.train", "--config", str(path), "--stage_updats", "3"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 2
    assert "mu-grpo: Unknown option '--stage_updats'. Did you mean '--stage_updates'?\n" in done.stderr
    assert "Traceback" not in done.stderr and "usage:" not in done.stderr


@pytest.mark.parametrize("arguments", [["trian"], []])
def test_an_unknown_command_names_the_known_ones(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        cli(arguments)
    assert end.value.code == 2
    assert f"{{{','.join(COMMANDS)}}}" in capsys.readouterr().err


def test_a_command_without_a_recipe_asks_for_one():
    with pytest.raises(ValueError, match="No recipe is named: give `--config recipes/NAME.yaml`"):
        parse([])


def test_rewards_may_lie_in_the_working_directory(tmp_path, policy, no_model, monkeypatch):
    (tmp_path / "my_own_rewards.py").write_text(
        "def score(completions, **kwargs):\n    return [0.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(pytest.fail.Exception, match="A model was loaded"):
        cli(["train", "--config", str(recipe_for(tmp_path, policy, reward_funcs="my_own_rewards:score"))])


# Arguments of the trainer


def test_trls_config_is_refused(tmp_path, policy, no_model):
    with pytest.raises(TypeError, match="`args` is a GRPOConfig. Use `MuGRPOConfig`"):
        MuGRPOTrainer(str(policy), digit_share, args=GRPOConfig(str(tmp_path), use_cpu=True, bf16=False))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": [digit_share]}, "`tools` cannot be honored"),
        ({"rollout_func": digit_share}, "`rollout_func` cannot be honored"),
        ({"environment_factory": object}, "`environment_factory` cannot be honored"),
        ({"quantization_config": object()}, "`quantization_config` cannot be honored"),
        ({"processing_class": object()}, "`processing_class` is a object, not a tokenizer"),
        ({"peft_config": IA3Config()}, "A IA3 adapter cannot be merged"),
        ({"peft_config": LoraConfig(use_dora=True)}, "`use_dora=True` in the `LoraConfig`"),
        ({"peft_config": LoraConfig(target_parameters=["a.b"])}, "`target_parameters=.* Use plain LoRA"),
        ({"eval_dataset": Dataset.from_dict({"prompts": ["1"]})}, "'eval_dataset' has no column 'prompt'"),
        ({"eval_dataset": {"hard": Dataset.from_dict({"text": ["1"]})}}, "'hard' has no column 'prompt'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_the_trainer_does_not_support_is_refused(tmp_path, policy, no_model, arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(tmp_path, policy, arguments=arguments)


def test_evaluating_without_a_dataset_is_refused(tmp_path, policy, no_model):
    with pytest.raises(ValueError, match="`eval_strategy='steps'` needs an `eval_dataset`"):
        make(tmp_path, policy, eval_strategy="steps", eval_steps=2)


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (DatasetDict(train=Dataset.from_dict({"prompt": PROMPTS})), TypeError, r"holds several splits: pass one"),
        (["1+1="], TypeError, "`train_dataset` is a list, not a `datasets.Dataset`"),
        (Dataset.from_dict({"question": PROMPTS}), ValueError, "no column 'prompt' in the dataset"),
        (Dataset.from_dict({"prompt": PROMPTS[:3]}), ValueError, r"has 3 usable prompts, fewer than .*=4`\). Lower"),
        (Dataset.from_dict({"prompt": [1, 2, 3, 4]}), ValueError, "row 0: 1 is of type int, where a string or a list"),
        (Dataset.from_dict({"prompt": ["1+1", "", "2", "3"]}), ValueError, "row 1: '' is empty"),
        (
            Dataset.from_dict({"prompt": ["1"] * 4 + ["1" * 200]}),
            ValueError,
            r"row 4 \(200 tokens\).* Raise `max_context_length`",
        ),
        (Dataset.from_dict({"prompt": ["1"] * 4, "image": [None] * 4}), ValueError, "Column 'image': images are not"),
        (
            Dataset.from_dict({"prompt": [[{"role": "user", "content": "1+1"}]] * 4}),
            ValueError,
            "has no chat template, but the prompts are lists of messages",
        ),
        (IterableDataset.from_generator(lambda: iter([{"prompt": "1"}])), ValueError, "the stream ended after 1 rows"),
    ],
    ids=["splits", "list", "no-prompt", "small", "number", "empty", "overlong", "image", "no-template", "stream"],
)
def test_a_dataset_that_cannot_be_trained_on_is_refused(tmp_path, policy, no_model, dataset, error, message):
    with pytest.raises(error, match=message):
        make(tmp_path, policy, dataset)


def needs_solution(completions, solution, **kwargs):
    return [0.0] * len(completions)


def takes_completions_only(completions):
    return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("reward_funcs", "message"),
    [
        (needs_solution, "'needs_solution' takes 'solution', which is no column .* Did you mean 'solutions'"),
        ([digit_share, takes_completions_only], r"'takes_completions_only' cannot be called .* Add `\*\*kwargs`"),
        (MathReward(), "The math reward reads the column 'answer', which the dataset lacks"),
        ("math", "The math reward reads the column 'answer'"),
        ("workers.train_worker:digit_shares", "has no function 'digit_shares'. Did you mean 'digit_share'"),
        ([], "give at least one function"),
        (None, "None is no reward function"),
        ([digit_share, digit_share], "Two reward functions are named 'digit_share'"),
    ],
)
def test_a_reward_that_cannot_be_called_is_refused(tmp_path, policy, no_model, reward_funcs, message):
    dataset = Dataset.from_dict({"prompt": PROMPTS, "solutions": PROMPTS})
    with pytest.raises(ValueError, match=message):
        make(tmp_path, policy, dataset, reward_funcs)


def test_a_context_beyond_the_models_is_refused(tmp_path, policy, no_model):
    with pytest.raises(ValueError, match=r"A context of 4096 tokens is configured, but the model supports 128"):
        make(tmp_path, policy, max_context_length=4096)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path, policy, no_model):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"Nothing can be written to '.*file' \(File exists\). Choose another `output_d"
    ):
        make(tmp_path / "file", policy)
    with pytest.raises(
        ValueError, match=r"Nothing can be written to .*\(Not a directory\). Choose another `stage_dir`"
    ):
        make(tmp_path / "out", policy, stage_dir=str(tmp_path / "file" / "stages"))


@pytest.mark.parametrize("manifest", ["{}", "[]", "null", '"x"', '{"schema_version": 99}'])
def test_b31_a_stage_folder_that_cannot_be_read_is_refused(tmp_path, policy, no_model, manifest):
    folder = tmp_path / "stages" / "stage-000"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(StageError, match="stage-000"):
        make(tmp_path, policy)


def test_a_run_without_a_length_is_refused(tmp_path, policy, no_model):
    with pytest.raises(ValueError, match="set one of them to a positive number"):
        make(tmp_path, policy, max_steps=-1, num_train_epochs=0)


# vLLM


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/nowhere/python", "'/nowhere/python' cannot be run to start vLLM: .* Set `vllm_python`"),
        (None, "cannot import vLLM .* Set `vllm_python` to an interpreter with vLLM installed, or `rollout_engine"),
    ],
)
def test_an_interpreter_without_vllm_is_refused(tmp_path, policy, no_model, monkeypatch, python, message):
    if python is None:  # an interpreter that sees nothing but the standard library
        python = str(tmp_path / "python")
        Path(python).write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
        Path(python).chmod(0o755)
    with pytest.raises(EngineError, match=message):
        make(tmp_path, policy, rollout_engine="vllm", vllm_python=python)


class DeafStub(StubVLLM):
    """Answers that it loaded the new weights, but keeps those it was started with."""

    async def _on_reload(self, request: web.Request) -> web.Response:
        self.calls.append("reload_weights")
        return web.json_response({"results": [None]})


class BlindStub(StubVLLM):
    """Finds no weights in the folder that it is to load."""

    async def _on_reload(self, request: web.Request) -> web.Response:
        return web.json_response({"message": "Call to collective_rpc method failed: no weights in it"}, status=500)


@pytest.fixture
def serve(tmp_path) -> Iterator[Callable[..., StubVLLM]]:
    servers: list[StubVLLM] = []

    def start(kind: type[StubVLLM] = StubVLLM, **attributes: Any) -> StubVLLM:
        stub = kind(write_policy(tmp_path / "served", seed=1), max_model_len=attributes.pop("max_model_len", 128))
        for name, value in attributes.items():
            setattr(stub, name, value)
        stub.start()
        servers.append(stub)
        return stub

    yield start
    for stub in servers:
        stub.stop()


def server_options(*urls: str, **options: Any) -> dict[str, Any]:
    return {"rollout_engine": "vllm", "vllm_mode": "server", "vllm_server_urls": list(urls), **options}


def test_a_dead_server_is_named_with_its_address(tmp_path, policy, no_model):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=rf"{url} was not healthy within 1 s; /health last: .* Start the server"):
        make(tmp_path, policy, **server_options(url, vllm_server_timeout=1.0))


def test_b20_a_server_that_is_up_but_unhealthy_is_named_with_its_status(tmp_path, policy, no_model, serve):
    stub = serve(health_status=503)
    with pytest.raises(ConnectionError, match="/health last: status 503"):
        make(tmp_path, policy, **server_options(stub.url, vllm_server_timeout=1.0))


def test_b18_a_server_with_raw_log_probs_is_refused(tmp_path, policy, no_model, serve):
    stub = serve(logprobs_mode="raw_logprobs")
    with pytest.raises(EngineError, match="does not give log-probs after temperature.*processed_logprobs"):
        make(tmp_path, policy, **server_options(stub.url))


def test_b23_a_server_with_too_short_a_context_is_refused(tmp_path, policy, no_model, serve):
    stub = serve(max_model_len=SERVER_CONTEXT)
    with pytest.raises(
        EngineError, match=r"allows 64 tokens .* but the run needs 128. Start it with `--max-model-len 1"
    ):
        make(tmp_path, policy, **server_options(stub.url))


def test_b23_a_prompt_longer_than_the_server_takes_is_refused_with_its_row(tmp_path, policy, no_model, serve):
    stub = serve(max_model_len=SERVER_CONTEXT)
    dataset = Dataset.from_dict({"prompt": [*PROMPTS, "1" * SERVER_CONTEXT]})
    with pytest.raises(ValueError, match=rf"row {len(PROMPTS)} \(64 tokens\)"):
        make(tmp_path, policy, dataset, **server_options(stub.url, max_context_length=SERVER_CONTEXT))


@pytest.mark.parametrize("version", ["0.10.2", "1.0.0"])
def test_a_server_of_an_unsupported_version_is_refused(tmp_path, policy, no_model, serve, version):
    stub = serve(version=version)
    with pytest.raises(EngineError, match=rf"vLLM {version} is not supported: the range is"):
        make(tmp_path, policy, **server_options(stub.url))


def test_one_bad_server_among_good_ones_is_found(tmp_path, policy, no_model, serve):
    good, bad = serve(), serve(logprobs_mode="raw_logprobs")
    with pytest.raises(EngineError, match=rf"{bad.url} does not give log-probs after temperature"):
        make(tmp_path, policy, **server_options(good.url, bad.url))


def test_a_server_that_cannot_load_the_policy_stops_the_run_before_anything_is_generated(tmp_path, policy, serve):
    stub = serve(BlindStub)
    trainer = make(tmp_path, policy, **server_options(stub.url))
    with pytest.raises(EngineError, match="no weights in"):
        trainer.train()
    assert stub.generated == []


def test_b25_a_server_with_another_model_is_found_before_anything_is_generated(tmp_path, policy, serve):
    stub = serve(DeafStub)
    trainer = make(tmp_path, policy, **server_options(stub.url))
    with pytest.raises(EngineError, match="disagree about .* probe tokens .* serves other or stale weights"):
        trainer.train()
    assert "reload_weights" in stub.calls
    assert stub.generated == []
