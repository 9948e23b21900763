"""What reaches the Hub, at its HTTP API: the model with its card, a stage as a dataset, and nothing else."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pytest
import transformers.utils.hub
import yaml
from helpers import PROMPTS, config_options, save_tiny_policy
from huggingface_hub import ModelCard
from safetensors.torch import load
from stub_hub import Repository, StubHub
from transformers import AutoModelForCausalLM
from workers.training_run import make_trainer, train

from mu_grpo_trl import export, load_stage, stage_cli
from mu_grpo_trl import train as train_command
from mu_grpo_trl.hub import _log_failure, push_run
from mu_grpo_trl.stage.schema import MANIFEST_NAME

TOKEN = "hf_" + "s" * 34
MODEL = {
    "README.md", "run.png", "config.json", "generation_config.json", "model.safetensors", "summary.json",
    "tokenizer.json", "tokenizer_config.json",
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("objects_of_the_libraries_are_not_collected")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def hub(monkeypatch) -> Iterator[StubHub]:
    with StubHub() as stub:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", stub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield stub


def options(policy: Path, output_dir: Path, **changes: Any) -> dict[str, Any]:
    """Two stages of two updates."""
    defaults = {"model": str(policy), "prompts": PROMPTS[:12], "stage_updates": 2, "max_steps": 4}
    return {**config_options(output_dir), **defaults, **changes}


@pytest.fixture(scope="module")
def finished(policy, tmp_path_factory) -> Path:
    """The folder of a run that is over, with things in it that are nobody's business."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    trainer = train(options(policy, folder, save_strategy="steps", save_steps=2, log_completions=True))
    trainer.save_model(str(folder), _internal_call=True)
    trainer.create_model_card(dataset_name="someone/prompts")
    for name in (".env", "notes.txt", "optimizer.pt", "key.json", "vllm/vllm-0.log", "nonfinite/update-1.parquet"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(TOKEN)
    return folder


def test_a_push_holds_the_model_and_its_card_and_nothing_else(hub, policy, finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    trainer = make_trainer(options(policy, folder, hub_model_id="me/tiny", hub_private_repo=True, hub_token=TOKEN))
    trainer.push_to_hub()
    assert list(hub.repositories) == [("model", "me/tiny")]
    repository = hub.repositories["model", "me/tiny"]
    assert set(repository.files) == MODEL
    assert repository.private and repository.tokens == {TOKEN}
    assert not [name for name, content in repository.files.items() if TOKEN.encode() in content]
    pushed, kept = load(repository.files["model.safetensors"]), trainer.model.state_dict()
    assert all(pushed[name].equal(kept[name]) for name in pushed)


def test_checkpoints_pushed_while_training_hold_the_model_alone(hub, policy, tmp_path):
    spec = options(policy, tmp_path / "run", push_to_hub=True, hub_model_id="me/tiny", hub_always_push=True)
    trainer = train({**spec, "save_strategy": "steps", "save_steps": 2})
    trainer._finish_current_push()
    repository = hub.repositories["model", "me/tiny"]
    assert set(repository.files) <= MODEL
    assert {"model.safetensors", "config.json"} <= set(repository.files)
    assert repository.commits == ["Training in progress, step 2", "Training in progress, step 4"]


def test_the_card_says_how_the_model_was_trained(finished):
    card = ModelCard.load(finished / "README.md")
    assert card.data.datasets == "someone/prompts"
    assert card.data.base_model is None  # it was a local folder, and its path is nobody's business
    assert {"mu-grpo", "trl", "generated_from_trainer"} == set(card.data.tags)
    text = str(card)
    for line in (
        "| stages | 2 |",
        "| updates a stage (μ) | 2 |",
        "| updates | 4 of 4 |",
        "| clip of the ratio | [0, 5] |",
        "| veto | sequence, τ_c = 0.0001 |",
        "| prompt groups an update × responses | 4 × 4 |",
        "| data | [someone/prompts](https://huggingface.co/datasets/someone/prompts) |",
        "| rewards | `digit_share` |",
        "![reward, ratios, veto and time over the run](run.png)",
        f"- trl: {version('trl')}",
        "arXiv preprint arXiv:2605.17570",
        "@software{vonwerra2020trl",
    ):
        assert line in text, line
    summaries = [load_stage(finished / f"stages/stage-00{stage}") for stage in range(2)]
    for stage, rows in enumerate(summaries):
        reward = sum(rows["reward"]) / len(rows)
        assert f"| {stage} | {2 * stage + 1}–{2 * stage + 2} | {len(rows)} | {reward:.4g} |" in text
    assert str(finished.parent) not in text


@pytest.fixture
def recipe(policy, tmp_path) -> list[str]:
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"problem": "{text}", "answer": "1"}}\n' for text in PROMPTS))
    recipe = options(policy, tmp_path / "run", push_to_hub=True, hub_model_id="me/tiny", conversational=False)
    del recipe["prompts"]
    recipe |= {
        "model_name_or_path": recipe.pop("model"),
        "dataset_name": str(tmp_path / "prompts.jsonl"),
        "prompt_template": "none",
        "reward_funcs": ["mu_grpo_trl.rewards.answers:boxed_reward"],  # a module that a worker imports in no time
        "max_steps": 2,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return ["--config", str(tmp_path / "recipe.yaml")]


def test_a_push_that_fails_costs_nothing_but_the_push_and_can_be_made_up_for(hub, recipe, tmp_path, caplog, capsys):
    hub.failing = True
    with pytest.raises(SystemExit) as ended:
        train_command.main(recipe)
    assert ended.value.code == train_command.PUSH_FAILED == 4
    message = next(record.getMessage() for record in caplog.records if "push to the Hub failed" in record.getMessage())
    assert "the stand-in fails" in message
    assert message.endswith(f"push it later by `mu-grpo push {tmp_path}/run me/tiny`.")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").config.vocab_size
    with pytest.raises(SystemExit) as ended:
        export.main(["push", f"{tmp_path}/run", "me/tiny", "--public"])
    assert ended.value.code == 4
    hub.failing = False
    export.main(["push", f"{tmp_path}/run", "me/tiny", "--public"])
    assert capsys.readouterr().out.splitlines()[-1] == f"{hub.url}/me/tiny"
    assert set(hub.repositories["model", "me/tiny"].files) == MODEL - {"run.png"}  # of a run that saves no checkpoint


def test_a_run_is_pushed_privately_and_never_to_a_public_repository_unasked(hub, finished):
    assert push_run(finished, "tiny") == f"{hub.url}/me/tiny"
    assert hub.repositories["model", "me/tiny"].private
    hub.repositories["model", "me/open"] = Repository(private=False)
    with pytest.raises(ValueError, match="me/open is public. Give --public"):
        push_run(finished, "me/open")
    assert not hub.repositories["model", "me/open"].files
    with pytest.raises(ValueError, match="holds no model"):
        push_run(finished / "stages", "me/tiny")


def test_an_upload_that_fails_in_the_background_is_said(caplog):
    from concurrent.futures import Future

    job: Future[None] = Future()
    job.set_exception(OSError("no route"))
    with caplog.at_level(logging.WARNING, "mu_grpo_trl.hub"):
        _log_failure(job)
    assert "An upload to the Hub failed (OSError: no route). Training goes on." in caplog.text


def stage_command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        stage_cli.main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_stage_is_pushed_as_a_private_dataset_without_its_policy(hub, finished, tmp_path, capsys):
    stage = finished / "stages/stage-001"
    for name in ("groups/bad.arrow.rejected", "unscored-r0of1-x.npz"):
        (stage / name).write_bytes(b"x")
    assert (stage / "policy/model.safetensors").exists()
    assert stage_command("push", str(stage), "rollouts") == 0
    assert capsys.readouterr().out == f"{hub.url}/datasets/me/rollouts\n"
    repository = hub.repositories["dataset", "me/rollouts"]
    shards = {f"groups/{path.name}" for path in stage.glob("groups/*.arrow")}
    assert set(repository.files) == {"README.md", MANIFEST_NAME, *shards} and shards
    assert repository.private
    for name, content in repository.files.items():
        path = tmp_path / "again" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    card = repository.files["README.md"].decode()
    assert "| prompt groups × responses | 8 × 4 |" in card and "arXiv:2605.17570" in card
    again = datasets.load_dataset(
        str(tmp_path / "again"), split="train", cache_dir=str(tmp_path / "cache"), download_mode="force_redownload"
    )
    assert again.sort(["group", "sample"]).to_dict() == load_stage(stage).to_dict()
    assert load_stage(tmp_path / "again").to_dict() == load_stage(stage).to_dict()


def test_a_stage_that_is_not_sound_or_not_complete_is_not_pushed(hub, finished, tmp_path, capsys):
    stage = tmp_path / "stage-000"
    shutil.copytree(finished / "stages/stage-000", stage)
    next(stage.glob("groups/*.arrow")).write_bytes(b"damaged")
    assert stage_command("push", str(stage), "rollouts") == 2
    assert "mu-grpo stage:" in capsys.readouterr().err
    assert not hub.repositories
