"""Everything between a dataset and token ids: load, check, tokenize and fingerprint prompts.

Rows are numbered from 0, as in `dataset[row]`. Text only: prompts with images are refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import datasets
import jinja2
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetsError
from transformers import PreTrainedTokenizerBase

from .options import nearest

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Prompt = str | list[Message]
RowRule = Literal["error", "drop"]

PAPER_PROMPT = "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}."
"""Default prompt template. App. B.1 asks for step-by-step reasoning and a boxed answer but gives no wording; this one
is Qwen2.5-Math's."""

STREAM_LIMIT = 262_144
"""Most rows [`materialize_stream`] reads by default: eight stages' worth of prompts at the paper's setting."""

_PLACEHOLDER = "{problem}"
_CHUNK = 2_000
_MAX_LISTED = 10
_MAX_LOGGED = 1_000
_SPLIT_WORDS = ("train", "training", "test", "testing", "validation", "valid", "val", "dev", "eval")
_RENDER_ARGUMENTS = {
    "conversation", "tokenize", "return_dict", "tools", "chat_template", "add_generation_prompt",
    "continue_final_message", "padding", "truncation", "max_length", "return_tensors", "tokenizer_kwargs",
}  # fmt: skip


def load_prompts(
    source: str,
    *,
    conversational: bool,
    split: str = "train",
    config: str | None = None,
    prompt_column: str = "problem",
    answer_column: str | None = "answer",
    prompt_template: str | None = PAPER_PROMPT,
    system_prompt: str | None = None,
    answer_delimiter: str | None = "####",
    keep_columns: Sequence[str] = (),
    max_rows: int | None = None,
    bad_rows: RowRule = "error",
) -> Dataset:
    r"""
    Load prompts and their reference answers from the Hub or from local files.

    Args:
        source (`str`):
            Hub id, a local `.jsonl`, `.json`, `.parquet` or `.csv` file, or a folder of them (or one written by
            `Dataset.save_to_disk`). In a folder, files whose name or parent folder holds the split's name are read,
            in sorted order; if no file names any split, all of them are `train`.
        conversational (`bool`):
            `True` makes each prompt a list of messages, for models with a chat template; `False` a string.
        split (`str`):
            Split of a Hub dataset or folder. A single file is one split, whatever its name.
        config (`str`, *optional*):
            Configuration of a Hub dataset.
        prompt_column (`str`):
            Column with the problem: a string, or a list of messages (used as it is, without the template).
        answer_column (`str`, *optional*):
            Column with the reference answer, turned into text by [`answer_text`]. `None` for no `answer` column.
        prompt_template (`str`, *optional*):
            Text whose `{problem}` is replaced by the problem; other braces are literal. `None`: the problem as it is.
        system_prompt (`str`, *optional*):
            First message of each conversation that does not start with a system message.
        answer_delimiter (`str`, *optional*):
            An answer of the form `"... #### 42"` (GSM8K) becomes `"42"`. `None` takes answers whole.
        keep_columns (`Sequence[str]`):
            Further columns to keep, such as test cases.
        max_rows (`int`, *optional*):
            Read at most so many rows, from the first.
        bad_rows (`"error"` or `"drop"`):
            What to do with rows whose problem or answer is empty or of a wrong type: refuse the dataset, or leave them
            out and log their row numbers.

    Returns:
        `datasets.Dataset` with the columns `prompt`, `answer` (strings) and `keep_columns`. Duplicate rows are kept.

    Raises:
        FileNotFoundError: `source` looks like a path and does not exist.
        ValueError: an option, a column or a row is unusable; the message names file, row, column and value.
    """
    _check_options(conversational, prompt_template, system_prompt, keep_columns, max_rows, bad_rows)
    table = _read_table(source, split, config, max_rows)
    wanted = [prompt_column, *([answer_column] if answer_column else []), *keep_columns]
    _check_columns(wanted, table)

    def make_prompt(row: dict[str, Any]) -> Prompt:
        return _make_prompt(row.get(prompt_column), prompt_template, conversational, system_prompt)

    makers: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {"prompt": (prompt_column, make_prompt)}
    if answer_column:
        makers["answer"] = (answer_column, lambda row: answer_text(row.get(answer_column), answer_delimiter))
    columns, good = _convert(table.rows, makers, table.place, bad_rows)
    for name in keep_columns:
        columns[name] = [table.rows[row].get(name) for row in good]
    return _to_dataset(columns)


