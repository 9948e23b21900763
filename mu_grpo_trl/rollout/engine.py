"""What generates rollouts: the protocol every engine implements, and the plain data that crosses it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

FinishReason = Literal["stop", "length"]


class EngineError(RuntimeError):
    """The engine cannot do its work, or does it wrongly; the message says what, why and how to mend it."""


@dataclass(frozen=True)
class SamplingParams:
    """Everything that shapes the sampling distribution; sent to the engine in full and recorded in the manifest.

    Training samples untruncated (top_p 1, top_k off, min_p 0, no penalties): anything else would make the engine's
    log-probs those of another distribution than the trainer's. Evaluation may sample greedily or with a top_p.

    Args:
        temperature (`float`): divides the logits, in the engine and in the trainer alike; 0 takes the likeliest token.
        max_tokens (`int`): upper limit on the generated tokens of one response, EOS included.
        context_length (`int`): upper limit on prompt and response together, in tokens.
        num_generations (`int`): G, responses per prompt group.
        eos_token_ids (`tuple[int, ...]`): tokens that end a response; the sampled one is kept in the response.
        stop (`tuple[str, ...]`): strings that end a response (`finish_reason` is then `"stop"`).
        seed (`int`): the stage's sampling seed; the in-process engine derives one per batch from it. vLLM gets none.
        top_p (`float`): share of the probability that the likeliest tokens, which are sampled from, reach; 1 is all.
    """

    temperature: float
    max_tokens: int
    context_length: int
    num_generations: int
    eos_token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()
    seed: int = 0
    top_p: float = 1.0

    def max_tokens_for(self, prompt_length: int) -> int:
        """Tokens a response to a prompt of `prompt_length` tokens may have (0 or less: the prompt is too long)."""
        return min(self.max_tokens, self.context_length - prompt_length)


@dataclass(frozen=True)
class GroupRequest:
    """One prompt of the stage, to be answered `num_generations` times."""

    group: int
    prompt_ids: list[int]


@dataclass(frozen=True)
class Completion:
    """One response as the engine sampled it.

    Args:
        token_ids (`np.ndarray` int32 `(T,)`): generated tokens, the sampled EOS included, T ≥ 1.
        logps (`np.ndarray` float32 `(T,)`): log-probs of `token_ids` after temperature, found by token id; NaN where
            the engine gave none (missing, null, or at its floor).
        finish_reason (`"stop"` or `"length"`): `"length"` only when the token limit cut the response.
    """

    token_ids: np.ndarray
    logps: np.ndarray
    finish_reason: FinishReason


@dataclass(frozen=True)
class GroupResult:
    """A finished prompt group: exactly `num_generations` completions, in sample order."""

    group: int
    completions: list[Completion]


class Engine(Protocol):
    """Life of an engine: `open` → (`score` → `generate`)… → `release` once a stage, `close` at the end of the run."""

    name: str
    version: str

    def open(self, policy: Path, policy_version: str) -> None:
        """Take the device and load the weights in folder `policy`; `policy_version` names them."""
        ...

    def score(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Log-probs (float32 `(len − 1,)`, at temperature 1) of tokens 1… of each sequence, by the loaded weights."""
        ...

    def generate(self, requests: Iterable[GroupRequest], sampling: SamplingParams) -> Iterator[GroupResult]:
        """Answer the requests, yielding groups as they finish, in any order."""
        ...

    def release(self) -> None:
        """Give the device back for the optimization phase."""
        ...

    def close(self) -> None:
        """End everything the engine started."""
        ...
