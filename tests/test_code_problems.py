"""Rows of code_contests and LiveCodeBench, and what their pickles may not do."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from mu_grpo_trl.rewards import code_problems
from mu_grpo_trl.rewards.code_problems import (
    CodeTest,
    ProblemError,
    from_code_contests,
    from_livecodebench,
    unpack_private_tests,
)

REAL_PRIVATE_TESTS = (
    "eJxrYJmaz8gABhEZQEZ0tVJmXkFpiZKVgpJhTF5iUnJMnpKOglJ+aQlUNNI1GCJUklpcUlJZkAoSLC5JycxTqtVRQNJuDNWOILAYhCCI"
    "MdI0Ji85MQloWjKQSE5KjMlLSgSam5SciG64nz+y2WACJESMJWYY7ibFG8T5KnaKHgAcinnp"
)
"""Of 1873_A in livecodebench/code_generation_lite, as it stands there."""

STDIN_CASE = {"input": "1 2\n", "output": "3\n", "testtype": "stdin"}
CALL_CASE = {"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def contests_row(**columns: Any) -> dict[str, Any]:
    return {
        "description": "\nAdd.",
        "public_tests": {"input": ["1 2"], "output": ["3"]},
        "private_tests": {"input": ["2 2"], "output": ["4"]},
        "generated_tests": {"input": ["0 0", "5 5"], "output": ["0", "10"]},
        "time_limit": {"seconds": 1, "nanos": 500_000_000},
        "memory_limit_bytes": 256_000_000,
        **columns,
    }


def livecodebench_row(**columns: Any) -> dict[str, Any]:
    return {
        "question_content": "Add.",
        "starter_code": "",
        "metadata": "{}",
        "public_test_cases": json.dumps([STDIN_CASE]),
        "private_test_cases": "[]",
        **columns,
    }


def test_code_contests_row_gives_its_tests_in_order_and_its_limits():
    problem = from_code_contests(contests_row())
    assert [(test.input, test.output) for test in problem.tests] == [
        ("1 2", "3"),
        ("2 2", "4"),
        ("0 0", "0"),
        ("5 5", "10"),
    ]
    assert (problem.statement, problem.num_public, problem.time_limit_s) == ("Add.", 1, 1.5)
    assert problem.memory_limit_bytes == 256_000_000
    assert len(from_code_contests(contests_row(), generated=False).tests) == 2


def test_columns_that_are_null_give_no_limits_and_no_tests_of_that_kind():
    row = contests_row(private_tests=None, generated_tests=None, time_limit=None, memory_limit_bytes=None)
    problem = from_code_contests(row)
    assert (len(problem.tests), problem.time_limit_s, problem.memory_limit_bytes) == (1, None, None)


NO_TESTS = {"input": [], "output": []}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"description": None}, "no text in `description`"),
        ({"private_tests": {"input": ["1", "2"], "output": ["1"]}}, "2 inputs but 1 outputs"),
        (dict.fromkeys(("public_tests", "private_tests", "generated_tests"), NO_TESTS), "has no test"),
        ({"input_file": "in.txt"}, "only stdin and stdout"),
    ],
)
def test_code_contests_rows_that_cannot_be_judged_are_refused(columns, message):
    with pytest.raises(ProblemError, match=message):
        from_code_contests(contests_row(**columns))


def test_private_tests_of_a_real_row():
    problem = from_livecodebench(livecodebench_row(private_test_cases=REAL_PRIVATE_TESTS))
    assert problem.num_public == 1
    assert len(problem.tests) == 5
    assert problem.tests[1] == CodeTest("1\nabc\n", "YES\n")
    assert all(test.kind == "stdin" for test in problem.tests)


def test_private_tests_may_be_a_list_json_or_a_pickle_of_either():
    for private in (json.dumps([STDIN_CASE]), packed([STDIN_CASE]), packed(json.dumps([STDIN_CASE]))):
        problem = from_livecodebench(livecodebench_row(private_test_cases=private))
        assert problem.tests == (CodeTest("1 2\n", "3\n"),) * 2


def test_functional_tests_carry_the_name_to_call():
    row = livecodebench_row(
        public_test_cases=json.dumps([CALL_CASE]), metadata='{"func_name": "total"}', starter_code="class Solution:"
    )
    problem = from_livecodebench(row)
    assert (problem.function, problem.tests[0].kind) == ("total", "functional")
    assert problem.starter_code == "class Solution:"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"question_content": " "}, "no text in `question_content`"),
        ({"public_test_cases": "[]"}, "has no test"),
        ({"public_test_cases": "[{"}, "`public_test_cases` is no JSON"),
        ({"public_test_cases": "[" * 100_000}, "`public_test_cases` is no JSON"),
        ({"public_test_cases": json.dumps([CALL_CASE])}, "no `func_name`"),
        ({"public_test_cases": json.dumps([{**STDIN_CASE, "testtype": "shell"}])}, "'shell'"),
        ({"public_test_cases": '[{"input": 1, "output": "1"}]'}, "no text `input` and `output`"),
        ({"private_test_cases": packed({"a": 1})}, "no list of tests but dict"),
        ({"private_test_cases": "not base64"}, "neither JSON nor base64 of zlib"),
        ({"private_test_cases": REAL_PRIVATE_TESTS[:80]}, "ends in the middle"),
        ({"private_test_cases": base64.b64encode(zlib.compress(b"no pickle")).decode()}, "cannot be read"),
    ],
)
def test_livecodebench_rows_that_cannot_be_read_are_refused(columns, message):
    with pytest.raises(ProblemError, match=message):
        from_livecodebench(livecodebench_row(**columns))


class Calls:
    """Its pickle calls a function when it is read."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        function, *arguments = self.call
        return function, tuple(arguments)


@pytest.mark.parametrize("call", [(os.system, "touch {}"), (eval, "open('{}', 'w')"), (Path.touch, Path("{}"))])
def test_a_pickle_that_would_run_something_is_refused_before_it_runs(call, tmp_path: Path):
    witness = tmp_path / "ran"
    call = [type(part)(str(part).format(witness)) if isinstance(part, str | Path) else part for part in call]
    text = packed([STDIN_CASE, Calls(*call)])
    with pytest.raises(ProblemError, match="only strings, numbers, lists and dicts"):
        unpack_private_tests(text)
    assert not witness.exists()
    pickle.loads(zlib.decompress(base64.b64decode(text)))
    assert witness.exists(), "the attack has to work on an unpickler that admits it, else this test shows nothing"


@pytest.mark.parametrize("pickled", [b"Pname\n.", b"cbuiltins\neval\n.", b"\x80\x04\x82\x01."])
def test_other_ways_out_of_a_pickle_are_closed(pickled):
    with pytest.raises(ProblemError):
        unpack_private_tests(base64.b64encode(zlib.compress(pickled)).decode())


def test_what_unpacks_to_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(code_problems, "MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(ProblemError, match="more than 1000 bytes"):
        unpack_private_tests(packed("0" * 1_000_000))
