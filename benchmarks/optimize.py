"""
The optimization phase: one update on fixed long-tailed rollouts, against TRL's own `_compute_loss` on the same ones.

    python -m benchmarks.optimize
    python -m benchmarks.optimize --device cuda --model 1.5b

Response lengths are log-normal (mean 600, σ of the log 0.9, cut at 8k), and 35% of the groups have no advantage. Both
sides run forward, backward and the optimizer step of the same update at the micro-batch that is best for them (the
smallest within 5% of the fastest), found before. TRL's rows are padded to the longest of the update, as its trainer
pads a generation batch of one update (its default, and the kindest to it: at μ = 4 it pads to the longest of four).
The ratio is of useful tokens, those of responses of nonzero advantage, per second. Each of this side's optimizations
is also switched off alone, and the memory that an update takes beyond weights and optimizer state is measured in a
process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from mu_grpo_trl import MuGRPOConfig, MuGRPOTrainer
from mu_grpo_trl.lab.warm_start import warm_start_path
from mu_grpo_trl.stage import GroupRollout, Response, ResponseRow, StageReader, StageWriter
from mu_grpo_trl.update import StageBatches

from .common import make_parser, num_pairs, report, seconds
from .synthetic import PROMPT_TOKENS, group_advantages, long_tailed_lengths, make_manifest

GENERATIONS = 8
UPDATE = 1  # the second of the stage: the first is checked against made-up log-probs and would be refused
MAX_LENGTH = 8192
TRL_MICROBATCHES = (1, 2, 4, 8, 16)
TRL_TUNING_ROWS = 16  # all rows are equally long there
TOKEN_BUDGETS = (2048, 4096, 8192, 16_384)
SWITCHES: dict[str, dict[str, Any]] = {
    "skip_zero_advantage": {"skip_zero_advantage": False},
    "sort_by_length": {"sort_by_length": False},
    "lean_head": {"lean_head": False},
}


@dataclass(frozen=True)
class Size:
    """A model of random weights and the prompts of an update."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    prompts: int


SIZES = {
    "tiny": Size(64, 2, 2, 2, 176, 2048, prompts=8),
    "0.5b": Size(896, 24, 14, 2, 4864, 151_936, prompts=16),
    "1.5b": Size(1536, 28, 12, 2, 8960, 151_936, prompts=16),
    "7b": Size(3584, 28, 28, 4, 18_944, 152_064, prompts=16),
}


