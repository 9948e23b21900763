"""`train_on_stage`: updates on a stage that another run filled, with the quickstart's model, data and reward."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from mu_grpo_trl.checkpoints import CheckpointError
from mu_grpo_trl.lab.warm_start import warm_start_path
from mu_grpo_trl.rollout.transformers_engine import TransformersEngine
from mu_grpo_trl.stage.schema import StageError
from mu_grpo_trl.train import make_trainer, parse, recipe_path
from mu_grpo_trl.trainer import MuGRPOTrainer

GROUPS, SIZE = 32, 8

pytestmark = pytest.mark.usefixtures("objects_of_the_libraries_are_not_collected")


def quickstart(output_dir: Path, **options: Any) -> MuGRPOTrainer:
    """The quickstart with one stage of 4 updates × 8 prompts × 8 responses."""
    values = {
        "model_name_or_path": warm_start_path(),
        "output_dir": output_dir,
        "max_rows": 200,
        "prompts_per_update": SIZE,
        "stage_updates": GROUPS // SIZE,
        "max_steps": GROUPS // SIZE,
        "reward_workers": 1,
        "disable_tqdm": True,
        **options,
    }
    arguments = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    return make_trainer(*parse(["--config", str(recipe_path("quickstart.yaml")), *arguments]))


def weights(trainer: MuGRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Filled:
    """The stage, and the weights that the run which filled it ended with."""

    def __init__(self, folder: Path) -> None:
        trainer = quickstart(folder)
        trainer.train()
        self.stage = folder / "stages" / "stage-000"
        self.weights = weights(trainer)
        self.bytes = contents(self.stage)


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Filled:
    return Filled(tmp_path_factory.mktemp("filled"))


@pytest.fixture
def no_engine(monkeypatch):
    """An engine that is asked for anything fails the test; so does a server that is contacted."""

    def fail(*_, **__):
        pytest.fail("The engine was used.")

    for name in ("open", "score", "generate"):
        monkeypatch.setattr(TransformersEngine, name, fail)
    monkeypatch.setattr("mu_grpo_trl.preflight.make_vllm_engine", fail)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_at_the_size_it_was_filled_for_the_weights_are_bitwise_those_of_the_run_that_filled_it(
    filled, tmp_path, no_engine, engine
):
    trainer = quickstart(tmp_path, train_on_stage=filled.stage, rollout_engine=engine, max_steps=-1)
    trainer.train()
    ours = weights(trainer)
    assert [name for name in ours if not torch.equal(ours[name], filled.weights[name])] == []
    assert contents(filled.stage) == filled.bytes
    assert not list((tmp_path / "stages").glob("stage-*"))
    assert trainer.telemetry.counts["generated_tokens"] == 0


def test_at_another_size_all_groups_but_the_tail_are_taken_in_order_and_it_says_so(
    filled, tmp_path, no_engine, caplog
):
    trainer = quickstart(tmp_path, train_on_stage=filled.stage, prompts_per_update=5, max_steps=-1)
    taken: list[int] = []
    update_groups = trainer.schedule.update_groups
    object.__setattr__(trainer.schedule, "update_groups", lambda u: taken.extend(got := update_groups(u)) or got)
    with caplog.at_level(logging.WARNING, logger="mu_grpo_trl.stored"):
        trainer.train()
    assert taken == list(range(30))
    assert trainer.state.global_step == trainer.args.max_steps == 6
    assert trainer.telemetry.counts["responses"] == 30 * 8
    assert "32 prompt groups: 6 updates of 5 take all but the last 2" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_generations": 4}, "num_generations: 8 → 4"),
        ({"temperature": 0.5}, r"sampling\['temperature'\]: 1.0 → 0.5"),
        ({"max_completion_length": 20}, r"sampling\['max_tokens'\]: 32 → 20"),
        ({"max_rows": 100}, "dataset_hash: '.*' → '.*'"),
        ({"advantage_eps": 0.1}, r"scoring\['advantage_eps'\]: 1e-06 → 0.1"),
    ],
)
def test_what_the_stage_was_generated_with_is_bound(filled, tmp_path, no_engine, options, message):
    trainer = quickstart(tmp_path, train_on_stage=filled.stage, **options)
    with pytest.raises(StageError, match=f"{message}.*stored → now"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 5}, "`max_steps=5` is more than the 4 updates of 8 prompt groups .* at most 4"),
        ({"prompts_per_update": 33}, "`prompts_per_update=33` is more than the 32 prompt groups .* at most 32"),
        ({"anchor": "trainer"}, "`anchor='trainer'` contradicts `train_on_stage=.*Use `anchor: engine`"),
    ],
)
def test_a_run_that_does_not_fit_the_stage_is_refused(filled, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        quickstart(tmp_path, train_on_stage=filled.stage, **options)


def test_a_folder_without_a_stage_is_refused(tmp_path):
    with pytest.raises(StageError, match="there is no stage here"):
        quickstart(tmp_path, train_on_stage=tmp_path / "nowhere")


def test_a_run_on_a_stored_stage_resumes_within_it_and_only_on_the_same_one(filled, tmp_path, no_engine):
    saving = {"train_on_stage": filled.stage, "save_strategy": "steps", "save_steps": 2}
    quickstart(tmp_path, **saving, max_steps=2).train()
    trainer = quickstart(tmp_path, **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    ours = weights(trainer)
    assert [name for name in ours if not torch.equal(ours[name], filled.weights[name])] == []
    with pytest.raises(CheckpointError, match="prompts_per_update: 8 → 4"):
        quickstart(tmp_path, **saving, prompts_per_update=4).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-2")
        )


# Checkpoints


@pytest.mark.parametrize(("at_stage_ends", "expected"), [(True, {1, 2, 3, 4}), (False, {3, 4})])
def test_stages_end_with_a_checkpoint_unless_told_otherwise(tmp_path, at_stage_ends, expected):
    trainer = quickstart(
        tmp_path, stage_updates=1, save_strategy="steps", save_steps=3, save_at_stage_end=at_stage_ends
    )
    trainer.train()
    assert {int(path.name.removeprefix("checkpoint-")) for path in tmp_path.glob("checkpoint-*")} == expected
