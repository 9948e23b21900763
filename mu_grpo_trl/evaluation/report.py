"""What came of an evaluation: scores, the chosen checkpoint, and `eval.json`, `eval.md` and the printed table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .benchmarks import BENCHMARKS, PAPER_BENCHMARKS, Benchmark
from .metrics import INTERVAL_METHOD, average_interval, interval, pass_at_k
from .policies import Checkpoint
from .store import ResponseStore, write_atomically

JSON_NAME, MARKDOWN_NAME = "eval.json", "eval.md"


@dataclass(frozen=True)
class Setting:
    """A setting of the evaluation, and where its value comes from: the paper, an assumption, the recipe, or given."""

    name: str
    value: Any
    origin: str


@dataclass(frozen=True)
class BenchmarkScore:
    """
    One checkpoint on one benchmark.

    Args:
        num_problems (`int`), num_samples (`int`): problems, and responses to each.
        pass_at_1 (`float`): share of right responses.
        interval (`tuple[float, float]`): of `pass_at_1`, at 95%; see [`~mu_grpo_trl.evaluation.metrics.interval`].
        pass_at (`dict[int, float]`): pass@k by k.
        mean_length (`float`): tokens of a response, the EOS included.
        truncated_share (`float`): of the responses, cut by the limit.
        unanswered_share (`float`): of the responses, without a complete box.
    """

    num_problems: int
    num_samples: int
    pass_at_1: float
    interval: tuple[float, float]
    pass_at: dict[int, float]
    mean_length: float
    truncated_share: float
    unanswered_share: float


@dataclass(frozen=True)
class CheckpointScores:
    """All scores of one checkpoint, by benchmark."""

    checkpoint: Checkpoint
    benchmarks: dict[str, BenchmarkScore]


@dataclass(frozen=True)
class Results:
    """
    An evaluation that is complete.

    Args:
        settings (`list[Setting]`): what it was.
        checkpoints (`list[CheckpointScores]`): in the order of training.
    """

    settings: list[Setting]
    checkpoints: list[CheckpointScores]

    @property
    def averaged(self) -> list[str]:
        """Benchmarks that the average is over: those of the paper's five, or all where none of these was evaluated."""
        present = list(self.checkpoints[0].benchmarks)
        return [name for name in present if name in PAPER_BENCHMARKS] or present

    def average(self, scores: CheckpointScores) -> float:
        """Unweighted average of pass@1 over [`averaged`]."""
        return sum(scores.benchmarks[name].pass_at_1 for name in self.averaged) / len(self.averaged)

    @property
    def best(self) -> CheckpointScores:
        """The checkpoint of the highest average, the first of several."""
        return max(self.checkpoints, key=self.average)

    @property
    def last(self) -> CheckpointScores:
        """The checkpoint at the end of training."""
        return self.checkpoints[-1]


def score_benchmark(benchmark: Benchmark, store: ResponseStore, ks: Sequence[int]) -> BenchmarkScore:
    """
    Scores from the stored responses.

    Raises:
        `ValueError`: some are missing.
    """
    if store.missing:
        raise ValueError(f"{store.path}: {len(store.missing)} problems of {benchmark.title} have no responses.")
    num_correct = np.array([sum(r.correct for r in store.responses[problem]) for problem in range(store.num_problems)])
    responses = [response for group in store.responses.values() for response in group]
    return BenchmarkScore(
        num_problems=store.num_problems,
        num_samples=store.num_samples,
        pass_at_1=pass_at_k(num_correct, store.num_samples, 1),
        interval=interval(num_correct, store.num_samples),
        pass_at={k: pass_at_k(num_correct, store.num_samples, k) for k in ks},
        mean_length=sum(response.num_tokens for response in responses) / len(responses),
        truncated_share=sum(response.finish_reason == "length" for response in responses) / len(responses),
        unanswered_share=sum(response.answer is None for response in responses) / len(responses),
    )


def write_results(results: Results, folder: Path) -> str:
    """Write `eval.json` and `eval.md` into `folder`, and return the text of the latter."""
    text = as_markdown(results)
    write_atomically(folder / JSON_NAME, json.dumps(as_json(results), indent=1, ensure_ascii=False))
    write_atomically(folder / MARKDOWN_NAME, text)
    return text


