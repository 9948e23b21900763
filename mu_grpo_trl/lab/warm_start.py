"""The lab's starting policy: a tiny Qwen2, warm-started by SFT on worked sums of which half the steps are careless.

    python -m mu_grpo_trl.lab.warm_start --output models/warm-start

The policy knows the format and the digits, and it knows two ways to add: with the carries, and without them. Which one a
step of its training solutions used was a coin toss, so about two solutions of three end wrong, and reinforcement
learning has something to choose from. What this command writes with its defaults (two to five minutes on two cores) is
shipped beside this file; `warm_start_path` gives the folder.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from datasets import Dataset
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

from mu_grpo_trl.lab.arithmetic import (
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


def worked_solution(problem: Problem, additions: tuple[Addition, Addition] = (add, add)) -> str:
    r"""`12+7=19;19+5=24;\boxed{24}` for `(12, 7, 5)`, with one way of adding for each step."""
    a, b, c = problem
    first = additions[0](a, b)
    second = additions[1](first, c)
    return f"{a}+{b}={first};{first}+{c}={second};\\boxed{{{second}}}"


def make_solutions(n: int, seed: int, careless: float = 0.5) -> Dataset:
    """Training problems with worked solutions, each step of which may drop its carries.

    Args:
        n (`int`): number of problems, all of the training split.
        seed (`int`): decides the problems and which steps are careless.
        careless (`float`, *optional*, defaults to `0.5`): probability that a step drops its carries, if it has any.

    Returns:
        `datasets.Dataset` with the columns `prompt` and `completion`, as [`~trl.SFTTrainer`] takes them.
    """
    rng = random.Random(seed)

    def addition() -> Addition:
        return add_without_carry if rng.random() < careless else add

    problems = draw_problems(n, seed, "train")
    return Dataset.from_dict(
        {
            "prompt": [prompt_of(problem) for problem in problems],
            "completion": [worked_solution(problem, (addition(), addition())) for problem in problems],
        }
    )


def make_model(tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    """A random Qwen2 of 0.34 M parameters: 3 layers, 3 heads of 32 (a size vLLM's CPU kernels take), untied.

    The initial weights are four times the usual size, which suits so narrow a model: it learns in half the steps.
    """
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def train(max_steps: int, seed: int, num_solutions: int = 30_000) -> SFTTrainer:
    """Train on the CPU, so that a seed stands for one policy wherever it runs, and return the finished trainer."""
    set_seed(seed)
    tokenizer = make_tokenizer()
    with TemporaryDirectory() as scratch:
        args = SFTConfig(
            output_dir=scratch,
            max_steps=max_steps,
            per_device_train_batch_size=64,
            learning_rate=2e-3,
            adam_beta2=0.98,
            lr_scheduler_type="cosine",
            warmup_steps=50,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=100,
            save_strategy="no",
            report_to="none",
            seed=seed,
        )
        trainer = SFTTrainer(
            model=make_model(tokenizer),
            args=args,
            train_dataset=make_solutions(num_solutions, seed),
            processing_class=tokenizer,
        )
        trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model and tokenizer to")
    parser.add_argument("--max_steps", type=int, default=1600, help="optimizer steps of 64 solutions")
    parser.add_argument("--seed", type=int, default=0, help="decides the initial weights, problems and errors")
    args = parser.parse_args()
    trainer = train(args.max_steps, args.seed)
    trainer.model.save_pretrained(args.output)
    trainer.processing_class.save_pretrained(args.output)
    held_out = make_problems(500, split="held_out")
    accuracy = greedy_accuracy(trainer.model, trainer.processing_class, held_out, MAX_RESPONSE_TOKENS)
    print(f"greedy accuracy on 500 held-out problems: {accuracy:.3f}")


if __name__ == "__main__":
    main()
