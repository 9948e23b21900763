r"""
Normalizes the LaTeX of one answer, so that harmless formatting does not decide a verdict. Standard library only.

Units are not compared (`9 \text{ inches}` is `9`), nor are currency and degree signs. A percent sign is remembered.
What a product-of-letters reading would get wrong (words) or what Math-Verify drops in silence (the base in `52_8`, the
colon of `12:00`, the gap in `1 2`, an ellipsis) is marked, and compared as text only.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Number:
    """Exact value of a plain numeral, and whether it was written as a decimal."""

    value: Fraction
    is_decimal: bool


@dataclass(frozen=True)
class AnswerText:
    r"""
    A normalized answer.

    Attributes:
        latex (`str`):
            Normalized LaTeX, without units and percent sign.
        key (`str`):
            What is compared as text: case, spacing and `\text` do not count, nor does the order of a list of words.
        number (`Number` or `None`):
            Value, if the answer is one plain numeral.
        is_percent (`bool`):
            Whether a percent sign was removed.
        is_words (`bool`):
            Whether it contains words: as a product of letters, "Monday" would equal "Dynamo".
        is_garbled (`bool`):
            Whether Math-Verify would drop or misread a part of it.
    """

    latex: str
    key: str
    number: Number | None
    is_percent: bool
    is_words: bool
    is_garbled: bool


_UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "θ": r"\theta ", "∅": r"\emptyset ", "°": r"^\circ ", "…": r"\ldots ", "√": r"\sqrt ", "。": ".", "、": ",",
}  # fmt: skip
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
_PLAIN_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

_CLEANING = [
    (re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*"), ""),
    (re.compile(r"\\!|\\(?:displaystyle|textstyle|limits|rm|bf|it|tt)(?![A-Za-z])|\\(?:text)?color\s*\{[^{}]*\}"), ""),
    (re.compile(r"\\(?:normalsize|small|[lL]arge|LARGE|[hH]uge)(?![A-Za-z])"), ""),
    (re.compile(r"(?<!\\)\\[()\[\]]|\\?\$|[£€]"), ""),
    (re.compile(r"\\(?:begin|end)\{(?:aligned|align|gathered|gather|equation|split)\*?\}"), ""),
    (re.compile(r"\\\\\s*&\s*(?==)"), " "),
    (re.compile(r"\\(?:text(?:bf|it|rm|normal)|mathbf|mathit|mbox|bm|boldsymbol|underline)\s*(?=\{)"), r"\\text"),
    (re.compile(r"\\(?:text|mathrm)\s*\{\s*([ei]|[^A-Za-z{}]+|,?\s*(?:and|or)\s*)\s*\}(?!\s*\^)"), r" \1 "),
    (re.compile(r"\\mathrm\s*(?=\{)"), r"\\text"),
    (re.compile(r"(?<=\d)(?:\\[,;: ]|\{,\}|~)(?=\d{3}(?!\d))"), ""),
    (re.compile(r"\\[,;: >]|\\q?quad(?![A-Za-z])|\\hspace\*?\{[^{}]*\}|~|\s+"), " "),
    (re.compile(r";"), ","),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
]
_MATRIX = re.compile(r"matrix|array|cases")
_ANSWER_PREFIX = re.compile(
    r"\A(?:\\text\s*\{)?\s*(?:the )?(?:final |correct )?answer\s*(?:is\b|[:=]|\})\s*[:=]?\s*\}?\s*(?=\S)",
    re.IGNORECASE,
)
_LEFT_EDGE = re.compile(r"\A[\s=:]+")
_RIGHT_EDGE = re.compile(r"[\s.,:\\]+\Z")  # a backslash: of `\ `

_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*percent\s*\}|\bpercent)\Z")
_TEXT_UNIT = re.compile(r"(?<=[\w}!)])\s*\\text\s*\{\s*[^{}]*[A-Za-z][^{}]*\}\s*(?:\^\s*\{?\d\}?)?\Z")
_BARE_UNIT = re.compile(
    r"(?<=[\d}])\s+(?:[A-Za-z]{4,}|cm|mm|km|kg|mg|ml|ft|in|hrs?|min|sec|mph|lbs?|oz|yd)\b[A-Za-z ./]*(?:\^\{?\d\}?)?\Z"
)
_DEGREES = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree)\s*\Z")
_HALF_OF_DAY = re.compile(r"\b[ap]\.? ?m\b", re.IGNORECASE)

_SPELLING = [
    (re.compile(r"\\text\s*\{\s*([A-Za-z])\s*\}"), r" \1 "),
    (re.compile(r"\b([ap])\. ?m\b\.?", re.IGNORECASE), r"\1m"),
    (re.compile(r"\A([-+]?\d{1,3})((?: \d{3})+)(?=\.\d|\Z)"), lambda m: m.group(1) + m.group(2).replace(" ", "")),
    (re.compile(r"(?<![A-Za-z0-9.}])(\d+(?:\.\d+)?)[eE]([-+]?\d+)(?![A-Za-z0-9.])"), r"\1 \\times 10^{\2}"),
    (re.compile(r"(?<![\\A-Za-z])(sqrt|pi|infty)(?![A-Za-z])"), r"\\\1 "),
    (re.compile(r"\\sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\[dtc]?frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"(?<=[\d]),(?=\d{3}[,}])(?=[^{]*\})"), ""),
    (re.compile(r"\A\(([0-9A-F]+)\) ?_"), r"\1_"),
    (re.compile(r"\A(-?\d+) (\d+)/(\d+)\Z"), r"\1\\frac{\2}{\3}"),
    (re.compile(r"\A(?!\d{1,2}:[0-5]\d\Z)(\d+) ?: ?([1-9]\d*)\Z"), r"\\frac{\1}{\2}"),
]
_CHOICE = re.compile(
    r"\A(?:\\text\s*\{\s*)?\(([A-J])\)\s*\}?\s*(?!\\(?:cdot|times|cup|cap)\b)(?=[\w\\-])(.+)\Z", re.DOTALL
)

_ENVIRONMENT = re.compile(r"\\(?:begin|end|operatorname)\s*\{[^{}]*\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_OPERATOR_WORDS = frozenset(
    ("and", "or", "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan")
    + ("log", "ln", "exp", "max", "min", "mod", "gcd", "lcm", "det")
)
_SHORT_WORDS = frozenset(("yes", "no", "odd", "all", "both", "none", "true"))
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_GARBLED = re.compile(r"\d_|(?<![_^\d.{])\d+ +[\d.]|\\[lcd]?dots|\.\.\.|\d *:|'|[^\x00-\x7f]")

_NUMERAL = re.compile(
    r"(?P<sign>[-+]?) ?(?:"
    r"\\[dtc]?frac *\{ ?(?P<over>-?\d+) ?\} *\{ ?(?P<under>-?\d+) ?\}"
    r"|(?P<digits>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
    r"(?: ?/ ?(?P<divisor>\d+)| ?\\(?:times|cdot) ?10 ?\^(?:\{ ?(?P<exponent>[-+]?\d{1,3}) ?\}|(?P<power>\d)))?"
    r")"
)
_REPEATING = re.compile(r"(-?)(\d*)\.(\d*) ?\\overline *\{ ?(\d+) ?\}")
_MAX_NUMERAL_CHARS = 1000


def normalize(answer: str) -> AnswerText:
    """
    Normalize the LaTeX of one answer.

    Args:
        answer (`str`):
            Content of a box, or a gold.

    Returns:
        [`AnswerText`]
    """
    latex, is_percent = _strip_units(_clean(answer))
    for pattern, replacement in _SPELLING:
        latex = pattern.sub(replacement, latex.strip())
    number = _numeral(latex)
    is_words = number is None and _has_words(latex)
    return AnswerText(
        latex=latex,
        key=_key(latex, is_words),
        number=number,
        is_percent=is_percent,
        is_words=is_words,
        is_garbled=number is None and bool(_GARBLED.search(latex)),
    )


def split_choice(answer: str) -> tuple[str, str] | None:
    r"""`("B", "42")` for a choice written with its value, `\textbf{(B)}\ 42`; `None` for anything else."""
    match = _CHOICE.match(_clean(answer))
    return (match.group(1), match.group(2)) if match else None


def _clean(answer: str) -> str:
    latex = _SUPERSCRIPT.sub(lambda m: "^{" + m.group().translate(_PLAIN_DIGITS) + "}", answer)
    latex = unicodedata.normalize("NFKC", "".join(_UNICODE.get(char, char) for char in latex))
    for pattern, replacement in _CLEANING:
        latex = pattern.sub(replacement, latex)
    if not _MATRIX.search(latex):
        latex = latex.replace("\\\\", ",").replace("&", "")
    return _trim(_ANSWER_PREFIX.sub("", _trim(latex)))


def _trim(latex: str) -> str:
    return _RIGHT_EDGE.sub("", _LEFT_EDGE.sub("", latex))


def _strip_units(latex: str) -> tuple[str, bool]:
    value = _PERCENT.sub("", latex)
    if value and value != latex:
        return value, True
    for unit in (_TEXT_UNIT, _BARE_UNIT, _DEGREES):
        value = unit.sub("", latex)
        removed = latex[len(value) :]
        is_operator = any(word in _OPERATOR_WORDS for word in _WORD.findall(removed))
        if value and not is_operator and not _HALF_OF_DAY.search(removed) and not _has_words(value):
            latex = value
    return latex, False


def _has_words(latex: str) -> bool:
    if any(_WORD.search(text) for text in _TEXT.findall(latex)):
        return True
    words = [word for word in _WORD.findall(_ENVIRONMENT.sub("", latex)) if word.lower() not in _OPERATOR_WORDS]
    return any(
        len(word) >= 4 or word.istitle() or (word.isupper() and len(word) > 2) or word in _SHORT_WORDS
        for word in words
    )


def _key(latex: str, is_words: bool) -> str:
    key = _TEXT.sub(r"\1", latex).replace("\\left", "").replace("\\right", "")
    key = re.sub(r"\\[dtc]frac", r"\\frac", key)
    key = re.sub(r",? *\b(?:and|or)\b", ",", key)
    key = re.sub(r"([_^])\{ ?(\w|(?<=_\{)\w+) ?\}", r"\1\2", key)
    if is_words:
        items = re.sub(r"[\s.'\"]", "", key).lower().split(",")
        return ",".join(items if re.search(r"[()\[\]]", key) else sorted(filter(None, items)))
    key = re.sub(r"(?<!\d) +| +(?!\d)", "", key)
    key = re.sub(r"\A\((\w)\)\Z", r"\1", key)
    return key if "\\" in key else key.lower()


def _numeral(latex: str) -> Number | None:
    if len(latex) > _MAX_NUMERAL_CHARS:
        return None
    if repeating := _REPEATING.fullmatch(latex):
        return Number(_repeating_decimal(*repeating.groups()), is_decimal=False)
    match = _NUMERAL.fullmatch(latex)
    if match is None:
        return None
    over, under, digits = match.group("over", "under", "digits")
    divisor = int(under or match.group("divisor") or 1)
    if divisor == 0:
        return None
    exponent = int(match.group("exponent") or match.group("power") or 0)
    value = Fraction((over or digits).replace(",", "")) / divisor * Fraction(10) ** exponent
    return Number(-value if match.group("sign") == "-" else value, is_decimal="." in (digits or ""))


def _repeating_decimal(sign: str, whole: str, fixed: str, period: str) -> Fraction:
    value = int(whole + fixed or 0) + Fraction(int(period), 10 ** len(period) - 1)
    return (-value if sign else value) / 10 ** len(fixed)