def normalize_answers(
    dataset: Dataset, column: str = "answer", *, answer_delimiter: str | None = None, bad_rows: RowRule = "error"
) -> Dataset:
    """
    Turn the answers of a dataset that was not made by [`load_prompts`] into text.

    Args:
        dataset (`datasets.Dataset`): any dataset with `column`.
        column (`str`): column with the reference answers; each goes through [`answer_text`].
        answer_delimiter (`str`, *optional*): as in [`load_prompts`].
        bad_rows (`"error"` or `"drop"`): as in [`load_prompts`].

    Returns:
        `datasets.Dataset` with `column` a column of strings, and without the rows dropped.

    Raises:
        ValueError: the column is missing, or a row has no usable answer and `bad_rows="error"`.
    """
    if column not in dataset.column_names:
        raise ValueError(_missing_column(column, "the dataset", dataset.column_names))
    rows = [{column: value} for value in dataset.with_format(None)[column]]
    makers = {column: (column, lambda row: answer_text(row[column], answer_delimiter))}
    columns, good = _convert(rows, makers, "row {}".format, bad_rows)
    if columns[column] == [row[column] for row in rows]:
        return dataset
    if len(good) < len(dataset):
        dataset = dataset.select(good)
    return dataset.remove_columns(column).add_column(column, columns[column])  # pyright: ignore[reportCallIssue]


def answer_text(value: Any, delimiter: str | None = None) -> str:
    """
    Text of a reference answer.

    Strings lose surrounding white space. Numbers are written in full without a trailing `.0` (`27.0` is `"27"`,
    `1e-07` is `"0.0000001"`). A list of one is unwrapped, a longer one is joined by `", "`. With a `delimiter`, an
    answer whose last line has the delimiter, preceded by white space or nothing, is cut to what follows it.

    Raises:
        ValueError: `value` is `None`, a bool, a dict, NaN, infinite, empty, or a list holding one of these. The
            message continues a sentence that begins with the value.
    """
    if isinstance(value, list | tuple):
        if any(isinstance(item, list | tuple) for item in value):
            raise ValueError("is a list of lists, where a flat list of answers is needed")
        try:
            text = ", ".join(map(answer_text, value))
        except ValueError as reason:
            raise ValueError(f"holds an item that {reason}") from reason
    elif isinstance(value, str):
        text = value.strip()
    elif isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        text = _number_text(value)
    else:
        raise ValueError(f"is of type {type(value).__name__}, where text or a number is needed")
    if not text:
        raise ValueError("is empty")
    if delimiter and (found := re.search(rf"(?:\A|\s){re.escape(delimiter)}([^\n]*)\Z", text)):
        text = found[1].strip()
        if not text:
            raise ValueError(f"has nothing after {delimiter!r}")
    return text


def materialize_stream(
    stream: Iterable[dict[str, Any]], *, max_steps: int, prompts_per_update: int, limit: int = STREAM_LIMIT
) -> Dataset:
    """
    Read from a stream the rows that a run will use, so that its length, order and position on resume are fixed.

    Reads `max_steps * prompts_per_update` rows, fewer if the stream ends before, and never more than `limit`: the
    stream may be infinite. A run that needs more prompts than were read repeats them in a new order, as with any
    dataset. Columns are united over the rows; what a row lacks is `None`.

    Args:
        stream (`Iterable[dict]`): a `datasets.IterableDataset`, or anything that yields rows.
        max_steps (`int`): updates in the run; a stream has no length to derive it from.
        prompts_per_update (`int`): prompt groups per update, over all ranks.
        limit (`int`): most rows read; they are held in memory.

    Raises:
        ValueError: `max_steps` is not set, `limit` is below one update, the stream is shorter than one update, or a
            row is not a dict.
    """
    if max_steps <= 0:
        raise ValueError(
            f"max_steps={max_steps}: an iterable dataset has no length, so the number of updates must be given; "
            "set max_steps, or pass a datasets.Dataset."
        )
    if limit < prompts_per_update:
        raise ValueError(f"limit={limit} is below one update ({prompts_per_update} prompts); raise the limit.")
    needed = max_steps * prompts_per_update
    rows = list(islice(stream, min(needed, limit)))
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {number} of the stream is of type {type(row).__name__}, where a dict is needed.")
    if len(rows) < prompts_per_update:
        raise ValueError(
            f"the stream ended after {len(rows)} rows, but one update takes {prompts_per_update} prompts; "
            "lower prompts_per_update or give a longer stream."
        )
    if len(rows) < needed:
        logger.warning(
            "%d prompts were read from the stream (%s), but %d updates take %d: prompts will repeat.",
            len(rows), "limit reached" if len(rows) == limit else "it ended", max_steps, needed,
        )  # fmt: skip
    names = list(dict.fromkeys(name for row in rows for name in row))
    return _to_dataset({name: [row.get(name) for row in rows] for name in names})


