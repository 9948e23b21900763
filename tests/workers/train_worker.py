"""
Training runs on stored stages, for tests that start processes: `python train_worker.py SPEC.json`, alone or under
`accelerate launch`. The spec holds the options of one run, or those of several that differ in `variants`. The main
process writes the parameters after every update to `<output_dir>/weights.pt`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from deepspeed.utils import safe_get_full_grad
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from mu_grpo_trl import MuGRPOConfig, MuGRPOTrainer
from mu_grpo_trl.phases import is_zero3, merged_weights


def digit_share(completions, **columns) -> list[float]:
    """A reward with signal for a random model: the share of digits, in tenths."""
    return [round(10 * sum(c.isdigit() for c in text) / max(len(text), 1)) / 10 for text in completions]


class RecordGradients(TrainerCallback):
    """Keeps the whole gradient of every update, gathered, as the optimizer gets it; `{}` where there is none."""

    def __init__(self) -> None:
        self.trainer: MuGRPOTrainer | None = None
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.gradients = [{} for _ in range(state.max_steps)]
        if is_zero3(self.trainer.accelerator):  # its step follows the last backward pass at once
            engine = self.trainer.model_wrapped
            step = engine.step
            engine.step = lambda: (self.record(state.global_step), step())

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if not is_zero3(self.trainer.accelerator):
            self.record(state.global_step)

    def record(self, update: int) -> None:
        gradient = (lambda p: p.grad) if not is_zero3(self.trainer.accelerator) else safe_get_full_grad
        gathered = {name: gradient(p) for name, p in self.trainer.model.named_parameters()}
        self.gradients[update] = {
            name: (g.full_tensor() if isinstance(g, DTensor) else g).detach().cpu().clone()
            for name, g in gathered.items()
            if g is not None
        }


class RecordWeights(TrainerCallback):
    """Keeps all parameters, gathered, before training and after every update."""

    def __init__(self) -> None:
        self.trainer: MuGRPOTrainer | None = None
        self.weights: list[dict[str, torch.Tensor]] = []

    def record(self) -> None:
        trainer = self.trainer
        tensors = merged_weights(trainer.model, is_zero3(trainer.accelerator))
        self.weights.append({name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors})

    def on_train_begin(self, args, state, control, **kwargs):
        self.record()

    def on_step_end(self, args, state, control, **kwargs):
        self.record()


def skip_compiling_deepspeed_ops() -> None:
    """ZeRO on the CPU would build an extension for shared-memory reduction, which needs a compiler and a minute."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main() -> None:
    skip_compiling_deepspeed_ops()
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    for variant in spec.pop("variants", [{}]):
        train(spec | variant)


def train(spec: dict[str, Any]) -> None:
    resume = spec.pop("resume", None)
    model = spec.pop("model")
    prompts = spec.pop("prompts")
    peft_config = None
    if spec.pop("lora", False):
        from peft import LoraConfig

        peft_config = LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    records_gradients = spec.pop("record_gradients", False)
    recorder = RecordGradients() if records_gradients else RecordWeights()
    trainer = MuGRPOTrainer(
        model=model,
        reward_funcs=digit_share,
        args=MuGRPOConfig(**spec),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        callbacks=[recorder],
        peft_config=peft_config,
    )
    recorder.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    if trainer.accelerator.is_main_process:
        if records_gradients:
            torch.save(recorder.gradients, f"{trainer.args.output_dir}/gradients.pt")
        else:
            torch.save(recorder.weights, f"{trainer.args.output_dir}/weights.pt")


if __name__ == "__main__":
    main()
