"""Same rollouts in, same gradient out: against TRL's own `GRPOTrainer` loss, and the seam the trainer relies on."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers import PROMPTS, config_options, save_tiny_policy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workers.train_worker import digit_share

from mu_grpo_trl import MuGRPOConfig, MuGRPOTrainer
from mu_grpo_trl.config import REFUSED
from mu_grpo_trl.stage.reader import StageReader


class SecondUpdate(TrainerCallback):
    """Keeps the weights before the second update and its gradients."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, torch.Tensor] = {}

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == 1:
            self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        if state.global_step == 1:
            self.gradients = {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


def trl_gradients(policy: Path, second: SecondUpdate, reader: StageReader, groups, folder: Path, **options):
    """Gradient that TRL's own loss gives for the same responses, with anchors it computes at the first weights."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    trl = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy),
        reward_funcs=digit_share,
        args=GRPOConfig(
            str(folder), use_cpu=True, bf16=False, gradient_checkpointing=False, loss_type="grpo", num_generations=4,
            per_device_train_batch_size=16, report_to="none", vllm_importance_sampling_correction=False, **options,
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
    )  # fmt: skip
    responses = [reader.response(int(group), sample) for group in groups for sample in range(4)]
    prompts = [torch.tensor(response.prompt_ids.astype("int64")) for response in responses]
    completions = [torch.tensor(response.completion_ids.astype("int64")) for response in responses]
    rewards = torch.tensor(reader.rewards(groups))
    advantages = rewards - rewards.mean(1, keepdim=True)
    if options.get("scale_rewards") != "none":
        advantages = advantages / (rewards.std(1, keepdim=True) + 1e-4)
    inputs = {
        "prompt_ids": pad_sequence(prompts, True, tokenizer.pad_token_id, padding_side="left"),
        "prompt_mask": pad_sequence([torch.ones_like(ids) for ids in prompts], True, 0, padding_side="left"),
        "completion_ids": pad_sequence(completions, True, tokenizer.pad_token_id),
        "completion_mask": pad_sequence([torch.ones_like(ids) for ids in completions], True, 0),
        "advantages": advantages.flatten().float(),
    }
    if options.get("mask_truncated_completions"):
        cut = torch.tensor(reader.truncated(groups)).flatten()
        inputs["completion_mask"] = inputs["completion_mask"] * ~cut[:, None]
    trl.model.train()
    trl.current_gradient_accumulation_steps = 1
    whole = [torch.cat([inputs[f"prompt_{kind}"], inputs[f"completion_{kind}"]], 1) for kind in ("ids", "mask")]
    with torch.no_grad():
        inputs["old_per_token_logps"] = trl._get_per_token_logps_and_entropies(
            trl.model, *whole, inputs["completion_ids"].size(1)
        )[0]
        if options.get("beta"):
            inputs["ref_per_token_logps"] = inputs["old_per_token_logps"]
    trl.model.load_state_dict(second.weights, strict=False)
    trl.compute_loss(trl.model, inputs).backward()
    return {name: p.grad for name, p in trl.model.named_parameters()}, len({len(ids) for ids in completions})


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"beta": 0.04},
        {"beta": 0.04, "use_bias_correction_kl": False, "temperature": 1.3},
        {"scale_rewards": "none"},
        {"mask_truncated_completions": True},
        {"entropy_coef": 0.01},
    ],
)
def test_with_trainer_anchors_and_without_veto_the_gradient_is_trls(policy, tmp_path, options):
    second = SecondUpdate()
    trainer = MuGRPOTrainer(
        model=str(policy),
        reward_funcs=digit_share,
        args=MuGRPOConfig(
            **config_options(
                tmp_path / "ours", anchor="trainer", objective="grpo", advantage_eps=1e-4, optim="sgd",
                learning_rate=3.0, max_grad_norm=0.0, stage_updates=2, max_steps=2, max_completion_length=60,
                max_tokens_per_microbatch=96, **options,
            )
        ),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        callbacks=[second],
    )  # fmt: skip
    trainer.train()
    reader = StageReader(tmp_path / "ours" / "stages" / "stage-000")
    groups = trainer.schedule.update_groups(1)
    expected, num_lengths = trl_gradients(policy, second, reader, groups, tmp_path / "trl", epsilon=0.2, **options)
    assert num_lengths > 3  # ragged
    difference = torch.stack([(second.gradients[name] - expected[name]).norm() for name in expected]).norm()
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert norm > 1e-4
    assert difference <= 1e-5 * norm


def test_overridden_methods_still_have_the_signatures_they_override():
    def names(function) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(GRPOTrainer.__init__) == names(MuGRPOTrainer.__init__)
    assert names(GRPOTrainer.training_step) == ["self", "model", "inputs", "num_items_in_batch"]
    assert names(GRPOTrainer.compute_loss) == names(MuGRPOTrainer.compute_loss)
    assert names(GRPOTrainer._prepare_inputs) == names(MuGRPOTrainer._prepare_inputs)
    assert names(GRPOTrainer.log) == names(MuGRPOTrainer.log)
    assert names(GRPOTrainer._save_checkpoint) == names(MuGRPOTrainer._save_checkpoint)
    assert names(GRPOTrainer.get_train_dataloader) == names(MuGRPOTrainer.get_train_dataloader)
    assert names(Trainer.floating_point_ops) == names(MuGRPOTrainer.floating_point_ops)
    assert names(Trainer.train)[:2] == ["self", "resume_from_checkpoint"]


HONORED = {
    "model_init_kwargs", "trust_remote_code", "disable_dropout", "cast_lm_head_to_fp32", "num_generations",
    "num_generations_eval", "max_completion_length", "ds3_gather_for_generation", "shuffle_dataset", "temperature",
    "generation_kwargs", "chat_template_kwargs", "cache_implementation", "use_vllm", "vllm_mode", "vllm_model_impl",
    "vllm_enable_sleep_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
    "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size", "beta", "epsilon",
    "epsilon_high", "reward_weights", "scale_rewards", "mask_truncated_completions", "use_bias_correction_kl",
    "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps", "entropy_coef", "log_completions",
    "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo", "learning_rate",
}  # fmt: skip


def test_every_option_grpo_adds_is_honored_or_refused():
    added = {f.name for f in fields(GRPOConfig)} - {f.name for f in fields(GRPOConfig.__mro__[1])} | {"learning_rate"}
    assert not added - HONORED - set(REFUSED), "new in TRL: honor or refuse"
    assert not HONORED & set(REFUSED)
    assert added >= HONORED
