from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time

import pytest

from mu_grpo_trl.rewards.answers import boxed_reward
from mu_grpo_trl.rewards.math import MathReward, check_golds, extract_answer, gold_text, prepare_gold, verify

POWER_TOWER = r"\boxed{\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)}-4\right)}-5}{16}}"


@pytest.mark.parametrize(
    ("gold", "response", "verdict"),
    [
        (r"2\sqrt{3}", r"\boxed{2}", 0),
        (r"2\sqrt{3}", r"\boxed{2\sqrt{3}}", 1),
        (r"3\pi", r"\boxed{3}", 0),
        (r"2^{10}", r"\boxed{2}", 0),
        (r"2^{10}", r"\boxed{1024}", 1),
        ("10!", r"\boxed{10}", 0),
        ("10!", r"\boxed{3628800}", 1),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{3}", 0),
        ("(1, 2)", r"\boxed{2}", 0),
        ("1331 and 1728", r"\boxed{1728}", 0),
        ("1331 and 1728", r"\boxed{1331, 1728}", 1),
        ("1, 2, 3", r"\boxed{3}", 0),
        ("1, 2, 3", r"\boxed{1,2,3}", 1),
        ("1,2", r"\boxed{1,2}", 1),
        ("9 and -7", r"\boxed{-7, 9}", 1),
        ("9 and -7", r"\boxed{9}", 0),
        ("2, 3, or 4", r"\boxed{2, 3}", 0),
        (r"\pm 2021", r"\boxed{2021}", 0),
        (r"1-\frac{1}{\mathrm{e}}", r"\boxed{1+\frac{1}{\mathrm{e}}}", 0),
        (r"1-\frac{1}{\mathrm{e}}", r"\boxed{\frac{e-1}{e}}", 1),
        ("3x+4y+14=0", r"\boxed{3x-y+13=0}", 0),
        ("3c", r"\boxed{3}", 0),
    ],
)
def test_b01_bare_latex_gold_is_compared_whole(gold, response, verdict):
    assert verify(gold, response) == verdict


@pytest.mark.parametrize(
    ("gold", "answer"), [("52_8", "52"), ("12:00", "1:00"), ("1 2", "3"), (r"1, 2, \ldots, n", "1,2,n")]
)
def test_b01_gold_that_the_parser_would_misread_is_compared_as_text(gold, answer):
    assert prepare_gold(gold).kind == "partial"
    assert verify(gold, f"\\boxed{{{answer}}}") == 0
    assert verify(gold, f"\\boxed{{{gold}}}") == 1


@pytest.mark.parametrize(
    "gold",
    [
        r"\sqrt{3}",
        r"\dfrac{3}{7}",
        r"\frac12",
        r"\frac{\pi}{4}",
        "(1,2)",
        "x^2+1",
        r"[0, \infty)",
        r"\text{(B)}",
        "B",
        "Yes",
    ]
    + [
        "Monday",
        r"\text{DNE}",
        r"\$5",
        r"\text{4:10 P.M.}",
        r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
        r"0.\overline{3}",
    ],
)
def test_b02_gold_verifies_against_itself_and_not_against_another_answer(gold):
    assert verify(gold, f"\\boxed{{{gold}}}") == 1
    assert verify(gold, r"\boxed{1234}") == 0


def test_b02_golds_that_are_no_mathematics_are_counted_and_named_in_the_log(caplog):
    report = check_golds(["42", "Yes", "", "52_8", r"3 \mid n", r"\frac{1}{2", 7])
    assert report.counts == {"number": 2, "words": 1, "empty": 1, "partial": 1, "unparsed": 1, "unreachable": 1}
    assert [(row, kind) for row, _, kind in report.rows] == [
        (2, "empty"),
        (3, "partial"),
        (4, "unparsed"),
        (5, "unreachable"),
    ]
    assert "4 of 7 golds (57.14%)" in caplog.text and "row 3 partial: '52_8'" in caplog.text


@pytest.mark.parametrize("gold", ["", "  ", "$$"])
def test_b02_empty_gold_is_never_met(gold):
    assert verify(gold, r"\boxed{42}") == 0
    assert verify(gold, r"\boxed{}") == 0


