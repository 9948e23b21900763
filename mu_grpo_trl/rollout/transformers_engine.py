"""The in-process engine: batched sampling with the training model itself, or with a copy where training is sharded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations import deepspeed as hf_deepspeed

from .engine import Completion, EngineError, GroupRequest, GroupResult, SamplingParams

COMPACT_BELOW = 0.75
"""Finished rows leave the batch once fewer than this share of its rows are unfinished."""


class TransformersEngine:
    """
    Samples in the training process. Implements [`~mu_grpo_trl.rollout.engine.Engine`].

    One call of [`generate`] answers its requests as one batch, whose random numbers depend on `sampling.seed` and the
    groups of the batch alone: the same batch gives the same bits again. Prompts are prefilled once per group, not once
    per response, the cache is appended to in place, and finished rows leave the batch.

    Args:
        model (`PreTrainedModel` or None): the unwrapped training model; None to load a copy of each policy from disk
            (needed where the training model is sharded).
        device (`torch.device`): where to sample.
        pad_token_id (`int`): any id; padded positions are masked by length.
        autocast (`Callable[[], AbstractContextManager]`): the trainer's autocast, so that both compute alike.
    """

    name = "transformers"
    version = transformers.__version__

    def __init__(
        self,
        model: PreTrainedModel | None,
        device: torch.device,
        pad_token_id: int,
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self._model = model
        self._owns_model = model is None
        self._device = device
        self._pad_token_id = pad_token_id
        self._autocast = autocast

    def open(self, policy: Path, policy_version: str) -> None:
        if self._owns_model:
            self._model = load_unsharded(policy, self._device)

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        logps = sequence_logps(self._require_model(), sequences, self._device, self._autocast)
        return [sequence.numpy() for sequence in logps]

    def generate(self, requests: Iterable[GroupRequest], sampling: SamplingParams) -> Iterator[GroupResult]:
        batch = list(requests)
        if not batch:
            return
        with _evaluating(self._require_model()), _seeded(self._device, sampling.seed, batch[0].group):
            completions = self._sample(batch, sampling)
        size = sampling.num_generations
        for position, request in enumerate(batch):
            yield GroupResult(request.group, completions[position * size : (position + 1) * size])

    def release(self) -> None:
        if self._owns_model:
            self._model = None

    def close(self) -> None:
        self.release()

    def _require_model(self) -> PreTrainedModel:
        if self._model is None:
            raise EngineError("The in-process engine has no policy loaded; call `open` first.")
        return self._model

    @torch.no_grad()
    def _sample(self, batch: list[GroupRequest], sampling: SamplingParams) -> list[Completion]:
        """Sample all responses of `batch`, in group-major order."""
        model, size, device = self._require_model(), sampling.num_generations, self._device
        limits = torch.tensor([sampling.max_tokens_for(len(r.prompt_ids)) for r in batch], device=device)
        limits = limits.repeat_interleave(size)
        max_tokens = int(limits.max())
        eos = torch.tensor(sampling.eos_token_ids, device=device)
        rows = torch.arange(len(batch) * size, device=device)  # rows of the output still being generated
        tokens = torch.zeros(len(rows), max_tokens, dtype=torch.int64, device=device)
        logps = torch.zeros(len(rows), max_tokens, dtype=torch.float32, device=device)
        lengths = torch.zeros(len(rows), dtype=torch.int64, device=device)
        stopped = torch.zeros(len(rows), dtype=torch.bool, device=device)

        logits, cache, mask = self._prefill(model, batch, max_tokens)
        logits, mask = logits.repeat_interleave(size, 0), mask.repeat_interleave(size, 0)
        cache.batch_repeat_interleave(size)
        cached = (
            mask.size(1) - max_tokens
        )  # columns of the mask; what is sampled later counts as seen, but is not there
        positions = mask[:, :cached].sum(1, keepdim=True)
        alive = torch.ones_like(stopped)  # of `rows`
        for step in range(max_tokens):
            step_logps = _sampling_logps(logits.float(), sampling)
            sampled = torch.multinomial(step_logps.exp(), 1)
            tokens[rows, step] = sampled[:, 0]
            logps[rows, step] = step_logps.gather(1, sampled)[:, 0]
            ended = alive & torch.isin(sampled[:, 0], eos)
            stopped[rows[ended]] = True
            lengths[rows[alive]] = step + 1
            alive = alive & ~ended & (limits[rows] > step + 1)
            num_alive = int(alive.sum())
            if num_alive == 0:
                break
            if num_alive < COMPACT_BELOW * len(rows):
                cache.batch_select_indices(alive.nonzero()[:, 0])
                rows, mask, sampled, positions = rows[alive], mask[alive], sampled[alive], positions[alive]
                alive = alive[alive]
            with self._autocast():
                logits = model(
                    input_ids=sampled,
                    attention_mask=mask[:, : cached + step + 1],
                    position_ids=positions + step,
                    past_key_values=cache,
                    use_cache=True,
                ).logits[:, -1]
        return _completions(tokens, logps, lengths, stopped)

    def _prefill(
        self, model: PreTrainedModel, batch: list[GroupRequest], max_tokens: int
    ) -> tuple[torch.Tensor, DynamicCache, torch.Tensor]:
        """Next-token logits `(B, V)`, cache and mask `(B, P + max_tokens)` of the left-padded prompts."""
        longest = max(len(request.prompt_ids) for request in batch)
        ids = torch.full((len(batch), longest), self._pad_token_id)
        mask = torch.ones(len(batch), longest + max_tokens, dtype=torch.int64)
        for row, request in enumerate(batch):
            ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
            mask[row, : longest - len(request.prompt_ids)] = 0
        ids, mask = ids.to(self._device), mask.to(self._device)
        positions = (mask[:, :longest].cumsum(1) - 1).clamp(min=0)
        cache = _roomy_cache(model, longest + max_tokens)
        with self._autocast():
            output = model(
                input_ids=ids, attention_mask=mask[:, :longest], position_ids=positions, past_key_values=cache,
                use_cache=True, logits_to_keep=1,
            )  # fmt: skip
        return output.logits[:, -1], cache, mask


def _sampling_logps(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Log-probs `(B, V)` of the distribution that is sampled from."""
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter(-1, best, 0.0)
    logps = (logits / sampling.temperature).log_softmax(-1)
    if sampling.top_p < 1:
        ordered, order = logps.sort(-1, descending=True)
        reached = ordered.exp().cumsum(-1) - ordered.exp()  # before the token itself, so that the first one stays
        kept = ordered.masked_fill(reached >= sampling.top_p, -torch.inf)
        logps = torch.empty_like(logps).scatter(-1, order, kept).log_softmax(-1)
    return logps


