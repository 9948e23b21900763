from __future__ import annotations

import asyncio
import functools
import logging
import sys
import threading
import time

import numpy as np
import pandas as pd
import pytest
import torch

from mu_grpo_trl.rewards.functions import RewardError, RewardFunctions, Scores, as_rewards, combine, resolve_reward
from mu_grpo_trl.rewards.math import MathReward

NAN = float("nan")


def score(functions, n=2, completions=None, **columns):
    completions = completions or [f"c{i}" for i in range(n)]
    n = len(completions)
    return functions.score(["p"] * n, completions, [[i] for i in range(n)], columns)


@pytest.fixture
def make():
    made = []

    def build(*args, **kwargs):
        made.append(RewardFunctions(*args, **kwargs))
        return made[-1]

    yield build
    for functions in made:
        functions.close()


def lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


async def lengths_later(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(completion)) for completion in completions]


class Lengths:
    def __call__(self, completions, **kwargs):
        return [float(len(completion)) for completion in completions]


class LengthsLater:
    async def __call__(self, completions, **kwargs):
        await asyncio.sleep(0.01)
        return [float(len(completion)) for completion in completions]


def scaled(completions, scale, **kwargs):
    return [scale * len(completion) for completion in completions]


def hides_that_it_is_async(**kwargs):
    return lengths_later(**kwargs)


class Judge:
    async def later(self, completions, scale=1.0, **kwargs):
        return tuple(scale * value for value in await lengths_later(completions))

    @staticmethod
    def now(completions, **kwargs):
        return np.array(lengths(completions))


def hang_in_pool(**kwargs):
    time.sleep(100)


def raise_in_pool(**kwargs):
    raise ZeroDivisionError("in the pool")


def array_from_pool(completions, **kwargs):
    assert "trainer_state" not in kwargs
    return np.arange(len(completions), dtype=np.float32)


def test_b42_every_kind_of_callable_is_called_and_keeps_the_order(make):
    partial = functools.partial(scaled, scale=2.0)
    functions = make([lengths, lengths_later, Lengths(), LengthsLater(), partial])
    assert functions.names == ["lengths", "lengths_later", "Lengths", "LengthsLater", "scaled"]
    scores = score(functions, completions=["a", "bbb", "cc"])
    for name in functions.names:
        factor = 2.0 if name == "scaled" else 1.0
        assert scores[name].tolist() == [factor, 3 * factor, 2 * factor]
        assert scores[name].dtype == np.float64


@pytest.mark.parametrize(
    ("function", "name", "factor"),
    [
        (hides_that_it_is_async, "hides_that_it_is_async", 1),
        (lambda **kwargs: lengths_later(**kwargs), "<lambda>", 1),
        (Judge().later, "later", 1),
        (Judge.now, "now", 1),
        (functools.partial(Judge().later, scale=3), "later", 3),
        (functools.partial(functools.partial(scaled), scale=2), "scaled", 2),
        (functools.partial(LengthsLater()), "LengthsLater", 1),
        (functools.wraps(scaled)(lambda **kwargs: lengths(**kwargs)), "scaled", 1),
    ],
)
def test_b42_odd_callables_are_called_too(make, function, name, factor):
    assert score(make(function), completions=["a", "bbb"])[name].tolist() == [factor, 3 * factor]


def test_functions_get_the_arguments_that_trl_passes(make):
    seen = {}

    def reward(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **kwargs):
        log_extra("answer", answer)
        log_metric("mean", 0.5)
        seen.update(kwargs, ids=completion_ids, prompts=prompts, state=trainer_state)
        return [1.0] * len(prompts)

    logged = []
    make(reward).score(
        ["p", "p"],
        ["a", "b"],
        [[1], [2]],
        {"answer": ["x", "y"], "prompt": ["dropped"] * 2},
        trainer_state="state",
        log_extra=lambda *args: logged.append(args),
        log_metric=lambda *args: logged.append(args),
    )
    assert seen == {"ids": [[1], [2]], "prompts": ["p", "p"], "state": "state"}
    assert logged == [("answer", ["x", "y"]), ("mean", 0.5)]


