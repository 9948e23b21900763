"""Prompts from files to token ids: loading, bad rows, tokenization as TRL does it, length checks, streams, hashes."""

from __future__ import annotations

import hashlib
import json
import logging
from decimal import Decimal
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from trl.trainer.grpo_trainer import GRPOTrainer

from mu_grpo_trl.data import (
    PAPER_PROMPT,
    PromptReport,
    answer_text,
    check_prompts,
    dataset_hash,
    load_prompts,
    materialize_stream,
    normalize_answers,
    tokenize_prompts,
    tokenizer_hash,
)

BOS, EOS = 256, 257
CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if brief %}!{% endif %}{% endif %}"
)
CHAT_WITH_BOS = "{{ bos_token }}" + CHAT


def byte_tokenizer(
    chat_template: str | None = None, *, adds: str = "", lowercase: bool = False
) -> PreTrainedTokenizerFast:
    """One token a byte (ids 0–255), `<s>` = 256, `</s>` = 257; `adds` names what plain text gets: bos, eos or both."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    pieces = ["<s>"] * ("bos" in adds) + ["$A"] + ["</s>"] * ("eos" in adds)
    core.post_processor = processors.TemplateProcessing(
        single=" ".join(pieces), special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    if lowercase:
        core.normalizer = normalizers.Lowercase()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = chat_template
    return tokenizer


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def trl_prompt_ids(prompts: list, tokenizer: PreTrainedTokenizerFast, **chat_template_kwargs) -> list[list[int]]:
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        _is_vlm=False,
        environment_factories=None,
        tools=None,
        chat_template=None,
        chat_template_kwargs=chat_template_kwargs,
    )
    return GRPOTrainer._tokenize_prompts(trainer, prompts)[0]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("204", "204"),
        (" \\$ 5", "\\$ 5"),
        ("\n\\begin{pmatrix} 0 & 3\n\\end{pmatrix}\n", "\\begin{pmatrix} 0 & 3\n\\end{pmatrix}"),
        ("025", "025"),
        (2, "2"),
        (27.0, "27"),
        (-1.0, "-1"),
        (-0.0, "0"),
        (6.5, "6.5"),
        (0.1, "0.1"),
        (1e-07, "0.0000001"),
        (1e22, "10000000000000000000000"),
        (10**400, "1" + "0" * 400),
        (Decimal("2.50"), "2.5"),
        (Decimal("100"), "100"),
        (["2"], "2"),
        ([2.0], "2"),
        (["9", " -7 "], "9, -7"),
    ],
)
def test_b57_answers_become_text(value, text):
    assert answer_text(value) == text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "NoneType"),
        (True, "bool"),
        ({"a": 2}, "dict"),
        ("", "is empty"),
        (" \n\t", "is empty"),
        ([], "is empty"),
        (["2", None], "holds an item that is of type NoneType"),
        (["2", ""], "holds an item that is empty"),
        ([["2"]], "list of lists"),
        ([True], "bool"),
        (float("nan"), "no finite number"),
        (float("-inf"), "no finite number"),
        (Decimal("NaN"), "no finite number"),
    ],
)
def test_b57_what_is_no_answer_is_refused(value, reason):
    with pytest.raises(ValueError, match=reason):
        answer_text(value)


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers())
def test_a_number_written_as_an_answer_reads_back_equal_and_plain(number):
    text = answer_text(number)
    assert type(number)(Decimal(text)) == number
    assert "e" not in text.lower() and not text.endswith(".0")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("She sells 16 - 3 = <<16-3=13>>13.\n#### 13", "13"),
        ("so it is #### 2,125 ", "2,125"),
        ("#### -4", "-4"),
        ("####-4", "-4"),
        ("first #### 1\nthen\n#### 2", "2"),
        ("42", "42"),
        ('[{"output": "..\\n####\\n.."}]', '[{"output": "..\\n####\\n.."}]'),
        ("a##### 3", "a##### 3"),
        ("#### 3\nand more", "#### 3\nand more"),
    ],
)
def test_gsm8k_answers_are_cut_to_what_follows_the_delimiter(value, text):
    assert answer_text(value, "####") == text


def test_nothing_after_the_delimiter_is_no_answer():
    with pytest.raises(ValueError, match="nothing after '####'"):
        answer_text("So the answer is\n#### ", "####")


def test_without_a_delimiter_the_whole_answer_is_kept(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"problem": "p", "answer": "x\n#### 4"}])
    assert load_prompts(file, conversational=False)["answer"][:] == ["4"]
    assert load_prompts(file, conversational=False, answer_delimiter=None)["answer"][:] == ["x\n#### 4"]


def test_b57_numeric_solutions_of_a_users_dataset_become_text():
    dataset = Dataset.from_list([{"prompt": user("1+1?"), "solution": 2}, {"prompt": user("1+2?"), "solution": 3}])
    fixed = normalize_answers(dataset, "solution")
    assert fixed["solution"][:] == ["2", "3"]
    assert fixed["prompt"][:] == dataset["prompt"][:]


def test_b57_a_missing_solution_of_a_users_dataset_names_row_and_column_or_is_dropped(caplog):
    dataset = Dataset.from_dict({"prompt": ["a", "b", "c"], "solution": [1.0, None, 2.5]})
    with pytest.raises(ValueError, match="1 of 3 rows .*: row 1, column 'solution': None is of type NoneType"):
        normalize_answers(dataset, "solution")
    with caplog.at_level(logging.WARNING):
        fixed = normalize_answers(dataset, "solution", bad_rows="drop")
    assert fixed.to_dict() == {"prompt": ["a", "c"], "solution": ["1", "2.5"]}
    assert "row 1, column 'solution'" in caplog.text


def test_answers_that_are_clean_text_leave_the_dataset_as_it_is():
    dataset = Dataset.from_dict({"prompt": ["a"], "answer": ["1"]})
    assert normalize_answers(dataset) is dataset


def test_normalizing_a_missing_column_names_the_nearest_one():
    with pytest.raises(ValueError, match="no column 'answers' in the dataset. Did you mean 'answer'?"):
        normalize_answers(Dataset.from_dict({"answer": ["1"]}), "answers")


ROWS = [{"problem": "What is {1} + {x}?", "answer": "a"}, {"problem": "Two?", "answer": "b"}]
TEXTS = [PAPER_PROMPT.replace("{problem}", row["problem"]) for row in ROWS]


def test_the_papers_prompt_asks_for_steps_and_a_box_and_survives_braces_in_problems(tmp_path):
    loaded = load_prompts(write_jsonl(tmp_path / "a.jsonl", ROWS), conversational=False)
    assert loaded.column_names == ["prompt", "answer"]
    assert loaded["prompt"][0] == (
        "What is {1} + {x}?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )


def test_a_problem_that_holds_the_placeholder_is_not_expanded_again(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"problem": "write {problem}", "answer": "1"}])
    loaded = load_prompts(file, conversational=False, prompt_template="Q: {problem} {{}}")
    assert loaded["prompt"][:] == ["Q: write {problem} {{}}"]


@pytest.mark.parametrize("kind", ["jsonl", "json list", "json lines", "bom", "parquet", "csv", "saved", "saved dict"])
def test_every_kind_of_file_gives_the_same_dataset(tmp_path, kind):
    path = tmp_path / f"data.{kind.split()[0]}"
    if kind == "json list":
        path.write_text("\n " + json.dumps(ROWS, indent=1))
    elif kind == "json lines":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    elif kind == "bom":
        path = tmp_path / "data.jsonl"
        path.write_bytes(b"\xef\xbb\xbf" + "\n\n".join(map(json.dumps, ROWS)).encode())
    elif kind == "parquet":
        Dataset.from_list(ROWS).to_parquet(path)
    elif kind == "csv":
        Dataset.from_list(ROWS).to_csv(path)
    elif kind == "saved":
        Dataset.from_list(ROWS).save_to_disk(path)
    elif kind == "saved dict":
        DatasetDict({"train": Dataset.from_list(ROWS), "test": Dataset.from_list(ROWS[:1])}).save_to_disk(path)
    else:
        write_jsonl(path, ROWS)
    loaded = load_prompts(str(path), conversational=False)
    assert loaded.to_dict() == {"prompt": TEXTS, "answer": ["a", "b"]}


def test_csv_answers_keep_their_zeros_and_na_is_an_answer_but_an_empty_cell_is_not(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("problem,answer\np,075\nq,NA\n")
    assert load_prompts(str(path), conversational=False)["answer"][:] == ["075", "NA"]
    path.write_text("problem,answer\np,075\nq,\n")
    with pytest.raises(ValueError, match="a.csv row 1, column 'answer': '' is empty"):
        load_prompts(str(path), conversational=False)


def test_ints_strings_and_floats_may_share_a_json_column_and_rows_may_differ_in_keys(tmp_path):
    rows = [
        {"problem": "p", "answer": 70, "id": "0"},
        {"answer": "336^\\circ", "problem": "q", "level": 3},
        {"problem": "r", "answer": 27.0, "id": 2},
    ]
    loaded = load_prompts(write_jsonl(tmp_path / "a.jsonl", rows), conversational=False, keep_columns=["id", "level"])
    assert loaded["answer"][:] == ["70", "336^\\circ", "27"]
    assert loaded["id"][:] == ["0", None, 2]  # a string that looks like JSON stays a string
    assert loaded["level"][:] == [None, 3, None]


def test_duplicate_rows_are_kept_in_order(tmp_path):
    rows = [{"problem": "p", "answer": answer} for answer in ("179", "312", "179")]
    loaded = load_prompts(write_jsonl(tmp_path / "a.jsonl", rows), conversational=False)
    assert loaded["answer"][:] == ["179", "312", "179"]


def test_conversational_prompts_are_messages_with_an_optional_system_message(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ROWS[1:])
    options: dict[str, Any] = {"conversational": True, "prompt_template": "{problem} Box it."}
    assert load_prompts(file, **options)["prompt"][:] == [user("Two? Box it.")]
    system = {"role": "system", "content": "Be brief."}
    loaded = load_prompts(file, system_prompt="Be brief.", **options)
    assert loaded["prompt"][:] == [[system, *user("Two? Box it.")]]


def test_prompts_that_are_messages_already_are_taken_as_they_are(tmp_path):
    own = {"role": "system", "content": "Own."}
    rows = [{"prompt": user("1+1?"), "solution": 2}, {"prompt": [own, *user("2+2?")], "solution": [4]}]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    options: dict[str, Any] = {"prompt_column": "prompt", "answer_column": "solution"}
    loaded = load_prompts(file, conversational=True, system_prompt="Given.", **options)
    assert loaded["prompt"][:] == [[{"role": "system", "content": "Given."}, *user("1+1?")], [own, *user("2+2?")]]
    assert loaded["answer"][:] == ["2", "4"]
    with pytest.raises(ValueError, match="row 0, column 'prompt': .* needs conversational=True"):
        load_prompts(file, conversational=False, **options)


def test_code_rows_need_no_answer_column_and_keep_their_tests(tmp_path):
    tests = [{"input": ["1\n"], "output": ["2\n"]}, {"input": [], "output": []}]
    rows = [{"description": "\nAdd one.", "public_tests": test, "cf_rating": None} for test in tests]
    loaded = load_prompts(
        write_jsonl(tmp_path / "a.jsonl", rows),
        conversational=False,
        prompt_column="description",
        answer_column=None,
        prompt_template=None,
        keep_columns=["public_tests", "cf_rating"],
    )
    assert loaded.to_dict() == {"prompt": ["\nAdd one."] * 2, "public_tests": tests, "cf_rating": [None, None]}


def test_max_rows_reads_no_further(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\nnot json\n")
    assert len(load_prompts(str(path), conversational=False, max_rows=1)) == 1
    with pytest.raises(ValueError, match="a.jsonl line 2 is not JSON"):
        load_prompts(str(path), conversational=False)


def test_a_folder_gives_the_files_of_the_split_in_sorted_order(tmp_path):
    write_jsonl(tmp_path / "train-00001.jsonl", ROWS[1:])
    write_jsonl(tmp_path / "train-00000.jsonl", ROWS[:1])
    (tmp_path / "test").mkdir()
    write_jsonl(tmp_path / "test" / "part.jsonl", [{"problem": "t", "answer": ""}])
    assert load_prompts(str(tmp_path), conversational=False)["answer"][:] == ["a", "b"]
    with pytest.raises(ValueError, match="part.jsonl row 0, column 'answer'"):
        load_prompts(str(tmp_path), conversational=False, split="test")
    with pytest.raises(ValueError, match="no file of split 'validation' .*train-00000.jsonl"):
        load_prompts(str(tmp_path), conversational=False, split="validation")


def test_a_folder_whose_files_name_no_split_is_all_train(tmp_path):
    write_jsonl(tmp_path / "algebra.jsonl", ROWS[:1])
    write_jsonl(tmp_path / "constrained.jsonl", ROWS[1:])
    assert load_prompts(str(tmp_path), conversational=False)["answer"][:] == ["a", "b"]
    with pytest.raises(ValueError, match="no file of split 'test'"):
        load_prompts(str(tmp_path), conversational=False, split="test")


def test_a_single_file_is_one_split_whatever_its_name(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ROWS)
    assert len(load_prompts(file, conversational=False, split="test")) == 2


def test_a_bad_row_names_its_own_file_row_column_and_value(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ROWS)
    write_jsonl(tmp_path / "b.jsonl", [*ROWS, {"problem": "r", "answer": {"a": 2}}])
    expected = r"1 of 5 rows cannot be used: .*/b.jsonl row 2, column 'answer': \{'a': 2\} is of type dict"
    with pytest.raises(ValueError, match=expected):
        load_prompts(str(tmp_path), conversational=False)


@pytest.mark.parametrize("problem", [None, "", "  \n", 5, [], [{"role": "user"}], user(" "), ["text"]])
def test_a_problem_that_is_no_text_is_refused(tmp_path, problem):
    rows = [ROWS[0], {"problem": problem, "answer": "1"}]
    with pytest.raises(ValueError, match="a.jsonl row 1, column 'problem'"):
        load_prompts(write_jsonl(tmp_path / "a.jsonl", rows), conversational=True)


def test_bad_rows_are_dropped_on_request_and_their_numbers_logged(tmp_path, caplog):
    answers = ["1", "", None, "2", "  ", True, [3]]
    rows = [{"problem": f"p{i}", "answer": answer} for i, answer in enumerate(answers)]
    rows.append({"problem": "no answer key"})  # pyright: ignore[reportArgumentType]
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        loaded = load_prompts(
            file, conversational=False, prompt_template=None, keep_columns=["problem"], bad_rows="drop"
        )
    assert loaded.to_dict() == {
        "prompt": ["p0", "p3", "p6"],
        "answer": ["1", "2", "3"],
        "problem": ["p0", "p3", "p6"],
    }
    assert "5 of 8 rows dropped" in caplog.text
    assert all(f"row {row}, column 'answer'" in caplog.text for row in (1, 2, 4, 5, 7))


def test_dropping_never_leaves_an_empty_dataset(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"problem": "p", "answer": ""}])
    with pytest.raises(ValueError, match="1 of 1 rows cannot be used"):
        load_prompts(file, conversational=False, bad_rows="drop")


def test_a_missing_column_is_named_with_the_nearest_one(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(
        ValueError, match="no column 'problm' in .*a.jsonl. Did you mean 'problem'[?] Its columns: problem, a"
    ):
        load_prompts(file, conversational=False, prompt_column="problm")
    with pytest.raises(ValueError, match="no column 'level' in"):
        load_prompts(file, conversational=False, keep_columns=["level"])


def test_a_missing_file_is_named_with_the_nearest_one(tmp_path):
    write_jsonl(tmp_path / "aime24.jsonl", ROWS)
    with pytest.raises(FileNotFoundError, match="aime42.jsonl' does not exist. Did you mean '.*aime24.jsonl'"):
        load_prompts(str(tmp_path / "aime42.jsonl"), conversational=False)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.txt", b"hello", "of no known kind"),
        ("a.jsonl", b"", "has no rows"),
        ("a.jsonl", b"[1]\n", "line 1 is of type list"),
        ("a.jsonl", b'{"problem": "\xff"}\n', "line 1 is not JSON in UTF-8"),
        ("a.json", b"[1]", "row 0 is of type int"),
        ("a.json", b"[{]", " is not JSON"),
        ("a.csv", b"problem,answer\n1,2\n1,2,3,4\n", "cannot be read as CSV"),
        ("a.csv", b"", "cannot be read as CSV"),
        ("a.parquet", b"no parquet at all", "cannot be read as parquet"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.*{reason}"):
        load_prompts(str(tmp_path / name), conversational=False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bad_rows": "skip"}, "bad_rows='skip' is unknown"),
        ({"prompt_template": "Solve: {question}"}, "has no {problem}"),
        ({"system_prompt": "Hi"}, "system_prompt needs conversational=True"),
        ({"max_rows": 0}, "max_rows=0 must be at least 1"),
        ({"keep_columns": "level"}, "must be a list of names"),
        ({"keep_columns": ["answer"]}, "made here"),
        ({"config": "main"}, "exist on the Hub only"),
        ({"split": "train[:5]"}, "exist on the Hub only"),
    ],
)
def test_an_unusable_option_is_refused_with_its_value(tmp_path, options, reason):
    file = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ValueError, match=reason):
        load_prompts(file, **{"conversational": False, **options})


def test_a_hub_dataset_is_loaded_by_id_configuration_and_split(monkeypatch):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return Dataset.from_list([{"question": "q", "answer": "x\n#### 1"}] * 3)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    loaded = load_prompts(
        "openai/gsm8k", config="main", split="test", prompt_column="question", conversational=False, max_rows=2
    )
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    assert loaded["answer"][:] == ["1", "1"]


def test_a_hub_failure_names_id_configuration_and_split(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="'nobody/nothing' .config='main', split='test'. is no local file"):
        load_prompts("nobody/nothing", config="main", split="test", conversational=False)


@pytest.mark.parametrize("adds", ["", "bos"])
def test_plain_prompts_are_tokenized_as_trl_does(adds):
    tokenizer = byte_tokenizer(adds=adds)
    prompts = ["ab", "x = {1}\n naïve", " 2"]
    ours = tokenize_prompts(prompts, tokenizer)
    assert ours == trl_prompt_ids(prompts, tokenizer)
    assert [len(ids) for ids in ours] == [2 + bool(adds), 15 + bool(adds), 2 + bool(adds)]


@pytest.mark.parametrize("template", [CHAT, CHAT_WITH_BOS])
@pytest.mark.parametrize("kwargs", [{}, {"brief": True}])
def test_conversations_are_tokenized_as_trl_does(template, kwargs):
    tokenizer = byte_tokenizer(template, adds="bos")
    prompts = [user("hi"), [{"role": "system", "content": "s"}, *user("longer")]]
    ours = tokenize_prompts(prompts, tokenizer, kwargs)
    assert ours == trl_prompt_ids(prompts, tokenizer, **kwargs)
    text = "[user]hi[/][assistant]" + "!" * len(kwargs)
    assert tokenizer.decode(ours[0], skip_special_tokens=True) == text


def test_one_prompt_alone_has_the_ids_it_has_in_a_batch():
    tokenizer = byte_tokenizer(CHAT_WITH_BOS)
    prompts = [user("a"), user("bcd"), user("e" * 50)]
    alone = [tokenize_prompts([prompt], tokenizer)[0] for prompt in prompts]
    assert alone == tokenize_prompts(prompts, tokenizer)


def test_no_prompts_give_no_rows():
    assert tokenize_prompts([], byte_tokenizer()) == []


def test_a_prompt_that_ends_with_the_assistant_is_continued():
    tokenizer = byte_tokenizer(CHAT)
    ids = tokenize_prompts([[*user("q"), {"role": "assistant", "content": "Let me"}]], tokenizer)[0]
    assert tokenizer.decode(ids) == "[user]q[/][assistant]Let me"


def test_b49_a_chat_template_with_bos_gives_exactly_one_bos():
    tokenizer = byte_tokenizer(CHAT_WITH_BOS, adds="bos")
    ids = tokenize_prompts([user("hi")], tokenizer)[0]
    assert ids[0] == BOS and ids.count(BOS) == 1


@pytest.mark.parametrize("adds", ["", "bos"])
def test_b49_text_rendered_with_bos_and_tokenized_again_has_exactly_one_bos(adds):
    tokenizer = byte_tokenizer(CHAT_WITH_BOS, adds=adds)
    rendered = tokenizer.apply_chat_template(user("hi"), tokenize=False, add_generation_prompt=True)
    assert isinstance(rendered, str) and rendered.startswith("<s>")
    again = tokenize_prompts([rendered], tokenizer)[0]
    assert again.count(BOS) == 1
    assert again == tokenize_prompts([user("hi")], tokenizer)[0]


def test_b49_a_tokenizer_that_adds_no_bos_is_left_alone():
    assert BOS not in tokenize_prompts(["hi"], byte_tokenizer())[0]
    assert BOS not in tokenize_prompts([user("hi")], byte_tokenizer(CHAT))[0]


@pytest.mark.parametrize(("template", "warned"), [(CHAT, True), (CHAT_WITH_BOS, False)])
def test_b49_a_template_without_the_bos_that_plain_text_gets_is_reported(template, warned, caplog):
    dataset = Dataset.from_dict({"prompt": [user("hi")]})
    with caplog.at_level(logging.WARNING):
        check_prompts(dataset, byte_tokenizer(template, adds="bos"), 64, 8)
    assert ("emits no BOS token '<s>'" in caplog.text) is warned


def test_a_tokenizer_that_ends_prompts_with_eos_is_refused():
    dataset = Dataset.from_dict({"prompt": ["hi"]})
    with pytest.raises(ValueError, match="ends each prompt with its EOS token '</s>'"):
        check_prompts(dataset, byte_tokenizer(adds="bos eos"), 64, 8)


def test_conversations_without_a_chat_template_are_refused():
    with pytest.raises(ValueError, match="has no chat template, .*conversational=False"):
        tokenize_prompts([user("hi")], byte_tokenizer())


def test_a_failing_chat_template_shows_the_prompt_and_its_reason():
    refusing = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match=r"fails on \[\{'role': 'user', 'content': 'hi'\}\]: System role not supp"):
        tokenize_prompts([user("hi")], byte_tokenizer(refusing))


@pytest.mark.parametrize("name", ["add_generation_prompt", "tokenize", "chat_template"])
def test_template_arguments_that_are_decided_here_are_refused(name):
    with pytest.raises(ValueError, match=f"holds .'{name}'."):
        tokenize_prompts([user("hi")], byte_tokenizer(CHAT), {name: True})


def texts_of(*lengths: int) -> Dataset:
    return Dataset.from_dict({"prompt": ["x" * length for length in lengths], "answer": ["1"] * len(lengths)})


def test_b23_a_prompt_that_fits_without_its_full_response_stays_and_is_counted(caplog):
    dataset = texts_of(100, 200, 300, 1500, 500, 600, 700, 1024)
    with caplog.at_level(logging.WARNING):
        checked, report = check_prompts(dataset, byte_tokenizer(), 2048, 1024)
    assert checked["prompt"][:] == dataset["prompt"][:]
    assert report == PromptReport(
        num_prompts=8, dropped_rows=(), num_shortened=1, mean_tokens=4924 / 8, longest_tokens=1500
    )
    assert "1 of 8 prompts leave less than max_completion_length=1024" in caplog.text


def test_b23_with_the_full_response_demanded_the_long_prompt_is_an_error_that_names_its_row():
    with pytest.raises(ValueError, match=r"1 of 8 prompts .*context_length=2048: row 3 \(1500 tokens\). .*'drop'"):
        check_prompts(texts_of(*[100] * 3, 1500, *[100] * 4), byte_tokenizer(), 2048, 1024, min_response_tokens=1024)


def test_b23_overlong_prompts_are_dropped_with_a_count_and_the_others_are_unaffected(caplog):
    dataset = texts_of(5, 2048, 2047, 9, 3000)
    with caplog.at_level(logging.WARNING):
        checked, report = check_prompts(dataset, byte_tokenizer(), 2048, 1, "drop")
    assert [len(prompt) for prompt in checked["prompt"]] == [5, 2047, 9]
    assert checked["answer"][:] == ["1"] * 3
    assert report == PromptReport(
        num_prompts=3, dropped_rows=(1, 4), num_shortened=0, mean_tokens=2061 / 3, longest_tokens=2047
    )
    assert "row 1 (2048 tokens), row 4 (3000 tokens)" in caplog.text


def test_lengths_count_the_tokens_of_the_chat_template_and_bos():
    dataset = Dataset.from_dict({"prompt": [user("hi")]})
    length = 1 + len("[user]hi[/][assistant]")
    tokenizer = byte_tokenizer(CHAT_WITH_BOS)
    assert check_prompts(dataset, tokenizer, length + 1, 1)[1].longest_tokens == length
    with pytest.raises(ValueError, match="1 of 1 prompts leave fewer than min_response_tokens=1"):
        check_prompts(dataset, tokenizer, length, 1, "drop")
    with pytest.raises(ValueError, match="1 of 1 prompts"):
        check_prompts(dataset, tokenizer, length + 1, 1, "drop", chat_template_kwargs={"brief": True})


def test_row_numbers_are_right_beyond_the_first_chunk():
    lengths = [3] * 4500
    lengths[4321] = 50
    with pytest.raises(ValueError, match=r"row 4321 \(50 tokens\)"):
        check_prompts(texts_of(*lengths), byte_tokenizer(), 20, 8)


@pytest.mark.parametrize("rule", ["truncate", ""])
def test_an_unknown_rule_for_overlong_prompts_is_refused(rule):
    with pytest.raises(ValueError, match="use 'error' or 'drop'"):
        check_prompts(texts_of(3), byte_tokenizer(), 20, 8, rule)


@pytest.mark.parametrize("least", [0, 9])
def test_the_least_response_lies_between_one_token_and_the_longest_response(least):
    with pytest.raises(ValueError, match=f"min_response_tokens={least} must be"):
        check_prompts(texts_of(3), byte_tokenizer(), 20, 8, min_response_tokens=least)


@pytest.mark.parametrize(
    ("prompts", "reason"),
    [
        (["a", "", "b", " \n"], r"2 of 4 prompts cannot be used: row 1: '' is empty; row 3: ' \\n' is empty"),
        (["a", None], "row 1: None is of type NoneType"),
        ([1, 2], "row 0: 1 is of type int"),
        ([user("a"), []], r"row 1: \[\] has no text"),
        ([user("a"), user("")], "row 1: .* has no text"),
        ([[{"role": "user", "text": "a"}]], "row 0: .* no message with 'role' and 'content'"),
        ([[{"role": "user", "content": [{"type": "image"}]}]], "row 0: .*other than text"),
        ([[{"role": "user", "content": 5}]], "row 0: .*content is of type int"),
        (["a", user("b"), "c"], r"mixed: strings in rows 0, 2; lists of messages in rows 1"),
        ([], "no rows"),
    ],
)
def test_prompts_of_a_users_dataset_that_cannot_be_used_are_refused_with_their_rows(prompts, reason):
    dataset = Dataset.from_dict({"prompt": prompts}, on_mixed_types="use_json")
    with pytest.raises(ValueError, match=reason):
        check_prompts(dataset, byte_tokenizer(CHAT), 64, 8)


def test_content_may_be_text_in_one_row_and_parts_in_another_and_numbers_in_strings_stay_strings():
    rows = [{"prompt": user("[1, 2]")}, {"prompt": [{"role": "user", "content": [{"type": "text", "text": "7"}]}]}]
    dataset = materialize_stream(rows, max_steps=2, prompts_per_update=1)
    assert dataset["prompt"][:] == [row["prompt"] for row in rows]


def test_content_in_text_parts_is_a_prompt():
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": [{"type": "text", "text": "four"}]}]]})
    assert check_prompts(dataset, byte_tokenizer(template), 64, 8)[1].longest_tokens == 4


def test_a_users_dataset_without_prompts_or_of_another_type_is_refused():
    with pytest.raises(ValueError, match="no column 'prompt' in the dataset. Did you mean 'prompts'"):
        check_prompts(Dataset.from_dict({"prompts": ["a"]}), byte_tokenizer(), 64, 8)
    with pytest.raises(TypeError, match="IterableDataset, .*materialize_stream"):
        check_prompts(texts_of(1).to_iterable_dataset(), byte_tokenizer(), 64, 8)  # pyright: ignore


def test_a_dataset_with_an_output_format_is_checked_as_well():
    checked, report = check_prompts(texts_of(3, 4).with_format("numpy"), byte_tokenizer(), 64, 8)
    assert report.mean_tokens == 3.5


def test_b59_a_stream_needs_max_steps():
    with pytest.raises(ValueError, match="max_steps=-1: an iterable dataset has no length"):
        materialize_stream(iter([{"prompt": "a"}]), max_steps=-1, prompts_per_update=1)


def test_b59_keys_are_united_over_the_rows_of_a_stream():
    def rows():
        for i in range(8):
            yield {"prompt": f"p{i}", "solution": str(i)} if i % 2 else {"prompt": f"p{i}"}

    dataset = materialize_stream(IterableDataset.from_generator(rows), max_steps=4, prompts_per_update=2)
    assert dataset["prompt"][:] == [f"p{i}" for i in range(8)]
    assert dataset["solution"][:] == [None, "1", None, "3", None, "5", None, "7"]


def test_b59_an_infinite_stream_is_read_as_far_as_the_run_needs():
    drawn = []

    def rows():
        for i in count():
            drawn.append(i)
            yield {"prompt": str(i)}

    dataset = materialize_stream(rows(), max_steps=3, prompts_per_update=4)
    assert dataset["prompt"][:] == [str(i) for i in range(12)] and drawn == list(range(12))


def test_b59_an_infinite_stream_is_read_no_further_than_the_limit_and_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        dataset = materialize_stream(
            ({"prompt": str(i)} for i in count()), max_steps=100, prompts_per_update=4, limit=10
        )
    assert len(dataset) == 10
    assert "10 prompts were read from the stream (limit reached), but 100 updates take 400" in caplog.text


def test_b59_a_stream_shorter_than_the_run_repeats_and_one_shorter_than_an_update_is_refused(caplog):
    rows = [{"prompt": str(i)} for i in range(8)]
    with caplog.at_level(logging.WARNING):
        assert len(materialize_stream(iter(rows), max_steps=5, prompts_per_update=8)) == 8
    assert "8 prompts were read from the stream (it ended), but 5 updates take 40" in caplog.text
    with pytest.raises(ValueError, match="ended after 8 rows, but one update takes 9 prompts"):
        materialize_stream(iter(rows), max_steps=5, prompts_per_update=9)


def test_b59_reading_a_stream_again_gives_the_same_prompts():
    stream = IterableDataset.from_generator(lambda: ({"prompt": str(i)} for i in range(50)))
    shuffled = stream.shuffle(seed=3, buffer_size=20)
    first, again = (materialize_stream(shuffled, max_steps=5, prompts_per_update=4) for _ in range(2))
    assert dataset_hash(first) == dataset_hash(again)
    assert first["prompt"][:] != [str(i) for i in range(20)]


def test_streams_refuse_rows_that_are_no_dicts_and_a_limit_below_an_update():
    with pytest.raises(ValueError, match="row 1 of the stream is of type str"):
        materialize_stream([{"prompt": "a"}, "b"], max_steps=2, prompts_per_update=1)  # pyright: ignore
    with pytest.raises(ValueError, match="limit=3 is below one update"):
        materialize_stream([], max_steps=2, prompts_per_update=4, limit=3)


def test_the_dataset_hash_is_fixed_by_prompts_and_answers_alone():
    rows = {"prompt": ["a", "ü"], "answer": ["1", "2"]}
    expected = hashlib.sha256(b'["prompt","answer"]["a","1"]["\\u00fc","2"]').hexdigest()
    assert dataset_hash(Dataset.from_dict(rows)) == expected
    assert dataset_hash(Dataset.from_dict({"answer": rows["answer"], "prompt": rows["prompt"]})) == expected
    assert dataset_hash(Dataset.from_dict({**rows, "level": [1, 2]})) == expected
    assert dataset_hash(Dataset.from_dict(rows).with_format("numpy")) == expected


def test_the_dataset_hash_sees_order_content_and_borders():
    rows = [("ab", "c"), ("d", "e")]
    variants = [rows, rows[::-1], rows[:1], [("a", "bc"), ("d", "e")], [("ab", "c"), ("d", "f")], rows + rows]
    variant_datasets = [
        Dataset.from_list([{"prompt": prompt, "answer": answer} for prompt, answer in v]) for v in variants
    ]
    assert len(set(map(dataset_hash, variant_datasets))) == len(variants)


def test_the_dataset_hash_does_not_depend_on_how_messages_are_stored(tmp_path):
    messages = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    padded = [[{"content": m["content"], "role": m["role"], "name": None} for m in prompt] for prompt in messages]
    dataset = Dataset.from_dict({"prompt": messages})
    assert dataset_hash(Dataset.from_dict({"prompt": padded})) == dataset_hash(dataset)
    dataset.save_to_disk(tmp_path / "saved")
    assert dataset_hash(Dataset.load_from_disk(str(tmp_path / "saved"))) == dataset_hash(dataset)


def test_the_tokenizer_hash_survives_saving_and_use(tmp_path):
    tokenizer = byte_tokenizer(CHAT, adds="bos")
    expected = tokenizer_hash(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_hash(tokenizer) == expected
    tokenizer.save_pretrained(tmp_path)
    assert tokenizer_hash(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == expected


def test_the_tokenizer_hash_sees_whatever_changes_the_ids_of_a_prompt():
    def more_tokens():
        tokenizer = byte_tokenizer(CHAT)
        tokenizer.add_tokens(["<think>"])
        return tokenizer

    def other_eos():
        tokenizer = byte_tokenizer(CHAT)
        tokenizer.eos_token = "<s>"
        return tokenizer

    variants = [
        byte_tokenizer(CHAT),
        byte_tokenizer(CHAT_WITH_BOS),
        byte_tokenizer(),
        byte_tokenizer(CHAT, adds="bos"),
        byte_tokenizer(CHAT, lowercase=True),
        more_tokens(),
        other_eos(),
    ]
    assert len({tokenizer_hash(tokenizer) for tokenizer in variants}) == len(variants)
