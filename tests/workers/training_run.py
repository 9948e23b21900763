"""
One training run as a child of a fork server (see `tests/processes.py`): alone or as one rank of several, with a fault
injected on request. What a run generates, it appends to `<output_dir>/generated.jsonl`.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from datasets import Dataset
from transformers import TrainerCallback, set_seed
from workers.train_worker import digit_share, skip_compiling_deepspeed_ops

from mu_grpo_trl import MuGRPOConfig, MuGRPOTrainer, phases
from mu_grpo_trl.losses import LossInputs
from mu_grpo_trl.phases import is_zero3, merged_weights
from mu_grpo_trl.rollout import fill
from mu_grpo_trl.rollout.transformers_engine import TransformersEngine
from mu_grpo_trl.stage.writer import StageWriter

GENERATED = "generated.jsonl"


class CountedEngine:
    """Makes `TransformersEngine.generate` note what it was asked for, and fail or die at a chosen call of a stage."""

    def __init__(self, output_dir: str, fault: Callable[[], None] | None, at_call: int) -> None:
        self._path = Path(output_dir) / GENERATED
        self._fault, self._at_call, self._calls = fault, at_call, 0
        self._generate = TransformersEngine.generate

    def __enter__(self) -> None:
        counted = self

        def generate(engine: TransformersEngine, requests, sampling):
            counted._calls += 1
            if counted._fault is not None and counted._calls == counted._at_call:
                counted._fault()
            requests = list(requests)
            with counted._path.open("a") as file:
                file.write(json.dumps([sampling.seed, [request.group for request in requests]]) + "\n")
            return counted._generate(engine, requests, sampling)

        TransformersEngine.generate = generate

    def __exit__(self, *_) -> None:
        TransformersEngine.generate = self._generate


class FaultAtUpdate(TrainerCallback):
    """Calls `fault` before or after the optimizer step of one update."""

    def __init__(self, fault: Callable[[], None], update: int, event: str) -> None:
        self._fault, self._update, self._event = fault, update, event

    def on_step_begin(self, args, state, control, **kwargs):
        if self._event == "begin" and state.global_step == self._update:
            self._fault()

    def on_optimizer_step(self, args, state, control, **kwargs):
        if self._event == "step" and state.global_step == self._update:
            self._fault()

    def on_save(self, args, state, control, **kwargs):
        if self._event == "saved" and state.global_step == self._update:
            self._fault()


class Poison:
    """Makes a log-prob of the policy NaN in the first micro-batch of some updates."""

    def __init__(self, trainer: MuGRPOTrainer, updates: set[int], rank: int = 0) -> None:
        self._trainer, self._updates = trainer, updates
        self._mine = trainer.accelerator.process_index == rank
        self._loss_inputs = trainer._loss_inputs
        trainer._loss_inputs = self

    def __call__(self, model: Any, inputs: dict[str, torch.Tensor]) -> LossInputs:
        made = self._loss_inputs(model, inputs)
        first = self._trainer._update.microbatches[0]["input_ids"]
        if self._mine and self._trainer.state.global_step in self._updates and torch.equal(inputs["input_ids"], first):
            made.policy_logps[0, 0] *= math.nan
        return made


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ZeroDivisionError("injected on this rank")


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_twice() -> None:
    interrupt()
    interrupt()


FAULTS = {
    "die": die,
    "fail": fail,
    "terminate": terminate,
    "interrupt": interrupt,
    "interrupt_twice": interrupt_twice,
}


def calls_fault_at(function: Callable[..., Any], fault: Callable[[], None], call: int) -> Callable[..., Any]:
    """`function`, but with `fault` before its `call`-th call."""
    calls = 0

    def wrapped(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            fault()
        return function(*args, **kwargs)

    return wrapped


def make_trainer(spec: dict[str, Any], reward: Any = digit_share, **arguments: Any) -> MuGRPOTrainer:
    """A trainer on the prompts and the model of `spec`; what else `spec` holds are options of the config."""
    options = dict(spec)
    prompts, model = options.pop("prompts"), options.pop("model")
    lora = options.pop("lora", None)
    if lora is not None:
        from peft import LoraConfig

        arguments["peft_config"] = LoraConfig(task_type="CAUSAL_LM", **lora)
    set_seed(0)  # LoRA's initial values
    data = prompts if isinstance(prompts, dict) else {"prompt": prompts}
    return MuGRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=MuGRPOConfig(**options),
        train_dataset=Dataset.from_dict(data),
        **arguments,
    )


def whole_weights(trainer: MuGRPOTrainer) -> dict[str, torch.Tensor]:
    """The merged policy, gathered; collective."""
    tensors = merged_weights(trainer.model, is_zero3(trainer.accelerator))
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}


def train(spec: dict[str, Any], resume: Any = None, fault: dict[str, Any] | None = None) -> MuGRPOTrainer:
    """
    Train; `fault` is `{"kind": name in FAULTS, "at": place, "number": n, "rank": r}` with a place of generate, append,
    complete, publish, checkpoint (calls counted from 1), begin, step, saved (updates), or reward. The kind
    "poison" needs only an update and a rank: see [`Poison`].
    """
    os.makedirs(spec["output_dir"], exist_ok=True)
    rank = int(os.environ.get("RANK", 0))
    callbacks, at, reward = [], None, digit_share
    act = None
    if fault is not None and fault.get("rank", 0) == rank:
        act, at, number = FAULTS.get(fault["kind"]), fault.get("at"), fault["number"]
        if at in ("begin", "step", "saved"):
            callbacks.append(FaultAtUpdate(act, number, at))
        elif at in ("append", "complete"):
            setattr(StageWriter, at, calls_fault_at(getattr(StageWriter, at), act, number))
        elif at == "publish":
            phases.save_file = calls_fault_at(phases.save_file, act, number)
        elif at == "checkpoint":
            MuGRPOTrainer._save_rng_state = calls_fault_at(MuGRPOTrainer._save_rng_state, act, number)
        elif at == "reward":
            reward = calls_fault_at(digit_share, act, number)
            reward.__name__ = "digit_share"
    fill.FLUSH_GROUPS = 4
    at_call = fault["number"] if at == "generate" and fault is not None else 0
    with CountedEngine(spec["output_dir"], act if at == "generate" else None, at_call):
        trainer = make_trainer(spec, reward, callbacks=callbacks)
        if fault is not None and fault["kind"] == "poison":
            Poison(trainer, {fault["number"]}, fault["rank"])
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def child(env: dict[str, str], log: str, spec: dict[str, Any], resume: Any, fault: dict[str, Any] | None) -> None:
    """Body of a child process; the main rank leaves the final weights in `<output_dir>/final.pt`."""
    os.environ.update(env)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # As at a prompt: what a shell starts in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    gc.freeze()  # what the fork server imported need not be searched for garbage
    try:
        skip_compiling_deepspeed_ops()
        trainer = train(spec, resume, fault)
        weights = whole_weights(trainer)
        trainer.save_model(f"{spec['output_dir']}/saved")
        if trainer.accelerator.is_main_process:
            torch.save(weights, f"{spec['output_dir']}/final.pt")
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if (wandb := sys.modules.get("wandb")) is not None and wandb.run is not None:
            wandb.finish()  # a child of `multiprocessing` runs no exit handlers
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error, SystemExit) else 1)