@pytest.mark.parametrize("kind", ["sync", "async", "async_stubborn", "async_blocking"])
def test_b42_reward_that_never_returns_is_unscorable_and_the_others_are_not(make, caplog, kind):
    async def forever(**kwargs):
        if kind == "async_blocking":
            time.sleep(6)
        while True:
            try:
                await asyncio.sleep(100)
            except asyncio.CancelledError:
                if kind == "async":
                    raise

    def sync_forever(**kwargs):
        threading.Event().wait(100)

    hanging = sync_forever if kind == "sync" else forever
    functions = make([hanging, lengths, lengths_later], timeout_s=0.3)
    name = functions.names[0]
    started = time.monotonic()
    scores = score(functions)
    assert time.monotonic() - started < 5
    assert np.isnan(scores[name]).all() and scores.failed >= {name}
    assert scores["lengths"].tolist() == [2.0, 2.0]
    assert functions.counters[name] == {"calls": 1, "timeouts": 1, "unscorable": 2}
    assert sum(f"{name!r}: a call took longer than 0.3 s" in record.message for record in caplog.records) == 1
    again = score(functions)
    assert again["lengths"].tolist() == [2.0, 2.0]
    assert kind == "async_blocking" or again["lengths_later"].tolist() == [2.0, 2.0]  # it blocks their event loop


def test_b42_async_calls_of_several_groups_run_side_by_side(make):
    async def slow(completions, **kwargs):
        await asyncio.sleep(0.5)
        return [1.0] * len(completions)

    functions = make(slow)
    threads = [threading.Thread(target=score, args=(functions,)) for _ in range(10)]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started < 2.5
    assert functions.counters["slow"] == {"calls": 10, "unscorable": 0}


def test_plain_callables_are_never_called_twice_at_once(make):
    inside, most = [], []

    def reward(completions, **kwargs):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return [1.0] * len(completions)

    functions = make(reward)
    threads = [threading.Thread(target=score, args=(functions,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8


def test_b42_rewards_work_inside_a_running_event_loop(make):
    functions = make([lengths_later, lengths])

    async def notebook_cell():
        return score(functions)

    assert asyncio.run(notebook_cell())["lengths_later"].tolist() == [2.0, 2.0]


def test_b42_a_call_that_waits_behind_one_that_blocks_the_loop_is_made_again(make):
    async def blocks(completions, **kwargs):
        if completions[0] == "block":
            time.sleep(4)
        return [1.0] * len(completions)

    functions = make(blocks, timeout_s=0.3)
    results = {}

    def call(text):
        results[text] = score(functions, completions=[text])["blocks"].tolist()

    threads = [threading.Thread(target=call, args=(text,)) for text in ("block", "pass")]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert results["pass"] == [1.0] and np.isnan(results["block"]).all()
    assert functions.counters["blocks"]["timeouts"] == 1


def test_b42_async_reward_may_call_the_math_reward_and_trls(make):
    from trl.rewards import accuracy_reward

    ours = MathReward(workers=1)

    async def both(completions, answer, **kwargs):
        mine = ours(completions=completions, answer=answer)
        theirs = accuracy_reward(
            [[{"role": "assistant", "content": text}] for text in completions], solution=["$5$", "$5$"]
        )
        return [a + b for a, b in zip(mine, theirs, strict=True)]

    assert score(make(both), completions=[r"$\boxed{5}$", r"$\boxed{6}$"], answer=["5", "5"])["both"].tolist() == [
        2.0,
        0.0,
    ]
    ours.close()


def test_b42_too_many_hanging_calls_stop_the_run(make):
    release = threading.Event()
    functions = make(lambda **kwargs: release.wait(30), timeout_s=0.05)
    for _ in range(7):
        score(functions)
    with pytest.raises(RewardError, match="8 reward calls still hang.*module:function"):
        score(functions)
    release.set()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ([1.0], "'reward' returned 1 rewards for 2 completions"),
        (1.0, "'reward' returned 1.0 of type float"),
        (None, "'reward' returned None of type NoneType"),
        (["1.0", "0.0"], "'reward' returned '1.0' at position 0, which is no number"),
        ([1.0, [0.0]], "position 1"),
        ([1.0, 1j], "position 1"),
        ("ab", "of type str"),
        ({0: 1.0, 1: 0.0}, "of type dict"),
        (np.zeros((2, 1)), "position 0"),
        (torch.zeros(3), "3 rewards for 2"),
        (torch.tensor(1.0), "of type float"),
    ],
)
@pytest.mark.parametrize("rule", ["stop", "unscorable"])
def test_b43_bad_output_is_one_error_naming_the_function(make, output, message, rule):
    def reward(**kwargs):
        return output

    with pytest.raises(RewardError, match="list of 2 numbers") as caught:
        score(make(reward, on_error=rule))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "output",
    [
        [1.0, 0.0],
        (1, 0),
        [True, False],
        np.array([1.0, 0.0]),
        np.array([1, 0]),
        np.array([True, False]),
        [np.float32(1), np.int64(0)],
        torch.tensor([1.0, 0.0], requires_grad=True),
        torch.tensor([1.0, 0.0], dtype=torch.bfloat16),
        [torch.tensor(1.0), torch.tensor(0)],
        [torch.tensor(1.0, requires_grad=True), torch.tensor(False)],
        [np.array(1.0), np.array(0)],
        np.array([1.0, 0.0], dtype=np.float16),
        np.array([1, 0], dtype=object),
        torch.tensor([True, False]),
        pd.Series([1.0, 0.0], index=[7, 3]),
    ],
)
def test_b43_lists_arrays_and_tensors_are_accepted(output):
    rewards = as_rewards("f", output, 2)
    assert rewards.tolist() == [1.0, 0.0] and rewards.dtype == np.float64


