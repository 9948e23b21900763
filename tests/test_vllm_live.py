"""The vLLM engine against a real vLLM server, on CPU, with a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from mu_grpo_trl.rollout.engine import EngineError, GroupRequest, GroupResult, SamplingParams
from mu_grpo_trl.rollout.vllm_client import VLLMEngine
from mu_grpo_trl.rollout.vllm_process import ManagedServer, ServerOptions
from mu_grpo_trl.rollout.vllm_server import ClientOptions

pytestmark = pytest.mark.vllm

EOS, END_OF_TURN = 0, 1
SPECIAL = ["<|eos|>", "<|end_of_turn|>"]
LETTERS = sorted(letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter.isascii())
VOCAB_SIZE = len(SPECIAL) + len(LETTERS)
SAMPLING = SamplingParams(0.7, 40, 96, 4, eos_token_ids=(EOS, END_OF_TURN), seed=11)


def save_policy(folder: Path, seed: int) -> Path:
    """A random Qwen2 with one token a letter, whose generation config tries to change the sampling."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[EOS]).save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=[EOS, END_OF_TURN], do_sample=True, temperature=0.2, top_k=3, repetition_penalty=1.3
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("policies")
    return [save_policy(folder / f"policy-{seed}", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, vllm_python: str) -> ManagedServer:
    options = ServerOptions(
        log_dir=tmp_path_factory.mktemp("logs"),
        python=vllm_python,
        max_model_len=96,
        dtype="float32",
        startup_timeout_s=300.0,
        extra_args=("--enforce-eager",),
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
    )
    return ManagedServer(options)


@pytest.fixture(scope="module")
def engine(server: ManagedServer, policies: list[Path], vllm_python: str) -> Iterator[VLLMEngine]:
    options = ClientOptions(
        vocab_size=VOCAB_SIZE, context_length=96, progress_timeout_s=120.0, connection_timeout_s=60.0
    )
    engine = VLLMEngine([server], options, python=vllm_python)
    engine.check()
    engine.open(policies[0], "policy-0")
    yield engine
    engine.close()


def trainer_logps(policy: Path, sequence: list[int], temperature: float) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([sequence])).logits[0, :-1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0].numpy()


def prompt(group: int) -> list[int]:
    return [2 + (7 * group + 3 * i) % len(LETTERS) for i in range(20 + group % 5)]


def answers(engine: VLLMEngine, count: int, sampling: SamplingParams) -> dict[int, GroupResult]:
    results = engine.generate([GroupRequest(group, prompt(group)) for group in range(count)], sampling)
    return {result.group: result for result in results}


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_b18_behavior_logps_are_the_trainers_after_temperature(
    engine: VLLMEngine, policies: list[Path], temperature: float
) -> None:
    results = answers(engine, 4, SamplingParams(temperature, 40, 96, 4, (EOS, END_OF_TURN), seed=11))
    for group, result in results.items():
        assert len({tuple(completion.token_ids) for completion in result.completions}) > 1  # sampled, each by itself
        for completion in result.completions:
            sequence = prompt(group) + completion.token_ids.tolist()
            expected = trainer_logps(policies[0], sequence, temperature)[len(prompt(group)) - 1 :]
            np.testing.assert_allclose(completion.logps, expected, rtol=0, atol=1e-4)


def test_scores_are_the_trainers_at_temperature_1(engine: VLLMEngine, policies: list[Path]) -> None:
    sequences = [prompt(0), prompt(1) * 3]
    for score, sequence in zip(engine.score(sequences), sequences, strict=True):
        np.testing.assert_allclose(score, trainer_logps(policies[0], sequence, 1.0), rtol=0, atol=1e-4)


def test_b48_only_the_trainers_eos_ids_end_a_response_and_the_sampled_one_is_kept(engine: VLLMEngine) -> None:
    """The server knows both EOS ids from its files, but stops at those it is asked for."""
    for eos in ((EOS, END_OF_TURN), (END_OF_TURN,), ()):
        sampling = SamplingParams(2.0, 70, 96, 8, eos_token_ids=eos, seed=5)
        completions = [c for result in answers(engine, 12, sampling).values() for c in result.completions]
        lasts = {int(c.token_ids[-1]) for c in completions if c.finish_reason == "stop"}
        assert lasts == set(eos)
        assert all(len(c.token_ids) == len(c.logps) and np.isfinite(c.logps).all() for c in completions)
        inside = {int(token) for c in completions for token in c.token_ids[:-1]} & {EOS, END_OF_TURN}
        assert inside == {EOS, END_OF_TURN} - set(eos)


def test_b48_stop_strings_end_a_response_as_stop_with_all_its_tokens(engine: VLLMEngine) -> None:
    sampling = SamplingParams(1.5, 70, 96, 8, eos_token_ids=(EOS,), stop=("A", "b"), seed=5)
    letters = {len(SPECIAL) + LETTERS.index(letter) for letter in "Ab"}
    completions = [c for result in answers(engine, 12, sampling).values() for c in result.completions]
    by_string = [c for c in completions if c.finish_reason == "stop" and c.token_ids[-1] != EOS]
    assert len(by_string) > 5
    assert {int(c.token_ids[-1]) for c in by_string} == letters
    assert not any(letters & set(c.token_ids[:-1].tolist()) for c in completions)


def test_b23_a_prompt_near_the_limit_gets_a_shorter_response(engine: VLLMEngine) -> None:
    sampling = SamplingParams(1.0, 40, 96, 2, eos_token_ids=(), seed=5)
    (result,) = engine.generate([GroupRequest(0, [5] * 90)], sampling)
    assert [(len(c.token_ids), c.finish_reason) for c in result.completions] == [(6, "length")] * 2
    with pytest.raises(EngineError, match="group 0 has 96 tokens"):
        list(engine.generate([GroupRequest(0, [5] * 96)], sampling))


def test_a_refused_request_shows_the_servers_words(engine: VLLMEngine) -> None:
    sampling = SamplingParams(1.0, 40, 4096, 2, eos_token_ids=(), seed=5)
    with pytest.raises(EngineError, match="answered 400: .*96"):
        list(engine.generate([GroupRequest(0, [5] * 90)], sampling))


def test_many_groups_at_once_survive_chunked_prefill(engine: VLLMEngine) -> None:
    requests = [GroupRequest(group, [2 + (group + i) % len(LETTERS) for i in range(80)]) for group in range(100)]
    results = list(engine.generate(requests, SAMPLING))
    assert sorted(result.group for result in results) == list(range(100))


def test_b25_after_release_and_open_the_new_weights_answer(
    engine: VLLMEngine, server: ManagedServer, policies: list[Path], tmp_path: Path
) -> None:
    url = server.url
    engine.release()
    engine.open(policies[1], "policy-1")
    assert server.url == url and server.alive
    np.testing.assert_allclose(
        engine.score([prompt(3)])[0], trainer_logps(policies[1], prompt(3), 1.0), rtol=0, atol=1e-4
    )
    completion = answers(engine, 1, SAMPLING)[0].completions[0]
    sequence = prompt(0) + completion.token_ids.tolist()
    expected = trainer_logps(policies[1], sequence, 0.7)[len(prompt(0)) - 1 :]
    np.testing.assert_allclose(completion.logps, expected, rtol=0, atol=1e-4)
    with pytest.raises(EngineError, match="could not load the policy .*missing"):
        engine.open(tmp_path / "missing", "policy-2")
    engine.open(policies[0], "policy-0")
    np.testing.assert_allclose(
        engine.score([prompt(3)])[0], trainer_logps(policies[0], prompt(3), 1.0), rtol=0, atol=1e-4
    )