def tokenize_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any] | None = None
) -> list[list[int]]:
    """
    Token ids of prompts, as TRL's GRPO tokenizes them for generation; what the engine gets is what is trained on.

    Strings get the tokenizer's special tokens. Conversations are rendered by the chat template, which alone decides on
    special tokens, with the header of a new assistant turn; a conversation that ends with an assistant message is
    continued instead. A string that already starts with the BOS token gets no second one.

    Args:
        prompts (`Sequence[str]` or `Sequence[list[dict]]`): all strings or all conversations.
        tokenizer (`PreTrainedTokenizerBase`): the policy's tokenizer.
        chat_template_kwargs (`dict`, *optional*): variables for the chat template, such as `enable_thinking`.

    Returns:
        `list[list[int]]`: one ragged row per prompt, never truncated.

    Raises:
        ValueError: there is no chat template, or it fails on a prompt.
    """
    if not prompts:
        return []
    if isinstance(prompts[0], str):
        rows = tokenizer(text=list(prompts))["input_ids"]  # pyright: ignore[reportArgumentType]
    else:
        _check_chat_template(tokenizer, chat_template_kwargs)
        texts = [_render(prompt, tokenizer, chat_template_kwargs or {}) for prompt in prompts]
        rows = tokenizer(text=texts, add_special_tokens=False)["input_ids"]
    return [_without_second_bos(ids, tokenizer.bos_token_id) for ids in rows]


@dataclass(frozen=True)
class PromptReport:
    """
    What [`check_prompts`] found.

    Args:
        num_prompts (`int`): prompts kept.
        dropped_rows (`tuple[int, ...]`): rows dropped, numbered as in the dataset given.
        num_shortened (`int`): kept prompts with less room for a response than `max_completion_length`.
        mean_tokens (`float`): mean length of the kept prompts, in tokens.
        longest_tokens (`int`): length of the longest kept prompt, in tokens.
    """

    num_prompts: int
    dropped_rows: tuple[int, ...]
    num_shortened: int
    mean_tokens: float
    longest_tokens: int


def check_prompts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    max_completion_length: int,
    overlong_prompts: RowRule = "error",
    *,
    min_response_tokens: int = 1,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> tuple[Dataset, PromptReport]:
    """
    Tokenize all prompts once, before anything expensive, and find the ones that cannot be trained on.

    Args:
        dataset (`datasets.Dataset`):
            Its `prompt` column holds strings or lists of messages, one kind throughout.
        tokenizer (`PreTrainedTokenizerBase`):
            The policy's tokenizer.
        context_length (`int`):
            Upper limit on prompt and response together, in tokens.
        max_completion_length (`int`):
            Upper limit on the response, in tokens. Prompts that leave less room stay, with shorter responses.
        overlong_prompts (`"error"` or `"drop"`):
            What to do with prompts that leave fewer than `min_response_tokens`.
        min_response_tokens (`int`):
            Least room for a response, in tokens; at most `max_completion_length`.
        chat_template_kwargs (`dict`, *optional*):
            Variables for the chat template.

    Returns:
        `tuple[datasets.Dataset, PromptReport]`: the dataset without the rows dropped, and the counts.

    Raises:
        TypeError: `dataset` is no `datasets.Dataset`.
        ValueError: a prompt is empty, malformed or overlong (`overlong_prompts="error"`), kinds are mixed, no prompt
            is left, or the tokenizer cannot make prompts of this kind.
    """
    _check_choice("overlong_prompts", overlong_prompts)
    if not 1 <= min_response_tokens <= max_completion_length:
        raise ValueError(
            f"min_response_tokens={min_response_tokens} must be at least 1 and at most "
            f"max_completion_length={max_completion_length}."
        )
    conversational = _check_prompt_rows(dataset)
    _check_special_tokens(next(_prompt_chunks(dataset))[:1], tokenizer, conversational, chat_template_kwargs)
    lengths: list[int] = []
    for chunk in _prompt_chunks(dataset):
        lengths.extend(map(len, tokenize_prompts(chunk, tokenizer, chat_template_kwargs)))
    if 0 in lengths:
        raise ValueError(f"row {lengths.index(0)}: the tokenizer makes no token of the prompt; remove the row.")
    longest_allowed = context_length - min_response_tokens
    overlong = [row for row, length in enumerate(lengths) if length > longest_allowed]
    if overlong:
        _report_overlong(overlong, lengths, context_length, min_response_tokens, overlong_prompts)
        dataset = dataset.select([row for row, length in enumerate(lengths) if length <= longest_allowed])
        lengths = [length for length in lengths if length <= longest_allowed]
    num_shortened = sum(context_length - length < max_completion_length for length in lengths)
    if num_shortened:
        logger.warning(
            "%d of %d prompts leave less than max_completion_length=%d within context_length=%d: their responses get "
            "what is left.", num_shortened, len(lengths), max_completion_length, context_length,
        )  # fmt: skip
    report = PromptReport(len(lengths), tuple(overlong), num_shortened, sum(lengths) / len(lengths), max(lengths))
    return dataset, report