def test_words_are_not_products_of_letters():
    assert verify("Monday", r"\boxed{Dynamo}") == 0
    assert verify("Monday", r"\boxed{\text{ monday. }}") == 1
    assert verify("Alice and Bob", r"\boxed{\text{Bob, Alice}}") == 1
    assert verify("Alice and Bob", r"\boxed{Alice} and \boxed{Bob}") == 1
    assert verify("Alice and Bob", r"\boxed{Alice}") == 0


@pytest.mark.parametrize(
    ("gold", "answer", "verdict"),
    [
        (r"$\frac{1}{2^{99}}$", r"\frac{1}{2^{98}}", 0),
        (r"$\frac{1}{2^{99}}$", "2^{-99}", 1),
        (r"$\frac{1}{200!}$", r"\frac{1}{300!}", 0),
        (r"\frac{1}{2004!}", r"\frac{1}{2006!}", 0),
        ("0.0000001", "0.0000002", 0),
        ("0.0000001", r"1 \times 10^{-7}", 1),
        ("(0.0000001, 1)", "(0.0000002, 1)", 0),
        (r"\{0.0000001, 1\}", r"\{0.0000002, 1\}", 0),
        ("x = 0.0000001", "0.0000002", 0),
        (r"\frac{x}{2^{99}}", r"\frac{x}{2^{98}}", 0),
        (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", r"\frac{1}{3 \cdot 2^{2006}}", 0),
        ("10^{30}", "10^{30}+1", 0),
        (r"\frac13", "0.333333", 1),
        (r"\frac13", "0.3333", 0),
        (r"\pi", "3.141593", 1),
        (r"\pi", "3.14", 0),
        (r"\sqrt{2}\cdot\sqrt{3}", r"\sqrt{6}", 1),
    ],
)
def test_b06_numbers_are_compared_relatively(gold, answer, verdict):
    assert verify(gold, f"\\boxed{{{answer}}}") == verdict


@pytest.mark.parametrize(
    ("gold", "response", "verdict"),
    [
        ("2", r"\boxed{1} \boxed{2}", 1),
        ("2", "\\boxed{1}\n\n\\boxed{2}", 1),
        ("2", r"\boxed{1}. Then \boxed{2}", 1),
        ("15", r"Each row has \boxed{3} seats, so with 5 rows the total is \boxed{15}", 1),
        ("15", "Step 1 gives \\boxed{3}.\n\nStep 2: multiply by 5, so the final result is\n\\boxed{15}", 1),
        ("2", r"First \boxed{1}. After checking again I get \boxed{2}", 1),
        ("2", r"\boxed{2}, so \boxed{2}", 1),
        ("$1,2$", r"\boxed{1} and \boxed{2}", 1),
        ("1,2", r"$x=\boxed{1}$ or $x=\boxed{2}$", 1),
        ("1,2", r"\boxed{1}, \boxed{2}, \boxed{3}", 0),
        ("1,2", r"\boxed{1} is wrong, rather \boxed{2}", 0),
        ("1", r"\boxed{1} \boxed{2}", 0),
        ("1", r"\boxed{1}, \boxed{2}", 0),
        ("2", r"\boxed{1 \text{ or } 2}", 0),
        ("2", r"\boxed{1, 2, 3}", 0),
        ("5", r"\boxed{\fbox{5}}", 1),
        ("5", r"\boxed{\fbox{3} + \fbox{2}}", 1),
        ("2", r"\boxed{\fbox{3} + \fbox{2}}", 0),
    ],
)
def test_b08_last_box_wins_and_only_a_set_may_be_spread_over_boxes(gold, response, verdict):
    assert verify(gold, response) == verdict


@pytest.mark.parametrize(
    "response",
    [
        r"Maybe \boxed{42}. Let me recheck everything: \boxed{4",
        r"So \boxed{42",
        r"First \boxed{42}. Finally \boxed{}",
        r"First \boxed{42}. Finally \boxed{ }",
        r"First \boxed{42}. Finally \boxed",
        r"First \boxed{42}. Finally \boxe",
        r"First \boxed{42}. Finally \boxed{\frac{42}{1}",
        r"First \boxed{42}. Finally \boxed{42\}",
    ],
)
def test_b09_cut_or_empty_last_box_is_no_answer(response):
    assert extract_answer(response) is None
    assert verify("42", response) == 0


@pytest.mark.parametrize(
    "last", [r"\boxed{42}", r"\boxed{\frac{84}{2}}", r"\fbox{42}", r"\boxed {\text{answer: } 42}", r"\boxed{\{42\}}"]
)
def test_b09_a_response_cut_anywhere_within_its_last_box_gives_no_answer(last):
    whole = rf"First \boxed{{42}}, checked again. Finally {last}"
    start = len(whole) - len(last)
    assert all(extract_answer(whole[:length]) == "42" for length in range(len(r"First \boxed{42}"), start + 1))
    cut = [whole[:length] for length in range(start + len(r"\box" if "boxed" in last else r"\fbo"), len(whole))]
    assert [text for text in cut if extract_answer(text) is not None] == []
    assert extract_answer(whole) == last[last.index("{") + 1 : -1].strip()


@pytest.mark.parametrize(
    "response", [r"so \boxed{42}. Let me ver", r"\boxed{42} (as asked in \boxed form)", "\\fbox\n{42}"]
)
def test_b09_complete_last_box_counts_whatever_follows(response):
    assert verify("42", response) == 1


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("42", r"We computed 42. \boxed{}"),
        ("42", "#### 42"),
        ("42", "Final Answer: **42**"),
        ("42", "<answer>42</answer>"),
        ("42", "$42$"),
        ("5", r"<think>\boxed{5}</think> I cannot decide."),
        ("5", r"<think>it is \boxed{5}"),
        ("5", r"<think>\boxed{5}</think> So \boxed{6}"),
    ],
)
def test_b10_what_is_in_no_box_or_in_the_reasoning_is_no_answer(gold, response):
    assert verify(gold, response) == 0


