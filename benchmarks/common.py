"""What all benchmarks share: alternating pairs of runs, and the line of JSON they end with."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

PAIRS = 5
QUICK_PAIRS = 2


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has: `--quick` and `--pairs`; read them with [`num_pairs`]."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_PAIRS} pairs instead of {PAIRS}")
    parser.add_argument("--pairs", type=int, help="pairs of runs, whatever --quick says")
    return parser


def num_pairs(options: argparse.Namespace) -> int:
    """How many pairs the command line asks for.

    Raises:
        SystemExit: below 1.
    """
    pairs = options.pairs if options.pairs is not None else QUICK_PAIRS if options.quick else PAIRS
    if pairs < 1:
        raise SystemExit(f"--pairs {pairs}: a ratio takes at least one pair.")
    return pairs


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock of one call, garbage collected before it."""
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def run_pairs(ours: Callable[[], float], other: Callable[[], float], pairs: int) -> list[float]:
    """Run both sides `pairs` times, alternately, the side that starts changing from pair to pair.

    Args:
        ours, other (`Callable[[], float]`): one run each, returning what it cost (seconds, bytes: less is better).

    Returns:
        `list[float]`: `other / ours` of each pair: above 1 where ours is better.
    """
    ratios = []
    for pair in range(pairs):
        if pair % 2 == 0:
            our_cost = ours()
            other_cost = other()
        else:
            other_cost = other()
            our_cost = ours()
        ratios.append(other_cost / our_cost)
    return ratios


def report(name: str, ratios: Sequence[float], **extra: Any) -> dict[str, Any]:
    """Print the last line of a benchmark, one JSON object, and return it.

    Args:
        name (`str`): of the benchmark, with its case if it has several.
        ratios (`Sequence[float]`): of the pairs, above 1 where ours is better.
        extra: further figures that JSON can hold.
    """
    line = {
        "name": name,
        "ratio": round(statistics.median(ratios), 4),
        "min": round(min(ratios), 4),
        "max": round(max(ratios), 4),
        "pairs": len(ratios),
        **extra,
    }
    print(json.dumps(line, allow_nan=False), flush=True)
    return line
