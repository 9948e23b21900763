r"""
Math reward: one rule from the response to a verdict of 0 or 1, the same in training and in evaluation.

`answers.py` says which text is the answer, `latex.py` what formatting is ignored. The verdict then is

1. equal text;
2. two plain numerals: exact, or for decimals equal to 6 decimal places and within a relative 1e-5;
3. otherwise [Math-Verify](https://github.com/huggingface/Math-Verify) on the whole parsed strings, confirmed by a
   relative comparison of the numbers (its own is absolute, so that it calls 2^-99 and 2^-98 equal).

A gold that is words, that does not parse, or of which the parser would drop a part is compared as text alone, and
[`check_golds`] names it. Nothing here has a time limit: run it in a [`ProcessPool`], as [`MathReward`] does.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from .answers import extract_answer, extract_answers
from .latex import AnswerText, normalize, split_choice
from .pool import GIB, Crashed, ProcessPool, Raised, TimedOut

__all__ = ["Gold", "GoldReport", "MathReward", "check_golds", "extract_answer", "gold_text", "prepare_gold", "verify"]

logger = logging.getLogger(__name__)

_DECIMAL_PLACES = 6
_DECIMAL_TOLERANCE = Fraction(1, 10**5)
_EXACT_DIGITS = 50
_EXACT_TOLERANCE = Fraction(1, 10**40)
_MEMORY_LIMIT_BYTES = 2 * GIB
ANSWER_LIMIT_S = 5.0
_WARM_UP_GOLD, _WARM_UP_ANSWER = r"\frac{x}{2}", r"\frac{2x}{4}"  # imports sympy and Math-Verify, which takes seconds

GoldKind = Literal["number", "math", "words", "partial", "unparsed", "empty"]


@dataclass(frozen=True)
class Gold:
    """
    A gold answer, parsed once.

    Attributes:
        raw (`str`):
            As in the dataset.
        kind (`str`):
            `"number"` and `"math"` are compared as mathematics. Compared as text alone: `"words"`, `"partial"` (the
            parser would drop or misread a part) and `"unparsed"`. `"empty"` can be met by nothing.
        text ([`AnswerText`]):
            Normalized text.
        expression (`sympy.Basic`, `sympy.MatrixBase` or `None`):
            Parsed gold, for `"number"` and `"math"`.
    """

    raw: str
    kind: GoldKind
    text: AnswerText
    expression: Any = None

    @property
    def is_set(self) -> bool:
        """Whether several values are asked for, so that a run of boxes may give them."""
        if self.expression is None:
            return "," in self.text.key
        from sympy import FiniteSet

        return isinstance(self.expression, FiniteSet) and len(self.expression) > 1


@lru_cache(maxsize=8192)
def prepare_gold(answer: str) -> Gold:
    r"""
    Parse a gold answer, as bare LaTeX, in `$...$` or in `\boxed{...}`, all of it or nothing.

    Args:
        answer (`str`):
            Gold as in the dataset.

    Returns:
        [`Gold`]
    """
    text = normalize(extract_answer(answer) or answer)
    if not text.key:
        return Gold(answer, "empty", text)
    if text.is_garbled:
        return Gold(answer, "partial", text)
    if text.is_words:
        return Gold(answer, "words", text)
    expression = _parse(text.latex)
    if expression is None:
        return Gold(answer, "number" if text.number else "unparsed", text)
    return Gold(answer, "number" if text.number else "math", text, expression)


def verify(gold: Gold | str, text: str) -> float:
    r"""
    Verdict on a response.

    Args:
        gold ([`Gold`] or `str`):
            Gold answer.
        text (`str`):
            Response; its answer is found by [`extract_answer`].

    Returns:
        `float`: 1.0 if the answer equals the gold, else 0.0.

    Examples:
    ```python
    >>> verify(r"2\sqrt{3}", r"so it is \boxed{\sqrt{12}}")
    1.0
    >>> verify("42", "#### 42")
    0.0
    ```
    """
    return verify_answers(gold, extract_answers(text))


def verify_answers(gold: Gold | str, answers: Sequence[str]) -> float:
    """Verdict on the boxes found by [`extract_answers`]: the last counts, or the whole run if the gold is a set."""
    gold = prepare_gold(gold) if isinstance(gold, str) else gold
    if not answers or gold.kind == "empty":
        return 0.0
    if _equal(gold, answers[-1]):
        return 1.0
    return float(len(answers) > 1 and gold.is_set and _equal(gold, ", ".join(answers)))


def _equal(gold: Gold, answer: str) -> bool:
    if _equal_text(gold, normalize(answer)):
        return True
    chosen, gold_chosen = split_choice(answer), split_choice(gold.raw)
    if chosen is None:
        return gold_chosen is not None and _equal(prepare_gold(gold_chosen[1]), answer)
    letter, value = chosen
    if gold_chosen is not None:
        return letter == gold_chosen[0] and _equal(prepare_gold(gold_chosen[1]), value)
    return gold.text.key == letter.lower() or _equal_text(gold, normalize(value))


def _equal_text(gold: Gold, answer: AnswerText) -> bool:
    if gold.text.key == answer.key:
        return True
    if gold.text.number and answer.number:
        return _equal_numerals(gold.text, answer)
    if gold.expression is None or answer.is_words or answer.is_garbled:
        return False
    expression = _parse(answer.latex)
    return expression is not None and _equal_expressions(gold.expression, expression)


def _equal_numerals(gold: AnswerText, answer: AnswerText) -> bool:
    assert gold.number and answer.number
    is_decimal = gold.number.is_decimal or answer.number.is_decimal
    value, other = gold.number.value, answer.number.value
    if _close(value, other, is_decimal):
        return True
    if gold.is_percent == answer.is_percent:
        return False
    return _close(value / 100, other, is_decimal) if gold.is_percent else _close(value, other / 100, is_decimal)


def _close(value: Fraction, other: Fraction, is_decimal: bool) -> bool:
    if value == other:
        return True
    near = abs(value - other) <= _DECIMAL_TOLERANCE * max(abs(value), abs(other))
    return is_decimal and near and round(value, _DECIMAL_PLACES) == round(other, _DECIMAL_PLACES)


@lru_cache(maxsize=512)
def _parse(latex: str) -> Any:
    """Sympy expression of all of `latex`, or `None`."""
    import sympy
    from latex2sympy2_extended import NormalizationConfig, normalize_latex
    from math_verify.parser import parse_latex_cached

    config = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
    try:
        expression = parse_latex_cached(normalize_latex(latex, config))
    except Exception:  # the parser raises bare `Exception`, and anything sympy raises on nonsense
        return None
    return None if expression in (sympy.nan, sympy.zoo) else expression


def _equal_expressions(gold: Any, answer: Any) -> bool:
    import sympy
    from math_verify import verify as math_verify

    logging.getLogger("math_verify.grader").setLevel(logging.ERROR)  # it warns that its own time limit is off

    if isinstance(gold, sympy.Set):
        answer = _bounds_as_set(answer)

    def equal(first: Any, second: Any) -> bool:
        return math_verify(first, second, float_rounding=_DECIMAL_PLACES, timeout_seconds=None)

    return (equal(gold, answer) or equal(_count_symbols(gold), _count_symbols(answer))) and _confirmed(gold, answer)


def _bounds_as_set(expression: Any) -> Any:
    r"""
    The interval that numbers bound, as in `-2 < x \le 2` and `x > 1`. Anything else stays as it is: an inequality that
    is still to be solved, such as `x^2 < 4`, is no interval.
    """
    import sympy

    bounds = expression.args if isinstance(expression, sympy.And) else (expression,)
    inequalities = (sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge)
    is_solved = all(
        isinstance(bound, inequalities)
        and (bound.lhs.is_Symbol and bound.rhs.is_number or bound.lhs.is_number and bound.rhs.is_Symbol)
        for bound in bounds
    )
    return expression.as_set() if is_solved and len(expression.free_symbols) == 1 else expression


def _count_symbols(expression: Any) -> Any:
    r"""The expression with n, m and k as positive integers, as they are meant, so that \sqrt{1/n} is 1/\sqrt{n}."""
    import sympy

    counts = {symbol: str(symbol) for symbol in expression.free_symbols if str(symbol) in ("n", "m", "k")}
    return expression.subs(
        {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in counts.items()}
    )


def _confirmed(gold: Any, answer: Any) -> bool:
    """Whether the numbers of two expressions that Math-Verify calls equal are also relatively close."""
    import sympy

    if isinstance(gold, sympy.Eq) or isinstance(answer, sympy.Eq):
        sides = [side for side in (gold, answer) if isinstance(side, sympy.Eq)]
        if len({side.lhs for side in sides}) > 1:
            return True  # rearranged equations: nothing stands opposite
        return _confirmed(*(side.rhs if isinstance(side, sympy.Eq) else side for side in (gold, answer)))
    if isinstance(gold, sympy.FiniteSet) and isinstance(answer, sympy.FiniteSet):
        return all(any(_confirmed(value, other) for other in answer.args) for value in gold.args)
    gold_parts, answer_parts = _parts(gold), _parts(answer)
    if gold_parts is not None and answer_parts is not None:
        return all(map(_confirmed, gold_parts, answer_parts))
    return _relatively_close(gold, answer)


def _parts(expression: Any) -> Sequence[Any] | None:
    import sympy

    if isinstance(expression, sympy.Interval):
        return expression.start, expression.end
    if isinstance(expression, sympy.MatrixBase):
        return expression.flat()
    return expression.args if isinstance(expression, sympy.Tuple) else None


def _relatively_close(gold: Any, answer: Any) -> bool:
    """Compares two scalars at one point; anything that has no finite value there is left to Math-Verify."""
    import sympy

    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return True
    names = sorted({str(symbol) for symbol in gold.free_symbols | answer.free_symbols})
    point = {name: sympy.Rational(10 + 7 * i, 13) for i, name in enumerate(names)}
    value, other = (
        side.subs({symbol: point[str(symbol)] for symbol in side.free_symbols}).doit() for side in (gold, answer)
    )
    if value == other:
        return True
    if value.is_Rational and other.is_Rational:
        return False
    has_decimals = gold.has(sympy.Float) or answer.has(sympy.Float)
    tolerance = _DECIMAL_TOLERANCE if has_decimals else _EXACT_TOLERANCE
    value, other = value.evalf(_EXACT_DIGITS), other.evalf(_EXACT_DIGITS)
    if not (value.is_number and other.is_number and value.is_finite and other.is_finite):
        return True
    return bool(abs(value - other) <= sympy.Rational(tolerance) * sympy.Max(abs(value), abs(other)))


def gold_text(value: Any, row: int, column: str) -> str:
    """
    Gold of a dataset row as text.

    Args:
        value (`Any`):
            String, number, or list of these (several values: all of them are asked for).
        row (`int`), column (`str`):
            Where it stands, for the error.

    Returns:
        `str`

    Raises:
        TypeError: For anything else (`None`, a dict, a bool, NaN), naming row and column.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value:
        return ", ".join(gold_text(item, row, column) for item in value)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return str(int(value)) if value.is_integer() else repr(value)
    raise TypeError(
        f"{value!r} in row {row} of column {column!r} is no gold answer: it must be a string, a finite number or a "
        "list of these. Fix or drop the row, or choose another column."
    )


