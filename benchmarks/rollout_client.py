"""
What the vLLM client costs: against a server that answers at once, and beside `LLM.generate` in process.

- `replay`: a stub server replays answers of a real vLLM (see `replay_server`). The client takes them in, validates
  them and writes them to a stage, as in a rollout; tokens/s, all of them with log-probs. Beside it, a client that only
  reads and parses the same answers (threads, `urllib`, `json.loads`) and keeps nothing.
- `vllm`: the lab's checkpoint on the CPU, equal prompts, sampling and batch limits: the client with a managed server,
  against `LLM.generate` in a process of its own in the same interpreter, log-probs asked for by both. Seconds per
  token; this is `ratio`.

    python -m benchmarks.rollout_client [--quick] [--part all|replay|vllm] [--groups 128] [--prompts 256]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoTokenizer

from mu_grpo_trl.data import tokenize_prompts
from mu_grpo_trl.lab import load_task
from mu_grpo_trl.rollout import vllm_wire
from mu_grpo_trl.rollout.engine import GroupRequest, GroupResult, SamplingParams
from mu_grpo_trl.rollout.fill import FillProgress, fill_stage
from mu_grpo_trl.rollout.vllm_client import VLLMEngine
from mu_grpo_trl.rollout.vllm_process import ManagedServer, ServerOptions
from mu_grpo_trl.rollout.vllm_server import ClientOptions
from mu_grpo_trl.stage import GroupRollout, ResponseRow, StageWriter

from . import replay_server
from .common import make_parser, num_pairs, report, run_pairs
from .synthetic import make_manifest

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "mu_grpo_trl" / "lab" / "checkpoint"
NUM_GENERATIONS = 8
MEAN_LENGTH = 1000
MAX_TOKENS = 8192
NUM_ANSWERS = 16
SCORE_THREADS = 2
BATCH_LIMITS = {"max_num_seqs": 256, "max_num_batched_tokens": 4096, "max_model_len": 128}
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

spawn = multiprocessing.get_context("spawn")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--part", choices=["all", "replay", "vllm"], default="all")
    parser.add_argument("--groups", type=int, default=128, help="prompt groups replayed in a run")
    parser.add_argument("--prompts", type=int, default=256, help="prompt groups vLLM answers in a run")
    parser.add_argument(
        "--model", type=Path, default=CHECKPOINT, help="folder of the model vLLM serves: the lab's, or SmolLM2's"
    )
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get("MU_GRPO_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python")),
        help="interpreter with vLLM",
    )
    options = parser.parse_args()
    extra: dict[str, Any] = {}
    if options.part in ("all", "replay"):
        ratios, extra = measure_replay(options.groups, num_pairs(options))
        replayed = report("rollout_client replay", ratios, **extra)
        extra = {"replay": replayed}
    if options.part in ("all", "vllm"):
        ratios, figures = measure_vllm(options)
        report("rollout_client", ratios, **figures, **extra)


def measure_replay(num_groups: int, pairs: int) -> tuple[list[float], dict[str, Any]]:
    """Seconds of the bare client over those of the engine and stage, and the engine's rates."""
    answers = replay_server.make_answers(NUM_ANSWERS, NUM_GENERATIONS, MEAN_LENGTH, MAX_TOKENS)
    requests = [
        GroupRequest(group, [2 + group % NUM_ANSWERS] * replay_server.PROMPT_TOKENS) for group in range(num_groups)
    ]
    rates: list[float] = []
    rates_per_cpu: list[float] = []

    def ours() -> float:
        started, cpu = time.perf_counter(), time.process_time()
        tokens = _fill(engine, requests)
        seconds = time.perf_counter() - started
        rates.append(tokens / seconds)
        rates_per_cpu.append(tokens / (time.process_time() - cpu))
        return seconds

    with _replay_server(answers) as url:
        engine = VLLMEngine([url], ClientOptions(replay_server.VOCAB_SIZE, context_length=2 * MAX_TOKENS))
        engine.open(CHECKPOINT, "replayed")
        ours()  # warms both sides up
        rates.clear()
        rates_per_cpu.clear()
        ratios = run_pairs(ours, lambda: _read_bare(url, requests), pairs)
        engine.close()
    figures = {
        "tokens_per_s": round(statistics.median(rates)),
        "tokens_per_s_min": round(min(rates)),
        "tokens_per_s_max": round(max(rates)),
        "tokens_per_cpu_s": round(statistics.median(rates_per_cpu)),
        "bytes_per_answer": round(statistics.mean(map(len, answers.values()))),
    }
    return ratios, figures


