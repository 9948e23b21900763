r"""
Finds the answer in a response. Standard library only, linear in the length of the text.

The rule, the same in training and in evaluation:

- Only what follows the last `</think>` is read; a `<think>` that is never closed is unfinished reasoning, no answer.
- The answer is the content of the last `\boxed{...}` or `\fbox{...}`; a box around it takes its place
(`\boxed{\fbox{5}}`).
- A last box that is empty or cut off is no answer, whatever came before. A complete one counts, whatever comes after.
- No box, no answer: `#### 42`, `**42**` and `<answer>42</answer>` are not read.
"""

from __future__ import annotations

import re
from typing import Any

MAX_ANSWER_CHARS = 4000  # a longer box is no answer

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(\{)?")
_CUT_COMMAND = re.compile(r"\\(?:box|boxe|boxed|fbo|fbox)\s*\Z")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_JOINER = re.compile(
    r"(?:\s|[,;$]|\\[()\[\],; ]|\\quad|\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b|\b[A-Za-z](?:_\{?\w\}?)?\s*=)*"
)
_MAX_JOINER_CHARS = 60


def _visible(text: str) -> str:
    _, closed, after = text.rpartition("</think>")
    if closed:
        return after
    return "" if "<think>" in text else text


def _matching_braces(text: str) -> dict[int, int]:
    """Position of the closing brace for each opening one that has one; escaped braces are no braces."""
    matching: dict[int, int] = {}
    opened: list[int] = []
    for token in _BRACE.finditer(text):
        if token.group() == "{":
            opened.append(token.start())
        elif token.group() == "}" and opened:
            matching[opened.pop()] = token.start()
    return matching


def _outermost_boxes(text: str) -> list[tuple[int, int, str]]:
    r"""`(start, end, content)` of the trailing complete boxes, last first; empty when the last one is cut off."""
    matching = _matching_braces(text)
    found: list[tuple[int, int, str]] = []
    for box in reversed([match for match in _BOX.finditer(text) if match.group(1)]):
        opened = box.end() - 1
        closed = matching.get(opened)
        if closed is None:
            if found:
                continue
            return []
        while found and found[-1][0] < closed:
            found.pop()  # it stands inside this box
        found.append((box.start(), closed + 1, text[opened + 1 : closed].strip()))
    return found


def extract_answers(text: str) -> list[str]:
    r"""
    The trailing run of boxes of a response, in reading order; the last one is the answer.

    Boxes belong to one run when nothing but commas, "and", "or", spaces, math delimiters and `x =` stands between
    them. Only a gold that is a set of several values may be met by the run (`\boxed{1} and \boxed{2}` for `1,2`).

    Args:
        text (`str`):
            Response.

    Returns:
        `list[str]`: Contents of the boxes; empty when the response has no answer.
    """
    text = _visible(text)
    if _CUT_COMMAND.search(text):
        return []
    run: list[str] = []
    next_start = len(text)
    for start, end, content in _outermost_boxes(text):
        between = text[end:next_start] if run else ""
        joined = len(between) <= _MAX_JOINER_CHARS and _JOINER.fullmatch(between)
        if not joined or not 0 < len(content) <= MAX_ANSWER_CHARS:
            break
        run.append(content)
        next_start = start
    return run[::-1]


def extract_answer(text: str) -> str | None:
    r"""
    The answer of a response by the rule of this module.

    Args:
        text (`str`):
            Response.

    Returns:
        `str` or `None`: Content of the last box, or `None` when the response gives no answer.

    Examples:
    ```python
    >>> extract_answer(r"First \boxed{1}, then \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    >>> extract_answer(r"Maybe \boxed{42}. Let me recheck: \boxed{4") is None
    True
    ```
    """
    answers = extract_answers(text)
    return answers[-1] if answers else None


def boxed_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """1.0 where a response gives an answer, right or wrong, by the rule of this module, else 0.0: a format reward."""
    texts = [completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions]
    return [float(extract_answer(text) is not None) for text in texts]