def test_b43_raising_reward_stops_with_name_prompt_and_traceback(make):
    def divide(**kwargs):
        return [1 / 0]

    with pytest.raises(RewardError) as caught:
        score(make(divide))
    text = str(caught.value)
    assert "'divide'" in text and "prompt 'p'" in text and "ZeroDivisionError" in text and "return [1 / 0]" in text


def test_b43_raising_reward_is_unscorable_by_rule(make, caplog):
    def divide(**kwargs):
        return [1 / 0]

    async def time_out(**kwargs):
        raise TimeoutError("the judge's own")

    functions = make([divide, time_out], on_error="unscorable")
    scores = score(functions)
    assert np.isnan(scores["divide"]).all() and scores.failed == {"divide", "time_out"}
    assert functions.counters["divide"] == {"calls": 1, "raised": 1, "unscorable": 2}
    assert functions.counters["time_out"] == {"calls": 1, "raised": 1, "unscorable": 2}
    assert "division by zero" in caplog.text


def test_b43_reward_that_exits_ends_neither_the_run_nor_the_event_loop(make):
    def leave(**kwargs):
        sys.exit(3)

    async def leave_later(**kwargs):
        sys.exit(3)

    functions = make([leave, leave_later, lengths_later], on_error="unscorable")
    for _ in range(2):
        scores = score(functions)
        assert scores.failed == {"leave", "leave_later"} and scores["lengths_later"].tolist() == [2.0, 2.0]
    for reward in (leave, leave_later):
        with pytest.raises(RewardError, match=rf"'{reward.__name__}' raised on prompt 'p'(.|\n)*SystemExit"):
            score(make(reward))


def test_b40_none_nan_and_infinities_are_unscorable(make):
    def reward(**kwargs):
        return [1.0, None, NAN, float("inf"), -float("inf"), 0, 10**400, torch.tensor(float("nan"))]

    functions = make(reward)
    np.testing.assert_array_equal(score(functions, n=8)["reward"], [1.0, NAN, NAN, NAN, NAN, 0.0, NAN, NAN])
    assert functions.counters["reward"]["unscorable"] == 6


