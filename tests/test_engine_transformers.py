"""The in-process engine: its log-probs are the model's, its samples the model's distribution, its work repeatable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import save_tiny_policy
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from mu_grpo_trl.rollout.engine import EngineError, GroupRequest, GroupResult, SamplingParams
from mu_grpo_trl.rollout.transformers_engine import TransformersEngine

CPU = torch.device("cpu")
SAMPLING = SamplingParams(
    temperature=1.0, max_tokens=24, context_length=128, num_generations=8, eos_token_ids=(1,), seed=3
)
REQUESTS = [
    GroupRequest(group, [3 + (group * 7 + i) % 40 for i in range(length)])
    for group, length in enumerate([1, 2, 9, 17, 5, 12])
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(save_tiny_policy(tmp_path_factory.mktemp("policy")))


def generate(model: PreTrainedModel, sampling: SamplingParams, requests=REQUESTS) -> list[GroupResult]:
    return list(TransformersEngine(model, CPU, 0).generate(requests, sampling))


@torch.no_grad()
def plain_logps(model: PreTrainedModel, prompt: list[int], completion: np.ndarray, temperature: float) -> np.ndarray:
    """Log-probs of the completion's tokens from one forward pass over the sequence alone."""
    ids = torch.tensor([[*prompt, *completion.tolist()]])
    model.eval()
    logps = (model(input_ids=ids).logits[0].double() / temperature).log_softmax(-1)
    return logps[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def assert_logps_are_the_models(model: PreTrainedModel, sampling: SamplingParams) -> list[int]:
    lengths = []
    for request, result in zip(REQUESTS, generate(model, sampling), strict=True):
        assert result.group == request.group
        assert len(result.completions) == sampling.num_generations
        for completion in result.completions:
            expected = plain_logps(model, request.prompt_ids, completion.token_ids, sampling.temperature)
            np.testing.assert_allclose(completion.logps, expected, atol=1e-5, rtol=0)
            lengths.append(len(completion.token_ids))
    return lengths


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logps_equal_a_plain_forward_pass_at_any_temperature(model, temperature):
    lengths = assert_logps_are_the_models(
        model, replace(SAMPLING, temperature=temperature, eos_token_ids=(1, 4, 8, 12, 16, 20))
    )
    assert len(set(lengths)) > 5  # ragged


def test_logps_stay_right_while_finished_rows_leave_the_batch(model):
    eos = tuple(range(1, 12))  # ends about every fifth token, so that the batch is compacted again and again
    lengths = assert_logps_are_the_models(model, replace(SAMPLING, eos_token_ids=eos, max_tokens=60))
    assert np.mean(lengths) < 12 < max(lengths)


def test_logps_are_right_with_learned_positions():
    torch.manual_seed(0)
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=51, n_positions=128, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3)
    )
    assert_logps_are_the_models(gpt2, SAMPLING)


def test_the_limit_is_each_prompts_own_where_the_context_ends(model):
    sampling = replace(SAMPLING, eos_token_ids=(), max_tokens=10, context_length=20)
    for request, result in zip(REQUESTS, generate(model, sampling), strict=True):
        expected = min(10, 20 - len(request.prompt_ids))
        assert [len(completion.token_ids) for completion in result.completions] == [expected] * 8
        assert {completion.finish_reason for completion in result.completions} == {"length"}


def test_b48_any_of_several_eos_ids_ends_a_response_and_stays_in_it(model):
    eos = (1, 7, 30)
    ends = set()
    for result in generate(model, replace(SAMPLING, eos_token_ids=eos, max_tokens=60, num_generations=32)):
        for completion in result.completions:
            stopped = completion.finish_reason == "stop"
            assert stopped == (completion.token_ids[-1] in eos)
            assert not np.isin(completion.token_ids[:-1], eos).any()
            ends |= {int(completion.token_ids[-1])} if stopped else set()
    assert ends == set(eos)


def test_eos_as_the_last_allowed_token_is_a_stop_not_a_cut(model):
    sampling = replace(SAMPLING, eos_token_ids=tuple(range(1, 26)), max_tokens=1, num_generations=64)
    completions = [completion for result in generate(model, sampling) for completion in result.completions]
    reasons = [(completion.finish_reason, completion.token_ids[0] in range(1, 26)) for completion in completions]
    assert set(reasons) == {("stop", True), ("length", False)}


def test_the_same_batch_gives_the_same_bits_whatever_happened_before(model):
    first = generate(model, SAMPLING)
    torch.rand(1000)
    generate(model, SAMPLING, REQUESTS[2:4])
    again = generate(model, SAMPLING)
    for one, other in zip(first, again, strict=True):
        for a, b in zip(one.completions, other.completions, strict=True):
            assert a.token_ids.tobytes() == b.token_ids.tobytes()
            assert a.logps.tobytes() == b.logps.tobytes()