def as_json(results: Results) -> dict[str, Any]:
    """The content of `eval.json`."""
    return {
        "settings": {setting.name: {"value": setting.value, "from": setting.origin} for setting in results.settings},
        "interval": INTERVAL_METHOD,
        "average_of": results.averaged,
        "best": results.best.checkpoint.label,
        "last": results.last.checkpoint.label,
        "checkpoints": [_checkpoint_json(results, scores) for scores in results.checkpoints],
    }


def _checkpoint_json(results: Results, scores: CheckpointScores) -> dict[str, Any]:
    average, checkpoint = results.average(scores), scores.checkpoint
    return {
        "label": checkpoint.label,
        "step": checkpoint.step,
        "weights": checkpoint.weights_hash,
        "average": average,
        "average_interval": _average_interval(results, scores),
        "benchmarks": {
            name: {
                "num_problems": score.num_problems,
                "num_samples": score.num_samples,
                "pass@1": score.pass_at_1,
                "interval": score.interval,
                **{f"pass@{k}": value for k, value in score.pass_at.items()},
                "mean_length": score.mean_length,
                "truncated_share": score.truncated_share,
                "unanswered_share": score.unanswered_share,
            }
            for name, score in scores.benchmarks.items()
        },
    }


def _average_interval(results: Results, scores: CheckpointScores) -> tuple[float, float]:
    averaged = [scores.benchmarks[name] for name in results.averaged]
    return average_interval([score.pass_at_1 for score in averaged], [score.interval for score in averaged])


def as_markdown(results: Results) -> str:
    """Tables of accuracies, of what else the responses show, and of the settings."""
    names = list(results.checkpoints[0].benchmarks)
    header = ["checkpoint", *map(_title, names), f"average of {len(results.averaged)}"]
    accuracies, details = [], []
    for scores in results.checkpoints:
        marks = [word for word, one in (("best", results.best), ("last", results.last)) if scores is one]
        label = scores.checkpoint.label + (f" ({', '.join(marks)})" if marks else "")
        bold = "**" if scores is results.best else ""
        cells = [_with_interval(score.pass_at_1, score.interval) for score in scores.benchmarks.values()]
        average = f"{bold}{_with_interval(results.average(scores), _average_interval(results, scores))}{bold}"
        accuracies.append([label, *cells, average])
        details += [
            [scores.checkpoint.label, _title(name), *_details(score)] for name, score in scores.benchmarks.items()
        ]
    detail_header = ["checkpoint", "benchmark", "problems × samples", "pass@k, %", "mean tokens", "cut", "unanswered"]
    missing = [_title(name) for name in PAPER_BENCHMARKS if name not in results.averaged]
    caution = f" The paper averages over five; missing: {', '.join(missing)}." if missing else ""
    settings = [[setting.name, _cell(setting.value), setting.origin] for setting in results.settings]
    return "\n".join(
        [
            "# Evaluation",
            "",
            f"pass@1 in %, with 95% intervals. Best by the unweighted average of "
            f"{', '.join(map(_title, results.averaged))}: **{results.best.checkpoint.label}**; "
            f"last: {results.last.checkpoint.label}.{caution}",
            "",
            *_table(header, accuracies),
            "",
            *_table(detail_header, details),
            "",
            f"Intervals: {INTERVAL_METHOD}",
            "",
            *_table(["setting", "value", "from"], settings),
            "",
        ]
    )


def _details(score: BenchmarkScore) -> list[str]:
    return [
        f"{score.num_problems} × {score.num_samples}",
        ", ".join(f"pass@{k} {100 * value:.1f}" for k, value in score.pass_at.items()),
        f"{score.mean_length:.1f}",
        f"{score.truncated_share:.1%}",
        f"{score.unanswered_share:.1%}",
    ]


def _title(name: str) -> str:
    return BENCHMARKS[name].title if name in BENCHMARKS else name


def _with_interval(value: float, bounds: tuple[float, float]) -> str:
    return f"{100 * value:.1f} [{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]"


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {item}" for name, item in value.items())
    return str(value).replace("\n", "\\n").replace("|", "\\|")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table whose columns are also aligned as plain text."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    rule = "|".join("-" * (width + 2) for width in widths)
    return [f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])]