def dataset_hash(dataset: Dataset) -> str:
    """
    SHA-256 of the prompts and of the `answer` and `solution` columns, in row order, as 64 hex digits.

    Depends on the content alone: not on the process, the storage format, or keys of messages that are `None`.
    """
    names = [name for name in ("prompt", "answer", "solution") if name in dataset.column_names]
    digest = hashlib.sha256(_canonical(names))
    for batch in dataset.select_columns(names).with_format(None).iter(_CHUNK):
        for row in zip(*batch.values(), strict=True):  # pyright: ignore[reportAttributeAccessIssue]
            digest.update(_canonical(_without_none(list(row))))
    return digest.hexdigest()


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """
    SHA-256 of all that decides the ids of a prompt, as 64 hex digits: vocabulary, special tokens, chat template, and
    the ids of a text of its own tokens (which also shows merges, normalization and added BOS or EOS).
    """
    step = max(1, len(tokenizer) // 512)
    probe = tokenizer.decode(list(range(0, len(tokenizer), step)), skip_special_tokens=True)
    content = {
        "vocab": tokenizer.get_vocab(),
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "special_ids": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id],
        "chat_template": tokenizer.chat_template,
        "probe": tokenizer(probe)["input_ids"],
    }
    return hashlib.sha256(_canonical(content)).hexdigest()


@dataclass(frozen=True)
class _Table:
    """Rows of one or more files in order; `starts` and `names` are the first row and the name of each file."""

    rows: list[dict[str, Any]]
    starts: list[int]
    names: list[str]

    def place(self, row: int) -> str:
        file = bisect_right(self.starts, row) - 1
        return f"{self.names[file]} row {row - self.starts[file]}"