def test_b40_response_that_one_function_cannot_score_is_unscorable():
    rewards = {"a": np.array([1.0, 0.0, 1.0]), "b": np.array([0.5, NAN, 0.25])}
    np.testing.assert_array_equal(combine(rewards, {"a": 1.0, "b": 2.0}), [2.0, NAN, 1.5])


def test_b40_function_that_does_not_apply_to_the_group_is_left_out():
    rewards = {"a": np.array([1.0, 0.0]), "b": np.array([NAN, NAN])}
    np.testing.assert_array_equal(combine(rewards), [1.0, 0.0])
    np.testing.assert_array_equal(combine({"b": np.array([NAN, NAN])}), [NAN, NAN])


def test_b40_failed_call_is_not_taken_for_a_function_that_does_not_apply():
    rewards = Scores({"a": np.array([1.0, 0.0]), "b": np.array([NAN, NAN])}, failed=["b"])
    np.testing.assert_array_equal(combine(rewards), [NAN, NAN])


def test_weights_go_by_function(make):
    def zeros(completions, **kwargs):
        return [0.5] * len(completions)

    functions = make([lengths, zeros], reward_weights=[0.25, 2])
    assert functions.combine(score(functions, completions=["aaaa", "bb"])).tolist() == [2.0, 1.5]


def test_named_rewards_run_in_processes(make):
    functions = make(["math", f"{__name__}:array_from_pool"], workers=1)
    assert functions.names == ["math", "array_from_pool"]
    scores = score(functions, completions=[r"\boxed{1/2}", r"\boxed{2}"], answer=[r"\frac12"] * 2)
    assert scores["math"].tolist() == [1.0, 0.0]
    assert scores["array_from_pool"].tolist() == [0.0, 1.0]


def test_named_reward_that_hangs_raises_or_gets_no_json_says_so(make):
    functions = make(f"{__name__}:hang_in_pool", workers=1, timeout_s=0.5)
    assert np.isnan(score(functions)["hang_in_pool"]).all()
    assert functions.counters["hang_in_pool"] == {"calls": 1, "timeouts": 1, "unscorable": 2}
    with pytest.raises(RewardError, match="ZeroDivisionError: in the pool"):
        score(make(f"{__name__}:raise_in_pool", workers=1))
    with pytest.raises(RewardError, match="JSON values only"):
        score(make(f"{__name__}:raise_in_pool", workers=1), image=[object(), object()])


def test_functions_are_checked_at_construction():
    with pytest.raises(ValueError, match="Two reward functions are named 'lengths'"):
        RewardFunctions([lengths, lengths])
    with pytest.raises(ValueError, match="1 reward functions with 2 weights"):
        RewardFunctions(lengths, reward_weights=[1, 2])
    with pytest.raises(ValueError, match="on_error='skip'"):
        RewardFunctions(lengths, on_error="skip")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no reward function"):
        RewardFunctions([3])
    with pytest.raises(ValueError, match="'accuracy' is no reward"):
        resolve_reward("accuracy")


def test_reward_model_scores_as_trl_does(make, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2ForSequenceClassification, PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "a", "b", "c", "d"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="d"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(tmp_path / "judge")
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(GPT2Config(vocab_size=6, n_embd=8, n_layer=1, n_head=2, num_labels=1))
    model.save_pretrained(tmp_path / "judge")

    functions = make(str(tmp_path / "judge"))
    assert functions.names == ["judge"]
    rewards = functions.score(["a ", "a "], ["b", "b c d"], [[3], [3, 4, 5]], {})["judge"]
    model.config.pad_token_id = 1
    expected = [model.eval()(torch.tensor([ids])).logits[0, 0].item() for ids in ([2, 3], [2, 3, 4, 5])]
    np.testing.assert_allclose(rewards, expected, atol=1e-6)
    assert expected[0] != pytest.approx(expected[1])


def test_failures_are_logged_once_a_call(make, caplog):
    caplog.set_level(logging.WARNING)
    functions = make(lambda **kwargs: time.sleep(1), timeout_s=0.05)
    score(functions)
    assert len([record for record in caplog.records if "took longer" in record.message]) == 1
