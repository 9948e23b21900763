"""
Programming problems with their tests, from rows of code_contests and LiveCodeBench in their Hub columns.

LiveCodeBench's private tests are a pickle. It is read by an unpickler that admits strings, numbers, lists and dicts
and nothing else, so that no row, whoever wrote it, can run anything here.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MAX_UNPACKED_BYTES = 1 << 30
"""A row's private tests are refused above this size: a few kilobytes of zlib can unpack to any size."""


class ProblemError(ValueError):
    """A row that is no problem, or whose tests cannot be read."""


@dataclass(frozen=True)
class CodeTest:
    """
    One test.

    Args:
        input (`str`): what the program reads from stdin, or the arguments of the call, one JSON value per line.
        output (`str`): what it has to print, or the value that the call has to return, as JSON.
        kind (`str`): `"stdin"` or `"functional"`.
    """

    input: str
    output: str
    kind: Literal["stdin", "functional"] = "stdin"


@dataclass(frozen=True)
class CodeProblem:
    """
    One problem.

    Args:
        statement (`str`): the text shown to the policy, without starter code.
        tests (`tuple[CodeTest, ...]`): public ones first; at least one.
        num_public (`int`): how many of `tests` the statement's reader may know.
        starter_code (`str`): to be completed; empty for programs that read stdin.
        function (`str`, *optional*): name of the function, or method of `Solution`, that functional tests call.
        time_limit_s (`float`, *optional*): of one test, in seconds, where the row says it.
        memory_limit_bytes (`int`, *optional*): of one test, where the row says it.
    """

    statement: str
    tests: tuple[CodeTest, ...]
    num_public: int
    starter_code: str = ""
    function: str | None = None
    time_limit_s: float | None = None
    memory_limit_bytes: int | None = None


def from_code_contests(row: Mapping[str, Any], generated: bool = True) -> CodeProblem:
    """
    Read a row of [deepmind/code_contests](https://huggingface.co/datasets/deepmind/code_contests).

    Args:
        row (`Mapping`): with `description`, `public_tests`, `private_tests`, `generated_tests` (each of equally many
            `input` and `output`), `time_limit` (`seconds`, `nanos`), `memory_limit_bytes`.
        generated (`bool`): take the tests that mutation made too; their outputs are those of correct solutions.

    Raises:
        `ProblemError`: no test, an input without output, or input and output in files instead of stdin and stdout.
    """
    if row.get("input_file") or row.get("output_file"):
        raise ProblemError(
            f"The problem reads from {row.get('input_file')!r} and writes to {row.get('output_file')!r}; only stdin "
            "and stdout are supported: filter such rows out."
        )
    names = ("public_tests", "private_tests", "generated_tests") if generated else ("public_tests", "private_tests")
    tests: list[CodeTest] = []
    num_public = 0
    for name in names:
        pairs = row.get(name) or {}
        inputs, outputs = pairs.get("input") or [], pairs.get("output") or []
        if len(inputs) != len(outputs):
            raise ProblemError(f"`{name}` has {len(inputs)} inputs but {len(outputs)} outputs: the row was cut.")
        tests += [CodeTest(given, expected) for given, expected in zip(inputs, outputs, strict=True)]
        if name == "public_tests":
            num_public = len(tests)
    limit = row.get("time_limit") or {}
    seconds = (limit.get("seconds") or 0) + (limit.get("nanos") or 0) / 1e9
    return CodeProblem(
        _statement(row, "description"),
        _at_least_one(tests),
        num_public,
        time_limit_s=seconds or None,
        memory_limit_bytes=row.get("memory_limit_bytes") or None,
    )


