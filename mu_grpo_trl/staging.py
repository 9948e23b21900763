"""Make a stage: publish β, hand the device to the engine, probe it, fill the stage, take the device back."""

from __future__ import annotations

import logging
import os
import random
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .config import MuGRPOConfig
from .data import dataset_hash, tokenize_prompts, tokenizer_hash
from .losses import group_advantages
from .phases import WEIGHT_FILES, DeviceHandover, check_publishable, publish
from .ranks import broadcast_string, check_shared_folder
from .replicas import replicate
from .rewards.functions import RewardFunctions
from .rewards.math import MathReward, gold_text
from .rollout.engine import Engine, EngineError, GroupRequest, GroupResult, SamplingParams
from .rollout.fill import FillProgress, fill_stage, remove_unscored
from .rollout.rendezvous import MEETING_PREFIX, Rendezvous
from .rollout.transformers_engine import sequence_logps
from .schedule import Schedule
from .signals import Interrupted, StopRequest
from .stage.reader import StageReader
from .stage.schema import (
    GROUPS_NAME,
    MANIFEST_NAME,
    GroupRollout,
    Manifest,
    ManifestLostError,
    ResponseRow,
    StageError,
    read_manifest,
)
from .stage.writer import StageWriter
from .telemetry import Telemetry, in_words

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

RUN_ID_FILE = "run_id"
NUM_PROBES = 4
PROBE_TOKENS = 64
NO_SIGNAL_SHARE = 0.95
IN_PROCESS_ROWS = 256


@dataclass
class TrainingState:
    """What the trainer lends while a stage is made: the models change identity when training starts."""

    model: Callable[[], Any]
    wrapped_model: Callable[[], torch.nn.Module]
    optimizer: Callable[[], torch.optim.Optimizer | None]
    autocast: Callable[[], AbstractContextManager[Any]]


