"""The vLLM engine against a stub server: requests, answers, faults, weights, processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stub_vllm import EOS, VOCAB_SIZE, StubVLLM, reference_logps, write_policy

from mu_grpo_trl.rollout import vllm_wire as wire
from mu_grpo_trl.rollout.engine import Completion, EngineError, GroupRequest, GroupResult, SamplingParams
from mu_grpo_trl.rollout.vllm_client import ClientOptions, VLLMEngine
from mu_grpo_trl.rollout.vllm_process import ManagedServer, ServerOptions, device_sets, preflight
from mu_grpo_trl.rollout.vllm_server import ServerUnreachable

SAMPLING = SamplingParams(
    temperature=0.7, max_tokens=12, context_length=40, num_generations=4, eos_token_ids=(EOS, 1), seed=7
)
QUICK: dict[str, Any] = {"connection_timeout_s": 2.0, "progress_timeout_s": 20.0, "retry_wait_s": 0.01}


def requests(count: int) -> list[GroupRequest]:
    return [GroupRequest(group, [2 + group % 40, 5, 6 + group % 7]) for group in range(count)]


def engine_for(*servers: Any, **options: Any) -> VLLMEngine:
    settings = {"vocab_size": VOCAB_SIZE, "context_length": 40, **QUICK, **options}
    return VLLMEngine(list(servers), ClientOptions(**settings))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    return write_policy(tmp_path / "policy-0", seed=0)


@pytest.fixture
def stub(policy: Path) -> Iterator[StubVLLM]:
    stub = StubVLLM(policy)
    stub.start()
    yield stub
    stub.stop()


@pytest.fixture
def engine(stub: StubVLLM, policy: Path) -> Iterator[VLLMEngine]:
    engine = engine_for(stub.url)
    engine.open(policy, "v0")
    yield engine
    engine.close()


def answer_all(engine: VLLMEngine, count: int, sampling: SamplingParams = SAMPLING) -> dict[int, GroupResult]:
    results = list(engine.generate(iter(requests(count)), sampling))
    assert sorted(result.group for result in results) == list(range(count))
    return {result.group: result for result in results}


def test_sampled_logps_are_those_of_the_policy_after_temperature(engine: VLLMEngine, policy: Path) -> None:
    results = answer_all(engine, 30)
    for request in requests(30):
        for completion in results[request.group].completions:
            ids = completion.token_ids.tolist()
            expected = reference_logps(policy, request.prompt_ids + ids, 0.7)[len(request.prompt_ids) - 1 :]
            np.testing.assert_allclose(completion.logps, expected, rtol=0, atol=1e-5)
            assert completion.token_ids.dtype == np.int32 and completion.logps.dtype == np.float32


def test_every_sampling_field_is_sent_so_that_no_server_default_matters(engine: VLLMEngine, stub: StubVLLM) -> None:
    answer_all(engine, 2)
    body = stub.generated[0]
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    asked = {"frequency_penalty": 0.0, "temperature": 0.7, "n": 4, "min_tokens": 0, "max_tokens": 12, "logprobs": 0}
    ends = {"stop_token_ids": [EOS, 1], "stop": [], "ignore_eos": True, "skip_special_tokens": False}
    assert {**neutral, **asked, **ends}.items() <= body.items()
    assert body["prompt"] == requests(1)[0].prompt_ids and body["cache_salt"] == "v0"
    assert "seed" not in body  # stops the CPU build at a chunked prefill


def test_b23_max_tokens_shrink_to_the_context_and_a_prompt_without_room_is_named(
    engine: VLLMEngine, stub: StubVLLM
) -> None:
    long = GroupRequest(0, [3] * 35)
    (result,) = engine.generate([long], SAMPLING)
    assert stub.generated[-1]["max_tokens"] == 5
    assert max(len(completion.token_ids) for completion in result.completions) <= 5
    with pytest.raises(EngineError, match="group 9 has 40 tokens.*context of 40"):
        list(engine.generate([GroupRequest(9, [3] * 40)], SAMPLING))


def test_b48_the_sampled_eos_is_kept_and_stop_strings_count_as_stop(engine: VLLMEngine) -> None:
    sampling = SamplingParams(1.0, 20, 40, 8, eos_token_ids=(EOS, 1), stop=("7", "8"), seed=1)
    ends = {"eos": 0, "string": 0, "length": 0}
    for result in answer_all(engine, 40, sampling).values():
        for completion in result.completions:
            last = int(completion.token_ids[-1])
            kind = "length" if completion.finish_reason == "length" else "eos" if last in (EOS, 1) else "string"
            ends[kind] += 1
            assert np.isfinite(completion.logps).all()
            assert kind != "string" or last in (7, 8)
            assert kind != "length" or (len(completion.token_ids) == 20 and last not in (EOS, 1, 7, 8))
    assert min(ends.values()) > 0


def test_b48_a_server_that_runs_past_an_eos_of_the_trainer_is_an_error(engine: VLLMEngine, stub: StubVLLM) -> None:
    stub.ignores_stop_ids = True
    with pytest.raises(EngineError, match="went on after EOS token"):
        answer_all(engine, 40)


def distorted(engine: VLLMEngine, stub: StubVLLM, change: Any) -> list[Completion]:
    stub.distort = lambda answer: change(answer["choices"][1])
    return answer_all(engine, 1)[0].completions


def test_b16_an_isolated_null_is_nan_and_leaves_its_neighbors_alone(engine: VLLMEngine, stub: StubVLLM) -> None:
    plain = answer_all(engine, 1)[0].completions[1].logps
    logps = distorted(engine, stub, lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(1, None))[1].logps
    assert np.isnan(logps[1]) and np.isnan(logps).sum() == 1
    np.testing.assert_array_equal(np.delete(logps, 1), np.delete(plain, 1))


@pytest.mark.parametrize("value", [-9999.0, -1000.0, float("-inf"), float("nan")])
def test_b17_floor_values_are_nan_never_anchors(engine: VLLMEngine, stub: StubVLLM, value: float) -> None:
    logps = distorted(engine, stub, lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, value))[1].logps
    assert np.isnan(logps[0]) and np.isfinite(logps[1:]).all()


def test_b16_a_response_without_any_usable_logp_is_an_error(engine: VLLMEngine, stub: StubVLLM) -> None:
    def garbage(choice: dict[str, Any]) -> None:
        choice["logprobs"]["token_logprobs"] = [float("nan")] * len(choice["token_ids"])

    with pytest.raises(EngineError, match="group 0, sample 1: none of .* tokens has a usable log-prob"):
        distorted(engine, stub, garbage)


def test_b16_the_logp_is_that_of_the_sampled_id_not_of_the_likeliest() -> None:
    raw = (
        b'{"model": "policy", "choices": [{"index": 0, "finish_reason": "stop", "stop_reason": 0, "token_ids": [5, 0],'
        b'"logprobs": {"tokens": ["token_id:5", "token_id:0"], "token_logprobs": [-3.0, -0.5], "top_logprobs":'
        b'[{"token_id:7": -0.1, "token_id:5": -3.0}, {"token_id:0": -0.5}]}}]}'
    )
    sampling = SamplingParams(1.0, 5, 40, 1, eos_token_ids=(0,))
    (completion,) = wire.parse_generation(raw, GroupRequest(0, [3]), sampling, "policy", 48)
    assert completion.logps.tolist() == [-3.0, -0.5] and completion.token_ids.tolist() == [5, 0]


def shorten(choice: dict[str, Any]) -> None:
    choice["logprobs"]["token_logprobs"].pop()


WRONG = {
    "above 0": lambda choice: choice["logprobs"]["token_logprobs"].__setitem__(0, 0.5),
    "token ids but": shorten,
    "other tokens": lambda choice: choice["logprobs"]["tokens"].__setitem__(0, "token_id:47"),
    "do not fit": lambda choice: (
        choice["token_ids"].__setitem__(0, VOCAB_SIZE),
        choice["logprobs"]["tokens"].__setitem__(0, f"token_id:{VOCAB_SIZE}"),
    ),
    "index": lambda choice: choice.__setitem__("index", 0),
    "no token ids": lambda choice: choice.__setitem__("token_ids", None),
    "finish_reason='repetition'": lambda choice: choice.__setitem__("finish_reason", "repetition"),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_answer_that_contradicts_the_request_is_refused(engine: VLLMEngine, stub: StubVLLM, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        distorted(engine, stub, WRONG[message])


def test_an_answer_cut_below_the_limit_is_refused(engine: VLLMEngine, stub: StubVLLM) -> None:
    def cut(choice: dict[str, Any]) -> None:
        choice["token_ids"], choice["finish_reason"] = choice["token_ids"][:1], "length"
        choice["logprobs"] = {key: value[:1] for key, value in choice["logprobs"].items()}

    with pytest.raises(EngineError, match="1 tokens ended with finish_reason='length'.*Allowed: 12 tokens"):
        distorted(engine, stub, cut)


def test_other_prompt_ids_and_another_model_in_the_answer_are_refused(engine: VLLMEngine, stub: StubVLLM) -> None:
    stub.distort = lambda answer: answer["choices"][0].__setitem__("prompt_token_ids", [1, 2])
    with pytest.raises(EngineError, match="other token ids than it was sent"):
        answer_all(engine, 1)
    stub.distort = lambda answer: answer.__setitem__("model", "other")
    with pytest.raises(EngineError, match="'other' answered"):
        answer_all(engine, 1)


def test_choices_in_any_order_become_samples_in_order(engine: VLLMEngine, stub: StubVLLM) -> None:
    plain = answer_all(engine, 1)[0].completions
    stub.distort = lambda answer: answer["choices"].reverse()
    mixed = answer_all(engine, 1)[0].completions
    assert [c.token_ids.tolist() for c in mixed] == [c.token_ids.tolist() for c in plain]


@pytest.mark.parametrize("fault", ["drop", "truncate", "html", "500", "503", "429", "408"])
def test_b22_only_the_failed_groups_are_asked_again(engine: VLLMEngine, stub: StubVLLM, fault: str) -> None:
    stub.fault = lambda number, body: fault if number in (6, 7) else None
    answer_all(engine, 10)
    assert len(stub.generated) == 12
    prompts = [tuple(body["prompt"]) for body in stub.generated]
    assert set(prompts) == {tuple(request.prompt_ids) for request in requests(10)}


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_an_aborted_response_is_asked_for_again(engine: VLLMEngine, stub: StubVLLM, reason: str | None) -> None:
    def abort_once(answer: dict[str, Any]) -> None:
        if len(stub.generated) == 1:
            answer["choices"][0]["finish_reason"] = reason

    stub.distort = abort_once
    answer_all(engine, 1)
    assert len(stub.generated) == 2


def test_b22_retries_are_bounded_and_the_error_quotes_the_server(engine: VLLMEngine, stub: StubVLLM) -> None:
    stub.fault = lambda number, body: "500"
    with pytest.raises(EngineError, match="Group 0 failed 6 times.*500: .*told to fail with 500"):
        answer_all(engine, 1)
    assert len(stub.generated) == 6


def test_a_refused_request_is_an_error_at_once_with_the_servers_words(engine: VLLMEngine, stub: StubVLLM) -> None:
    stub.fault = lambda number, body: "400"
    with pytest.raises(EngineError, match="answered 400: .*told to fail with 400"):
        answer_all(engine, 1)
    assert len(stub.generated) == 1


def test_b22_an_error_ends_what_is_in_flight_and_leaves_the_engine_usable(engine: VLLMEngine, stub: StubVLLM) -> None:
    stub.fault = lambda number, body: "400" if number == 9 else "hang" if number > 5 else None
    seen = []
    with pytest.raises(EngineError, match="answered 400"):
        for result in engine.generate(requests(9), SAMPLING):
            seen.append(result.group)
    assert len(seen) == len(set(seen)) <= 5
    stub.fault = lambda number, body: None
    answer_all(engine, 9)


def test_b20_an_unhealthy_server_is_a_connection_error_that_quotes_the_status(stub: StubVLLM, policy: Path) -> None:
    stub.health_status = 503
    engine = engine_for(stub.url, connection_timeout_s=0.5)
    start = time.monotonic()
    with pytest.raises(ConnectionError, match="not healthy within 0.5 s.*503"):
        engine.open(policy, "v0")
    assert time.monotonic() - start < 2.0
    engine.close()


def test_b20_no_server_at_the_address_is_a_connection_error(policy: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    engine = engine_for(url, connection_timeout_s=0.3)
    with pytest.raises(ServerUnreachable, match=url):
        engine.check()
    engine.close()


def test_b20_a_server_that_never_answers_stops_the_run(stub: StubVLLM, policy: Path) -> None:
    engine = engine_for(stub.url, progress_timeout_s=0.5)
    engine.open(policy, "v0")
    stub.fault = lambda number, body: "hang"
    with pytest.raises(EngineError, match=r"No prompt group finished for 0.5 s \(.*3 groups in flight.*status 200"):
        answer_all(engine, 3)
    engine.close()


def test_b20_an_external_server_that_dies_midway_is_reported_with_its_address(stub: StubVLLM, policy: Path) -> None:
    engine = engine_for(stub.url, connection_timeout_s=0.5)
    engine.open(policy, "v0")

    def die(number: int, body: dict[str, Any]) -> str | None:
        stub.health_status = 502
        return "drop"

    stub.fault = die
    with pytest.raises(ServerUnreachable, match="127.0.0.1.*502"):
        answer_all(engine, 3)
    engine.close()


def test_an_external_server_that_came_back_gets_the_policy_again(stub: StubVLLM, engine: VLLMEngine) -> None:
    loads = stub.calls.count("reload_weights")
    stub.fault = lambda number, body: "drop" if number == 2 else None
    answer_all(engine, 5)
    assert stub.calls.count("reload_weights") == loads + 1


def test_b18_raw_logps_are_found_out_by_measurement(stub: StubVLLM, policy: Path) -> None:
    engine = engine_for(stub.url)
    for mode, message in (
        ("raw_logprobs", "by 1.000 instead of 0.5.*processed_logprobs"),
        ("raw_logits", "logits"),
        ("processed_logits", "logits"),
    ):
        stub.logprobs_mode = mode
        with pytest.raises(EngineError, match=message):
            engine.check()
    engine.close()


def test_a_server_that_does_not_fit_is_refused_before_the_first_stage(stub: StubVLLM) -> None:
    url = stub.url
    engine = engine_for(url, context_length=65)
    with pytest.raises(EngineError, match="allows 64 tokens.*needs 65"):
        engine.check()
    engine.close()
    engine = engine_for(url)
    stub.version = "0.21.2"
    with pytest.raises(EngineError, match="0.21.2 is not supported: the range is 0.22 to 0.31"):
        engine.check()
    engine.close()


def test_b25_scores_are_those_of_the_policy_opened_last(engine: VLLMEngine, policy: Path, tmp_path: Path) -> None:
    sequences = [[2, 9, 4, 11], [7, 3]]
    for folder in (policy, write_policy(tmp_path / "policy-1", seed=1)):
        engine.open(folder, folder.name)
        for score, sequence in zip(engine.score(sequences), sequences, strict=True):
            np.testing.assert_allclose(score, reference_logps(folder, sequence), rtol=0, atol=1e-6)


def test_b25_a_reload_that_does_nothing_shows_in_the_scores(
    engine: VLLMEngine, stub: StubVLLM, tmp_path: Path
) -> None:
    stub.reload_does_nothing = True
    newer = write_policy(tmp_path / "policy-1", seed=1)
    engine.open(newer, "v1")
    (score,) = engine.score([[2, 9, 4, 11]])
    assert np.abs(score - reference_logps(newer, [2, 9, 4, 11])).mean() > 0.3


def test_b25_a_prefix_cache_that_stays_is_an_error(engine: VLLMEngine, stub: StubVLLM, policy: Path) -> None:
    stub.reset_succeeds = False
    with pytest.raises(EngineError, match="kept its prefix cache"):
        engine.open(policy, "v1")


def test_b25_one_stale_server_among_two_is_found(stub: StubVLLM, policy: Path, tmp_path: Path) -> None:
    stale = StubVLLM(policy)
    stale.reload_does_nothing = True
    engine = engine_for(stub.url, stale.start())
    engine.open(policy, "v0")
    engine.score([[2, 9, 4, 11]])
    engine.open(write_policy(tmp_path / "policy-1", seed=1), "v1")
    with pytest.raises(EngineError, match="one of them has other weights"):
        engine.score([[2, 9, 4, 11]])
    engine.close()
    stale.stop()


def test_a_policy_that_the_server_cannot_read_is_an_error_with_the_path(engine: VLLMEngine, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="could not load the policy .*missing.*no weights in"):
        engine.open(tmp_path / "missing", "v1")


def test_concurrency_is_bounded_and_shared_by_the_servers(stub: StubVLLM, policy: Path) -> None:
    second = StubVLLM(policy)
    engine = engine_for(stub.url, second.start(), concurrency=12)
    engine.open(policy, "v0")
    stub.delay_s = second.delay_s = 0.01
    answer_all(engine, 60)
    assert stub.most_at_once == second.most_at_once == 3
    assert min(len(stub.generated), len(second.generated)) >= 20
    engine.close()
    second.stop()


def test_requests_are_read_no_further_than_the_servers_need(engine: VLLMEngine, stub: StubVLLM, policy: Path) -> None:
    read = []

    def endless() -> Iterator[GroupRequest]:
        for request in requests(10_000):
            read.append(request.group)
            yield request

    narrow = engine_for(stub.url, concurrency=8)
    narrow.open(policy, "v0")
    results = narrow.generate(endless(), SAMPLING)
    next(results)
    assert len(read) == 4
    results.close()
    narrow.close()


def test_proxy_variables_are_never_used(monkeypatch: pytest.MonkeyPatch, stub: StubVLLM, policy: Path) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    engine = engine_for(stub.url)
    engine.open(policy, "v0")
    answer_all(engine, 2)
    engine.close()


def test_a_closed_engine_says_so(engine: VLLMEngine, policy: Path) -> None:
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.open(policy, "v0")


# Managed servers: real processes that run the stub under the name of vLLM's module.


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "site"
    (package / "vllm" / "entrypoints" / "openai").mkdir(parents=True)
    (package / "vllm" / "__init__.py").write_text("__version__ = '0.31.0+cpu'\n")
    server = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import stub_vllm; stub_vllm.main()"
    (package / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text(server)
    monkeypatch.setenv("PYTHONPATH", str(package))
    return package


def managed(tmp_path: Path, **options: Any) -> ManagedServer:
    return ManagedServer(ServerOptions(log_dir=tmp_path / "logs", startup_timeout_s=20.0, **options))


def process_of(server: ManagedServer) -> int:
    return int(server.log_tail().split("stub of process ")[1].split()[0])


def test_a_managed_server_lives_from_open_to_close(fake_vllm: Path, tmp_path: Path, policy: Path) -> None:
    server = managed(tmp_path)
    engine = engine_for(server, release="stop")
    engine.open(policy, "v0")
    answer_all(engine, 3)
    first = process_of(server)
    engine.release()
    assert not server.alive
    newer = write_policy(tmp_path / "policy-1", seed=1)
    engine.open(newer, "v1")
    np.testing.assert_allclose(engine.score([[2, 9, 4]])[0], reference_logps(newer, [2, 9, 4]), rtol=0, atol=1e-6)
    second = process_of(server)
    engine.close()
    for process in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_managed_server_sleeps_and_wakes_up_with_new_weights(fake_vllm: Path, tmp_path: Path, policy: Path) -> None:
    server = managed(tmp_path)
    engine = engine_for(server, release="sleep")
    engine.open(policy, "v0")
    first = process_of(server)
    engine.release()
    newer = write_policy(tmp_path / "policy-1", seed=1)
    engine.open(newer, "v1")
    assert process_of(server) == first
    np.testing.assert_allclose(engine.score([[2, 9, 4]])[0], reference_logps(newer, [2, 9, 4]), rtol=0, atol=1e-6)
    engine.close()


@pytest.mark.parametrize("fault", ["crash", "freeze"])
def test_b20_a_managed_server_that_dies_or_freezes_is_started_again(
    fake_vllm: Path, tmp_path: Path, policy: Path, fault: str
) -> None:
    server = managed(tmp_path, env={"STUB_FAULT": fault})
    engine = engine_for(server, connection_timeout_s=0.8)
    engine.open(policy, "v0")
    first = process_of(server)
    results = answer_all(engine, 8)
    assert process_of(server) != first
    ids = results[7].completions[0].token_ids.tolist()
    expected = reference_logps(policy, requests(8)[7].prompt_ids + ids, 0.7)[2:]
    np.testing.assert_allclose(results[7].completions[0].logps, expected, rtol=0, atol=1e-5)
    engine.close()


def test_a_restart_may_take_longer_than_a_group(fake_vllm: Path, tmp_path: Path, policy: Path) -> None:
    server = managed(tmp_path, env={"STUB_FAULT": "crash", "STUB_STARTS_IN_S": "2"})
    engine = engine_for(server, progress_timeout_s=1.0)
    engine.open(policy, "v0")
    answer_all(engine, 8)
    engine.close()


def test_restarts_are_bounded_and_the_error_quotes_the_log(fake_vllm: Path, tmp_path: Path, policy: Path) -> None:
    server = managed(tmp_path, env={"STUB_FAULT": "crash", "STUB_FAULT_REPEATS": "1"})
    engine = engine_for(server, max_restarts=1)
    engine.open(policy, "v0")
    with pytest.raises(EngineError, match="(?s)died 2 times.*exit code 3.*stub of process"):
        answer_all(engine, 8)
    engine.close()


def test_a_server_that_cannot_start_quotes_its_log_at_once(fake_vllm: Path, tmp_path: Path, policy: Path) -> None:
    engine = engine_for(managed(tmp_path, env={"STUB_FAILS_TO_START": "no kernel image"}))
    start = time.monotonic()
    with pytest.raises(EngineError, match="(?s)exit code 1.*ValueError: no kernel image"):
        engine.open(policy, "v0")
    assert time.monotonic() - start < 10.0
    engine.close()


def test_a_server_that_dies_in_its_checks_quotes_the_first_error_of_its_log(
    fake_vllm: Path, tmp_path: Path, policy: Path
) -> None:
    server = managed(tmp_path, env={"STUB_DIES_IN_CHECKS": "CUDA error: no kernel image"})
    engine = engine_for(server, retry_wait_s=0.3)
    with pytest.raises(EngineError, match="(?s)exit code 4.*CUDA error: no kernel image.*last line 99"):
        engine.open(policy, "v0")
    engine.close()


def test_a_port_in_use_is_named(fake_vllm: Path, tmp_path: Path, policy: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = engine_for(managed(tmp_path, port=port))
        with pytest.raises(EngineError, match=f"Port {port} is in use"):
            engine.open(policy, "v0")
        engine.close()


def test_a_server_dies_with_its_trainer_even_when_that_is_killed(
    fake_vllm: Path, tmp_path: Path, policy: Path
) -> None:
    trainer = (
        "import sys, time; from pathlib import Path\n"
        "from mu_grpo_trl.rollout.vllm_process import ManagedServer, ServerOptions\n"
        "server = ManagedServer(ServerOptions(log_dir=Path(sys.argv[1])))\n"
        "server.start(Path(sys.argv[2])); print(server.log_tail(), flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", trainer, str(tmp_path / "logs"), str(policy)]
    environment = os.environ | {"PYTHONPATH": f"{fake_vllm}:{Path(__file__).parents[1]}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as running:
        assert running.stdout is not None
        server = int(running.stdout.readline().split("stub of process ")[1].split()[0])
        os.kill(server, 0)
        running.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while _runs(server):
        assert time.monotonic() < deadline, "the server outlived its trainer"
        time.sleep(0.05)


def _runs(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_servers_do_not_join_the_training_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mu_grpo_trl.rollout.vllm_process import _server_env

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", "/cache")
    monkeypatch.setenv("no_proxy", "example.org")
    env = _server_env({"EXTRA": "2"})
    assert not env.keys() & {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}
    assert "PYTORCH_CUDA_ALLOC_CONF" not in env
    assert (env["HF_HOME"], env["EXTRA"], env["VLLM_SERVER_DEV_MODE"]) == ("/cache", "2", "1")
    assert env["no_proxy"] == "example.org,127.0.0.1,localhost"


def test_preflight_gives_the_version_or_says_what_is_missing(fake_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight(sys.executable) == "0.31.0+cpu"
    (fake_vllm / "vllm" / "__init__.py").write_text("__version__ = '0.32.0'\n")
    with pytest.raises(EngineError, match="0.32.0 is not supported"):
        preflight(sys.executable)
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(EngineError, match="cannot import vLLM.*No module named 'vllm'.*vllm_python"):
        preflight(sys.executable)
    with pytest.raises(EngineError, match="'/no/such/python' cannot be run"):
        preflight("/no/such/python")


def test_device_sets_are_consecutive_and_must_fit() -> None:
    assert device_sets(None, 2, ["0", "1", "2", "3"]) == ["0,1", "2,3"]
    assert device_sets(1, 2, ["4", "5", "6"]) == ["4,5"]
    assert device_sets(3, 1, []) == [None, None, None]
    with pytest.raises(ValueError, match="2 server.s. of 2 device.s. each do not fit on 3"):
        device_sets(2, 2, ["0", "1", "2"])
