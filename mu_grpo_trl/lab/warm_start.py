"""The lab's starting policy: a tiny Qwen2, warm-started by SFT on worked sums of which half are wrong.

    python -m mu_grpo_trl.lab.warm_start --output models/warm-start

The policy knows the format and the digits, and also a habit to unlearn: in half of its solutions no carry was ever
carried. So it starts at or below 0.35 on held-out problems, and reinforcement learning has something to choose from. The result of
this command with its defaults is shipped beside this file; `warm_start_path` gives the folder.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

from mu_grpo_trl.lab.arithmetic import (
    LARGEST_OPERAND,
    MAX_PROMPT_TOKENS,
    MAX_RESPONSE_TOKENS,
    Problem,
    draw_problems,
    greedy_accuracy,
    make_problems,
    make_tokenizer,
    prompt_of,
)

Addition = Callable[[int, int], int]


def warm_start_path() -> Path:
    """Folder of the shipped checkpoint: model and tokenizer, loadable by transformers and vLLM."""
    return Path(__file__).with_name("checkpoint")


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


def add_without_carry(a: int, b: int) -> int:
    """The sum of the digits column by column, every carry dropped: 18 + 73 gives 81."""
    total, place = 0, 1
    while a or b:
        total += (a + b) % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return total


def worked_solution(problem: Problem, addition: Addition = add) -> str:
    r"""`12+7=19;19+5=24;\boxed{24}` for `(12, 7, 5)`, each step done by `addition`."""
    a, b, c = problem
    first = addition(a, b)
    second = addition(first, c)
    return f"{a}+{b}={first};{first}+{c}={second};\\boxed{{{second}}}"