class Bench:
    """A model, a stage of two updates for it, and both ways to take one."""

    def __init__(self, size: Size, device: str, folder: Path) -> None:
        self.size, self.device, self.folder = size, device, folder
        torch.manual_seed(0)
        self.tokenizer = AutoTokenizer.from_pretrained(warm_start_path())
        config = LlamaConfig(
            vocab_size=size.vocab, hidden_size=size.hidden, num_hidden_layers=size.layers,
            num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, intermediate_size=size.intermediate,
            max_position_embeddings=2 * MAX_LENGTH, pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
        )  # fmt: skip
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model = LlamaForCausalLM(config).to(device=device, dtype=dtype)
        self.reader = self._make_stage()
        groups = np.arange(size.prompts, 2 * size.prompts)
        advantages = self.reader.advantages(groups)
        self.useful_tokens = int(self.reader.lengths(groups)[1][advantages != 0].sum())
        self.responses = [self.reader.response(int(g), s) for g in groups for s in range(GENERATIONS)]

    def _make_stage(self) -> StageReader:
        rng, size = np.random.default_rng(0), self.size
        manifest = make_manifest(2, size.prompts, GENERATIONS)
        lengths = long_tailed_lengths(rng, (manifest.num_groups, GENERATIONS), cut=MAX_LENGTH - PROMPT_TOKENS[1])
        advantages = np.concatenate([group_advantages(rng, size.prompts, GENERATIONS) for _ in range(2)])
        writer = StageWriter.create(self.folder / "stage", manifest)
        for group in range(manifest.num_groups):
            prompt = rng.integers(3, size.vocab, rng.integers(*PROMPT_TOKENS), dtype=np.int32)
            rows = [
                self._row(rng, int(length), float(advantage))
                for length, advantage in zip(lengths[group], advantages[group], strict=True)
            ]
            writer.append([GroupRollout(group, manifest.prompt_indices[group], prompt, manifest.policy_version, rows)])
        writer.complete()
        return StageReader(writer.path)

    def _row(self, rng: np.random.Generator, length: int, advantage: float) -> ResponseRow:
        reward = float(advantage > 0)
        return ResponseRow(
            completion_ids=rng.integers(3, self.size.vocab, length, dtype=np.int32),
            behavior_logps=np.full(length, -np.log(self.size.vocab), dtype=np.float32),
            rewards={"accuracy": reward},
            reward=reward,
            advantage=advantage,
            finish_reason="stop",
        )

    def _common_options(self) -> dict[str, Any]:
        return {
            "output_dir": tempfile.mkdtemp(dir=self.folder),
            "num_generations": GENERATIONS,
            "max_completion_length": MAX_LENGTH,
            "learning_rate": 1e-6,
            "gradient_checkpointing": False,
            "use_cpu": self.device == "cpu",
            "bf16": self.device == "cuda",
            "report_to": "none",
            "save_strategy": "no",
            "max_steps": 2,
        }

    def ours(self, budget: int, **switches: Any) -> Callable[[], None]:
        """One update by this trainer; calling the result takes it."""
        config = MuGRPOConfig(
            **self._common_options(), rollout_engine="transformers", prompts_per_update=self.size.prompts,
            stage_updates=2, max_tokens_per_microbatch=budget, per_device_train_batch_size=10_000, **switches,
        )  # fmt: skip
        self.model.__dict__.pop("forward", None)  # the head of the trainer before
        trainer = MuGRPOTrainer(
            self.model, _no_reward, config, self._prompts(2 * self.size.prompts), processing_class=self.tokenizer
        )
        trainer._batches = StageBatches(self.reader, trainer.schedule, 0, 0, 1, trainer._batch_options)
        trainer.state.global_step = UPDATE
        trainer.create_optimizer()

        def update() -> None:
            trainer.training_step(trainer.model, {})
            self._step(trainer.optimizer)

        return update

    def trl(self, microbatch: int, num_rows: int | None = None) -> Callable[[], None]:
        """One update by TRL's `_compute_loss`, or `num_rows` of it; calling the result takes it."""
        rows = num_rows or len(self.responses)
        config = GRPOConfig(
            **self._common_options(), per_device_train_batch_size=microbatch, loss_type="grpo", beta=0.0,
            gradient_accumulation_steps=rows // microbatch,
        )  # fmt: skip
        self.model.__dict__.pop("forward", None)
        trainer = GRPOTrainer(
            self.model, _no_reward, config, self._prompts(self.size.prompts), processing_class=self.tokenizer
        )
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = rows // microbatch  # set by the training loop
        order = torch.randperm(len(self.responses), generator=torch.Generator().manual_seed(0))[:rows]
        batch = {name: tensor[order].to(self.device) for name, tensor in _trl_batch(self.responses).items()}
        total = batch["completion_mask"].sum()

        def update() -> None:
            trainer.model.train()
            for start in range(0, rows, microbatch):
                inputs = {name: tensor[start : start + microbatch] for name, tensor in batch.items()}
                with trainer.compute_loss_context_manager():
                    loss = trainer._compute_loss(trainer.model, inputs | {"num_items_in_batch": total})
                trainer.accelerator.backward(loss)
            self._step(trainer.optimizer)

        return update

    def _prompts(self, count: int) -> Dataset:
        return Dataset.from_dict({"prompt": ["1+1="] * count})

    def _step(self, optimizer: Any) -> None:
        optimizer.step()
        optimizer.zero_grad()
        if self.device == "cuda":
            torch.cuda.synchronize()