def from_livecodebench(row: Mapping[str, Any]) -> CodeProblem:
    """
    Read a row of [livecodebench/code_generation_lite](https://huggingface.co/datasets/livecodebench/code_generation_lite).

    Args:
        row (`Mapping`): with `question_content`, `starter_code`, `metadata` (JSON), `public_test_cases` (JSON) and
            `private_test_cases` (JSON, or base64 of zlib of a pickle of it).

    Raises:
        `ProblemError`: no test, tests that cannot be read or hold anything but text, or functional tests without
            `func_name` in `metadata`.
    """
    public = _test_cases(row.get("public_test_cases") or "[]", "public_test_cases")
    tests = _at_least_one(public + _test_cases(row.get("private_test_cases") or "[]", "private_test_cases"))
    metadata = _json(row.get("metadata") or "{}", "metadata")
    function = metadata.get("func_name") if isinstance(metadata, dict) else None
    if function is None and any(test.kind == "functional" for test in tests):
        raise ProblemError("`metadata` has no `func_name`, but a test is `functional`: nothing says what to call.")
    return CodeProblem(
        _statement(row, "question_content"),
        tests,
        len(public),
        starter_code=row.get("starter_code") or "",
        function=function,
    )


def unpack_private_tests(text: str) -> Any:
    """
    The value in a `private_test_cases` string: base64, zlib, and a pickle of strings, numbers, lists and dicts.

    Raises:
        `ProblemError`: another encoding, over `MAX_UNPACKED_BYTES`, or a pickle that names anything to be imported.
    """
    try:
        inflater = zlib.decompressobj()
        data = inflater.decompress(base64.b64decode(text, validate=True), MAX_UNPACKED_BYTES)
        if inflater.unconsumed_tail:
            raise ProblemError(f"`private_test_cases` unpacks to more than {MAX_UNPACKED_BYTES} bytes and is refused.")
        if not inflater.eof:
            raise ProblemError("`private_test_cases` ends in the middle: the row was cut.")
        return _PlainUnpickler(io.BytesIO(data)).load()
    except ProblemError:
        raise
    except (binascii.Error, zlib.error) as error:
        raise ProblemError(f"`private_test_cases` is neither JSON nor base64 of zlib: {error}.") from error
    except Exception as error:  # a pickle may fail in any way
        raise ProblemError(f"The pickle in `private_test_cases` cannot be read: {error}.") from error


class _PlainUnpickler(pickle.Unpickler):
    """Everything that can do more than build plain values is reached through a global or a persistent id."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise ProblemError(
            f"The pickle in `private_test_cases` names {module_name}.{global_name}; only strings, numbers, lists and "
            "dicts are admitted. It may be an attack: do not open it by other means."
        )

    def persistent_load(self, pid: Any, /) -> Any:
        raise ProblemError(f"The pickle in `private_test_cases` refers to an object outside of it ({pid!r}).")


def _test_cases(text: str, name: str) -> list[CodeTest]:
    cases = _json(text, name) if text.lstrip().startswith("[") else unpack_private_tests(text)
    if isinstance(cases, str):
        cases = _json(cases, name)
    if not isinstance(cases, list):
        raise ProblemError(f"`{name}` holds no list of tests but {type(cases).__name__}.")
    return [_test_case(case, name) for case in cases]


def _test_case(case: Any, name: str) -> CodeTest:
    if not isinstance(case, dict) or not all(isinstance(case.get(key), str) for key in ("input", "output")):
        raise ProblemError(f"A test in `{name}` has no text `input` and `output`: {str(case)[:100]}")
    kind = case.get("testtype", "stdin")
    if kind not in ("stdin", "functional"):
        raise ProblemError(f"A test in `{name}` has `testtype` {kind!r}; known are 'stdin' and 'functional'.")
    return CodeTest(case["input"], case["output"], kind)


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProblemError(f"`{name}` is no JSON: {error}.") from error


def _statement(row: Mapping[str, Any], name: str) -> str:
    statement = row.get(name)
    if not isinstance(statement, str) or not statement.strip():
        raise ProblemError(f"The row has no text in `{name}`; its columns are {sorted(row)}.")
    return statement.strip()


def _at_least_one(tests: list[CodeTest]) -> tuple[CodeTest, ...]:
    if not tests:
        raise ProblemError("The row has no test: every program would pass. Filter such rows out.")
    return tuple(tests)
