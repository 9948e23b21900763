"""What is asked of vLLM's `/v1/completions` and what is accepted as its answer; pure functions, no network.

Of vLLM's two token-in-token-out interfaces this one is used: it is there without a flag in every supported version,
and gives the sampled tokens' log-probs as a plain list of floats (`/inference/v1/generate` has an object per token).
"""

from __future__ import annotations

import json
from typing import Any, TypeVar

import numpy as np

from .engine import Completion, EngineError, FinishReason, GroupRequest, SamplingParams

T = TypeVar("T")

FLOOR_LOGP = -1000.0
"""vLLM writes −9999 for −inf; nothing at or below this is a measured log-prob."""

_STRANGER = "Is it vLLM at this address?"
_ROUNDING = 1e-3
_NEUTRAL: dict[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "watermarking": False,
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "add_special_tokens": False,
    "echo": False,
    "stream": False,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
"""Sent with every request, so that no default of the server or of `generation_config.json` matters. `ignore_eos`
leaves the server's own EOS ids out: what ends a response is `stop_token_ids`, the trainer's set and no other."""


class UnusableAnswer(Exception):
    """An answer that the server did not finish; the group is asked again."""


def generation_body(request: GroupRequest, sampling: SamplingParams, model: str, cache_salt: str) -> dict[str, Any]:
    """
    The request for one prompt group.

    `cache_salt` names the weights: blocks of the prefix cache that were computed with others are never reused. There
    is no seed: a seeded request stops vLLM's CPU build when its prompt is prefilled in chunks, and slows its older
    sampler.

    Raises:
        [`EngineError`]: when the prompt leaves no room for a single token.
    """
    max_tokens = sampling.max_tokens_for(len(request.prompt_ids))
    if max_tokens < 1:
        raise EngineError(
            f"The prompt of group {request.group} has {len(request.prompt_ids)} tokens, which leaves none for the "
            f"response within a context of {sampling.context_length}. Drop it (`overlong_prompts: drop`) or raise "
            "`max_context_length`."
        )
    return _NEUTRAL | {
        "model": model,
        "prompt": request.prompt_ids,
        "n": sampling.num_generations,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": max_tokens,
        "stop_token_ids": list(sampling.eos_token_ids),
        "stop": list(sampling.stop),
        "logprobs": 0,
        "cache_salt": cache_salt,
    }


def scoring_body(sequence: list[int], model: str, cache_salt: str) -> dict[str, Any]:
    """The request for the log-probs of the tokens of `sequence` itself."""
    scoring = {"prompt": sequence, "n": 1, "temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0}
    return _NEUTRAL | scoring | {"model": model, "cache_salt": cache_salt}


def ranking_body(prompt_ids: list[int], temperature: float, model: str) -> dict[str, Any]:
    """The request for the two likeliest next tokens at `temperature`."""
    ranking = {"prompt": prompt_ids, "n": 1, "temperature": temperature, "max_tokens": 1, "logprobs": 2}
    return _NEUTRAL | ranking | {"model": model, "cache_salt": "check"}


def parse_generation(
    raw: bytes, request: GroupRequest, sampling: SamplingParams, model: str, vocab_size: int
) -> list[Completion]:
    """
    The completions of one group, in sample order.

    Raises:
        [`EngineError`]: when the answer contradicts the request: another model, other prompt ids, too few choices, ids
            and log-probs that do not belong together, an end that was not asked for, or no usable log-prob at all.
        [`UnusableAnswer`]: when the server gave up before the end.
    """
    where = f"group {request.group}"
    answer = _loads(raw, where)
    choices = sorted(answer["choices"], key=lambda choice: _field(choice, "index", int, where))
    if answer.get("model") != model:
        raise EngineError(f"{where}: asked model {model!r}, but {answer.get('model')!r} answered.")
    if [choice["index"] for choice in choices] != list(range(sampling.num_generations)):
        raise EngineError(
            f"{where}: asked for {sampling.num_generations} responses, got those of index "
            f"{[choice['index'] for choice in choices]}."
        )
    echoed = choices[0].get("prompt_token_ids")
    if echoed is not None and echoed != request.prompt_ids:
        raise EngineError(f"{where}: the server read other token ids than it was sent: {str(echoed)[:200]}.")
    return [_parse_choice(choice, request, sampling, vocab_size) for choice in choices]


def parse_scores(raw: bytes, sequence: list[int]) -> np.ndarray:
    """Log-probs (float32 `(len − 1,)`, temperature 1) of tokens 1… of `sequence`, found by id; NaN where missing."""
    where = "scoring"
    rows = _loads(raw, where)["choices"][0].get("prompt_logprobs")
    if not isinstance(rows, list) or len(rows) != len(sequence):
        raise EngineError(f"Asked for {len(sequence)} prompt log-probs, got {str(rows)[:200]}.")
    known = [_dict_or_none(row, where) or {} for row in rows[1:]]
    entries = [_dict_or_none(row.get(str(token)), where) for row, token in zip(known, sequence[1:], strict=True)]
    return _as_logps([None if entry is None else entry.get("logprob") for entry in entries], where)


def parse_ranking(raw: bytes) -> dict[str, float]:
    """Log-prob by token (`"token_id:N"`) of the answer to [`ranking_body`]: the two likeliest and the sampled one."""
    where = "log-prob check"
    logprobs = _field(_loads(raw, where)["choices"][0], "logprobs", dict, where)
    first = next(iter(_field(logprobs, "top_logprobs", list, where)), None)
    if not isinstance(first, dict) or len(first) < 2 or set(map(type, first.values())) != {float}:
        raise EngineError(f"{where}: {str(first)[:200]} are no log-probs of two tokens. {_STRANGER}")
    return first


def _loads(raw: bytes, where: str) -> dict[str, Any]:
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UnusableAnswer(f"{where}: the answer is no JSON ({error}): {raw[:200]!r}") from error
    if not isinstance(answer, dict) or not answer.get("choices"):
        raise UnusableAnswer(f"{where}: the answer has no choices: {raw[:200]!r}")
    if not isinstance(answer["choices"], list) or set(map(type, answer["choices"])) != {dict}:
        raise EngineError(f"{where}: its choices are no list of objects: {raw[:200]!r}. {_STRANGER}")
    return answer


def _field(holder: dict[str, Any], name: str, kind: type[T], where: str) -> T:
    """`holder[name]`, which must be exactly of type `kind`."""
    value = holder.get(name)
    if type(value) is not kind:
        raise EngineError(f"{where}: {name}={str(value)[:200]} in the answer is no {kind.__name__}. {_STRANGER}")
    return value


def _dict_or_none(value: Any, where: str) -> dict[str, Any] | None:
    if value is not None and not isinstance(value, dict):
        raise EngineError(f"{where}: {str(value)[:200]} in the answer is no object. {_STRANGER}")
    return value


def _parse_choice(
    choice: dict[str, Any], request: GroupRequest, sampling: SamplingParams, vocab_size: int
) -> Completion:
    where = f"group {request.group}, sample {choice['index']}"
    if choice.get("finish_reason") in (None, "abort", "error"):
        ended = choice.get("finish_reason")
        raise UnusableAnswer(f"{where}: the server ended the response with finish_reason={ended!r}.")
    if choice.get("token_ids") is None or choice.get("logprobs") is None:
        raise EngineError(f"{where}: no token ids or log-probs in the answer. {_STRANGER}")
    listed, logprobs = _field(choice, "token_ids", list, where), _field(choice, "logprobs", dict, where)
    token_logprobs = _field(logprobs, "token_logprobs", list, where)
    if len(listed) != len(token_logprobs) or not listed:
        raise EngineError(
            f"{where}: {len(listed)} token ids but {len(token_logprobs)} log-probs; they must be as many, "
            "and at least one."
        )
    if set(map(type, listed)) != {int} or logprobs.get("tokens") != [f"token_id:{token}" for token in listed]:
        raise EngineError(f"{where}: the log-probs belong to other tokens than the sampled ones.")
    if min(listed) < 0 or max(listed) >= vocab_size:
        raise EngineError(
            f"{where}: token ids from {min(listed)} to {max(listed)} do not fit the trainer's vocabulary of "
            f"{vocab_size}. The server runs another model."
        )
    token_ids = np.array(listed, dtype=np.int32)
    logps = _as_logps(token_logprobs, where)
    if np.isnan(logps).all():
        raise EngineError(
            f"{where}: none of {len(logps)} tokens has a usable log-prob, so the engine's logits are garbage. Check "
            "the weights and the dtype of the server."
        )
    return Completion(token_ids, logps, _finish_reason(choice, token_ids, request, sampling, where))


def _as_logps(values: list[Any], where: str) -> np.ndarray:
    strange = set(map(type, values)) - {float, int, type(None)}
    if strange:
        names = sorted(kind.__name__ for kind in strange)
        raise EngineError(f"{where}: log-probs of type {', '.join(names)} instead of numbers. {_STRANGER}")
    with np.errstate(invalid="ignore", over="ignore"):
        try:
            logps = np.array(values, dtype=np.float32)
        except OverflowError as error:
            raise EngineError(f"{where}: a log-prob is beyond all numbers ({error}). {_STRANGER}") from error
        if (logps > _ROUNDING).any():
            raise EngineError(
                f"{where}: a log-prob of {np.nanmax(logps):.4g} is above 0: the server gives logits. Start it with "
                "`--logprobs-mode processed_logprobs`."
            )
        logps[logps <= FLOOR_LOGP] = np.nan
    return logps


def _finish_reason(
    choice: dict[str, Any], token_ids: np.ndarray, request: GroupRequest, sampling: SamplingParams, where: str
) -> FinishReason:
    """`choice`'s finish reason, once it is what the request allows."""
    reason, detail = choice["finish_reason"], choice.get("stop_reason")
    limit = sampling.max_tokens_for(len(request.prompt_ids))
    is_eos = np.isin(token_ids, sampling.eos_token_ids)
    if is_eos[:-1].any():
        raise EngineError(
            f"{where}: the server went on after EOS token {token_ids[int(is_eos.argmax())]}, though asked to stop at "
            f"{list(sampling.eos_token_ids)}."
        )
    if reason == "length" and len(token_ids) == limit:
        return "length"
    if reason == "stop" and len(token_ids) <= limit and (is_eos[-1] or detail in sampling.stop):
        return "stop"
    raise EngineError(
        f"{where}: {len(token_ids)} tokens ended with finish_reason={reason!r}, stop_reason={detail!r}, token "
        f"{token_ids[-1]}. Allowed: {limit} tokens, EOS ids {list(sampling.eos_token_ids)}, stop strings "
        f"{list(sampling.stop)}. Does the server override limits or stop tokens?"
    )
