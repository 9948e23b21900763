r"""Three-number sums with worked steps: a verifiable task that a tiny policy learns in minutes on two cores.

    prompt     12+7+5=
    response   12+7=19;19+5=24;\boxed{24}

The held-out problems share no operands with the training ones, in whatever order. There is no chat template: prompts
are plain strings, one token a character.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .rewards import arithmetic_reward

Split = Literal["train", "held_out"]
Problem = tuple[int, ...]

PAD, EOS, BOX = "<pad>", "<eos>", r"\boxed{"
VOCABULARY = (PAD, EOS, BOX, "}", "+", "=", ";", *"0123456789")
LARGEST_OPERAND = 99
MAX_PROBLEMS = {"train": 800_000, "held_out": 80_000}  # safely below what the splits hold: ~873,000 and ~97,000
MAX_PROMPT_TOKENS = len("99+99+99=")
MAX_RESPONSE_TOKENS = len("99+99=198;198+99=297;") + 6  # the box, three digits, the brace, EOS

LONG_OPERANDS = 5
MAX_LONG_RESPONSE_TOKENS = len("99+99=198;198+99=297;297+99=396;396+99=495;") + 6


class RewardFunction(Protocol):
    """TRL's reward signature, for one answer column."""

    def __call__(self, completions: list[Any], answer: list[str]) -> list[float]: ...


def make_tokenizer(vocabulary: Sequence[str] = VOCABULARY) -> PreTrainedTokenizerFast:
    r"""One token a character, and one for `\boxed{`. Pad and EOS differ; there is no BOS and no unknown token.

    Text outside the task's alphabet raises instead of being encoded as something else.
    """
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def split_of(problem: Problem) -> Split:
    """The split a problem belongs to: a tenth is held out, by a hash of the sorted operands."""
    return "train" if zlib.crc32(repr(sorted(problem)).encode()) % 10 else "held_out"


def draw_problems(
    n: int, seed: int, split: Split, num_operands: int = 3, smallest: int = 1, limits: dict[str, int] = MAX_PROBLEMS
) -> list[Problem]:
    """The first `n` problems of `split` in a seeded order, none twice, operands from `smallest` to 99.

    Raises:
        ValueError: for an unknown split, or more problems than the split is sure to hold (`limits`).
    """
    if not 0 < n <= limits.get(split, 0):
        raise ValueError(f"n={n} of split={split!r} cannot be drawn: the splits hold {limits}; ask for 1 up to that.")
    rng = random.Random(seed)
    problems: dict[Problem, None] = {}
    while len(problems) < n:
        problem = tuple(rng.randint(smallest, LARGEST_OPERAND) for _ in range(num_operands))
        if split_of(problem) == split:
            problems[problem] = None
    return list(problems)


def prompt_of(problem: Problem) -> str:
    """`12+7+5=` for `(12, 7, 5)`."""
    return "+".join(map(str, problem)) + "="


def make_problems(n: int, seed: int = 0, split: Split = "train", num_operands: int = 3) -> Dataset:
    """Distinct problems of one split.

    Args:
        n (`int`): number of problems, at most `MAX_PROBLEMS[split]`.
        seed (`int`): same seed, same problems in the same order; a longer set begins with the shorter one.
        split (`"train"` or `"held_out"`): disjoint for all seeds.
        num_operands (`int`, *optional*, defaults to `3`): numbers to be added.

    Returns:
        `datasets.Dataset` with the string columns `prompt` (`12+7+5=`) and `answer` (`24`).

    Raises:
        ValueError: for an unknown split, or more problems than the split is sure to hold.
    """
    problems = draw_problems(n, seed, split, num_operands)
    return Dataset.from_dict({"prompt": [prompt_of(p) for p in problems], "answer": [str(sum(p)) for p in problems]})


@torch.no_grad()
def greedy_rewards(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    max_new_tokens: int,
    reward: RewardFunction = arithmetic_reward,
    batch_size: int = 256,
) -> list[float]:
    """Reward of the greedy response to each row, generated on the model's device.

    Args:
        model ([`~transformers.PreTrainedModel`]): in eval mode while it generates; its mode is restored.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): left as it is, whatever its padding side.
        dataset (`datasets.Dataset`): columns `prompt` (plain or conversational) and `answer`.
        max_new_tokens (`int`): limit on a response, its EOS included.
        reward (`RewardFunction`, *optional*, defaults to [`arithmetic_reward`]): judges one batch.
        batch_size (`int`, *optional*, defaults to `256`): prompts generated together.
    """
    was_training = model.training
    model.eval()
    rewards: list[float] = []
    for start in range(0, len(dataset), batch_size):
        batch = dataset[start : start + batch_size]
        inputs = encode_prompts(batch["prompt"], tokenizer).to(model.device)
        output = model.generate(  # pyright: ignore[reportCallIssue]
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards += reward(texts, batch["answer"])
    model.train(was_training)
    return rewards


def greedy_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    max_new_tokens: int,
    reward: RewardFunction = arithmetic_reward,
    batch_size: int = 256,
) -> float:
    """Mean of [`greedy_rewards`]."""
    rewards = greedy_rewards(model, tokenizer, dataset, max_new_tokens, reward, batch_size)
    return sum(rewards) / len(rewards)


def encode_prompts(prompts: list[Any], tokenizer: PreTrainedTokenizerBase) -> BatchEncoding:
    """Left-padded `input_ids` and `attention_mask` `(B, P)` of prompts, all plain or all conversational."""
    conversational = not isinstance(prompts[0], str)
    if conversational:  # the chat template writes the special tokens itself
        prompts = [tokenizer.apply_chat_template(p, add_generation_prompt=True, tokenize=False) for p in prompts]
    return tokenizer(
        prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=not conversational
    )