def test_b10_box_after_the_reasoning_is_the_answer():
    assert verify("5", r"<think>\boxed{6</think> so \boxed{5}") == 1
    assert verify("5", r"reasoning whose opening tag is in the prompt </think> \boxed{5}") == 1


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("42", r"\boxed {42}"),
        ("42", r"\boxed{42.}"),
        ("42", r"\fbox{42}"),
        ("42", r"\boxed{\text{Answer: }42}"),
        ("42", r"\boxed{\text{The final answer is } 42}"),
        ("42", r"\boxed{\begin{aligned}x&=42\end{aligned}}"),
        ("42", r"\boxed{\begin{aligned}x&=40+2\\&=42\end{aligned}}"),
        (r"$\frac{1}{2}$", r"\boxed{\frac12}"),
        (r"$\frac{1}{2}$", r"\boxed{1/2}"),
        (r"$\frac{1}{2}$", r"\boxed{\dfrac 1 2}"),
        ("1234567", r"\boxed{1\,234\,567}"),
        ("1234567", r"\boxed{1,234,567}"),
        ("1234567", r"\boxed{1{,}234{,}567}"),
        ("1234567", r"\boxed{1 234 567}"),
        ("1200", r"\boxed{1.2e3}"),
        ("1200", r"\boxed{1.2 \times 10^{3}}"),
        (r"10,\!080", r"\boxed{10080}"),
        (r"\$32,\!348", r"\boxed{32348}"),
        ("5", r"\boxed{\$5.00}"),
        (r"80\%", r"\boxed{80}"),
        (r"80\%", r"\boxed{0.8}"),
        (r"90^\circ", r"\boxed{90}"),
        (r"\frac{270}7\text{ degrees}", r"\boxed{\frac{270}{7}^\circ}"),
        ("025", r"\boxed{25}"),
        ("27.0", r"\boxed{27}"),
        ("-1.0", r"\boxed{−1}"),
        (r"9 \text{ inches}", r"\boxed{9}"),
        ("12 cups", r"\boxed{12\text{ cups}}"),
        ("3x^2", r"\boxed{3x²}"),
        (r"2\pi", r"\boxed{2π}"),
        (r"7\frac12", r"\boxed{7.5}"),
        ("7 1/2", r"\boxed{\frac{15}{2}}"),
        (r"\frac{1}{21,000}", r"\boxed{\frac{1}{21000}}"),
        (r"16.\overline{6}\%", r"\boxed{\frac{50}{3}\%}"),
        ("42", r"\boxed{\mathbf{42}}"),
        ("42", r"\boxed{\textbf{42}}"),
        ("42", r"\boxed{$42$}"),
        ("42", r"\boxed{x = 42}"),
        ("42", r"\boxed{\color{red}{42}}"),
        ("42", r"\boxed{\Large 42}"),
        ("42", r"\boxed{42\ }"),
        ("42", r"\boxed{(42)}"),
        ("42", r"\boxed{n = 42;}"),
        ("1234567", r"\boxed{1\;234\;567}"),
        ("1234567", r"\boxed{1~234~567}"),
        (r"\frac{3}{4}", r"\boxed{\tfrac34}"),
        (r"\frac{3}{4}", r"\boxed{\cfrac{3}{4}}"),
        (r"\frac{3}{4}", r"\boxed{{3\over 4}}"),
        ("B", r"\boxed{\text{(B)}}"),
        (r"\text{(B)}", r"\boxed{B}"),
        ("B", r"\boxed{\textbf{(B)}\ 42}"),
        ("42", r"\boxed{\textbf{(B)}\ 42}"),
        (r"\textbf{(B)}\ 42", r"\boxed{42}"),
        ("52_8", r"\boxed{52_{8}}"),
        (r"\text{4:10 P.M.}", r"\boxed{4:10 \text{ p.m.}}"),
        (r"\text{4:10 P.M.}", r"\boxed{\text{4:10 PM}}"),
        ("(-2,2]", r"\boxed{-2 < x \le 2}"),
        (r"[1,\infty)", r"\boxed{x \ge 1}"),
        (r"\sqrt{1/n}", r"\boxed{\frac{1}{\sqrt{n}}}"),
        (r"\sqrt{17}", r"\boxed{sqrt(17)}"),
        ("x^2-1", r"\boxed{(x-1)(x+1)}"),
    ],
)
def test_b13_harmless_formatting_does_not_matter(gold, response):
    assert verify(gold, response) == 1