@dataclass(frozen=True)
class GoldReport:
    """
    What a dataset's golds are worth to the math reward.

    Attributes:
        total (`int`):
            Number of rows.
        counts (`dict[str, int]`):
            Rows by [`Gold`] kind; `"unreachable"` are golds that do not even verify against themselves.
        rows (`list[tuple[int, str, str]]`):
            `(row, gold, kind)` of the rows that are empty, unreachable, or compared as text because the parser would
            fail or drop a part. None of these is ever paid to everybody.
    """

    total: int
    counts: dict[str, int]
    rows: list[tuple[int, str, str]] = field(repr=False)

    def __str__(self) -> str:
        share = len(self.rows) / max(1, self.total)
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        named = "; ".join(f"row {row} {kind}: {gold[:60]!r}" for row, gold, kind in self.rows[:10])
        more = f"; and {len(self.rows) - 10} more in `rows`" if len(self.rows) > 10 else ""
        return f"{len(self.rows)} of {self.total} golds ({share:.2%}) are no mathematics ({kinds}). {named}{more}"


def gold_kind(answer: str) -> str:
    """Kind of a gold, `"unreachable"` if even a response with the gold in a box is refused."""
    gold = prepare_gold(answer)
    if gold.kind != "empty" and verify_answers(gold, extract_answers(f"\\boxed{{{answer}}}")) != 1.0:
        return "unreachable"
    return gold.kind


