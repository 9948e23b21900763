"""
A server that answers like vLLM and does nothing for it: every answer lies ready in memory. For `rollout_client`.

The answers are made from `vllm_answer.json`, what vLLM 0.31 answered to one request of the client: its layout and its
numbers, repeated to the lengths of long-tailed responses, with token ids spread over a large vocabulary.
"""

from __future__ import annotations

import itertools
import json
import socket
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from .synthetic import long_tailed_lengths

EOS = 1
VOCAB_SIZE = 150_000
PROMPT_TOKENS = 100
MODEL = "policy"
_TEMPLATE = Path(__file__).with_name("vllm_answer.json")
_SPREAD = 8_000


def make_answers(num_answers: int, num_generations: int, mean_length: float, max_tokens: int) -> dict[int, bytes]:
    """Answers to the prompts `[first] * PROMPT_TOKENS`, by `first`, from 2 on."""
    rng = np.random.default_rng(0)
    template = json.loads(_TEMPLATE.read_text())
    answers = {}
    for first in range(2, 2 + num_answers):
        lengths = long_tailed_lengths(rng, num_generations, mean_length, cut=max_tokens).tolist()
        choices = [_choice(template["choices"], index, length, max_tokens) for index, length in enumerate(lengths)]
        for choice in choices:
            choice["prompt_token_ids"] = [first] * PROMPT_TOKENS
        answers[first] = json.dumps({**template, "model": MODEL, "choices": choices}, separators=(",", ":")).encode()
    return answers


def serve(connection: Connection, answers: dict[int, bytes]) -> None:
    """Serve `answers` until killed, after sending the port."""
    app = web.Application(client_max_size=2**26)
    app.add_routes(
        [
            web.get("/health", _empty),
            web.get("/version", lambda request: _json({"version": "0.31.0"})),
            web.get("/v1/models", lambda request: _json({"data": [{"id": MODEL, "max_model_len": 2**20}]})),
            web.post("/collective_rpc", lambda request: _json({"results": [None]})),
            web.post("/reset_prefix_cache", lambda request: _json({"success": True})),
        ]
    )

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("prompt_logprobs") is not None:  # the client's fingerprint of the weights
            scores = [None, *({str(token): {"logprob": -1.0}} for token in body["prompt"][1:])]
            return await _json({"choices": [{"prompt_logprobs": scores}]})
        if body["n"] == 1:  # the client's check of the log-prob mode
            return await _json({"choices": [{"logprobs": {"top_logprobs": [_ranking(body["temperature"])]}}]})
        return web.Response(body=answers[body["prompt"][0]], content_type="application/json")

    app.router.add_post("/v1/completions", complete)

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    connection.send(listener.getsockname()[1])
    web.run_app(app, sock=listener, print=None, access_log=None)


def _choice(templates: list[dict[str, Any]], index: int, length: int, max_tokens: int) -> dict[str, Any]:
    """A response of `length` tokens that ends with EOS, or at `max_tokens`."""
    template = templates[index % len(templates)]
    captured = itertools.cycle(template["token_ids"][:-1])
    ids = [token * _SPREAD + i % _SPREAD for i, token in enumerate(itertools.islice(captured, length))]
    stopped = length < max_tokens
    if stopped:
        ids[-1] = EOS
    logps = list(itertools.islice(itertools.cycle(template["logprobs"]["token_logprobs"]), length))
    names = [f"token_id:{token}" for token in ids]
    return {
        **template,
        "index": index,
        "text": ("".join(itertools.islice(itertools.cycle(template["text"]), 3 * length))),
        "token_ids": ids,
        "logprobs": {
            "text_offset": np.cumsum([0, *map(len, names[:-1])]).tolist(),
            "token_logprobs": logps,
            "tokens": names,
            "top_logprobs": [{name: logp} for name, logp in zip(names, logps, strict=True)],
        },
        "finish_reason": "stop" if stopped else "length",
        "stop_reason": EOS if stopped else None,
    }


def _ranking(temperature: float) -> dict[str, float]:
    return {"token_id:5": -0.1, "token_id:6": -0.1 - 4.0 / temperature}


async def _empty(request: web.Request) -> web.Response:
    return web.Response()


async def _json(content: dict[str, Any]) -> web.Response:
    return web.json_response(content)