def measure_vllm(options: argparse.Namespace) -> tuple[list[float], dict[str, Any]]:
    """Seconds per token of `LLM.generate` over those of the client and a managed server."""
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model)
    task = load_task("smollm2-sums" if tokenizer.chat_template else "arithmetic", options.prompts)
    prompts = tokenize_prompts(task["prompt"], tokenizer, None)
    sampling = SamplingParams(1.0, 40, BATCH_LIMITS["max_model_len"], NUM_GENERATIONS, (tokenizer.eos_token_id,))
    rates: dict[str, list[float]] = {"http": [], "in_process": []}
    cpu_us: dict[str, list[float]] = {"http": [], "in_process": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        _http_engine(options, Path(folder)) as engine,
        _llm_process(options, prompts, sampling) as generate,
    ):

        def over_http() -> float:
            requests = [GroupRequest(group, ids) for group, ids in enumerate(prompts)]
            started, cpu_s = time.perf_counter(), _cpu_seconds()
            results = list(engine.generate(requests, sampling))
            seconds = time.perf_counter() - started
            tokens = sum(len(completion.token_ids) for result in results for completion in result.completions)
            return note("http", seconds, _cpu_seconds() - cpu_s, tokens)

        def in_process() -> float:
            cpu_s = _cpu_seconds()
            result = generate()
            assert result["responses"] == len(prompts) * NUM_GENERATIONS
            return note("in_process", result["seconds"], _cpu_seconds() - cpu_s, result["tokens"])

        def note(side: str, seconds: float, cpu_s: float, tokens: int) -> float:
            rates[side].append(tokens / seconds)
            cpu_us[side].append(1e6 * cpu_s / tokens)
            return seconds / tokens

        over_http()
        in_process()
        for values in (*rates.values(), *cpu_us.values()):
            values.clear()
        ratios = run_pairs(over_http, in_process, num_pairs(options))
    figures = {f"{side}_tokens_per_s": round(statistics.median(values)) for side, values in rates.items()}
    figures |= {f"{side}_cpu_us_per_token": round(statistics.median(values), 1) for side, values in cpu_us.items()}
    cpu_ratios = [other / ours for ours, other in zip(cpu_us["http"], cpu_us["in_process"], strict=True)]
    return ratios, {**figures, "cpu_ratio": round(statistics.median(cpu_ratios), 4)}


def _cpu_seconds() -> float:
    """CPU time of this process and of all it started that still run."""
    this = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (this, *this.children(recursive=True)))


def _fill(engine: VLLMEngine, requests: list[GroupRequest]) -> int:
    """Fill a stage with the answers, as a rollout does; its tokens."""
    manifest = make_manifest(1, len(requests), NUM_GENERATIONS)
    sampling = SamplingParams(1.0, MAX_TOKENS, 2 * MAX_TOKENS, NUM_GENERATIONS, (replay_server.EOS,))
    prompt_ids = {request.group: request.prompt_ids for request in requests}

    def score(result: GroupResult) -> GroupRollout:
        rows = [
            ResponseRow(one.token_ids, one.logps, {"accuracy": 0.0}, 0.0, 0.0, one.finish_reason)
            for one in result.completions
        ]
        return GroupRollout(result.group, result.group, prompt_ids[result.group], manifest.policy_version, rows)

    with tempfile.TemporaryDirectory() as folder:
        writer = StageWriter.create(folder, manifest)
        progress = FillProgress(0, len(requests), 0, visible=False)
        fill_stage(engine, writer, [iter(requests)], sampling, score, progress, score_threads=SCORE_THREADS)
        writer.complete()
    return progress.generated_tokens


def _read_bare(url: str, requests: list[GroupRequest]) -> float:
    """Seconds to read and parse the answers, and nothing else."""
    sampling = SamplingParams(1.0, MAX_TOKENS, 2 * MAX_TOKENS, NUM_GENERATIONS, (replay_server.EOS,))

    def read(request: GroupRequest) -> int:
        body = vllm_wire.generation_body(request, sampling, replay_server.MODEL, "replayed")
        headers = {"Content-Type": "application/json"}
        post = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(post) as response:
            answer = json.loads(response.read())
        return sum(len(choice["token_ids"]) for choice in answer["choices"])

    started = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, requests))
    return time.perf_counter() - started


@contextmanager
def _replay_server(answers: dict[int, bytes]) -> Iterator[str]:
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=replay_server.serve, args=(theirs, answers), daemon=True)
    process.start()
    theirs.close()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


@contextmanager
def _http_engine(options: argparse.Namespace, folder: Path) -> Iterator[VLLMEngine]:
    """The client, with a managed server that has the model loaded."""
    limits = (f"--{name.replace('_', '-')}={value}" for name, value in BATCH_LIMITS.items())
    server = ManagedServer(
        ServerOptions(
            log_dir=folder,
            python=options.vllm_python,
            dtype="float32",
            startup_timeout_s=600,
            extra_args=("--enforce-eager", *limits),
            env=ENVIRONMENT,
        )
    )
    vocab_size = json.loads((options.model / "config.json").read_text())["vocab_size"]
    engine = VLLMEngine([server], ClientOptions(vocab_size, context_length=BATCH_LIMITS["max_model_len"]))
    try:
        engine.open(options.model, "policy")
        yield engine
    finally:
        engine.close()


@contextmanager
def _llm_process(
    options: argparse.Namespace, prompts: list[list[int]], sampling: SamplingParams
) -> Iterator[Callable[[], dict[str, Any]]]:
    """A function that has the prompts answered once in process; the first call may be slower."""
    job = {
        "model": str(options.model),
        "prompts": prompts,
        "llm": {"dtype": "float32", "enforce_eager": True, "logprobs_mode": "processed_logprobs", **BATCH_LIMITS},
        "sampling": {
            "n": sampling.num_generations,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": list(sampling.eos_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
        },
    }
    process = subprocess.Popen(
        [options.vllm_python, str(Path(__file__).with_name("vllm_in_process.py")), json.dumps(job)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def result() -> dict[str, Any]:
        for line in stdout:
            if line.startswith("RESULT "):
                return json.loads(line.removeprefix("RESULT "))
        raise SystemExit(f"{options.vllm_python} ended without a result: is vLLM installed there?")

    def generate() -> dict[str, Any]:
        stdin.write("\n")
        stdin.flush()
        return result()

    try:
        result()
        yield generate
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