def check_golds(golds: Iterable[Any], column: str = "answer", workers: int = 1, timeout_s: float = 10.0) -> GoldReport:
    """
    Parse all golds of a dataset once, and name in the log those that are no mathematics.

    Args:
        golds (`Iterable`):
            The column's values.
        column (`str`, *optional*, defaults to `"answer"`):
            Its name, for errors.
        workers (`int`, *optional*, defaults to `1`):
            Processes.
        timeout_s (`float`, *optional*, defaults to `10.0`):
            Seconds for one gold; one that takes longer is `"unreachable"`.

    Returns:
        [`GoldReport`]

    Raises:
        TypeError: If a value is no gold, naming row and column.
    """
    texts = [gold_text(value, row, column) for row, value in enumerate(golds)]
    unique = list(dict.fromkeys(texts))
    with ProcessPool(gold_kind, workers, timeout_s, _MEMORY_LIMIT_BYTES, warm_up=[_WARM_UP_GOLD]) as pool:
        results = pool.map((text,) for text in unique)
    kinds = {
        text: kind if isinstance(kind, str) else "unreachable" for text, kind in zip(unique, results, strict=True)
    }
    rows = [(row, text, kinds[text]) for row, text in enumerate(texts)]
    trouble = [entry for entry in rows if entry[2] in ("partial", "unparsed", "empty", "unreachable")]
    report = GoldReport(len(texts), dict(Counter(kind for _, _, kind in rows)), trouble)
    if trouble:
        logger.warning("%s", report)
    return report


