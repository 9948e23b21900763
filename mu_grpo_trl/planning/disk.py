"""Bytes on disk of stages, policies and checkpoints."""

from __future__ import annotations

from .architecture import Architecture

ROW_BYTES = 8 + 8 + 4 + 3 * 4 + 8 + 4 + 2 * 4 + 4 + 32
"""
Of a response beside its tokens and the rewards per function: prompt index, group, sample; three list offsets; reward
and advantage; two string offsets with "stop" and the hash of the policy. (`stage/schema.py`)
"""
REWARD_BYTES = 8
TOKEN_BYTES = 4 + 4
"""An id and a behavior log-prob."""
PROMPT_TOKEN_BYTES = 4
ADAM_NUMBERS = 2
LOG_ENTRY_BYTES, RANDOM_STATE_BYTES, OPTIONS_BYTES = 1600, 14_500, 12_000
"""Of `trainer_state.json` for each log, of `rng_state*.pth`, and of `training_args.bin` with the small files."""


def stage_rows(responses: int, prompt_tokens: float, response_tokens: float, num_rewards: int, shard_rows: int) -> int:
    """All shards of a stage. Each has its schema and paddings, about 3 KiB."""
    row = ROW_BYTES + REWARD_BYTES * num_rewards + PROMPT_TOKEN_BYTES * prompt_tokens + TOKEN_BYTES * response_tokens
    return int(responses * row) + -(-responses // shard_rows) * 3072


def policy(a: Architecture, weight_bytes: int, tokenizer_bytes: int, untied: bool) -> int:
    """A published policy: its weights, the LM head as a tensor of its own where `untied`, and the tokenizer."""
    return (a.num_parameters + (a.head_parameters if untied and a.tied else 0)) * weight_bytes + tokenizer_bytes


def checkpoint(
    a: Architecture, weight_bytes: int, trainable: int, tokenizer_bytes: int, with_optimizer: bool, masters: bool
) -> int:
    """A checkpoint: weights (of an adapter alone, if one is trained), Adam's two numbers for each, the tokenizer."""
    state = trainable * (4 * 3 if masters else weight_bytes * ADAM_NUMBERS) if with_optimizer else 0
    return trainable * weight_bytes + state + tokenizer_bytes


def run_state(log_entries: float, num_processes: int) -> int:
    """What a checkpoint holds beside tensors: one log entry after another, random states, options, the schedule."""
    return int(LOG_ENTRY_BYTES * log_entries) + RANDOM_STATE_BYTES * num_processes + OPTIONS_BYTES
