"""One update cut into micro-batches: every row once, ranks in step, little padding; masks that come from lengths."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from mu_grpo_trl.policy import completion_logps
from mu_grpo_trl.stage import Response, UpdatePlan, bundle_responses, collate, plan_update
from mu_grpo_trl.stage.batches import bundle_length
from mu_grpo_trl.stage.collate import shared_prompt_mask

LABEL_IGNORED = -100


def long_tailed_update(seed: int) -> np.ndarray:
    """Rows to forward of 32 prompts × 8 responses: log-normal, mean 600, cut at 8k, 35% of the groups left out."""
    generator = np.random.default_rng(seed)
    completions = generator.lognormal(math.log(600) - 0.9**2 / 2, 0.9, (32, 8)).clip(1, 8000).astype(int)
    prompts = np.repeat(generator.integers(50, 250, (32, 1)), 8, axis=1)
    kept = generator.random(32) >= 0.35
    return (prompts + completions)[kept].ravel()


def forwarded_tokens(plan: UpdatePlan, lengths: np.ndarray, padding_free: bool) -> list[int]:
    """Tokens that each rank forwards, counted anew."""
    rows = [[lengths[batch] for batch in rank if batch] for rank in plan.microbatches]
    return [sum(int(r.sum() if padding_free else len(r) * r.max()) for r in rank) for rank in rows]


def make_response(prompt: list[int], completion: list[int], logps: list[float], advantage: float) -> Response:
    return Response(
        np.array(prompt, dtype=np.int32),
        np.array(completion, dtype=np.int32),
        np.array(logps, dtype=np.float32),
        advantage,
    )


# The plan


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3300), max_size=80),
    num_ranks=st.integers(1, 9),
    max_tokens=st.integers(1, 20_000),
    max_rows=st.one_of(st.none(), st.integers(1, 12)),
    padding_free=st.booleans(),
    attention_cost=st.sampled_from([0.0, 1e-4]),
)
def test_every_row_is_forwarded_once_within_the_limits_and_ranks_stay_in_step(
    lengths, num_ranks, max_tokens, max_rows, padding_free, attention_cost
):
    total = np.array(lengths, dtype=int)
    arguments = (total, num_ranks, max_tokens, max_rows, padding_free, attention_cost)
    plan = plan_update(*arguments)

    assert len(plan.microbatches) == num_ranks
    assert len({len(rank) for rank in plan.microbatches}) == 1
    assert len(plan.microbatches[0]) >= 1
    assert sorted(row for rank in plan.microbatches for batch in rank for row in batch) == list(range(len(lengths)))
    for rank in plan.microbatches:
        for batch in rank:
            sizes = total[batch].tolist()
            assert sizes == sorted(sizes, reverse=True)
            assert max_rows is None or len(batch) <= max_rows
            if len(batch) > 1:
                assert (sum(sizes) if padding_free else len(sizes) * sizes[0]) <= max_tokens

    forwarded = forwarded_tokens(plan, total, padding_free)
    assert plan.forwarded_tokens == sum(forwarded)
    assert plan.padding_share == pytest.approx(1 - total.sum() / sum(forwarded) if lengths else 0.0, abs=1e-12)
    assert plan.padding_share <= (0.0 if padding_free else 0.04)
    if attention_cost == 0 and lengths:
        assert plan.imbalance == pytest.approx(max(forwarded) * num_ranks / sum(forwarded) - 1, abs=1e-12)
    assert plan_update(*arguments) == plan


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    num_ranks=st.integers(1, 8),
    max_tokens=st.integers(3000, 20_000),
)
def test_index_i_costs_no_more_than_index_i_minus_1_on_any_rank(lengths, num_ranks, max_tokens):
    plan = plan_update(lengths, num_ranks, max_tokens)
    for rank in plan.microbatches:
        costs = [len(batch) * max((lengths[row] for row in batch), default=0) for batch in rank]
        assert costs == sorted(costs, reverse=True)


def test_a_plan_counted_by_hand():
    # One rank, 16 tokens a micro-batch: 2 rows of 8, then 4 of 4; not one row of 8 with smaller ones.
    plan = plan_update([8, 8, 4, 4, 4, 4], 1, 16)
    assert plan == UpdatePlan([[[0, 1], [2, 3, 4, 5]]], forwarded_tokens=32, padding_share=0.0, imbalance=0.0)


def test_rows_of_unlike_length_are_not_padded_to_each_other():
    # 10 + 9 together would be 1 token of padding in 20, 5%: over the limit of 4%. 50 + 49 are 1 in 100.
    assert plan_update([10, 9], 1, 1000).microbatches == [[[0], [1]]]
    assert plan_update([49, 50], 1, 1000).microbatches == [[[1, 0]]]
    assert plan_update([49, 50], 1, 1000).padding_share == pytest.approx(0.01)


def test_a_row_longer_than_the_budget_goes_alone():
    assert plan_update([100, 100, 4, 4], 1, 8).microbatches == [[[0], [1], [2, 3]]]
    assert plan_update([100, 4, 4], 1, 8, padding_free=True).microbatches == [[[0], [1, 2]]]


def test_an_update_without_rows_is_one_empty_micro_batch_a_rank():
    plan = plan_update([], 3, 100)
    assert plan == UpdatePlan([[[]], [[]], [[]]], forwarded_tokens=0, padding_share=0.0, imbalance=0.0)


def test_ranks_without_rows_get_empty_micro_batches():
    plan = plan_update([8, 6], 4, 100)
    assert sorted(plan.microbatches) == [[[]], [[]], [[0]], [[1]]]
    assert plan.imbalance == pytest.approx(8 * 4 / 14 - 1)


def test_the_empty_micro_batches_of_a_plan_are_not_one_shared_list():
    plan = plan_update([], 2, 100)
    plan.microbatches[0][0].append(1)
    assert plan.microbatches[1] == [[]]


def test_the_quadratic_cost_of_attention_counts_in_the_balance():
    # Costs 100 + 100² = 10,100 and 50 + 50² = 2,550: 10,100 against 5,100 where tokens alone are even.
    assert plan_update([100, 50, 50], 2, 1000).imbalance == 0.0
    plan = plan_update([100, 50, 50], 2, 1000, attention_cost=1.0)
    assert plan.imbalance == pytest.approx(10_100 / 7_600 - 1)
    # One row of 100 costs as much as nearly four of 50.
    plan = plan_update([100] + [50] * 4, 2, 1000, attention_cost=1.0)
    assert sorted(sum(map(len, rank)) for rank in plan.microbatches) == [1, 4]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("max_tokens", [4096, 16_384, 65_536])
@pytest.mark.parametrize("padding_free", [False, True])
def test_a_long_tailed_update_is_padded_under_5_and_imbalanced_under_3_percent(num_ranks, max_tokens, padding_free):
    for seed in range(10):
        plan = plan_update(long_tailed_update(seed), num_ranks, max_tokens, padding_free=padding_free)
        assert plan.padding_share < 0.05
        assert plan.imbalance < 0.03


def test_balance_is_reached_by_swaps_rather_than_by_finer_cuts():
    counts = [len(plan_update(long_tailed_update(seed), 8, 16_384).microbatches[0]) for seed in range(10)]
    assert sum(counts) / 10 <= 5


def test_packed_rows_need_few_micro_batches():
    lengths = long_tailed_update(0)
    plan = plan_update(lengths, 4, 16_384, padding_free=True)
    assert len(plan.microbatches[0]) <= math.ceil(lengths.sum() / 4 / 16_384) + 1


def test_a_row_that_outweighs_a_rank_sets_the_time_and_the_others_fit_beside_it_in_one_pass():
    lengths = [8000] + [100] * 80
    plan = plan_update(lengths, 16, 16_384)
    assert max(forwarded_tokens(plan, np.array(lengths), padding_free=False)) == 8000
    assert len(plan.microbatches[0]) == 1


def test_planning_an_update_of_256_rows_takes_under_2_ms():
    generator = np.random.default_rng(0)
    prompts = generator.integers(50, 250, 256)
    completions = generator.lognormal(math.log(600) - 0.9**2 / 2, 0.9, 256).clip(1, 8000).astype(int)
    times = []
    for _ in range(10):
        start = time.process_time()
        plan_update(prompts + completions, 8, 16_384)
        times.append(time.process_time() - start)
    assert min(times) < 0.002


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], 1, 10), r"lengths \[0\]"),
        (([[1, 2]], 1, 10), "one positive length per row"),
        (([1], 0, 10), "num_ranks=0"),
        (([1], 1, 0), "max_tokens=0"),
        (([1], 1, 10, 0), "max_rows=0"),
        (([1], 1, 10, None, False, -1.0), "attention_cost=-1.0"),
    ],
)
def test_impossible_limits_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_update(*arguments)


def test_rows_that_are_not_sorted_keep_their_order_in_equal_numbers_per_rank():
    plan = plan_update([2, 9, 2, 2, 5], 2, 10, sort_by_length=False)
    # Rank 0: rows 0, 1, 2, of which 0 and 1 do not fit together (2 × 9 > 10); its costly micro-batch comes first.
    assert plan.microbatches == [[[1], [0], [2]], [[3, 4], [], []]]
    assert plan.forwarded_tokens == 9 + 2 + 2 + 2 * 5


# Bundles


def test_responses_share_their_prompt_where_that_costs_less():
    groups, prompts, completions = [0, 0, 0, 1, 1], [50, 50, 50, 50, 50], [10, 10, 10, 10, 10]
    assert bundle_responses(groups, prompts, completions, 1000) == [[0, 1, 2], [3, 4]]
    assert bundle_length([0, 1, 2], prompts, completions) == 49 + 3 * 11
    assert bundle_length([3], prompts, completions) == 60
    assert bundle_responses(groups, prompts, completions, 1000, share_prompts=False) == [[0], [1], [2], [3], [4]]
    # 71 tokens are the limit: 49 + 2 · 11.
    assert bundle_responses(groups, prompts, completions, 71) == [[0, 1], [2], [3, 4]]
    # Long responses gain little, and attention within the bundle is dense.
    assert bundle_responses(groups, prompts, [1000] * 5, 10_000) == [[0], [1], [2], [3], [4]]
    assert bundle_responses(groups, prompts, [1000] * 5, 10_000, share_prompts=True) == [[0, 1, 2], [3, 4]]
    assert bundle_responses(groups, prompts, completions, 1000, attention_cost=0.02) == [[0], [1], [2], [3], [4]]
    assert bundle_responses([], [], [], 1000) == []


# The collation

EOS = 2


def alone(responses: list[Response]) -> list[list[Response]]:
    return [[response] for response in responses]


def test_b47_masks_come_from_lengths_though_pad_is_eos():
    batch = collate(
        [
            [make_response([5, EOS], [7, 8, EOS], [-0.5, -0.25, -0.125], 1.5)],
            [make_response([EOS], [EOS], [-3.0], -2.0)],
        ],
        pad_token_id=EOS,
    )
    ignored = LABEL_IGNORED
    assert batch["input_ids"].tolist() == [[5, EOS, 7, 8, EOS], [EOS, EOS, EOS, EOS, EOS]]
    assert batch["labels"].tolist() == [[ignored, ignored, 7, 8, EOS], [ignored, EOS, ignored, ignored, ignored]]
    assert batch["completion_mask"].tolist() == [[True, True, True], [True, False, False]]
    assert batch["behavior_logps"].tolist() == [[-0.5, -0.25, -0.125], [-3.0, 0.0, 0.0]]
    assert batch["advantages"].tolist() == [1.5, -2.0]
    assert batch["rows"].tolist() == [0, 1]
    assert batch["columns"].tolist() == [1, 0]
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "behavior_logps": torch.float32,
        "completion_mask": torch.bool,
        "advantages": torch.float32,
        "rows": torch.int64,
        "columns": torch.int64,
    }


def test_b47_a_tokenizer_without_a_pad_token_changes_no_mask():
    responses = [make_response([1], [3, 4], [-1.0, -1.0], 1.0), make_response([1, 1, 1], [3], [-1.0], 1.0)]
    without, with_pad = collate(alone(responses), None), collate(alone(responses), 9)
    assert without["input_ids"].tolist() == [[1, 3, 4, 0], [1, 1, 1, 3]]
    assert with_pad["input_ids"].tolist() == [[1, 3, 4, 9], [1, 1, 1, 3]]
    for name in ("labels", "completion_mask", "behavior_logps", "columns"):
        assert torch.equal(without[name], with_pad[name])


def test_b16_a_missing_log_prob_stays_nan_in_the_batch():
    batch = collate([[make_response([1], [3, 4], [math.nan, -1.0], 1.0)]], 0)
    assert batch["behavior_logps"].isnan().tolist() == [[True, False]]
    assert batch["completion_mask"].tolist() == [[True, True]]


def test_an_empty_micro_batch_is_a_dummy_row_whose_loss_and_gradient_are_exactly_zero():
    batch = collate([], pad_token_id=None)
    assert batch["input_ids"].shape == (1, 2)
    assert batch["labels"].tolist() == [[LABEL_IGNORED, LABEL_IGNORED]]
    assert batch["completion_mask"].tolist() == [[False]]
    assert batch["behavior_logps"].tolist() == [[0.0]]
    assert batch["advantages"].tolist() == [0.0]
    assert batch["rows"].tolist() == batch["columns"].tolist() == [0]

    embedding = torch.nn.Embedding(4, 4)
    logits = embedding(batch["input_ids"])[:, :-1]
    logps = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)
    loss = (logps * batch["completion_mask"]).sum()
    loss.backward()
    assert loss.item() == 0.0
    assert embedding.weight.grad is not None
    assert torch.count_nonzero(embedding.weight.grad) == 0


token_ids = st.integers(0, 50_000)
responses_strategy = st.lists(
    st.builds(
        lambda prompt, tokens, advantage: make_response(
            prompt, [token for token, _ in tokens], [logp for _, logp in tokens], advantage
        ),
        st.lists(token_ids, min_size=1, max_size=8),
        st.lists(st.tuples(token_ids, st.floats(-20, 0, width=32)), min_size=1, max_size=8),
        st.floats(-3, 3, width=32),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=100, deadline=None)
@given(responses=responses_strategy, pad=token_ids)
def test_a_batch_holds_its_responses_and_nothing_else(responses, pad):
    batch = collate(alone(responses), pad)
    assert batch["input_ids"].shape[1] == max(len(r.prompt_ids) + len(r.completion_ids) for r in responses)
    assert batch["completion_mask"].shape[1] == max(len(r.completion_ids) for r in responses)
    for i, response in enumerate(responses):
        start, count = int(batch["columns"][i]) + 1, int(batch["completion_mask"][i].sum())
        stop = start + count
        assert batch["completion_mask"][i, :count].all()
        assert batch["input_ids"][i, :start].tolist() == response.prompt_ids.tolist()
        assert batch["input_ids"][i, start:stop].tolist() == response.completion_ids.tolist()
        assert (batch["input_ids"][i, stop:] == pad).all()
        assert batch["labels"][i, start:stop].tolist() == response.completion_ids.tolist()
        assert int((batch["labels"][i] != LABEL_IGNORED).sum()) == count
        assert batch["behavior_logps"][i, :count].tolist() == response.behavior_logps.tolist()
        assert (batch["behavior_logps"][i, count:] == 0).all()
        assert batch["advantages"][i] == response.advantage


SHARED = [
    [make_response([4, 5, 6], [7, 8], [-1.0, -2.0], 1.0), make_response([4, 5, 6], [9], [-3.0], -1.0)],
    [make_response([4], [5], [-1.0], 1.0)],
]


def test_a_bundle_is_one_row_behind_one_copy_of_the_prompt():
    batch = collate(SHARED, pad_token_id=0)
    ignored = LABEL_IGNORED
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7, 8, 6, 9], [4, 5, 0, 0, 0, 0, 0]]
    assert batch["labels"][0].tolist() == [ignored, ignored, ignored, 7, 8, ignored, 9]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 2, 3], [0, 1, 0, 0, 0, 0, 0]]
    assert batch["segments"].tolist() == [[0, 0, 1, 1, 1, 2, 2], [0, 0, -1, -1, -1, -1, -1]]
    assert batch["rows"].tolist() == [0, 0, 1]
    assert batch["columns"].tolist() == [2, 5, 0]
    mask = shared_prompt_mask(batch["segments"])[:, 0]
    assert mask[0, 6].tolist() == [True, True, False, False, False, True, True]
    assert mask[0, 4].tolist() == [True, True, True, True, True, False, False]
    assert mask.diagonal(dim1=1, dim2=2).all()


def test_packed_sequences_follow_each_other_and_count_their_own_positions():
    batch = collate([SHARED[0][:1], SHARED[1]], pad_token_id=None, packed=True)
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7, 8, 4, 5]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert "segments" not in batch
    assert batch["rows"].tolist() == [0, 0]
    assert batch["columns"].tolist() == [2, 5]
    assert collate([], None, packed=True)["position_ids"].tolist() == [[0, 1]]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_every_layout_gives_the_log_probs_and_gradients_of_responses_alone(kind):
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    model = add_head(kind)

    def respond(prompt: list[int], length: int) -> Response:
        return make_response(prompt, generator.integers(3, 40, length).tolist(), [-1.0] * length, 1.0)

    prompts = [generator.integers(3, 40, length).tolist() for length in (1, 2, 9, 14)]
    bundles = [[respond(prompt, length) for length in (1, 7, 12)] for prompt in prompts]
    responses = [response for bundle in bundles for response in bundle]

    def measured(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        logps, _ = completion_logps(model, batch)
        logps = torch.where(batch["completion_mask"], logps, 0.0)
        (logps * logps.detach().cos()).sum().backward()
        return logps.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    logps, gradient = measured(collate(alone(responses), 0))
    for batch in (collate(bundles, 0), collate(alone(responses), 0, packed=True)):
        other_logps, other_gradient = measured(batch)
        torch.testing.assert_close(other_logps, logps, atol=2e-6, rtol=0)
        assert (other_gradient - gradient).norm() <= 1e-6 * gradient.norm()


def add_head(kind: str) -> torch.nn.Module:
    sizes = {"vocab_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
    if kind == "gpt2":
        model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=64, n_embd=32, n_layer=2, n_head=2))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=1, intermediate_size=64))
    add_fused_lm_head(model, 1.0, False, outputs=("log_probs",))
    return model.eval()
