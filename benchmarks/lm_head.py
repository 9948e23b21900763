"""
The LM head of training on a CPU, alone: log-probs and their gradients, this project's tiles against TRL's fused head.

    python -m benchmarks.lm_head [--quick] [--case quickstart|optimize]

Both sides get the same rows, each scored; both compute log-probs in float32 and the gradients of hidden states and
weight. The cost of a side is its least CPU time of `--repetitions`, on one thread. Ends with one JSON object a case.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from trl.kernels.chunked_logprob import ChunkedLogProbFunction

from mu_grpo_trl.lm_head import _TiledLogProbs

from .common import make_parser, num_pairs, report, run_pairs

CASES = {"quickstart": (2200, 96, 17), "optimize": (4096, 64, 2048)}
"""Rows, hidden size and vocabulary: an update of the quickstart, and a micro-batch of `benchmarks.optimize`."""
TEMPERATURE = 0.7
TRL_CHUNK_ROWS = 32768


def measure(case: str, pairs: int, repetitions: int) -> None:
    """Run one case and print its line."""
    rows, hidden_size, vocab_size = CASES[case]
    torch.manual_seed(0)
    hidden = torch.randn(rows, hidden_size, requires_grad=True)
    weight = torch.randn(vocab_size, hidden_size).mul_(0.1).requires_grad_()
    targets, grad = torch.randint(vocab_size, (rows,)), torch.randn(rows)

    def tiles() -> torch.Tensor:
        return _TiledLogProbs.apply(hidden, weight, targets, TEMPERATURE)  # type: ignore[return-value]

    def trl() -> torch.Tensor:
        return ChunkedLogProbFunction.apply(
            hidden, weight, None, targets, TEMPERATURE, TRL_CHUNK_ROWS, None, 1.0, ("log_probs",)
        )[0]

    def cost(forward: Callable[[], torch.Tensor]) -> float:
        times = []
        for _ in range(repetitions):
            hidden.grad = weight.grad = None
            started = time.process_time()
            forward().backward(grad)
            times.append(time.process_time() - started)
        return min(times)

    assert torch.allclose(tiles(), trl(), atol=1e-5), "the two heads disagree"
    ratios = run_pairs(lambda: cost(tiles), lambda: cost(trl), pairs)
    report(f"lm_head/{case}", ratios, rows=rows, hidden_size=hidden_size, vocab_size=vocab_size)


def main() -> None:
    """Command line."""
    parser = make_parser(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--case", choices=tuple(CASES), help="one alone")
    parser.add_argument("--repetitions", type=int, default=5, help="runs a side and pair (5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for case in [options.case] if options.case else CASES:
        measure(case, num_pairs(options), options.repetitions)


if __name__ == "__main__":
    main()
