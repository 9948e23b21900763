"""What a server must be before rollouts are asked of it: measured where the server could be wrong about itself."""

from __future__ import annotations

import logging

from .engine import EngineError
from .vllm_process import check_version
from .vllm_server import Server
from .vllm_wire import parse_ranking, ranking_body

logger = logging.getLogger(__name__)

_PROMPTS = ([1], [2, 3], [3, 1, 2], [5, 4, 3, 2, 1])
_READABLE_GAP = (1e-3, 50.0)
_TOLERANCE = 0.15
_ROUNDING = 1e-3
_ADVICE = "Start it with `--logprobs-mode processed_logprobs`."


async def check_server(server: Server, context_length: int) -> str:
    """
    Find the one model that `server` serves, check that it fits the run, and return the version of its vLLM.

    Raises:
        [`EngineError`]: for an unsupported version, none or several models, too short a context, or log-probs before
            temperature.
    """
    if server.managed is None:
        await server.wait_until_healthy()
    version = check_version((await server.get_json("/version"))["version"])
    served = (await server.get_json("/v1/models"))["data"]
    models = [model for model in served if model.get("parent") is None]
    if len(models) != 1:
        raise EngineError(f"{server.url} serves {[model['id'] for model in served]}; exactly one model is needed.")
    server.model = models[0]["id"]
    limit = models[0].get("max_model_len")
    if limit is not None and limit < context_length:
        raise EngineError(
            f"{server.url} allows {limit} tokens of prompt and response (max_model_len), but the run needs "
            f"{context_length}. Start it with `--max-model-len {context_length}` or lower `max_context_length`."
        )
    await _check_logprobs_mode(server)
    return version


async def _check_logprobs_mode(server: Server) -> None:
    """
    Measure that log-probs are those after temperature: at twice the temperature the gap between the two likeliest
    tokens halves; before temperature it does not change.
    """
    measured = [ratio for prompt in _PROMPTS if (ratio := await _gap_ratio(server, prompt)) is not None]
    if not measured:
        logger.warning("Cannot measure whether %s gives processed log-probs: no two likely tokens.", server.url)
        return
    _, ratio = max(measured)
    if abs(ratio - 0.5) > _TOLERANCE:
        raise EngineError(
            f"{server.url} does not give log-probs after temperature: doubling the temperature scales the gap between "
            f"two tokens by {ratio:.3f} instead of 0.5. {_ADVICE}"
        )


async def _gap_ratio(server: Server, prompt_ids: list[int]) -> tuple[float, float] | None:
    """The gap between the two likeliest tokens at temperature 1, and what 2 multiplies it by; None if unreadable."""
    cold, hot = [
        parse_ranking(await server.complete(ranking_body(prompt_ids, temperature, server.model)))
        for temperature in (1.0, 2.0)
    ]
    if max(*cold.values(), *hot.values()) > _ROUNDING:
        raise EngineError(f"{server.url} gives logits for log-probs. {_ADVICE}")
    first, second = sorted(cold, key=cold.__getitem__, reverse=True)[:2]
    gap = cold[first] - cold[second]
    if first not in hot or second not in hot or not _READABLE_GAP[0] < gap < _READABLE_GAP[1]:
        return None
    return gap, (hot[first] - hot[second]) / gap
