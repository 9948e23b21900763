"""
Lists to be sorted, from `reasoning-gym`'s `number_sorting` (the extra `lab`), as text of one token a character.

    prompt     37,5,81,12,31,60,84<
    response   5,12,31,37,60,81,84

`<` asks for ascending order, `>` for descending. The held-out lists share no multiset of numbers with the training
ones. The warm start orders by tens alone at a part of its steps: numbers of one decade then stay as they came.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from datasets import Dataset

from .arithmetic import EOS, PAD, Split, split_of

VOCABULARY = (PAD, EOS, ",", "<", ">", *"0123456789")
NUM_NUMBERS = 7
LARGEST = 99
MAX_PROMPT_TOKENS = NUM_NUMBERS * len("99,")
MAX_RESPONSE_TOKENS = NUM_NUMBERS * len("99,")  # EOS in place of the last comma

Numbers = tuple[int, ...]


def draw_lists(n: int, seed: int, split: Split) -> Iterator[tuple[Numbers, bool]]:
    """
    The first `n` entries of `split` in `reasoning-gym`'s seeded stream: the numbers, and whether to sort descending.
    """
    from reasoning_gym.algorithmic.number_sorting import NumberSortingConfig, NumberSortingDataset

    config = NumberSortingConfig(
        min_numbers=NUM_NUMBERS, max_numbers=NUM_NUMBERS, max_decimals=0, min_value=0, max_value=LARGEST,
        seed=seed * 10_000_000,  # entry i is seeded by seed + i
    )  # fmt: skip
    stream, index = NumberSortingDataset(config), 0
    while n:
        entry = stream[index]["metadata"]
        index += 1
        numbers = tuple(int(float(number)) for number in entry["original_numbers"])
        if split_of(numbers) == split:
            n -= 1
            yield numbers, entry["direction"] == "descending"


def prompt_of(numbers: Numbers, descending: bool) -> str:
    """`37,5,81<` for `(37, 5, 81)` ascending."""
    return ",".join(map(str, numbers)) + (">" if descending else "<")


def answer_of(numbers: Numbers, descending: bool) -> str:
    """`5,37,81` for `(37, 5, 81)` ascending."""
    return ",".join(map(str, sorted(numbers, reverse=descending)))


def make_lists(n: int, seed: int = 0, split: Split = "train") -> Dataset:
    """Entries of one split with the string columns `prompt` and `answer`; the same for the same arguments."""
    entries = list(draw_lists(n, seed, split))
    return Dataset.from_dict({"prompt": [prompt_of(*e) for e in entries], "answer": [answer_of(*e) for e in entries]})


def make_solutions(n: int, seed: int, careless: float = 0.6) -> Dataset:
    """Training lists with solutions, each step of which may look at the tens alone (probability `careless`)."""
    rng = random.Random(seed)
    entries = list(draw_lists(n, seed + 1, "train"))
    return Dataset.from_dict(
        {
            "prompt": [prompt_of(*entry) for entry in entries],
            "completion": [_solution(*entry, careless, rng) for entry in entries],
        }
    )


def _solution(numbers: Numbers, descending: bool, careless: float, rng: random.Random) -> str:
    left, taken = list(numbers), []
    pick = max if descending else min
    while left:
        tens_only = rng.random() < careless
        taken.append(pick(left, key=lambda number: number // 10) if tens_only else pick(left))
        left.remove(taken[-1])
    return ",".join(map(str, taken))