@pytest.mark.parametrize(
    ("gold", "response"),
    [
        ("A", r"\boxed{\textbf{(B)}\ 42}"),
        (r"\textbf{(B)}\ 42", r"\boxed{\textbf{(A)}\ 42}"),
        ("4", r"\boxed{4\sqrt(2)}"),
        ("12", r"\boxed{1 2}"),
        (r"\text{4:10 P.M.}", r"\boxed{4:10 \text{ a.m.}}"),
        ("[0,1]", r"\boxed{[0,1)}"),
        ("(-2,2]", r"\boxed{-2 < x < 2}"),
        ("(-2,2)", r"\boxed{x^2 < 4}"),  # still to be solved
        (r"(-\infty,-3)\cup(3,\infty)", r"\boxed{|x| > 3}"),
        (r"[1,\infty)", r"\boxed{x \ge y}"),
        ("(1,2)", r"\boxed{(2,1)}"),
        ("1200", r"\boxed{1.2e4}"),
        (r"|x|", r"\boxed{x}"),
        ("42", r"\boxed{-42}"),
        ("0.5", r"\boxed{50}"),
    ],
)
def test_b13_normalization_does_not_make_different_answers_equal(gold, response):
    assert verify(gold, response) == 0


@pytest.fixture(scope="module")
def reward():
    reward = MathReward(workers=2, timeout_s=2.0)
    yield reward
    reward.close()


def test_b03_power_tower_costs_only_its_own_answer(reward, caplog):
    responses = [r"\boxed{16}", POWER_TOWER, r"\boxed{4^2}", r"\boxed{17}"]
    started = time.monotonic()
    with caplog.at_level(logging.WARNING, "mu_grpo_trl.rewards.math"):
        assert reward.score(["16"] * 4, responses) == [1.0, 0.0, 1.0, 0.0]
    assert time.monotonic() - started < 15
    (line,) = [record.getMessage() for record in caplog.records]
    assert "against '16'" in line and line.endswith(("timed_out: wrong.", "crashed: wrong.", "raised: wrong."))