class MathReward:
    """
    The math reward, as a reward function of TRL and for evaluation.

    1.0 for a correct answer, 0.0 for a wrong or missing one, `None` (unscorable) only where the gold is empty. An
    answer on which the verifier hangs, crashes or runs out of memory is a degenerate one and gets 0.0; it is counted,
    and no other answer is affected.

    Args:
        answer_column (`str`, *optional*, defaults to `"answer"`):
            Dataset column with the golds.
        workers (`int`, *optional*, defaults to `4`):
            Verifying processes.
        timeout_s (`float`, *optional*, defaults to `5.0`):
            Seconds for one answer.
        cache_size (`int`, *optional*, defaults to `65536`):
            Number of remembered verdicts.

    Attributes:
        counters (`Counter`):
            `scored`, `no_answer`, `empty_gold`, `cached`, `timed_out`, `crashed`, `raised`.
    """

    __name__ = "math"

    def __init__(
        self,
        answer_column: str = "answer",
        *,
        workers: int = 4,
        timeout_s: float = ANSWER_LIMIT_S,
        cache_size: int = 65536,
    ):
        self.answer_column = answer_column
        self.counters: Counter[str] = Counter()
        warm_up = [_WARM_UP_GOLD, [_WARM_UP_ANSWER]]
        self._pool = ProcessPool(verify_answers, workers, timeout_s, _MEMORY_LIMIT_BYTES, warm_up)
        self._cache: OrderedDict[tuple[str, ...], float] = OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """Score completions (strings or lists of messages) against the answer column, called as TRL does."""
        if self.answer_column not in columns:
            raise ValueError(
                f"The dataset has no column {self.answer_column!r} with the golds; it has {sorted(columns)}. Rename a "
                "column, or set `answer_column`."
            )
        return self.score(columns[self.answer_column], [completion_text(completion) for completion in completions])

    def score(self, golds: Sequence[Any], texts: Sequence[str]) -> list[float | None]:
        """
        Verdicts on responses, each with its own gold.

        Args:
            golds (`Sequence`):
                Gold answers, see [`gold_text`].
            texts (`Sequence[str]`):
                Responses.

        Returns:
            `list[float | None]`: In the order of `texts`.
        """
        tasks: list[tuple[str, ...] | float | None] = []
        for row, (value, text) in enumerate(zip(golds, texts, strict=True)):
            gold, answers = gold_text(value, row, self.answer_column), extract_answers(text)
            tasks.append((gold, *answers) if gold.strip() and answers else 0.0 if gold.strip() else None)
        verdicts = self._verdicts({task for task in tasks if isinstance(task, tuple)})
        scores = [verdicts[task] if isinstance(task, tuple) else task for task in tasks]
        with self._lock:
            self.counters.update(scored=len(tasks), no_answer=tasks.count(0.0), empty_gold=tasks.count(None))
        return scores

    def close(self) -> None:
        """End the verifying processes."""
        self._pool.close()

    def _verdicts(self, tasks: set[tuple[str, ...]]) -> dict[tuple[str, ...], float]:
        with self._lock:
            verdicts = {task: self._cache[task] for task in tasks if task in self._cache}
            for task in verdicts:
                self._cache.move_to_end(task)
        futures = {task: self._pool.submit(task[0], task[1:]) for task in tasks if task not in verdicts}
        results = {task: future.result() for task, future in futures.items()}
        failed = {task: _FAILURES[type(result)] for task, result in results.items() if not isinstance(result, float)}
        for task, failure in failed.items():
            logger.warning("Math: verifying %.200r against %.200r %s: wrong.", task[-1], task[0], failure)
        with self._lock:
            self.counters["cached"] += len(verdicts)
            self.counters.update(failed.values())
            self._cache.update((task, result) for task, result in results.items() if task not in failed)
            while len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return verdicts | {task: 0.0 if task in failed else result for task, result in results.items()}


_FAILURES: dict[type, str] = {TimedOut: "timed_out", Crashed: "crashed", Raised: "raised"}


def completion_text(completion: Any) -> str:
    """Text of a completion: a string, or the content of the last of its messages (text blocks joined)."""
    if isinstance(completion, str):
        return completion
    content = completion[-1]["content"] if completion else ""
    if isinstance(content, list):
        return "".join(block.get("text", "") for block in content)
    return content or ""
