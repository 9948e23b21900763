"""`MuGRPOTrainer`: TRL's `GRPOTrainer` with stages in place of its generation cadence. Wiring and overrides only."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, is_peft_model
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.trainer_pt_utils import get_model_param_count
from trl import GRPOTrainer
from trl.trainer.utils import get_config_model_id

from . import preflight
from .anchors import AnchorStore, recompute_anchors
from .callbacks import RunFiles, StageCallback
from .checkpoints import WholeCheckpoints, last_whole_checkpoint
from .config import MuGRPOConfig
from .guards import UpdateGuard, save_update
from .hub import PushesOnlyTheModel
from .losses import SUM_NAMES, LossInputs, metrics_from_sums, nan_unless_finite
from .phases import is_sharded
from .policy import completion_logps, reference_logps, turn_dropout_off, use_lean_head_in_training
from .report import attach
from .rewards.functions import RewardFunctions
from .rollout.engine import Engine
from .rollout.transformers_engine import TransformersEngine
from .running import ended_with_peers, lock_folders, running
from .signals import StopRequest
from .stage.reader import StageReader
from .staging import TrainingState
from .stored import make_stage_maker
from .telemetry import Telemetry, write_summary
from .update import BatchOptions, StageBatches, UpdateBatch, check_first_ratios, m2po_update_clip, make_objective


class MuGRPOTrainer(PushesOnlyTheModel, WholeCheckpoints, GRPOTrainer):
    """
    Trains by μ-GRPO: freeze the policy as β, generate a whole stage of rollouts with it, then take `stage_updates`
    optimizer updates on that static data.

    The signature is [`~trl.GRPOTrainer`]'s; `args` is a [`MuGRPOConfig`]. `tools`, `rollout_func`,
    `environment_factory`, `quantization_config` and vision models are refused.

    Overrides of the parent:

    - `get_train_dataloader`: an unprepared loader of ticks, one per update; the rows come from the stage on disk.
    - `training_step`: makes or reopens the stage when a tick enters one, then runs the update's micro-batches.
    - `compute_loss`, `_prepare_inputs`: the objective of [`mu_grpo_trl.losses`] in training; TRL's in evaluation.
    - `_get_grad_norm`: where the guard judges the update, before its step.
    - `log`: adds the diagnostics (ratios of sums reduced over ranks) and the timers.
    - `train`, `evaluate`: timers, resume, and `summary.json` at the end.
    - `floating_point_ops`: from the tokens really forwarded.

    Example:

    ```python
    trainer = MuGRPOTrainer(
        model="Qwen/Qwen2.5-Math-7B",
        reward_funcs=MathReward(),
        args=MuGRPOConfig("runs/math", stage_updates=1024, max_steps=4096),
        train_dataset=dataset,
    )
    trainer.train()
    ```
    """

    # Typed by the libraries below for every trainer and wrapper they have:
    args: MuGRPOConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    model: Any
    model_wrapped: Any
    ref_model: Any
    optimizer: Any
    accelerator: Any
    train_dataset: Any
    processing_class: Any
    _tokenizer: Any
    _update: UpdateBatch
    _tag_names = ["trl", "mu-grpo"]
    _name = "μ-GRPO"
    _paper = {"title": "How Off-Policy Can GRPO Be? μ-GRPO for Efficient LLM Reinforcement Learning",
              "id": "2605.17570"}  # fmt: skip

    def __init__(
        self,
        model,
        reward_funcs=None,
        args: MuGRPOConfig | None = None,
        train_dataset=None,
        eval_dataset=None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
    ):
        preflight.refuse_unsupported(tools, rollout_func, environment_factory, quantization_config)
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = MuGRPOConfig(f"{name.split('/')[-1]}-mu-GRPO")
        preflight.check_run(args, eval_dataset, peft_config)
        self.run_lock = lock_folders(args)
        model_config = preflight.text_config(model, args)
        processing_class = preflight.load_tokenizer(processing_class, model, args)
        limit = preflight.context_length(args, model_config)
        train_dataset, _ = preflight.check_dataset(train_dataset, args, processing_class, limit)
        self.schedule = preflight.make_schedule(args, len(train_dataset))
        preflight.check_rewards(reward_funcs, train_dataset.column_names)
        self.rewards = RewardFunctions(
            reward_funcs,
            args.reward_weights,
            processing_classes=reward_processing_classes,
            workers=args.reward_threads,
            timeout_s=args.reward_timeout_s,
            on_error=args.reward_error,  # type: ignore[arg-type]  # checked by the config
        )
        engine = None
        if args.starts_vllm and args.process_index == 0:
            engine = preflight.make_vllm_engine(args, model_config, limit)
        use_vllm, args.use_vllm = args.use_vllm, False  # the parent would start an engine of its own
        args.generation_batch_size = args.num_generations  # what evaluation logs is kept that long
        super().__init__(
            model=model,
            reward_funcs=[*self.rewards.callables],
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
        )
        args.use_vllm, args.generation_batch_size = use_vllm, None
        preflight.refuse_aux_loss(self.model, self.aux_loss_enabled)
        self._prepare_stages(train_dataset, limit, engine)

    def _prepare_stages(self, train_dataset, context_length: int, engine: Engine | None) -> None:
        """What the parent does not know. `engine` is None where generation is in process, and on ranks that wait."""
        args = self.args
        self.log_completions = False  # the parent would write its table at every log; ours is written once a stage
        self.rewards.to(self.accelerator.device)
        self.telemetry, self.stop_request = Telemetry(preflight.devices_peak(self.accelerator)), StopRequest()
        base_model = self._base_model()
        turn_dropout_off(self.model)
        if args.lean_head and not args.entropy_coef:
            use_lean_head_in_training(base_model, self.temperature, args.cast_lm_head_to_fp32)
        if args.rollout_engine == "transformers":
            shared = None if is_sharded(self.accelerator) else self.model
            engine = TransformersEngine(
                shared, self.accelerator.device, self._tokenizer.pad_token_id, self.accelerator.autocast
            )
        self.stage_maker = make_stage_maker(
            args, self.accelerator, self.schedule, train_dataset, self._tokenizer, tuple(self.eos_token_ids),
            context_length, self.rewards, engine, TrainingState(lambda: self.model, lambda: self.model_wrapped,
            lambda: self.optimizer, self.accelerator.autocast), self.telemetry, self.stop_request,
        )  # fmt: skip
        self.stage_callback = StageCallback(self.schedule, self.telemetry, lambda: self.stage_maker.settings)
        self.guard = UpdateGuard(args, self.accelerator, self.schedule, self.stop_request)
        for callback in (self.stage_callback, self.guard, RunFiles()):
            self.add_callback(callback)
        self.tracking = attach(self)
        self._batch_options = BatchOptions.of(args, base_model, self._tokenizer.pad_token_id, self._num_parameters)
        self._objective = make_objective(args)
        self._batches: StageBatches | None = None
        self._clip: dict[str, torch.Tensor] = {}  # M2PO's bound where it is found over the whole update
        self._update_sums = self._logged_sums = self._reduced = self._no_sums()

    # The training loop

    def get_train_dataloader(self) -> DataLoader:
        """One tick per update and epoch; not prepared, so that every rank gets every tick."""
        ticks: Any = [
            {"tick": torch.tensor(tick)}
            for tick in range(max(1, len(self.train_dataset) // self.schedule.prompts_per_update))
        ]
        return DataLoader(ticks, batch_size=1, collate_fn=lambda batch: batch[0], generator=torch.Generator())

    def training_step(self, model, inputs, num_items_in_batch=None) -> torch.Tensor:
        """One update: all micro-batches of this rank. Returns the loss, `num_processes` times this rank's share."""
        number = self.state.global_step
        model.train()  # also where no micro-batch follows
        batches = self._enter_stage(self.schedule.stage_of(number))
        self._update = batches.update(number)
        self._update_sums = self._update.skipped_sums.to(self.accelerator.device)
        if number == self.schedule.first_update(batches.stage):
            self._check_first_update(model, batches.reader)
        self._clip = self._m2po_clip()
        # Without a row there is no gradient: no backward leaves every `.grad` None, so that the optimizer neither
        # decays weights nor drifts on its momentum.
        microbatches = self._update.microbatches if self._update.plan.forwarded_tokens else []
        loss = self._forward_backward(model, microbatches)
        self._reduced = self.accelerator.reduce(torch.cat([self._update_sums, self.guard.flags()]), reduction="sum")
        self._record(self._update)
        return loss

    def _forward_backward(self, model, microbatches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        total = torch.zeros((), device=self.accelerator.device)
        is_deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED  # synchronizes by itself
        syncs_each_time = is_deepspeed or not self.args.sync_once
        try:
            for number, microbatch in enumerate(microbatches, start=1):
                is_last = number == len(microbatches)
                self.accelerator.gradient_state._set_sync_gradients(is_last)
                with nullcontext() if is_last or syncs_each_time else self.accelerator.no_sync(model):
                    total += Trainer.training_step(self, model, microbatch)
        finally:
            self.accelerator.gradient_state._set_sync_gradients(True)
        return total

    def _get_grad_norm(self, model, grad_norm=None):
        norm: Any = super()._get_grad_norm(model, grad_norm)
        judged = float(norm) if self._update.plan.forwarded_tokens else 0.0  # DeepSpeed's would be the one before
        if self.guard.accepts(self.state.global_step, judged, self._reduced.tolist(), model, self._save_update):
            self._logged_sums += self._reduced[: len(SUM_NAMES)]
        return norm

    def _save_update(self, folder: Path) -> str:
        batches, inputs = self._enter_stage(self.schedule.stage_of(self.state.global_step)), self._update_inputs()
        rank = self.accelerator.process_index
        return save_update(folder, self.state.global_step, rank, batches.reader, self._update.rows, inputs)

    @torch.no_grad()
    def _update_inputs(self) -> list[LossInputs]:
        """What the loss of each micro-batch of the update is made of, without its gradient."""
        with self.compute_loss_context_manager():
            prepared = [Trainer._prepare_inputs(self, microbatch) for microbatch in self._update.microbatches]
            return [self._loss_inputs(self.model_wrapped, inputs) for inputs in prepared]

    def _prepare_inputs(self, generation_batch):
        if self.model.training:
            return Trainer._prepare_inputs(self, generation_batch)
        self.args.steps_per_generation = 1  # the parent divides by it
        try:
            return super()._prepare_inputs(generation_batch)
        finally:
            self.args.steps_per_generation = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """In training: −(W / N) · objective of one micro-batch (W ranks whose gradients are averaged, N responses)."""
        if not self.model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        loss_inputs = self._loss_inputs(model, inputs)
        outputs = self._objective(loss_inputs, **self._clip)
        self._update_sums += outputs.sums
        objective = outputs.objective / self._update.num_responses
        if self.entropy_coef:
            assert loss_inputs.entropies is not None
            entropies = torch.where(loss_inputs.completion_mask, loss_inputs.entropies, 0.0)
            objective = objective + self.entropy_coef * entropies.sum() / self._update.num_tokens
        return nan_unless_finite(-self.accelerator.num_processes * objective)

    def _loss_inputs(self, model, inputs: dict[str, torch.Tensor]) -> LossInputs:
        logps, entropies = completion_logps(model, inputs)
        ref_logps = None
        if self.beta:
            ref_logps = reference_logps(self.ref_model, model, self.accelerator.unwrap_model(model), inputs)
        return LossInputs(
            policy_logps=logps,
            behavior_logps=inputs["behavior_logps"],
            advantages=inputs["advantages"],
            completion_mask=inputs["completion_mask"],
            ref_logps=ref_logps,
            entropies=entropies,
        )

    # Stages

    def _enter_stage(self, stage: int) -> StageBatches:
        """The batches of `stage`, made from the current weights unless training already is in it."""
        if self._batches is not None and self._batches.stage == stage:
            return self._batches
        if self._batches is not None:
            self._batches.close()
        callback = self.stage_callback
        with self.telemetry.interval("other"):
            if self.state.global_step > self.schedule.first_update(stage):
                reader = self.stage_maker.reopen(stage, callback.policy_hash)
            else:
                reader = self.stage_maker.make(stage)
                self._metrics["train"].update(self.tracking.stage_made(reader))
            callback.stage, callback.policy_hash = stage, reader.manifest.policy_hash
            self._batches = StageBatches(
                reader, self.schedule, stage, self.accelerator.process_index, self.accelerator.num_processes,
                self._batch_options,
            )  # fmt: skip
            if self.args.anchor == "trainer":
                self._use_trainer_anchors(self._batches)
        return self._batches

    def _use_trainer_anchors(self, batches: StageBatches) -> None:
        first = self.schedule.first_update(batches.stage)
        if self.state.global_step == first:
            updates = range(first, first + self.schedule.updates_in(batches.stage))
            with self.telemetry.interval("optimize"):
                recompute_anchors(batches, updates, self.accelerator, self._anchor_logps)
        batches.anchors = AnchorStore(batches.reader.path)
        batches.anchors.load()

    @torch.no_grad()
    def _anchor_logps(self, microbatch: dict[str, torch.Tensor]) -> torch.Tensor:
        with self.compute_loss_context_manager():
            return completion_logps(self.model_wrapped, Trainer._prepare_inputs(self, microbatch))[0]

    @torch.no_grad()
    def _check_first_update(self, model, reader: StageReader) -> None:
        """
        Before the first step of a stage the policy still is β: its ratios must be 1 on the real data.

        Raises:
            `EngineError`: they are not, on any rank.
        """
        inputs = Trainer._prepare_inputs(self, self._update.microbatches[0])
        with self.compute_loss_context_manager():
            sums = self._objective(self._loss_inputs(model, inputs)).sums
        metrics = metrics_from_sums(self.accelerator.reduce(sums, reduction="sum").tolist())
        check_first_ratios(metrics, self.args.probe_tolerance_for(self.model.dtype), reader)

    def _m2po_clip(self) -> dict[str, torch.Tensor]:
        """M2PO's clip over the tokens of the whole update, which takes a forward pass before the first backward."""
        if self.args.objective != "m2po" or self.args.m2po_scope != "update":
            return {}
        return {"clip": m2po_update_clip(self._update_inputs(), self.accelerator, self.args.m2po_threshold)}

    # Logging, evaluation, checkpoints

    def _no_sums(self) -> torch.Tensor:
        return torch.zeros(len(SUM_NAMES), dtype=torch.float64, device=self.accelerator.device)

    def _record(self, batch: UpdateBatch) -> None:
        """Count the update's tokens and keep its rollout metrics for the next log."""
        for name, value in batch.metrics.items():
            self._metrics["train"][name].append(value)
        for name, amount in batch.counts(self._num_parameters).items():
            self.telemetry.count(name, amount)

    def log(self, logs, start_time=None) -> None:
        if self.model.training:
            sums, self._logged_sums = self._logged_sums.tolist(), self._no_sums()
            if any(sums):
                self._metrics["train"].update({name: [value] for name, value in metrics_from_sums(sums).items()})
            figures = self.telemetry.metrics() | self.guard.metrics()
            self._metrics["train"].update({name: [value] for name, value in figures.items()})
        super().log(logs, start_time)

    def floating_point_ops(self, inputs) -> int:
        """6 · parameters · tokens forwarded on all ranks by the current update."""
        return 6 * self._update.plan.forwarded_tokens * self._num_parameters

    @cached_property
    def _num_parameters(self) -> int:
        return get_model_param_count(self.model)

    def evaluate(self, *args, **kwargs):
        with self.telemetry.interval("evaluation"):
            return super().evaluate(*args, **kwargs)

    def train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None):
        """
        As the parent's. Engines end with it, and `summary.json` in `output_dir` says where the time went.

        Raises:
            `Interrupted` (a `SystemExit`), `LearningError`, `FolderInUseError`: see `docs/guarantees.md`.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_whole_checkpoint(self.args.output_path)
        checkpoint = str(resume_from_checkpoint) if resume_from_checkpoint else None
        self._batches = None
        with running(self.args, self.accelerator, self.run_lock, self.stop_request, checkpoint):
            if checkpoint:
                self.stage_callback.restore(checkpoint)
            self.stage_maker.start()
            self.telemetry.start()
            try:
                with ended_with_peers(self.accelerator, self.args.meetings_path):
                    output = super().train(checkpoint, trial, ignore_keys_for_eval)
            finally:
                self.telemetry.stop()
                self._end_engines()
            if self.accelerator.is_main_process:
                path = self.args.output_path / "summary.json"
                write_summary(path, self.telemetry, self.schedule, self.state.global_step)
            self.guard.raise_outcome()
        return output

    def _end_engines(self) -> None:
        if self._batches is not None:
            self._batches.close()
        if self.stage_maker.engine is not None:
            self.stage_maker.engine.close()

    def _base_model(self):
        return self.model.get_base_model() if is_peft_model(self.model) else self.model