def test_workers_load_the_verifier_before_any_limit_runs(reward):
    warm_up = reward._pool._setup["warm_up"]
    code = "import json, sys, mu_grpo_trl.rewards.math as m; m.verify_answers(*json.loads(sys.argv[1]))"
    command = [sys.executable, "-c", f"{code}; print(*sys.modules)", json.dumps(warm_up)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"sympy", "math_verify.parser", "math_verify.grader"} <= set(loaded)


@pytest.mark.parametrize(
    "answer", ["9^{9^{9}}", "(9!)!!", "(10^{8})!", "(" * 1500 + "1" + ")" * 1500, "1" * 3900, "{" * 300]
)
def test_b03_degenerate_answers_are_wrong(reward, answer):
    assert reward.score(["5", "5"], [f"\\boxed{{{answer}}}", r"\boxed{5}"]) == [0.0, 1.0]


def test_b04_verdicts_off_the_main_thread_are_the_same(reward):
    scores: list = []
    responses = [r"\boxed{9^{9^{9}}}", r"\boxed{\frac{10}{2}}", r"\boxed{6}"]
    thread = threading.Thread(target=lambda: scores.extend(reward.score(["5"] * 3, responses)))
    thread.start()
    thread.join(timeout=15)
    assert scores == [0.0, 1.0, 0.0]

    direct: list = []
    thread = threading.Thread(target=lambda: direct.append(verify(r"2\sqrt{3}", r"\boxed{\sqrt{12}}")))
    thread.start()
    thread.join()
    assert direct == [1.0]


def test_reward_takes_trl_arguments_and_conversations():
    reward = MathReward("solution", workers=1)
    try:
        conversation = [{"role": "assistant", "content": r"\boxed{2}"}]
        blocks = [{"role": "assistant", "content": [{"type": "text", "text": r"\boxed{2}"}]}]
        kwargs = {"prompts": ["1+1?"] * 4, "completion_ids": [[1]] * 4, "trainer_state": None}
        completions = [r"\boxed{2}", conversation, blocks, "2"]
        assert reward(completions=completions, solution=[2, "2", 2.0, "2"], **kwargs) == [1.0, 1.0, 1.0, 0.0]
        assert reward(completions=[r"\boxed{2}"], solution=[""]) == [None]
        with pytest.raises(ValueError, match="no column 'solution'.*'answer'"):
            reward(completions=["2"], answer=["2"])
    finally:
        reward.close()


def test_repeated_answers_are_verified_once(reward):
    before = reward.counters["cached"]
    assert reward.score(["7"] * 3, [r"\boxed{14/2}"] * 3) == [1.0] * 3
    assert reward.counters["cached"] == before
    assert reward.score(["7"], [r"\boxed{14/2}"]) == [1.0]
    assert reward.counters["cached"] == before + 1


def test_b57_numeric_golds_become_text():
    assert [gold_text(value, 0, "answer") for value in (2, 2.0, 2.5, ["2"], ["1", 2], 10**400)] == [
        *("2", "2", "2.5", "2", "1, 2"),
        str(10**400),
    ]


@pytest.mark.parametrize("value", [None, True, {"a": 2}, [], float("nan"), float("inf"), [None]])
def test_b57_what_is_no_gold_is_an_error_naming_row_and_column(value):
    with pytest.raises(TypeError, match="row 3 of column 'solution'"):
        check_golds(["1", 2, "3", value], column="solution")


def test_extraction_is_linear_in_hostile_text():
    started = time.monotonic()
    for text in (r"\boxed{" * 50_000, r"\boxed{1} " * 50_000, "{" * 500_000, "\\" * 500_000 + r"\boxed{1}"):
        extract_answer(text)
    assert time.monotonic() - started < 5


def test_verifier_does_not_import_torch():
    code = "import sys, mu_grpo_trl.rewards.math as m; m.verify('x^2', r'\\boxed{x x}'); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_the_format_reward_pays_for_an_answer_of_any_kind():
    completions = [r"It is \boxed{7}.", "7", r"\boxed{}", r"\boxed{1} or \boxed{2", [{"content": r"\boxed{x}"}]]
    assert boxed_reward(completions) == [1.0, 0.0, 0.0, 0.0, 1.0]
