"""The benchmarks by name: where each is found, how its columns are called, and what its answers must be."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset

from ..data import load_prompts
from ..options import nearest

logger = logging.getLogger(__name__)

_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")
_MAX_LISTED = 5


def _integer(answer: str) -> str:
    r"""`"025"` is 25, `"2,125"` is 2125, and `336^\circ` (one Hub form of AIME25) is 336."""
    text = re.sub(r"\^\{?\\circ\}?\Z", "", answer).replace(",", "")
    if not re.fullmatch(r"[-+]?\d+", text):
        raise ValueError("is no whole number")
    return str(int(text))


@dataclass(frozen=True)
class Benchmark:
    """
    One benchmark.

    Args:
        name (`str`): as in options and file names.
        title (`str`): as in tables.
        source (`str`): Hub id, unless a file is given.
        split (`str`): on the Hub.
        prompt_column (`str`), answer_column (`str`): on the Hub, and in a file.
        num_samples (`int`): responses to a problem over which pass@1 is averaged (App. B.1).
        config (`str`, *optional*): configuration on the Hub.
        size (`int`, *optional*): problems of the whole benchmark; fewer are evaluated, but said to be fewer.
        files (`tuple[str, ...]`): names, without suffix, under which it is looked for in a folder; `name` by default.
        normalize (`Callable`, *optional*): brings an answer's text to its usual form; a `ValueError` refuses it.
    """

    name: str
    title: str
    source: str
    split: str
    prompt_column: str
    answer_column: str
    num_samples: int
    config: str | None = None
    size: int | None = None
    files: tuple[str, ...] = ()
    normalize: Callable[[str], str] | None = None


BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            "aime24", "AIME24", "HuggingFaceH4/aime_2024", "train", "problem", "answer", 16, size=30,
            normalize=_integer,
        ),
        Benchmark("aime25", "AIME25", "math-ai/aime25", "test", "problem", "answer", 16, size=30, normalize=_integer),
        Benchmark("amc23", "AMC23", "math-ai/amc23", "test", "question", "answer", 4, size=40, normalize=_integer),
        Benchmark("amc24", "AMC24", "rawsh/2024_AMC12", "train", "problem", "answer", 4, size=45),
        Benchmark("math500", "MATH-500", "HuggingFaceH4/MATH-500", "test", "problem", "answer", 4, size=500),
        Benchmark(
            "gsm8k", "GSM8K", "openai/gsm8k", "test", "question", "answer", 4, config="main", size=1319,
            files=("gsm8k", "gsm8k_test", "gsm8k_test_200"), normalize=_integer,
        ),
    )
}  # fmt: skip

PAPER_BENCHMARKS = ("amc23", "amc24", "aime24", "aime25", "math500")
"""Those whose unweighted average chooses the checkpoint (§5)."""

OWN_SAMPLES = 4


def find_benchmarks(
    names: Sequence[str], data: Mapping[str, str], data_dir: str | None, prompt_column: str, answer_column: str
) -> list[tuple[Benchmark, str]]:
    """
    The benchmarks `names`, each with its source: a file or Hub id.

    Args:
        names (`Sequence[str]`): of the registry, or keys of `data` for one's own.
        data (`Mapping[str, str]`): file, folder or Hub id by name; it wins over `data_dir`.
        data_dir (`str`, *optional*): folder with a file for each other benchmark, in place of the Hub.
        prompt_column (`str`), answer_column (`str`): of one's own files.

    Raises:
        `ValueError`: an unknown or repeated name, a file for a benchmark that is not asked for, or none in `data_dir`.
    """
    if not names or len(set(names)) < len(names):
        raise ValueError(f"`benchmarks={list(names)!r}`: name at least one, and each once.")
    for name in data:
        if name not in names:
            raise ValueError(
                f"`data` gives {name!r}, which is not in `benchmarks` ({', '.join(names)}). Add it there."
            )
    found = []
    for name in names:
        if name in BENCHMARKS:
            benchmark = BENCHMARKS[name]
        elif name in data:
            benchmark = Benchmark(name, name, data[name], "test", prompt_column, answer_column, OWN_SAMPLES)
        else:
            raise ValueError(
                f"There is no benchmark {name!r}.{nearest(name, BENCHMARKS)} Choose among {', '.join(BENCHMARKS)}, or "
                f"give your own file by `--data {name}=FILE`."
            )
        found.append((benchmark, data.get(name) or _source(benchmark, data_dir)))
    return found


def _source(benchmark: Benchmark, data_dir: str | None) -> str:
    if data_dir is None:
        return benchmark.source
    wanted = [f"{stem}{suffix}" for stem in benchmark.files or (benchmark.name,) for suffix in _SUFFIXES]
    for name in wanted:
        if Path(data_dir, name).is_file():
            return str(Path(data_dir, name))
    raise ValueError(
        f"{data_dir!r} has no file for {benchmark.name!r} (looked for {', '.join(wanted)}). Name one by "
        f"`--data {benchmark.name}=FILE`, or leave the benchmark out."
    )


def load_benchmark(
    benchmark: Benchmark,
    source: str | None = None,
    *,
    conversational: bool,
    prompt_template: str | None,
    system_prompt: str | None = None,
    max_problems: int | None = None,
) -> Dataset:
    """
    The problems of a benchmark in order, with the columns `prompt` and `answer` (text in its usual form).

    Args:
        benchmark (`Benchmark`): which.
        source (`str`, *optional*): a local file or folder, or another Hub id, with the benchmark's columns.
        conversational (`bool`), prompt_template (`str`, *optional*), system_prompt (`str`, *optional*): as in
            [`~mu_grpo_trl.data.load_prompts`].
        max_problems (`int`, *optional*): the first so many alone.

    Raises:
        `ValueError`: a missing column, an empty or repeated problem, or an answer that this benchmark cannot have.
        `FileNotFoundError`: there is no such file.
    """
    source = source or benchmark.source
    on_hub = source == benchmark.source and not Path(source).exists()
    is_file = Path(source).is_file()
    try:
        dataset = load_prompts(
            source,
            conversational=conversational,
            split="train" if is_file else benchmark.split,
            config=benchmark.config if on_hub else None,
            prompt_column=benchmark.prompt_column,
            answer_column=benchmark.answer_column,
            prompt_template=prompt_template,
            system_prompt=system_prompt,
        )
        _refuse_repeated(dataset)
        if benchmark.normalize is not None:
            dataset = dataset.remove_columns("answer").add_column("answer", _normalized(benchmark, dataset["answer"]))  # pyright: ignore[reportCallIssue]
    except ValueError as error:
        raise ValueError(f"Benchmark {benchmark.name!r} from {source!r}: {error}") from error
    if benchmark.size is not None and len(dataset) != benchmark.size:
        logger.warning(
            "%s from %r has %d problems, where the whole benchmark has %d.",
            benchmark.title, source, len(dataset), benchmark.size,
        )  # fmt: skip
    return dataset if max_problems is None else dataset.select(range(min(max_problems, len(dataset))))


def _normalized(benchmark: Benchmark, answers: Sequence[str]) -> list[str]:
    assert benchmark.normalize is not None
    texts = []
    for row, answer in enumerate(answers):
        try:
            texts.append(benchmark.normalize(answer))
        except ValueError as reason:
            raise ValueError(
                f"row {row}, column {benchmark.answer_column!r}: {answer[:80]!r} {reason}, as every answer of "
                f"{benchmark.title} is. Is it another dataset?"
            ) from reason
    return texts


def _refuse_repeated(dataset: Dataset) -> None:
    first: dict[str, int] = {}
    repeated = []
    for row, prompt in enumerate(dataset["prompt"]):
        if first.setdefault(str(prompt), row) != row:
            repeated.append(f"row {row} repeats row {first[str(prompt)]}")
    if repeated:
        listed = "; ".join(repeated[:_MAX_LISTED]) + (" …" if len(repeated) > _MAX_LISTED else "")
        raise ValueError(f"{len(repeated)} problems come twice ({listed}) and would count twice. Remove them.")