class StageMaker:
    """
    Turns the current weights into a complete stage on disk. Every rank calls [`make`] or [`reopen`] together.

    Args:
        config (`MuGRPOConfig`): the run's options.
        accelerator (`Accelerator`): the trainer's.
        schedule (`Schedule`): which prompts a stage holds.
        dataset (`datasets.Dataset`): prompts, and the columns reward functions read.
        tokenizer (`PreTrainedTokenizerBase`): of the policy.
        eos_token_ids (`tuple[int, ...]`): tokens that end a response.
        context_length (`int`): limit on prompt and response together, in tokens.
        rewards (`RewardFunctions`): what scores the responses.
        engine (`Engine` or None): what generates; None on ranks that only wait.
        training (`TrainingState`): the trainer's model and optimizer.
        telemetry (`Telemetry`): charged with each part.
        stop (`StopRequest`): a signal that ends the run interrupts the rollout.
    """

    def __init__(
        self,
        config: MuGRPOConfig,
        accelerator: Accelerator,
        schedule: Schedule,
        dataset: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: tuple[int, ...],
        context_length: int,
        rewards: RewardFunctions,
        engine: Engine | None,
        training: TrainingState,
        telemetry: Telemetry,
        stop: StopRequest,
    ) -> None:
        self._config = config
        self._accelerator = accelerator
        self._schedule = schedule
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._context_length = context_length
        self._rewards = rewards
        self.engine = engine
        self._training = training
        self._telemetry = telemetry
        self._stop = stop
        self._handover = DeviceHandover(accelerator, config.offload)
        check_publishable(training.model())
        for function in rewards.callables:
            if isinstance(function, MathReward):
                column = function.answer_column
                for row, answer in enumerate(dataset[column] if column in dataset.column_names else ()):
                    gold_text(answer, row, column)

    @property
    def settings(self) -> dict[str, Any]:
        """All that decides what data the run trains on, by name. Checkpoints keep it: it may not change on resume."""
        config, schedule = self._config, self._schedule
        sampling = asdict(self._sampling(0))
        del sampling["seed"]
        return {
            "seed": schedule.seed,
            "prompts_per_update": schedule.prompts_per_update,
            "stage_updates": schedule.stage_updates,
            "shuffle_dataset": schedule.shuffle,
            "shuffle_stage": schedule.shuffle_stage,
            "hash of the dataset": self._hashes[0],
            "hash of the tokenizer": self._hashes[1],
            **sampling,
            "anchor": config.anchor,
            "reward_funcs": self._rewards.names,
            **self._scoring,
        }

    @property
    def _scoring(self) -> dict[str, Any]:
        """What turns the rewards of a response into its advantage."""
        config = self._config
        return {
            "reward_weights": config.reward_weights,
            "scale_rewards": config.scale_rewards,
            "advantage_eps": config.advantage_eps,
        }

    def start(self) -> None:
        """
        Check that all ranks see the stages folder, and remove what a killed run left there. All ranks call it.

        Raises:
            `OSError`: the folder cannot be written, or is not shared (on all ranks).
        """
        check_shared_folder(self._accelerator, self._config.meetings_path)
        if self._accelerator.is_main_process:
            for leftover in self._config.meetings_path.glob(f"{MEETING_PREFIX}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        self._accelerator.wait_for_everyone()

    def folder(self, stage: int) -> Path:
        """Folder of a stage."""
        return self._config.stages_path / f"stage-{stage:03d}"

    def make(self, stage: int) -> StageReader:
        """
        Publish the current weights as β of `stage` and return the complete stage, generating what is missing of it.

        Raises:
            `EngineError`, `StageError`, `RewardError`: on the rank where it happened.
            `PeerError`: on the others.
            `Interrupted`: on all ranks, when a signal asked one of them to end the run.
        """
        with _isolated_rng(self._schedule.stage_seed(stage)):
            folder = self.folder(stage)
            with self._telemetry.interval("sync"):
                self._drop_old(stage)
                model = self._training.model()
                policy_hash = publish(
                    self._accelerator, model, self._tokenizer, folder / "policy", untie=self._needs_untied_head
                )
                probes = self._probe_sequences(stage)
                expected = sequence_logps(model, probes, self._accelerator.device, self._training.autocast)
            if not self._is_complete(stage, policy_hash):
                with self._telemetry.interval("handover"):
                    self._handover.offload(self._training.wrapped_model(), self._training.optimizer())
                self._generate(stage, policy_hash, probes, expected)
                with self._telemetry.interval("handover"):
                    self._handover.restore(self._training.wrapped_model(), self._training.optimizer())
            self._replicate(stage)
            reader = StageReader(folder)
            self._check_signal(reader)
            return reader

    def _check_signal(self, reader: StageReader) -> None:
        """Warn, or stop if `no_signal` says so, before updates are spent on a stage with hardly anything to learn."""
        summary = reader.summary()
        if max(summary.zero_advantage_group_share, summary.truncated_share) < NO_SIGNAL_SHARE:
            return
        message = (
            f"{reader.path}: {summary.zero_advantage_group_share:.1%} of its groups have equal rewards and "
            f"{summary.truncated_share:.1%} of its responses were cut (mean reward {summary.mean_reward:.4g}, "
            f"{summary.unscorable_responses} unscorable): {reader.manifest.num_updates} updates on it would learn "
            "next to nothing. Check the reward function, the prompts' difficulty and `max_completion_length`."
        )
        if self._config.no_signal == "stop":
            raise StageError(f"{message} The stage is kept; `no_signal: warn` trains on it all the same.")
        if self._accelerator.is_main_process:
            logger.warning(message)

    def reopen(self, stage: int, policy_hash: str) -> StageReader:
        """
        The complete stage that a checkpoint was taken in.

        Raises:
            `StageError`: it is not there, not complete, or was generated by other weights.
        """
        self._replicate(stage)
        return self._together(lambda _: self._verified(stage, policy_hash))

    def _replicate(self, stage: int) -> None:
        if self._config.replicate_stages:
            with self._telemetry.interval("sync"):
                replicate(self._accelerator, self.folder(stage))

    def _verified(self, stage: int, policy_hash: str) -> StageReader:
        """The stage, its bytes and settings checked on the main process."""
        folder, main = self.folder(stage), self._accelerator.is_main_process
        way_out = "Resume from a checkpoint at a stage boundary instead: its stage is generated anew."
        try:
            reader = StageReader(folder, verify=main)
        except StageError as error:
            raise StageError(
                f"The checkpoint lies within stage {stage}, which cannot be read: {error} {way_out}"
            ) from error
        manifest = reader.manifest
        if manifest.policy_hash != policy_hash:
            raise StageError(
                f"The checkpoint continues a stage generated by policy {policy_hash}, but {folder} holds one by "
                f"{manifest.policy_hash}. {way_out}"
            )
        if main:
            expected = replace(
                self._manifest(stage, policy_hash), engine=manifest.engine, engine_version=manifest.engine_version
            )
            difference = manifest.first_difference(expected)
            if difference is not None:
                raise StageError(
                    f"{folder} was generated with other settings: {difference} (stored → now). Restore them, or "
                    "remove the folder and resume from a checkpoint at its stage's beginning."
                )
        return reader

    @property
    def _needs_untied_head(self) -> bool:
        return self._config.rollout_engine == "vllm" and not torch.cuda.is_available()

    def _is_complete(self, stage: int, policy_hash: str) -> bool:
        """Whether the stage was already filled by these very weights; the main process decides."""

        def decide(_: Rendezvous) -> str:
            folder = self.folder(stage)
            if not self._accelerator.is_main_process or not (folder / MANIFEST_NAME).exists():
                return ""
            try:
                manifest = read_manifest(folder)
            except ManifestLostError:
                return ""  # it was cut: the writer adopts those shards that are this stage's
            if manifest.policy_hash != policy_hash:
                logger.warning(
                    "%s was generated by policy %s, but the weights are now %s: its rows are dropped.",
                    folder, manifest.policy_hash, policy_hash,
                )  # fmt: skip
                (folder / MANIFEST_NAME).unlink()
                shutil.rmtree(folder / GROUPS_NAME, ignore_errors=True)
                remove_unscored(folder)
                return ""
            if manifest.status == "complete":
                StageWriter.resume(folder, self._manifest(stage, policy_hash)).close()
            return read_manifest(folder).status

        return broadcast_string(self._accelerator, self._together(decide)) == "complete"

    def _generate(self, stage: int, policy_hash: str, probes: list[list[int]], expected: list[torch.Tensor]) -> None:
        main = self._accelerator.is_main_process
        folder = self.folder(stage)
        manifest = self._manifest(stage, policy_hash) if self.engine is not None else None
        writer = self._together(lambda _: StageWriter.resume(folder, manifest) if main and manifest else None)
        if manifest is not None and not main:
            writer = StageWriter.join(folder, manifest, self._accelerator.process_index)
        try:
            self._together(lambda meeting: self._run_engine(stage, writer, probes, expected, meeting))
            self._together(lambda _: writer.complete() if main and writer else None)
            if main:
                remove_unscored(folder)
        finally:
            if writer is not None:
                writer.close()

    def _together(self, work: Callable[[Rendezvous], Result]) -> Result:
        """Run `work` on every rank, and return once all have finished it; one that fails stops them all."""
        accelerator = self._accelerator
        meeting = Rendezvous(
            self._config.meetings_path / f"{MEETING_PREFIX}{broadcast_string(accelerator, uuid.uuid4().hex)}",
            accelerator.process_index,
            accelerator.num_processes,
        )
        with meeting.work():
            result = work(meeting)
        with self._telemetry.interval("rollout" if self.engine is None else "other"):
            self._wait(meeting)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            meeting.remove()
        return result

    def _wait(self, meeting: Rendezvous) -> None:
        try:
            with self._stop.interruptible():
                meeting.wait()
        except Interrupted as interrupted:
            meeting.tell(interrupted)
            raise

    def _run_engine(
        self,
        stage: int,
        writer: StageWriter | None,
        probes: list[list[int]],
        expected: list[torch.Tensor],
        meeting: Rendezvous,
    ) -> None:
        """Let this rank's engine, if it has one, fill its share of the stage."""
        engine = self.engine
        if engine is None or writer is None:
            return
        policy_hash = writer.manifest.policy_hash
        with self._telemetry.interval("sync"), self._stop.interruptible():
            engine.open(self.folder(stage) / "policy", policy_hash)
            tolerance = self._config.probe_tolerance_for(self._training.model().dtype)
            compare_probes(engine, probes, expected, tolerance)
        indices = self._schedule.prompt_indices(stage)
        prompt_ids = self._prompt_ids(indices)
        visible = self._accelerator.is_main_process and not self._config.disable_tqdm
        num_done, num_ranks = len(writer.done_groups), self._num_filling_ranks
        before = self._schedule.first_update(stage) * self._schedule.prompts_per_update + num_done

        def run_ends(added: int) -> str:
            added *= num_ranks  # the others keep pace
            first = self._schedule.first_update(stage)
            return in_words(self._telemetry.remaining_s(self._schedule, first, before + added, added))

        progress = FillProgress(stage, len(indices), num_done, visible, run_ends)
        with self._telemetry.interval("rollout"):
            fill_stage(
                engine,
                writer,
                self._batches(prompt_ids, writer.done_groups),
                self._sampling(stage),
                lambda result: self._score(result, int(indices[result.group]), prompt_ids[result.group], policy_hash),
                progress,
                score_threads=self._config.reward_threads,
                num_ranks=num_ranks,
                check=meeting.check,
                waiting=lambda: self._telemetry.interval("reward"),
                interruptible=self._stop.interruptible,
            )
        progress.close()
        self._telemetry.count("generated_tokens", progress.generated_tokens)
        self._telemetry.count("generated_groups", len(indices) - num_done)
        with self._telemetry.interval("handover"):
            engine.release()

    @property
    def _num_filling_ranks(self) -> int:
        return 1 if self._config.rollout_engine == "vllm" else self._accelerator.num_processes

    def _manifest(self, stage: int, policy_hash: str) -> Manifest:
        assert self.engine is not None
        return Manifest(
            stage=stage,
            seed=self._schedule.seed,
            num_updates=self._schedule.updates_in(stage),
            num_generations=self._config.num_generations or 0,
            prompts_per_update=self._schedule.prompts_per_update,
            prompt_indices=tuple(self._schedule.prompt_indices(stage).tolist()),
            dataset_hash=self._hashes[0],
            tokenizer_hash=self._hashes[1],
            sampling=asdict(self._sampling(stage)),
            engine=self.engine.name,
            engine_version=self.engine.version,
            policy_hash=policy_hash,
            policy_version=policy_hash,
            published_step=self._schedule.first_update(stage),
            run_id=self._run_id(),
            reward_names=tuple(self._rewards.names),
            scoring=self._scoring,
        )

    def _run_id(self) -> str:
        """Name of the run that owns the stages folder, kept there from its first start on."""
        path = self._config.stages_path / RUN_ID_FILE
        if not path.exists():
            temporary = path.with_suffix(f".{uuid.uuid4().hex}")
            temporary.write_text(uuid.uuid4().hex)
            with suppress(FileExistsError):
                os.link(temporary, path)
            temporary.unlink()
        return path.read_text()

    @cached_property
    def _hashes(self) -> tuple[str, str]:
        return dataset_hash(self._dataset), tokenizer_hash(self._tokenizer)

    def _sampling(self, stage: int) -> SamplingParams:
        config = self._config
        return SamplingParams(
            temperature=config.temperature,
            max_tokens=config.max_completion_length or 0,
            context_length=self._context_length,
            num_generations=config.num_generations or 0,
            eos_token_ids=self._eos_token_ids,
            stop=config.stop_strings,
            seed=self._schedule.stage_seed(stage),
        )

    def _prompt_ids(self, indices: np.ndarray) -> list[np.ndarray]:
        prompts = self._dataset.select(indices)["prompt"]
        ids: list[np.ndarray] = []
        for start in range(0, len(prompts), 1000):
            chunk = tokenize_prompts(prompts[start : start + 1000], self._tokenizer, self._config.template_kwargs)
            ids.extend(np.asarray(prompt, dtype=np.int32) for prompt in chunk)
        return ids

    def _batches(
        self, prompt_ids: list[np.ndarray], done: set[int]
    ) -> Iterator[list[GroupRequest] | Iterator[GroupRequest]]:
        """What this rank asks the engine for: one stream for servers; in process, fixed batches shared out by rank."""

        def request(group: int) -> GroupRequest:
            return GroupRequest(group, prompt_ids[group].tolist())

        if self._config.rollout_engine == "vllm":
            yield (request(group) for group in range(len(prompt_ids)) if group not in done)
            return
        batches = in_process_batches(prompt_ids, self._config.num_generations or 1, self._config.rollout_concurrency)
        for batch in batches[self._accelerator.process_index :: self._accelerator.num_processes]:
            if not done.issuperset(batch):
                yield [request(group) for group in batch]

    def _score(
        self, result: GroupResult, prompt_index: int, prompt_ids: np.ndarray, policy_version: str
    ) -> GroupRollout:
        config, example, size = self._config, self._dataset[prompt_index], len(result.completions)
        prompt = example["prompt"]
        ids = [completion.token_ids.tolist() for completion in result.completions]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        completions = (
            texts if isinstance(prompt, str) else [[{"role": "assistant", "content": text}] for text in texts]
        )
        columns = {name: [value] * size for name, value in example.items() if name != "prompt"}
        per_function = self._rewards.score(
            prompts=[prompt] * size, completions=completions, completion_ids=ids, columns=columns
        )
        rewards = self._rewards.combine(per_function)
        advantages = group_advantages(
            torch.from_numpy(rewards), config.advantage_eps, scale=config.scale_rewards == "group"
        ).tolist()
        rows = [
            ResponseRow(
                completion_ids=completion.token_ids,
                behavior_logps=completion.logps,
                rewards={name: float(values[i]) for name, values in per_function.items()},
                reward=float(rewards[i]),
                advantage=advantages[i],
                finish_reason=completion.finish_reason,
            )
            for i, completion in enumerate(result.completions)
        ]
        return GroupRollout(result.group, prompt_index, prompt_ids, policy_version, rows)

    def _probe_sequences(self, stage: int) -> list[list[int]]:
        """A few prompts of the stage, cut short: fixed by the schedule, the same on every rank."""
        indices = self._schedule.prompt_indices(stage)[:NUM_PROBES]
        return probe_sequences(self._prompt_ids(indices))

    def _drop_old(self, stage: int) -> None:
        """Delete what `keep_policies` (weights alone) and `keep_stages` do not keep of earlier stages."""
        config, accelerator = self._config, self._accelerator
        if not (accelerator.is_main_process or (config.replicate_stages and accelerator.is_local_main_process)):
            return
        for old in range(stage):
            folder = self.folder(old)
            if config.keep_policies is not None and old <= stage - max(config.keep_policies, 1):
                for weights in (folder / "policy").glob(WEIGHT_FILES):
                    weights.unlink(missing_ok=True)
            if config.keep_stages is not None and old < stage - config.keep_stages:
                shutil.rmtree(folder, ignore_errors=True)


def in_process_batches(
    prompt_ids: Sequence[Sequence[int] | np.ndarray], num_generations: int, concurrency: int | None
) -> list[list[int]]:
    """
    Positions of the prompts that one in-process batch answers together: of like length, `concurrency` rows (256 by
    default). Fixed by the prompts alone, since the random numbers of a batch depend on all of it.
    """
    size = max(1, (concurrency or IN_PROCESS_ROWS) // num_generations)
    order = np.argsort([len(ids) for ids in prompt_ids], kind="stable").tolist()
    return [order[start : start + size] for start in range(0, len(order), size)]


def probe_sequences(prompt_ids: Sequence[np.ndarray]) -> list[list[int]]:
    """The first few prompts, cut short, to have scored by the engine and by the policy itself."""
    return [ids[:PROBE_TOKENS].tolist() for ids in prompt_ids[:NUM_PROBES] if len(ids) > 1]


def compare_probes(engine: Engine, probes: list[list[int]], expected: list[torch.Tensor], tolerance: float) -> None:
    """
    Check that the engine has the weights it should have, by the log-probs of a few sequences.

    Args:
        engine (`Engine`): open.
        probes (`list[list[int]]`): token ids, ragged.
        expected (`list[torch.Tensor]` float32 `(len − 1,)` each): log-probs of tokens 1… by the policy itself.
        tolerance (`float`): largest mean absolute difference, in nats.

    Raises:
        `EngineError`: they differ by more, or `expected` is not finite.
    """
    if not all(logps.isfinite().all() for logps in expected):
        raise EngineError(
            "The policy's own log-probs of the probe tokens are not finite: its weights are damaged. Load others, "
            "or resume from an earlier checkpoint."
        )
    scored = engine.score(probes)
    differences = np.concatenate(
        [np.abs(ours.numpy() - theirs) for ours, theirs in zip(expected, scored, strict=True)] or [np.zeros(1)]
    )
    mean, worst = float(differences.mean()), float(differences.max())
    if not mean <= tolerance:
        raise EngineError(
            f"The engine {engine.name} and the trainer disagree about {len(differences)} probe tokens by "
            f"{mean:.4g} nats on average ({worst:.4g} at worst), above `probe_tolerance` {tolerance:g}: "
            "the engine serves other or stale weights, another tokenizer or temperature, or a stale prefix cache. "
            "Nothing was generated. Restart the server on this policy, or raise `probe_tolerance` if they differ "
            "only numerically (half precision, quantization)."
        )


@contextmanager
def _isolated_rng(seed: int) -> Iterator[None]:
    """Random states seeded by `seed` inside the block, the former ones after it."""
    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)