def _no_reward(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def _trl_batch(responses: list[Response]) -> dict[str, torch.Tensor]:
    """What TRL's `_generate_and_score_completions` gives: prompts padded on the left, completions on the right."""
    prompt_length = max(len(r.prompt_ids) for r in responses)
    length = max(len(r.completion_ids) for r in responses)
    batch = {
        "prompt_ids": torch.zeros(len(responses), prompt_length, dtype=torch.int64),
        "prompt_mask": torch.zeros(len(responses), prompt_length, dtype=torch.int64),
        "completion_ids": torch.zeros(len(responses), length, dtype=torch.int64),
        "completion_mask": torch.zeros(len(responses), length, dtype=torch.int64),
        "old_per_token_logps": torch.zeros(len(responses), length),
        "advantages": torch.tensor([float(r.advantage) for r in responses]),
    }
    for row, response in enumerate(responses):
        prompt, completion = len(response.prompt_ids), len(response.completion_ids)
        batch["prompt_ids"][row, -prompt:] = torch.from_numpy(np.array(response.prompt_ids))
        batch["prompt_mask"][row, -prompt:] = 1
        batch["completion_ids"][row, :completion] = torch.from_numpy(np.array(response.completion_ids))
        batch["completion_mask"][row, :completion] = 1
        batch["old_per_token_logps"][row, :completion] = torch.from_numpy(np.array(response.behavior_logps))
    return batch


@contextmanager
def peak_memory(device: str) -> Iterator[list[int]]:
    """Appends the most bytes in use inside the block beyond those before: on the device, or RssAnon of the process."""
    peak: list[int] = []
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        peak.append(torch.cuda.max_memory_allocated() - before)
        return
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, highest, done = _rss_anon(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            highest[0] = max(highest[0], _rss_anon())

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield peak
    done.set()
    watcher.join()
    peak.append(highest[0] - before)


def _rss_anon() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def measure_memory(bench: Bench, side: str, microbatch: int) -> int:
    """Peak bytes of one update, the optimizer's state made before it."""
    update = bench.ours(microbatch) if side == "ours" else bench.trl(microbatch)
    ids = torch.zeros(1, 64, dtype=torch.int64, device=bench.device)
    bench.model(input_ids=ids, use_cache=False).logits.sum().backward()  # gradients, and what is allocated only once
    with peak_memory(bench.device) as peak:
        update()
    return peak[0]


def memory_in_process_of_its_own(options: argparse.Namespace, side: str, microbatch: int) -> int:
    command = [sys.executable, "-m", "benchmarks.optimize", "--device", options.device, "--model", options.model]
    command += ["--memory-of", side, "--microbatch", str(microbatch), "--threads", str(options.threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["peak_bytes"]


def fastest(candidates: dict[int, Callable[[], None]], name: str) -> int:
    """
    The smallest micro-batch within 5% of the quickest (best of three, after one to warm up); those that run out of
    memory are left out.
    """
    times = {}
    for size, update in candidates.items():
        try:
            update()
            times[size] = min(seconds(update) for _ in range(3))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
    print(f"{name}: seconds by micro-batch: {json.dumps(times)}", flush=True)
    return min(size for size, time_s in times.items() if time_s <= 1.05 * min(times.values()))


def compare(bench: Bench, options: argparse.Namespace, pairs: int) -> dict[str, Any]:
    budget = fastest({size: bench.ours(size) for size in TOKEN_BUDGETS}, "ours (tokens)")
    microbatch = fastest({size: bench.trl(size, TRL_TUNING_ROWS) for size in TRL_MICROBATCHES}, "trl (rows)")
    sides: dict[str, Callable[[], Callable[[], None]]] = {
        "ours": lambda: bench.ours(budget),
        "trl": lambda: bench.trl(microbatch),
        **{f"without_{name}": lambda o=off: bench.ours(budget, **o) for name, off in SWITCHES.items()},
    }
    times: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name in list(sides) if pair % 2 == 0 else reversed(list(sides)):
            times[name].append(seconds(sides[name]()))
        print(json.dumps({name: round(values[-1], 3) for name, values in times.items()}), flush=True)
    memory = {
        "ours": memory_in_process_of_its_own(options, "ours", budget),
        "trl": memory_in_process_of_its_own(options, "trl", microbatch),
    }
    off = {
        f"ratio_{name}": round(float(np.median(np.array(times["trl"]) / np.array(times[name]))), 3)
        for name in times
        if name.startswith("without_")
    }
    return report(
        f"optimize/{options.model}/{options.device}",
        [trl / ours for trl, ours in zip(times["trl"], times["ours"], strict=True)],
        useful_tokens=bench.useful_tokens,
        useful_tokens_per_s={n: round(bench.useful_tokens / float(np.median(times[n]))) for n in ("ours", "trl")},
        **off,
        microbatch={"ours_tokens": budget, "trl_rows": microbatch},
        peak_mb={name: round(value / 2**20) for name, value in memory.items()},
        memory_ratio=round(memory["trl"] / memory["ours"], 3),
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=tuple(SIZES), default="tiny", help="random weights of that size")
    parser.add_argument("--threads", type=int, default=2, help="torch's, on the CPU")
    parser.add_argument("--memory-of", choices=("ours", "trl"), help="measure one side's memory and end")
    parser.add_argument("--microbatch", type=int, help="for --memory-of: tokens (ours) or rows (trl)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(SIZES[options.model], options.device, Path(folder))
        if options.memory_of:
            print(json.dumps({"peak_bytes": measure_memory(bench, options.memory_of, options.microbatch)}))
        else:
            compare(bench, options, num_pairs(options))


if __name__ == "__main__":
    main()
