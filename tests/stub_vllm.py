"""A small server that answers like vLLM's OpenAI server (formats copied from vLLM 0.31), and can be told to misbehave.

Its language model is a table of logits by last token: drawn from the seed in the policy folder's `weights.json`, or
that of a saved Qwen2 without layers. What it samples depends on prompt and weights alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from safetensors.numpy import load_file

VOCAB_SIZE = 48
EOS = 0


def write_policy(folder: Path, seed: int) -> Path:
    """A policy folder that the stub can load."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights.json").write_text(json.dumps({"seed": seed}))
    return folder


def reference_logps(folder: Path, sequence: list[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probs of tokens 1… of `sequence` under the policy in `folder`."""
    logps = _log_softmax(_table(folder)[sequence[:-1]] / temperature)
    return logps[np.arange(len(sequence) - 1), sequence[1:]]


def _table(folder: Path) -> np.ndarray:
    if not (folder / "weights.json").exists():
        return _bigram_table(folder)
    seed = json.loads((folder / "weights.json").read_text())["seed"]
    return np.random.default_rng(seed).normal(size=(VOCAB_SIZE, VOCAB_SIZE))


def _bigram_table(folder: Path) -> np.ndarray:
    """Logits by last token of a saved Qwen2 without layers."""
    tensors = load_file(folder / "model.safetensors")
    hidden = tensors["model.embed_tokens.weight"].astype(np.float64)
    epsilon = json.loads((folder / "config.json").read_text())["rms_norm_eps"]
    hidden /= np.sqrt(np.square(hidden).mean(-1, keepdims=True) + epsilon)
    return (hidden * tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def _named(token: int) -> str:
    return f"token_id:{token}"


class StubVLLM:
    """
    Runs on a thread of its own (`start`, `stop`), or alone in a process (`main`).

    Attributes to set for misbehavior: `logprobs_mode`, `health_status`, `reload_does_nothing`, `reset_succeeds`,
    `ignores_stop_ids`, `fault(number, body)` giving `"500"`, `"drop"`, `"hang"` … for the number-th generation
    request, and `distort(answer)`, which may change a finished answer in place.
    """

    def __init__(self, policy: Path, max_model_len: int = 64, name: str = "policy", version: str = "0.31.0") -> None:
        self.logprobs_mode = "processed_logprobs"
        self.health_status = 200
        self.reload_does_nothing = False
        self.reset_succeeds = True
        self.ignores_stop_ids = False
        self.fault: Callable[[int, dict[str, Any]], str | None] = lambda number, body: None
        self.distort: Callable[[dict[str, Any]], None] = lambda answer: None
        self.delay_s = 0.0
        self.version = version
        self.generated: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.most_at_once = 0
        self._at_once = 0
        self._max_model_len, self._name = max_model_len, name
        self._weights = _table(policy)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()

    def start(self) -> str:
        """Address of the started server."""
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._serve(0), self._loop).result()
        return self.url

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def serve_until_killed(self, port: int) -> None:
        self._loop.run_until_complete(self._serve(port))
        self._loop.run_forever()

    async def _serve(self, port: int) -> str:
        app = web.Application(client_max_size=2**26)
        app.add_routes(
            [
                web.get("/health", self._on_health),
                web.get("/version", self._on_version),
                web.get("/v1/models", self._on_models),
                web.post("/v1/completions", self._on_completions),
                web.post("/collective_rpc", self._on_reload),
                web.post("/reset_prefix_cache", self._on_reset),
                web.post("/sleep", self._on_sleep),
                web.post("/wake_up", self._on_sleep),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _on_health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health_status)

    async def _on_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _on_models(self, request: web.Request) -> web.Response:
        card = {"id": self._name, "object": "model", "parent": None, "max_model_len": self._max_model_len}
        return web.json_response({"object": "list", "data": [card]})

    async def _on_sleep(self, request: web.Request) -> web.Response:
        self.calls.append(request.path_qs)
        return web.Response()

    async def _on_reset(self, request: web.Request) -> web.Response:
        self.calls.append(request.path_qs)
        return web.json_response({"success": self.reset_succeeds})

    async def _on_reload(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(body["method"])
        folder = Path(body["kwargs"]["weights_path"])
        if not any((folder / name).exists() for name in ("weights.json", "model.safetensors")):
            return _error(500, f"Call to collective_rpc method failed: no weights in '{folder}'")
        if not self.reload_does_nothing:
            self._weights = _table(folder)
        return web.json_response({"results": [None]})

    async def _on_completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["model"] != self._name:
            return _error(404, f"The model `{body['model']}` does not exist.")
        if len(body["prompt"]) + body["max_tokens"] > self._max_model_len:
            return _error(400, f"max_tokens={body['max_tokens']} cannot be greater than {self._max_model_len}.")
        if message := os.environ.get("STUB_DIES_IN_CHECKS"):
            print(message, *(f"last line {number}" for number in range(100)), sep="\n", flush=True)
            os._exit(4)
        if body["n"] == 1:  # a check
            return web.json_response(self._answer(body))
        self.generated.append(body)
        fault = self.fault(len(self.generated), body)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await asyncio.sleep(self.delay_s)
            return await self._generate(request, body, fault)
        finally:
            self._at_once -= 1

    async def _generate(self, request: web.Request, body: dict[str, Any], fault: str | None) -> web.StreamResponse:
        if fault == "drop":
            assert request.transport is not None
            request.transport.abort()
        elif fault == "hang":
            await self._stopping.wait()
        elif fault == "crash":
            os._exit(3)
        elif fault == "out of memory":
            print("torch.OutOfMemoryError: out of memory", flush=True)
            os._exit(1)
        elif fault == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "html":
            return web.Response(text="<html>502 of some proxy</html>", content_type="text/html")
        elif fault is not None and fault != "truncate":
            return _error(int(fault), f"stub was told to fail with {fault}")
        answer = self._answer(body)
        self.distort(answer)
        if fault == "truncate":
            return await _send_a_part(request, json.dumps(answer).encode())
        return web.Response(text=json.dumps(answer), content_type="application/json")

    def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        choices = [self._choice(body, index) for index in range(body["n"])]
        return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"], "choices": choices}

    def _choice(self, body: dict[str, Any], index: int) -> dict[str, Any]:
        rng = np.random.default_rng([*body["prompt"], index])
        last, token_ids, rows, reason, detail = body["prompt"][-1], [], [], "length", None
        while len(token_ids) < body["max_tokens"]:
            rows.append(self._reported(last, body["temperature"]))
            probabilities = np.exp(_log_softmax(self._weights[last] / body["temperature"]))
            last = int(rng.choice(len(probabilities), p=probabilities / probabilities.sum()))
            token_ids.append(last)
            if last in body.get("stop_token_ids", ()) and not self.ignores_stop_ids:
                reason, detail = "stop", last
                break
            if str(last) in body.get("stop", ()):
                reason, detail = "stop", str(last)
                break
        return {
            "index": index,
            "text": " ".join(map(str, token_ids)),
            "logprobs": None if body.get("logprobs") is None else _logprobs(token_ids, rows, body["logprobs"]),
            "finish_reason": reason,
            "stop_reason": detail,
            "token_ids": token_ids,
            "prompt_logprobs": self._prompt_logprobs(body),
            "prompt_token_ids": body["prompt"],
        }

    def _prompt_logprobs(self, body: dict[str, Any]) -> list[dict[str, Any] | None] | None:
        if body.get("prompt_logprobs") is None:
            return None
        pairs = zip(body["prompt"], body["prompt"][1:], strict=False)
        rows = [(token, float(_log_softmax(self._weights[last])[token])) for last, token in pairs]
        return [None, *({str(t): {"logprob": lp, "rank": 1, "decoded_token": str(t)}} for t, lp in rows)]

    def _reported(self, last: int, temperature: float) -> np.ndarray:
        scaled = self._weights[last] / (temperature if self.logprobs_mode.startswith("processed") else 1.0)
        return scaled if self.logprobs_mode.endswith("logits") else _log_softmax(scaled)


def _logprobs(token_ids: list[int], rows: list[np.ndarray], top: int) -> dict[str, Any]:
    """vLLM's layout: the sampled token first among the top ones, where it comes even when it is none of them."""
    ranked = [[token, *np.argsort(-row)[:top].tolist()] for token, row in zip(token_ids, rows, strict=True)]
    return {
        "text_offset": list(range(len(token_ids))),
        "token_logprobs": [float(row[token]) for token, row in zip(token_ids, rows, strict=True)],
        "tokens": [_named(token) for token in token_ids],
        "top_logprobs": [{_named(t): float(row[t]) for t in tokens} for tokens, row in zip(ranked, rows, strict=True)],
    }


async def _send_a_part(request: web.Request, content: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": str(len(content))})
    await response.prepare(request)
    await response.write(content[: len(content) * 6 // 10])
    assert request.transport is not None
    request.transport.abort()
    return response


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "Error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


def main() -> None:
    """The stub in the place of `vllm.entrypoints.openai.api_server`; misbehaves as its environment says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--port", type=int)
    options, _ = parser.parse_known_args()
    if os.environ.get("STUB_FAILS_TO_START"):
        raise SystemExit(f"ValueError: {os.environ['STUB_FAILS_TO_START']}")
    time.sleep(float(os.environ.get("STUB_STARTS_IN_S", "0")))
    if os.environ.get("STUB_LOSES_ITS_PORT") and not (options.model / "port-lost").exists():
        (options.model / "port-lost").touch()
        taken = socket.create_server(("127.0.0.1", options.port))  # until this process ends, which is soon
        print(f"port of {taken.getsockname()} taken", flush=True)
    stub = StubVLLM(options.model)
    fault, marker = os.environ.get("STUB_FAULT"), options.model / "fault-happened"
    due = fault is not None and (not marker.exists() or bool(os.environ.get("STUB_FAULT_REPEATS")))

    def once(number: int, body: dict[str, Any]) -> str | None:
        if not due or number != 3:
            return None
        marker.touch()  # for the process that is started in this one's place
        return fault

    stub.fault = once
    print(f"stub of process {os.getpid()} is ready", flush=True)
    stub.serve_until_killed(options.port)


if __name__ == "__main__":
    main()
