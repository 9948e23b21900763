"""Rewards of the built-in tasks. Standard library only: each reward process imports this before it can score."""

from __future__ import annotations

import re

Response = str | list[dict[str, str]]

FINAL_BOX = re.compile(r"\\boxed\{(\d+)\}\Z")
NUMBER = re.compile(r"-?\d+(?:[.,]\d+)*")


def text_of(response: Response) -> str:
    """The text of a response, plain or conversational (its last message)."""
    return response if isinstance(response, str) else response[-1]["content"]


def arithmetic_reward(completions: list[Response], answer: list[str], **kwargs) -> list[float]:
    r"""1.0 where the response ends in `\boxed{answer}`, else 0.0 (TRL's reward signature).

    Strict: nothing may follow the box, digits must match exactly (`024` is not `24`), and earlier boxes do not count.
    The worked steps are not judged.
    """
    found = [FINAL_BOX.search(text_of(completion)) for completion in completions]
    return [float(box is not None and box[1] == gold) for box, gold in zip(found, answer, strict=True)]


def sum_reward(completions: list[Response], answer: list[str], **kwargs) -> list[float]:
    """1.0 where the last number of the response is the answer, else 0.0 (TRL's reward signature).

    A decimal or grouped number counts as one: `0.76` and `1,176` are not 76.
    """
    found = [NUMBER.findall(text_of(completion)) for completion in completions]
    return [float(numbers[-1:] == [gold]) for numbers, gold in zip(found, answer, strict=True)]


def exact_reward(completions: list[Response], answer: list[str], **kwargs) -> list[float]:
    """1.0 where the response is the answer, character by character, else 0.0 (TRL's reward signature)."""
    return [float(text_of(completion) == gold) for completion, gold in zip(completions, answer, strict=True)]
