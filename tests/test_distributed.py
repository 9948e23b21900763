"""One process, and two of DDP, FSDP2 and ZeRO-3, take the same updates on the same stored rollouts."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import PROMPTS, config_options, displacement_errors, run_worker, save_tiny_policy

from mu_grpo_trl.stage.reader import StageReader
from mu_grpo_trl.stage.schema import GroupRollout, ResponseRow
from mu_grpo_trl.stage.writer import StageWriter

NUM_UPDATES = 8
EMPTY_UPDATE, LONELY_UPDATE, VETOED_UPDATE = 2, 3, 5
VETO_THRESHOLD = 0.3  # above any probability that the tiny policy gives to a token
OPTIMIZATIONS = {"share_prompts": True}
ONE_OFF = {
    "skip_zero_advantage": {"skip_zero_advantage": False},
    "sort_by_length": {"sort_by_length": False},
    "share_prompts": {"share_prompts": False},
    "padding_free": {"share_prompts": False, "padding_free": True},
    "read_ahead": {"read_ahead": False},
    "lean_head": {"lean_head": False},
    "sync_once": {"sync_once": False},
}


def sgd_options(output_dir: Path) -> dict:
    """Plain SGD without gradient clipping: the first displacement is the gradient. Micro-batches are small, uneven."""
    return config_options(
        output_dir,
        optim="sgd",
        learning_rate=0.25,
        weight_decay=0.0,
        max_grad_norm=0.0,
        stage_updates=NUM_UPDATES,
        max_steps=NUM_UPDATES,
        max_tokens_per_microbatch=96,
        max_completion_length=24,
    )


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def stage(policy: Path, tmp_path_factory) -> Path:
    """A stage of real rollouts in which one update has nothing to forward and one a single row: a rank has none."""
    folder = tmp_path_factory.mktemp("stage")
    run_worker(
        folder, None, {"model": str(policy), "prompts": PROMPTS, **sgd_options(folder)} | {"learning_rate": 0.0}
    )
    source = StageReader(folder / "stages" / "stage-000")
    manifest = source.manifest
    for name, vetoed in (("edited", False), ("vetoed", True)):
        writer = StageWriter.create(folder / name, manifest)
        writer.append([_edited_group(source, group, vetoed) for group in range(manifest.num_groups)])
        writer.complete()
    shutil.copy(folder / "stages" / "run_id", folder / "run_id")
    return folder


def _edited_group(source: StageReader, group: int, vetoed: bool) -> GroupRollout:
    manifest = source.manifest
    advantages = source.advantages([group])[0].copy()
    update = group // manifest.prompts_per_update
    if update == EMPTY_UPDATE:
        advantages[:] = 0
    if update == LONELY_UPDATE:
        advantages[:] = 0
        advantages[0] = -1.5 if group % manifest.prompts_per_update == 0 else 0
    certain = vetoed and update == VETOED_UPDATE  # b = 0: the ratio of every token is its probability
    if certain:
        advantages[:] = -1.0
    responses = [source.response(group, sample) for sample in range(manifest.num_generations)]
    rewards = source.rewards([group])[0]
    rows = [
        ResponseRow(
            completion_ids=np.array(response.completion_ids),
            behavior_logps=np.array(response.behavior_logps) * (not certain),
            rewards={manifest.reward_names[0]: float(rewards[i])},
            reward=float(rewards[i]),
            advantage=float(advantages[i]),
            finish_reason="stop",
        )
        for i, response in enumerate(responses)
    ]
    prompt_ids = np.array(responses[0].prompt_ids)
    return GroupRollout(group, manifest.prompt_indices[group], prompt_ids, manifest.policy_version, rows)


def train(folder: Path, launcher: str | None, policy: Path, stage: Path, **options) -> list[dict[str, torch.Tensor]]:
    stages = folder / "stages"
    stages.mkdir(parents=True)
    shutil.copy(stage / "run_id", stages / "run_id")
    shutil.copytree(stage / "edited", stages / "stage-000")
    run_worker(folder, launcher, {"model": str(policy), "prompts": PROMPTS, **sgd_options(folder), **options})
    return torch.load(folder / "weights.pt")


@pytest.fixture(scope="module")
def single(policy: Path, stage: Path, tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    return train(tmp_path_factory.mktemp("single"), None, policy, stage)


@pytest.mark.distributed
@pytest.mark.parametrize("launcher", ["ddp", "fsdp2", "zero3"])
def test_two_ranks_take_the_gradients_and_reach_the_weights_of_one_process(launcher, policy, stage, single, tmp_path):
    weights = train(tmp_path / launcher, launcher, policy, stage)
    gradients = displacement_errors(single, weights, 1)
    assert max(gradients.values()) <= 1e-5, gradients
    final = displacement_errors(single, weights, NUM_UPDATES)
    assert max(final.values()) <= 1e-4, final


def test_one_padded_batch_gives_the_gradient_of_many_uneven_microbatches(policy, stage, single, tmp_path):
    weights = train(tmp_path / "whole", None, policy, stage, max_tokens_per_microbatch=100_000)
    assert max(displacement_errors(single, weights, 1).values()) <= 1e-5
    assert max(displacement_errors(single, weights, NUM_UPDATES).values()) <= 1e-4


def test_rows_of_zero_advantage_do_not_change_the_weights_when_forwarded(policy, stage, single, tmp_path):
    weights = train(tmp_path / "forwarded", None, policy, stage, skip_zero_advantage=False)
    assert max(displacement_errors(single, weights, 1).values()) <= 1e-6
    assert max(displacement_errors(single, weights, NUM_UPDATES).values()) <= 1e-4


def test_b44_an_update_without_signal_moves_no_weight(single):
    before, after = single[EMPTY_UPDATE], single[EMPTY_UPDATE + 1]
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    "launcher",
    [None, *(pytest.param(name, marks=pytest.mark.distributed) for name in ("ddp", "fsdp2", "zero3"))],
)
def test_each_optimization_can_be_switched_off_and_changes_no_gradient(launcher, policy, stage, tmp_path):
    variants = []
    for name, options in {"all": {}, **ONE_OFF}.items():
        stages = tmp_path / name / "stages"
        stages.mkdir(parents=True)
        shutil.copy(stage / "run_id", stages / "run_id")
        shutil.copytree(stage / "vetoed", stages / "stage-000")
        variants.append({"output_dir": str(tmp_path / name), **OPTIMIZATIONS, **options})
    spec = {**sgd_options(tmp_path), "learning_rate": 0.0, "veto_threshold": VETO_THRESHOLD}
    spec |= {"model": str(policy), "prompts": PROMPTS, "record_gradients": True, "variants": variants}
    run_worker(tmp_path / "run", launcher, spec)
    reference = flat_gradients(tmp_path / "all")
    norms = [float(gradient.norm()) for gradient in reference]
    assert [update for update, norm in enumerate(norms) if norm == 0] == [EMPTY_UPDATE, VETOED_UPDATE]
    for name in ONE_OFF:
        errors = [
            float((other - gradient).norm()) / (norm or 1)
            for other, gradient, norm in zip(flat_gradients(tmp_path / name), reference, norms, strict=True)
        ]
        assert max(errors) <= 1e-6, (name, errors)


def flat_gradients(folder: Path) -> list[torch.Tensor]:
    """The gradient of each update as one float64 vector."""
    gradients = torch.load(folder / "gradients.pt")
    names = {name: tensor.shape for update in gradients for name, tensor in update.items()}
    return [
        torch.cat([update.get(name, torch.zeros(shape)).double().flatten() for name, shape in sorted(names.items())])
        for update in gradients
    ]