def _read_table(source: str, split: str, config: str | None, max_rows: int | None) -> _Table:
    path = Path(source).expanduser()
    if path.exists():
        if config is not None or "[" in split:
            raise ValueError(
                f"config={config!r}, split={split!r}: configurations and split slices exist on the Hub only; "
                f"{source!r} is local. Leave config out, and use max_rows for a slice."
            )
        table = _read_local(path, split, max_rows)
    elif path.suffix in _READERS or source.startswith(("/", "./", "../", "~")):
        siblings = [str(path.parent / entry.name) for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise FileNotFoundError(f"{source!r} does not exist.{nearest(str(path), siblings)} Check the path.")
    else:
        table = _Table(_head(_load_hub(source, split, config), max_rows), [0], [f"{source} ({split})"])
    if not table.rows:
        raise ValueError(f"{source!r} has no rows; give a dataset with at least one.")
    return table


def _read_local(path: Path, split: str, max_rows: int | None) -> _Table:
    if path.is_dir() and any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
        saved = datasets.load_from_disk(str(path))
        if isinstance(saved, DatasetDict):
            if split not in saved:
                raise ValueError(f"{str(path)!r} has no split {split!r}; choose one of {list(saved)}.")
            saved = saved[split]
        return _Table(_head(saved, max_rows), [0], [str(path)])
    table = _Table([], [], [])
    for file in _folder_files(path, split) if path.is_dir() else [path]:
        if file.suffix not in _READERS:
            raise ValueError(f"{str(file)!r} is of no known kind; give one of {', '.join(_READERS)}.")
        table.starts.append(len(table.rows))
        table.names.append(str(file))
        limit = None if max_rows is None else max_rows - len(table.rows)
        table.rows.extend(islice(_READERS[file.suffix](file), limit))
    return table


def _folder_files(folder: Path, split: str) -> list[Path]:
    files = [file for file in sorted(folder.rglob("*")) if file.suffix in _READERS and file.is_file()]

    def names_split(file: Path, word: str) -> bool:
        parts = [*file.relative_to(folder).parts[:-1], file.stem]
        return any(re.search(rf"(?<![a-z]){re.escape(word)}(?![a-z])", part.lower()) for part in parts)

    chosen = [file for file in files if names_split(file, split.lower())]
    if not chosen and split == "train" and not any(names_split(file, word) for file in files for word in _SPLIT_WORDS):
        chosen = files
    if not chosen:
        seen = _listed([str(file.relative_to(folder)) for file in files]) or "no data files"
        raise ValueError(f"no file of split {split!r} in {str(folder)!r} ({seen}); name a file or another split.")
    return chosen


def _load_hub(source: str, split: str, config: str | None) -> Dataset:
    try:
        loaded = datasets.load_dataset(source, config, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        raise ValueError(
            f"{source!r} (config={config!r}, split={split!r}) is no local file or folder, and could not be loaded "
            f"from the Hub: {error}. Check id, configuration and split, or download the dataset and give its path."
        ) from error
    if not isinstance(loaded, Dataset):
        raise ValueError(f"split={split!r} of {source!r} is not one split; name exactly one.")
    return loaded


def _head(dataset: Dataset, max_rows: int | None) -> list[dict[str, Any]]:
    dataset = dataset.with_format(None)
    return (dataset if max_rows is None else dataset.select(range(min(max_rows, len(dataset))))).to_list()


def _read_jsonl(file: Path) -> Iterator[dict[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json_row(_parse_json(line, f"{file} line {number}"), f"{file} line {number}")


def _read_json(file: Path) -> Iterator[dict[str, Any]]:
    content = file.read_bytes()
    if not content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return _read_jsonl(file)
    return (_json_row(row, f"{file} row {n}") for n, row in enumerate(_parse_json(content, str(file))))


def _read_parquet(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(_CHUNK):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{str(file)!r} cannot be read as parquet ({error}); write it again.") from error


def _read_csv(file: Path) -> Iterator[dict[str, Any]]:
    try:  # All cells are text: an answer "075" keeps its zero, and "NA" stays an answer.
        frame = pd.read_csv(file, dtype=str, keep_default_na=False)
    except ValueError as error:
        raise ValueError(f"{str(file)!r} cannot be read as CSV ({str(error).strip()}); mend or convert it.") from error
    yield from frame.to_dict("records")  # pyright: ignore[reportReturnType]


_READERS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}


def _parse_json(content: bytes, place: str) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(
            f"{place} is not JSON in UTF-8 ({error}); write one object a line, or one list of objects."
        ) from error


def _json_row(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place} is of type {type(value).__name__}, where an object with named columns is needed.")
    return value


def _check_options(
    conversational: bool,
    template: str | None,
    system_prompt: str | None,
    keep_columns: Sequence[str],
    max_rows: int | None,
    bad_rows: str,
) -> None:
    _check_choice("bad_rows", bad_rows)
    if template is not None and _PLACEHOLDER not in template:
        raise ValueError(f"prompt_template={template!r} has no {_PLACEHOLDER}; put it where the problem belongs.")
    if system_prompt is not None and not conversational:
        raise ValueError(
            "system_prompt needs conversational=True: a plain prompt has no system message. "
            "Put the text into prompt_template instead."
        )
    if max_rows is not None and max_rows < 1:
        raise ValueError(f"max_rows={max_rows} must be at least 1; leave it out to read all rows.")
    if isinstance(keep_columns, str):
        raise ValueError(f"keep_columns={keep_columns!r} must be a list of names, such as [{keep_columns!r}].")
    if taken := {"prompt", "answer"}.intersection(keep_columns):
        raise ValueError(f"keep_columns holds {sorted(taken)}: those columns are made here; leave them out.")


def _check_choice(name: str, value: str) -> None:
    if value not in ("error", "drop"):
        raise ValueError(f"{name}={value!r} is unknown; use 'error' or 'drop'.")


def _check_columns(wanted: list[str], table: _Table) -> None:
    present = list(dict.fromkeys(name for row in table.rows for name in row))
    for name in wanted:
        if name not in present:
            raise ValueError(
                _missing_column(name, ", ".join(table.names[:3]), present)
                + " Name the right one in `prompt_column`, `answer_column` or `keep_columns`."
            )


def _missing_column(name: str, place: str, present: list[str]) -> str:
    return f"no column {name!r} in {place}.{nearest(name, present)} Its columns: {', '.join(present)}."


def _convert(
    rows: list[dict[str, Any]],
    makers: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]],
    place: Callable[[int], str],
    bad_rows: RowRule,
) -> tuple[dict[str, list[Any]], list[int]]:
    """New columns by `makers` (name → source column, function of a row), and the rows for which none failed."""
    columns: dict[str, list[Any]] = {name: [] for name in makers}
    good, faults = [], []
    for number, row in enumerate(rows):
        made = {}
        for name, (column, make) in makers.items():
            try:
                made[name] = make(row)
            except ValueError as reason:
                faults.append(f"{place(number)}, column {column!r}: {_short(row.get(column))} {reason}")
                break
        else:
            good.append(number)
            for name, value in made.items():
                columns[name].append(value)
    if faults and (bad_rows == "error" or not good):
        way_out = "Mend the rows, or drop them with bad_rows='drop'." if good else "No usable row: check the columns."
        raise ValueError(f"{len(faults)} of {len(rows)} rows cannot be used: {_listed(faults, '; ')}. {way_out}")
    if faults:
        logger.warning("%d of %d rows dropped: %s", len(faults), len(rows), _listed(faults, "; ", _MAX_LOGGED))
    return columns, good


def _make_prompt(value: Any, template: str | None, conversational: bool, system_prompt: str | None) -> Prompt:
    if fault := _prompt_fault(value):
        raise ValueError(fault)
    if isinstance(value, list):
        if not conversational:
            raise ValueError("is a list of messages, which needs conversational=True")
        messages = value
    else:
        text = template.replace(_PLACEHOLDER, value) if template else value
        if not conversational:
            return text
        messages = [{"role": "user", "content": text}]
    if system_prompt is not None and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return messages


def _number_text(value: int | float | Decimal) -> str:
    number = Decimal(str(value)) if isinstance(value, float) else Decimal(value)
    if not number.is_finite():
        raise ValueError("is no finite number")
    text = format(number, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _to_dataset(columns: dict[str, list[Any]]) -> Dataset:
    """Values of one column may differ in type: such a column is stored as JSON and read back unchanged."""
    mixed = [name for name, values in columns.items() if not _is_uniform(values)]
    # Encoded here, because datasets would store the string "0" of such a column as the number 0.
    encoded = {name: [None if v is None else json.dumps(v) for v in columns[name]] for name in mixed}
    dataset = Dataset.from_dict({**columns, **encoded})
    for name in mixed:
        dataset = dataset.cast_column(name, datasets.Json())  # pyright: ignore[reportArgumentType]
    return dataset


def _is_uniform(values: list[Any]) -> bool:
    try:
        pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return False
    return True


def _short(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _listed(items: Sequence[Any], separator: str = ", ", limit: int = _MAX_LISTED) -> str:
    more = f"{separator}and {len(items) - limit} more" if len(items) > limit else ""
    return separator.join(map(str, items[:limit])) + more


def _prompt_fault(prompt: Any) -> str | None:
    """Why `prompt` cannot be used, as the end of a sentence that begins with it; `None` if it can."""
    if isinstance(prompt, str):
        return None if prompt.strip() else "is empty"
    if not isinstance(prompt, list):
        return f"is of type {type(prompt).__name__}, where a string or a list of messages is needed"
    if fault := next(filter(None, map(_message_fault, prompt)), None):
        return fault
    return None if any(_message_text(message).strip() for message in prompt) else "has no text"


def _message_fault(message: Any) -> str | None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
        return "holds an entry that is no message with 'role' and 'content'"
    content = message["content"]
    parts = content if isinstance(content, list) else []
    if not isinstance(content, str | list | None) or not all(isinstance(part, dict) for part in parts):
        return f"holds a message whose content is of type {type(content).__name__}, where text is needed"
    if any(part.get("type") != "text" for part in parts):
        return "holds a message with content other than text, which is not supported"
    return None


def _message_text(message: Message) -> str:
    content = message["content"] or ""
    return content if isinstance(content, str) else "".join(part.get("text") or "" for part in content)


def _prompt_chunks(dataset: Dataset) -> Iterator[list[Any]]:
    for batch in dataset.select_columns("prompt").with_format(None).iter(_CHUNK):
        yield list(batch["prompt"])  # pyright: ignore[reportCallIssue, reportArgumentType]


def _check_prompt_rows(dataset: Dataset) -> bool:
    """Whether the prompts are conversations; raises if they are not all of one usable kind."""
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"the prompts are of type {type(dataset).__name__}, where a datasets.Dataset is needed: read a stream "
            "with materialize_stream, choose one split of a DatasetDict."
        )
    if "prompt" not in dataset.column_names:
        raise ValueError(_missing_column("prompt", "the dataset", dataset.column_names) + " load_prompts makes it.")
    if len(dataset) == 0:
        raise ValueError("the dataset has no rows; give at least one prompt.")
    faults, texts, conversations = [], [], []
    for row, prompt in enumerate(prompt for chunk in _prompt_chunks(dataset) for prompt in chunk):
        if fault := _prompt_fault(prompt):
            faults.append(f"row {row}: {_short(prompt)} {fault}")
        else:
            (texts if isinstance(prompt, str) else conversations).append(row)
    if faults:
        raise ValueError(f"{len(faults)} of {len(dataset)} prompts cannot be used: {_listed(faults, '; ')}.")
    if texts and conversations:
        raise ValueError(
            f"prompts are mixed: strings in rows {_listed(texts)}; lists of messages in rows {_listed(conversations)}"
            ". Use one kind throughout."
        )
    return bool(conversations)


def _check_special_tokens(
    prompts: list[Any],
    tokenizer: PreTrainedTokenizerBase,
    conversational: bool,
    chat_template_kwargs: dict[str, Any] | None,
) -> None:
    probe = tokenizer(text=["1"])["input_ids"][0]
    if not conversational and probe[-1:] == [tokenizer.eos_token_id]:
        raise ValueError(
            f"the tokenizer ends each prompt with its EOS token {tokenizer.eos_token!r}, so that responses would "
            "follow the end of the text; set tokenizer.add_eos_token = False."
        )
    adds_bos = conversational and probe[:1] == [tokenizer.bos_token_id]
    if adds_bos and probe[0] not in tokenize_prompts(prompts, tokenizer, chat_template_kwargs)[0]:
        logger.warning(
            "The chat template emits no BOS token %r, though the tokenizer adds it to plain text. The template is "
            "followed; if that is not meant, put {{ bos_token }} at its start.", tokenizer.bos_token,
        )  # fmt: skip


def _report_overlong(
    overlong: list[int], lengths: list[int], context_length: int, min_response_tokens: int, rule: RowRule
) -> None:
    rows = [f"row {row} ({lengths[row]} tokens)" for row in overlong]
    finding = (
        f"{len(overlong)} of {len(lengths)} prompts leave fewer than min_response_tokens={min_response_tokens} within "
        f"context_length={context_length}"
    )
    if rule == "error" or len(overlong) == len(lengths):
        way_out = " or drop them with overlong_prompts='drop'" if len(overlong) < len(lengths) else ""
        raise ValueError(f"{finding}: {_listed(rows)}. Raise `max_context_length`{way_out}.")
    logger.warning("%s; dropped: %s", finding, _listed(rows, limit=_MAX_LOGGED))


def _check_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any] | None) -> None:
    if tokenizer.chat_template is None:
        raise ValueError(
            f"tokenizer {tokenizer.name_or_path!r} has no chat template, but the prompts are lists of messages; use "
            "plain prompts (conversational=False), or set tokenizer.chat_template."
        )
    if reserved := _RENDER_ARGUMENTS.intersection(chat_template_kwargs or {}):
        raise ValueError(f"chat_template_kwargs holds {sorted(reserved)}, which are decided here; leave them out.")


def _render(messages: Any, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any]) -> str:
    prefilled = messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            **chat_template_kwargs,
        )
    except (jinja2.TemplateError, ValueError) as error:
        raise ValueError(
            f"the chat template fails on {_short(messages, 200)}: {error}. Change the messages or the template."
        ) from error
    assert isinstance(text, str)
    return text


def _without_second_bos(ids: list[int], bos_token_id: Any) -> list[int]:
    return ids[1:] if bos_token_id is not None and ids[:2] == [bos_token_id, bos_token_id] else ids


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
