"""The lab's starting policy: a tiny policy, warm-started by SFT on worked sums of which half the steps are careless.

    python -m mu_grpo_trl.lab.warm_start --output models/warm-start

The policy knows the format and the digits, and it knows two ways to add: with the carries, and without them. Which one
a step of its training solutions used was a coin toss, so about two solutions of three end wrong, and reinforcement
learning has something to choose from. What this command writes with its defaults (a few minutes on two cores) is
shipped beside this file; `warm_start_path` gives the folder.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from datasets import Dataset
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from mu_grpo_trl.lab.arithmetic import (
    EOS,
    MAX_RESPONSE_TOKENS,
    PAD,
    VOCABULARY,
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


def worked_solution(problem: Problem, additions: Sequence[Addition] | None = None) -> str:
    r"""`12+7=19;19+5=24;\boxed{24}` for `(12, 7, 5)`, with one way of adding for each step."""
    total, steps = problem[0], []
    for number, addition in zip(problem[1:], additions or [add] * (len(problem) - 1), strict=True):
        steps.append(f"{total}+{number}={addition(total, number)};")
        total = addition(total, number)
    return "".join(steps) + f"\\boxed{{{total}}}"


def make_solutions(n: int, seed: int, careless: float = 0.55, num_operands: int = 3) -> Dataset:
    """Training problems with worked solutions, each step of which may drop its carries.

    Args:
        n (`int`): number of problems, all of the training split.
        seed (`int`): decides the problems and which steps are careless.
        careless (`float`, *optional*, defaults to `0.55`): probability that a step drops its carries, if it has any.
        num_operands (`int`, *optional*, defaults to `3`): numbers to be added.

    Returns:
        `datasets.Dataset` with the columns `prompt` and `completion`, as [`~trl.SFTTrainer`] takes them.
    """
    rng = random.Random(seed)

    def addition() -> Addition:
        return add_without_carry if rng.random() < careless else add

    problems = draw_problems(n, seed, "train", num_operands)
    return Dataset.from_dict(
        {
            "prompt": [prompt_of(problem) for problem in problems],
            "completion": [worked_solution(p, [addition() for _ in p[1:]]) for p in problems],
        }
    )


def make_model(vocabulary: Sequence[str] = VOCABULARY, max_length: int = 64) -> Qwen2ForCausalLM:
    """A random Qwen2 of 0.34 M parameters: 3 layers, 3 heads of 32 (a size vLLM's CPU kernels take), untied.

    The initial weights are four times the usual size, which suits so narrow a model: it learns in half the steps.
    """
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=max_length,
        tie_word_embeddings=False,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=vocabulary.index(EOS),
        pad_token_id=vocabulary.index(PAD),
    )
    return Qwen2ForCausalLM(config)


def as_llama(model: Qwen2ForCausalLM) -> LlamaForCausalLM:
    """The same function as a Llama with attention biases, that of the output projection 0.

    `AutoTokenizer` replaces whatever tokenizer lies beside a Qwen2 by Qwen2's own, which does not know the box.
    """
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "rms_norm_eps", "rope_parameters",
        "bos_token_id", "eos_token_id", "pad_token_id",
    )  # fmt: skip
    llama = LlamaForCausalLM(LlamaConfig(attention_bias=True, **{name: getattr(model.config, name) for name in names}))
    missing, unexpected = llama.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected and all(name.endswith("o_proj.bias") for name in missing), (missing, unexpected)
    for name in missing:
        torch.nn.init.zeros_(llama.get_parameter(name))
    return llama


def train(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, solutions: Dataset, max_steps: int, seed: int
) -> None:
    """SFT in place, on the CPU."""
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
        SFTTrainer(model=model, args=args, train_dataset=solutions, processing_class=tokenizer).train()


def make_warm_start(
    output: Path,
    solutions: Callable[[int, int], Dataset] = make_solutions,
    vocabulary: Sequence[str] = VOCABULARY,
    max_length: int = 64,
    max_steps: int = 1200,
    seed: int = 0,
) -> LlamaForCausalLM:
    """
    Train a policy from scratch and write it to a folder with its tokenizer; the same arguments give the same weights.

    Args:
        output (`Path`): the folder.
        solutions (`Callable`, *optional*): makes `n` training solutions with a seed, [`make_solutions`] by default.
        vocabulary (`Sequence[str]`, *optional*): the task's tokens.
        max_length (`int`, *optional*, defaults to `64`): longest sequence.
        max_steps (`int`, *optional*, defaults to `1200`): optimizer steps of 64 solutions.
        seed (`int`, *optional*, defaults to `0`): decides the initial weights, problems and errors.
    """
    torch.set_num_threads(1)  # more threads round otherwise, and a seed would not stand for one policy
    set_seed(seed)
    model, tokenizer = make_model(vocabulary, max_length), make_tokenizer(vocabulary)
    train(model, tokenizer, solutions(30_000, seed), max_steps, seed)
    policy = as_llama(model)
    policy.generation_config = GenerationConfig(eos_token_id=vocabulary.index(EOS), pad_token_id=vocabulary.index(PAD))
    policy.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model and tokenizer to")
    parser.add_argument("--max_steps", type=int, default=1200, help="optimizer steps of 64 solutions")
    parser.add_argument("--seed", type=int, default=0, help="decides the initial weights, problems and errors")
    args = parser.parse_args()
    policy = make_warm_start(args.output, max_steps=args.max_steps, seed=args.seed)
    held_out = make_problems(500, split="held_out")
    accuracy = greedy_accuracy(policy, make_tokenizer(), held_out, MAX_RESPONSE_TOKENS)
    print(f"greedy accuracy on 500 held-out problems: {accuracy:.3f}")


if __name__ == "__main__":
    main()
