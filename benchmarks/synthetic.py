"""Made-up rollouts with the lengths and advantages of real ones: what the benchmarks measure on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mu_grpo_trl.stage import GroupRollout, Manifest, ResponseRow

VOCAB_SIZE = 32_000
PROMPT_TOKENS = (40, 200)


def long_tailed_lengths(
    rng: np.random.Generator, shape: int | tuple[int, ...], mean: float = 600, sigma: float = 0.9, cut: int = 8192
) -> np.ndarray:
    """Response lengths in tokens, int64 of `shape`: log-normal with `mean` before the cut, `sigma` of the log; what is
    longer than `cut` is cut there, as by a token limit."""
    return np.clip(np.rint(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, shape)), 1, cut).astype(np.int64)


def group_advantages(
    rng: np.random.Generator, num_groups: int, num_generations: int, zero_share: float = 0.35
) -> np.ndarray:
    """Advantages of 0/1 rewards, float32 `(num_groups, num_generations)`; in `zero_share` of the groups all are 0."""
    correct = rng.integers(1, num_generations, num_groups)
    rewards = rng.permuted(np.arange(num_generations) < correct[:, None], axis=1).astype(np.float64)
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / rewards.std(axis=1, ddof=1, keepdims=True)
    advantages[rng.permutation(num_groups) < round(zero_share * num_groups)] = 0.0
    return advantages.astype(np.float32)


def make_manifest(num_updates: int, prompts_per_update: int, num_generations: int) -> Manifest:
    """The manifest of a made-up stage."""
    return Manifest(
        stage=0,
        seed=0,
        num_updates=num_updates,
        num_generations=num_generations,
        prompts_per_update=prompts_per_update,
        prompt_indices=tuple(range(num_updates * prompts_per_update)),
        dataset_hash="synthetic",
        tokenizer_hash="synthetic",
        sampling={"temperature": 1.0},
        engine="synthetic",
        engine_version="0",
        policy_hash="synthetic",
        policy_version="step-0",
        published_step=0,
        run_id="benchmark",
        reward_names=("accuracy",),
    )


def make_groups(manifest: Manifest, mean_length: float, seed: int = 0) -> Iterator[GroupRollout]:
    """All groups of `manifest`'s stage, one at a time, with responses of `mean_length` tokens on average."""
    rng = np.random.default_rng(seed)
    size = manifest.num_generations
    for group in range(manifest.num_groups):
        advantages = group_advantages(rng, 1, size, zero_share=float(rng.random() < 0.35))[0]
        yield GroupRollout(
            group=group,
            prompt_index=manifest.prompt_indices[group],
            prompt_ids=rng.integers(0, VOCAB_SIZE, rng.integers(*PROMPT_TOKENS), dtype=np.int32),
            policy_version=manifest.policy_version,
            responses=[
                _make_row(rng, int(length), float(advantage))
                for length, advantage in zip(long_tailed_lengths(rng, size, mean_length), advantages, strict=True)
            ],
        )


def _make_row(rng: np.random.Generator, length: int, advantage: float) -> ResponseRow:
    reward = float(advantage > 0)
    return ResponseRow(
        completion_ids=rng.integers(0, VOCAB_SIZE, length, dtype=np.int32),
        behavior_logps=-rng.standard_exponential(length, dtype=np.float32),
        rewards={"accuracy": reward},
        reward=reward,
        advantage=advantage,
        finish_reason="stop",
    )
