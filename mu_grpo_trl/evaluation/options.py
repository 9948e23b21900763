"""The options of `mu-grpo eval`, where their defaults come from, and how they are read."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from ..config import MuGRPOConfig
from ..options import as_declared, nearest
from ..train import RecipeParser, ScriptArguments, check_recipe
from ..train import parse as parse_recipe
from .benchmarks import BENCHMARKS, PAPER_BENCHMARKS, Benchmark

PAPER, ASSUMPTION, RECIPE, GIVEN = "paper", "assumption", "recipe", "given"
"""Where the value of a setting comes from: the paper says so; it leaves it open (docs/assumptions.md); the recipe of
the training run; or whoever called the command."""


@dataclass
class EvaluationConfig:
    """
    Options of an evaluation; the defaults are the paper's protocol (App. B.1), or marked as assumptions in its output.

    Args:
        checkpoints (`list[str]`): folders, patterns of folders (`runs/x/checkpoint-*`) or Hub ids.
        output_dir (`str`, *optional*, defaults to `"runs/evaluation"`): responses and results; a second start there
            goes on with what is missing.
        benchmarks (`list[str]`, *optional*): of the registry, or of your own files. Defaults to the paper's five.
        data (`list[str]`, *optional*): `NAME=FILE` for benchmarks not to be taken from the Hub.
        data_dir (`str`, *optional*): folder with a file for every benchmark (`aime24.jsonl`, …).
        samples (`list[str]`, *optional*): responses to each problem, `4` for all benchmarks or `NAME=4` for one.
            Defaults to 16 for AIME and 4 for the others.
        pass_at (`list[int]`, *optional*): the k of pass@k. Defaults to 1 and all samples.
        temperature (`float`, *optional*, defaults to `1.0`): of sampling; 0 takes the likeliest token.
        top_p (`float`, *optional*, defaults to `1.0`): of sampling.
        context_length (`int`, *optional*): limit on prompt and response together, in tokens. Defaults to the training
            recipe's, then to the model's.
        max_tokens (`int`, *optional*): limit on a response, in tokens. Defaults to the training recipe's, then to what
            the prompt leaves of the context.
        max_problems (`int`, *optional*): the first so many problems of each benchmark alone.
        engine (`str`, *optional*): `"vllm"` or `"transformers"` (in process). Defaults to the recipe's.
        seed (`int`, *optional*, defaults to `0`): of sampling in process; vLLM's is its own.
    """

    checkpoints: list[str] = field(default_factory=list, metadata={"help": "Folders, patterns or Hub ids."})
    output_dir: str = field(default="runs/evaluation", metadata={"help": "Responses and results."})
    benchmarks: list[str] = field(
        default_factory=lambda: list(PAPER_BENCHMARKS), metadata={"help": f"Of {', '.join(BENCHMARKS)}, or your own."}
    )
    data: list[str] | None = field(default=None, metadata={"help": "NAME=FILE in place of the Hub."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder with a file for every benchmark."})
    samples: list[str] | None = field(default=None, metadata={"help": "Responses to a problem: 4, or NAME=4."})
    pass_at: list[int] | None = field(default=None, metadata={"help": "The k of pass@k."})
    temperature: float = field(default=1.0, metadata={"help": "Of sampling; 0: the likeliest token."})
    top_p: float = field(default=1.0, metadata={"help": "Of sampling."})
    context_length: int | None = field(default=None, metadata={"help": "Tokens of prompt and response together."})
    max_tokens: int | None = field(default=None, metadata={"help": "Tokens of a response."})
    max_problems: int | None = field(default=None, metadata={"help": "The first so many problems alone."})
    engine: str | None = field(default=None, metadata={"help": "'vllm' or 'transformers'."})
    seed: int = field(default=0, metadata={"help": "Of sampling in process."})

    def __post_init__(self) -> None:
        for name, annotation in get_type_hints(type(self)).items():
            setattr(self, name, as_declared(name, getattr(self, name), annotation))
        checks = {
            "temperature": (lambda v: v >= 0 and math.isfinite(v), "0 or more"),
            "top_p": (lambda v: 0 < v <= 1, "above 0, at most 1"),
            "context_length": (lambda v: v is None or v >= 2, "at least 2, or unset"),
            "max_tokens": (lambda v: v is None or v >= 1, "at least 1, or unset"),
            "max_problems": (lambda v: v is None or v >= 1, "at least 1, or unset"),
            "engine": (lambda v: v in (None, "vllm", "transformers"), "'vllm' or 'transformers'"),
            "pass_at": (lambda v: v is None or min(v, default=0) >= 1, "numbers of at least 1"),
        }
        for name, (holds, requirement) in checks.items():
            if not holds(getattr(self, name)):
                raise ValueError(f"`{name}={getattr(self, name)!r}` must be {requirement}.")

    @property
    def sources(self) -> dict[str, str]:
        """`data` by name."""
        return dict(self._pairs("data", self.data or ()))

    def num_samples(self, benchmark: Benchmark) -> int:
        """
        Responses to each problem of `benchmark`.

        Raises:
            `ValueError`: an unknown name, no positive number, or more than one where sampling is greedy.
        """
        plain = [entry for entry in self.samples or () if "=" not in entry]
        named = dict(self._pairs("samples", [entry for entry in self.samples or () if "=" in entry]))
        if unknown := [name for name in named if name not in self.benchmarks]:
            raise ValueError(f"`samples` names {unknown[0]!r}, no benchmark.{nearest(unknown[0], self.benchmarks)}")
        if len(plain) > 1:
            raise ValueError(f"`samples={self.samples!r}` gives several numbers for all benchmarks. Give one.")
        count = as_declared("samples", named.get(benchmark.name, plain[0] if plain else benchmark.num_samples), int)
        if count < 1:
            raise ValueError(f"`samples={count}` for {benchmark.name!r} must be at least 1.")
        if self.temperature == 0 and count > 1:
            raise ValueError(
                f"`temperature=0.0` gives {count} equal responses to each problem of {benchmark.name!r}. Set "
                "`samples: [1]`, or a temperature above 0."
            )
        return count

    def ks(self, num_samples: int) -> list[int]:
        """The k of pass@k for that many samples."""
        return sorted({1, *(self.pass_at or (num_samples,))})

    def origin(self, name: str, paper_or_assumption: str) -> str:
        """Where the value of the option `name` comes from, if it is the default."""
        return paper_or_assumption if getattr(self, name) == getattr(EvaluationConfig(), name) else GIVEN

    @staticmethod
    def _pairs(option: str, entries: Sequence[str]) -> list[tuple[str, str]]:
        pairs = [entry.partition("=") for entry in entries]
        for name, separator, value in pairs:
            if not (name and separator and value):
                raise ValueError(f"`{option}`: {name + separator + value!r} is not NAME=VALUE.")
        names = [name for name, _, _ in pairs]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"`{option}` gives {sorted(repeated)[0]!r} more than once.")
        return [(name, value) for name, _, value in pairs]


@dataclass(frozen=True)
class Options:
    """
    All that an evaluation was asked for.

    Args:
        evaluation ([`EvaluationConfig`]): its own options.
        script ([`~mu_grpo_trl.train.ScriptArguments`]): how training makes prompts.
        config ([`MuGRPOConfig`]): how training runs its engine.
        recipe (`Path` or None): the training recipe that `script` and `config` come from.
    """

    evaluation: EvaluationConfig
    script: ScriptArguments
    config: MuGRPOConfig
    recipe: Path | None


def parse(argv: Sequence[str]) -> Options:
    """
    Options from `--protocol FILE.yaml` and `--key value` arguments, which win; what is no option of the evaluation is
    one of training, and goes with its recipe `--config FILE.yaml`.

    Raises:
        `ValueError`: an unknown key, or a value that cannot be.
    """
    files = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    files.add_argument("--protocol", type=Path)
    files.add_argument("--config", type=Path)
    try:
        known, rest = files.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}: give the file's path after it.") from error
    parser = RecipeParser((EvaluationConfig,), allow_abbrev=False, prog="mu-grpo eval")  # type: ignore[arg-type]
    if known.protocol is not None:
        parser.set_defaults_with_config(**check_recipe(known.protocol, (EvaluationConfig,)))
    parsed: list[Any] = list(parser.parse_args_into_dataclasses(rest, return_remaining_strings=True))
    evaluation, training = parsed[0], parsed[-1]
    recipe = ["--config", str(known.config)] if known.config else []
    engine = ["--rollout_engine", evaluation.engine] if evaluation.engine else []
    script, config, _ = parse_recipe([*recipe, *training, *engine])
    config.output_dir, config.stage_dir = evaluation.output_dir, None  # where the servers' logs go
    config.vllm_release = "keep"
    if evaluation.context_length is not None:
        config.max_context_length, config.vllm_max_model_length = evaluation.context_length, None
    return Options(evaluation, script, config, known.config)