class _RoomyLayer(DynamicLayer):
    """
    A growing cache layer that writes a new token in place, where its parent copies all that is cached.

    Args:
        max_length (`int`): tokens it will ever hold; its buffers double up to that.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__()
        self._max_length = max_length
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.get_seq_length()
        stop = start + key_states.size(-2)
        if self._buffers is None or self._buffers[0].size(-2) < stop:
            self._buffers = self._with_room(key_states, stop), self._with_room(value_states, stop)
            if self.keys is not None and self.values is not None and start:
                self._buffers[0][..., :start, :] = self.keys
                self._buffers[1][..., :start, :] = self.values
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._buffers
        keys[..., start:stop, :] = key_states
        values[..., start:stop, :] = value_states
        self.keys, self.values = keys[..., :stop, :], values[..., :stop, :]
        return self.keys, self.values

    def _with_room(self, states: torch.Tensor, length: int) -> torch.Tensor:
        room = max(length, min(2 * length, self._max_length))
        return states.new_empty(*states.shape[:-2], room, states.size(-1))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._buffers = None

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._buffers = None


def _roomy_cache(model: PreTrainedModel, max_length: int) -> DynamicCache:
    """The model's cache; layers of full attention are appended to in place."""
    cache = DynamicCache(config=model.config)
    cache.layers = [_RoomyLayer(max_length) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@torch.no_grad()
def sequence_logps(
    model: torch.nn.Module,
    sequences: list[list[int]],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> list[torch.Tensor]:
    """
    Log-probs (float32, at temperature 1, on CPU) of tokens 1… of each sequence, from a plain forward pass.

    Under ZeRO-3 and FSDP every rank must call it with the same sequences.
    """
    was_training = model.training
    model.eval()
    logps = []
    for sequence in sequences:
        ids = torch.tensor([sequence], device=device)
        with autocast():
            logits = model(input_ids=ids, use_cache=False).logits
        logps.append(logits[0, :-1].float().log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu())
    model.train(was_training)
    return logps


@contextmanager
def whole_models() -> Iterator[None]:
    """Inside the block `from_pretrained` loads whole models on this rank alone, whatever sharding is configured."""
    reference = hf_deepspeed._hf_deepspeed_config_weak_ref
    ram_efficient = os.environ.pop("FSDP_CPU_RAM_EFFICIENT_LOADING", None)
    hf_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        hf_deepspeed._hf_deepspeed_config_weak_ref = reference
        if ram_efficient is not None:
            os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = ram_efficient


def load_unsharded(policy: Path, device: torch.device) -> PreTrainedModel:
    """A whole, frozen copy of the policy in folder `policy` on `device`, also under ZeRO-3 and FSDP."""
    with whole_models():
        model: Any = AutoModelForCausalLM.from_pretrained(policy, dtype="auto", local_files_only=True)
    return model.to(device).eval().requires_grad_(False)


def _completions(
    tokens: torch.Tensor, logps: torch.Tensor, lengths: torch.Tensor, stopped: torch.Tensor
) -> list[Completion]:
    ids, values = tokens.to(torch.int32).cpu().numpy(), logps.cpu().numpy()
    ends, stops = lengths.tolist(), stopped.tolist()
    return [
        Completion(ids[row, :end].copy(), values[row, :end].copy(), "stop" if stop else "length")
        for row, (end, stop) in enumerate(zip(ends, stops, strict=True))
    ]


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Eval mode inside the block, the former mode after it."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def _seeded(device: torch.device, seed: int, group: int) -> Iterator[None]:
    """Torch's random state derived from (seed, group) inside the block, the former state after it."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(np.random.SeedSequence([seed, group]).generate_state(1, np.uint64)[0] >> 1))
        yield