def test_other_seeds_and_other_groups_give_other_samples(model):
    def tokens(sampling: SamplingParams, groups: int) -> list[list[int]]:
        requests = [GroupRequest(groups + r.group, r.prompt_ids) for r in REQUESTS]
        return [c.token_ids.tolist() for r in generate(model, sampling, requests) for c in r.completions]

    assert tokens(SAMPLING, 0) != tokens(replace(SAMPLING, seed=4), 0)
    assert tokens(SAMPLING, 0) != tokens(SAMPLING, 6)


def test_generating_moves_neither_the_random_state_nor_the_mode(model):
    model.train()
    before = torch.get_rng_state()
    generate(model, SAMPLING)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training


def test_at_temperature_0_every_response_is_the_likeliest_one(model):
    requests = REQUESTS[2:4]
    for request, result in zip(requests, generate(model, replace(SAMPLING, temperature=0.0), requests), strict=True):
        expected = list(request.prompt_ids)
        with torch.no_grad():
            for _ in result.completions[0].token_ids:
                expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
        for completion in result.completions:
            assert completion.token_ids.tolist() == expected[len(request.prompt_ids) :]
            assert (completion.logps == 0).all()


@torch.no_grad()
def test_with_top_p_only_the_likeliest_tokens_that_reach_it_are_sampled(model):
    sampling = replace(SAMPLING, top_p=0.7, temperature=1.3)
    for request, result in zip(REQUESTS, generate(model, sampling), strict=True):
        for completion in result.completions:
            ids = torch.tensor([[*request.prompt_ids, *completion.token_ids.tolist()]])
            logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].double().numpy() / 1.3
            for position, token in enumerate(completion.token_ids):
                probabilities = np.exp(logits[position] - logits[position].max())
                probabilities /= probabilities.sum()
                order = np.argsort(-probabilities)
                nucleus = order[: int(np.searchsorted(probabilities[order].cumsum(), 0.7)) + 1]
                assert token in nucleus
                expected = np.log(probabilities[token] / probabilities[nucleus].sum())
                assert completion.logps[position] == pytest.approx(expected, abs=1e-4)


def test_samples_follow_the_distribution_of_the_model(model):
    """Pearson's χ² over the vocabulary for a first token, at temperature 1.3, with cells of at least 5 expected."""
    request, size = GroupRequest(0, [5, 6, 7, 8]), 20_000
    sampling = replace(SAMPLING, temperature=1.3, max_tokens=1, num_generations=size)
    [result] = generate(model, sampling, [request])
    counts = np.bincount([completion.token_ids[0] for completion in result.completions], minlength=51)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([request.prompt_ids])).logits[0, -1]
    expected = (logits.double() / 1.3).softmax(-1).numpy() * size
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    chi2 = ((observed - expected) ** 2 / expected).sum()
    freedom = len(observed) - 1
    assert freedom > 20
    assert chi2 < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations; the seed is fixed


def test_the_responses_of_a_group_are_independent_of_each_other(model):
    """Pairs of first tokens of neighboring samples agree as often as independent ones: Σ p²."""
    request, size = GroupRequest(0, [9, 4]), 10_000
    [result] = generate(model, replace(SAMPLING, max_tokens=1, num_generations=size), [request])
    tokens = np.array([completion.token_ids[0] for completion in result.completions])
    with torch.no_grad():
        p = model.eval()(input_ids=torch.tensor([request.prompt_ids])).logits[0, -1].double().softmax(-1)
    agreement = float((p**2).sum())
    error = (agreement * (1 - agreement) / (size / 2)) ** 0.5
    assert abs((tokens[::2] == tokens[1::2]).mean() - agreement) < 4 * error


def test_an_engine_of_its_own_loads_the_published_policy_and_forgets_it(tmp_path: Path):
    folder = save_tiny_policy(tmp_path)
    engine = TransformersEngine(None, CPU, 0)
    with pytest.raises(EngineError, match="call `open` first"):
        engine.score([[3, 4, 5]])
    engine.open(folder, "v0")
    reference = AutoModelForCausalLM.from_pretrained(folder)
    [scored] = engine.score([[3, 4, 5, 6]])
    np.testing.assert_allclose(scored, plain_logps(reference, [3], np.array([4, 5, 6]), 1.0), atol=1e-6)
    [result] = engine.generate(REQUESTS[:1], SAMPLING)
    [expected] = generate(reference, SAMPLING, REQUESTS[:1])
    for ours, theirs in zip(result.completions, expected.completions, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    engine.release()
    with pytest.raises(EngineError, match="call `open` first"):
        engine.score([[3, 4, 5]])
