"""What is published is what is trained: bit by bit, whole or not at all, and without touching the weights."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from helpers import REPOSITORY, make_tokenizer, save_tiny_policy
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mu_grpo_trl import phases
from mu_grpo_trl.phases import check_publishable, merged_weights, publish, tied_lm_head
from mu_grpo_trl.ranks import check_shared_folder
from mu_grpo_trl.stage.schema import StageError

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def tiny(folder: Path, dtype: torch.dtype = torch.float32, **options) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(save_tiny_policy(folder, **options), dtype=dtype)


def reloaded(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 43)[None]).logits


def bits(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def randomized(model: nn.Module, scale: float = 0.05) -> nn.Module:
    """Trainable parameters away from their initial values: `lora_B` starts at zero."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("untie", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_published_policy_is_the_model_bit_by_bit(accelerator, tmp_path, tied, untie, dtype):
    model = tiny(tmp_path / "model", dtype, tied=tied)
    publish(accelerator, model, TOKENIZER, tmp_path / "policy", untie=untie)
    other = reloaded(tmp_path / "policy")
    assert bits(other) == bits(model)
    assert torch.equal(logits(other), logits(model))
    shared = other.lm_head.weight.data_ptr() == other.model.embed_tokens.weight.data_ptr()
    assert shared == (tied and not untie)
    assert other.generation_config.eos_token_id == model.generation_config.eos_token_id


def test_a_large_policy_is_sharded_with_an_index_that_names_every_tensor(accelerator, tmp_path, monkeypatch):
    monkeypatch.setattr(phases, "MAX_SHARD_BYTES", 10_000)
    model = tiny(tmp_path / "model")
    publish(accelerator, model, TOKENIZER, tmp_path / "policy", untie=False)
    index = json.loads((tmp_path / "policy" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "policy").glob("*.safetensors"))
    assert len(files) > 3
    assert set(index["weight_map"]) == set(model.state_dict())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    assert bits(reloaded(tmp_path / "policy")) == bits(model)


def test_the_hash_names_the_weights_and_nothing_else(accelerator, tmp_path):
    model = tiny(tmp_path / "model")

    def hash_of(model: nn.Module) -> str:
        return publish(accelerator, model, TOKENIZER, tmp_path / "policy", untie=False)

    first = hash_of(model)
    assert hash_of(copy.deepcopy(model)) == first
    with torch.no_grad():
        weight = model.lm_head.weight
        weight.view(-1)[7] = torch.nextafter(weight.view(-1)[7], torch.tensor(9.0))
    assert hash_of(model) != first
    assert hash_of(model.bfloat16()) != hash_of(model.float())


@pytest.mark.parametrize("adapters", [{"r": 4}, {"r": 8, "use_rslora": True, "bias": "all"}])
def test_lora_is_published_as_pefts_merged_copy(accelerator, tmp_path, adapters):
    config = LoraConfig(lora_alpha=16, target_modules="all-linear", lora_dropout=0.1, **adapters)
    model = randomized(get_peft_model(tiny(tmp_path / "model"), config))
    publish(accelerator, model, TOKENIZER, tmp_path / "policy", untie=False)
    published, expected = reloaded(tmp_path / "policy"), copy.deepcopy(model).merge_and_unload()
    assert set(published.state_dict()) == set(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(published.state_dict()[name], tensor, atol=1e-6, rtol=0)
    assert (logits(published) - logits(tiny(tmp_path / "again"))).abs().max() > 0.1
    torch.testing.assert_close(logits(published), logits(model), atol=1e-4, rtol=0)


def test_lora_on_transposed_layers_is_merged_the_right_way_round():
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_attn = Conv1D(12, 6)

        def forward(self, x):
            return self.c_attn(x)

    torch.manual_seed(0)
    model = randomized(get_peft_model(Transposed(), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)))
    merged = dict(merged_weights(model, zero3=False))
    x = torch.randn(3, 6)
    torch.testing.assert_close(x @ merged["c_attn.weight"] + merged["c_attn.bias"], model.eval()(x))


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ],
)
@pytest.mark.parametrize("untie", [False, True])
def test_adapters_that_part_tied_weights_are_published_apart(accelerator, tmp_path, options, untie):
    """A tied model whose LM head or embedding is adapted is not tied any more: neither side may be lost."""
    model = randomized(get_peft_model(tiny(tmp_path / "model", tied=True), LoraConfig(r=4, **options)))
    publish(accelerator, model, TOKENIZER, tmp_path / "policy", untie=untie)
    torch.testing.assert_close(logits(reloaded(tmp_path / "policy")), logits(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_b53_the_base_weights_keep_every_bit_over_300_publishes(dtype):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 64)).to(dtype)
    before = base[0].weight.detach().clone()
    model = get_peft_model(base, LoraConfig(r=8, target_modules=["0"]))
    for _ in range(300):
        randomized(model, 1e-3)
        merged = dict(merged_weights(model, zero3=False))
    assert torch.equal(base[0].base_layer.weight, before)
    assert not torch.equal(merged["0.weight"], before)
    assert merged["0.weight"].dtype == dtype


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LoraConfig(target_modules=["q_proj"], use_dora=True), "DoRA"),
        (LoraConfig(target_modules=["q_proj"], lora_bias=True), "lora_bias"),
        (LoraConfig(target_modules=["embed_tokens"]), "Embedding"),
        (LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1]), "no plain LoRA"),
        (IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "IA3"),
    ],
)
def test_adapters_that_cannot_be_merged_out_of_place_are_refused(tmp_path, config, named):
    model = get_peft_model(tiny(tmp_path / "model"), config)
    with pytest.raises(ValueError, match=f"(?s){named}.*Use plain LoRA on linear layers"):
        check_publishable(model)


def test_plain_models_and_plain_lora_are_publishable(tmp_path):
    check_publishable(tiny(tmp_path / "model"))
    check_publishable(get_peft_model(tiny(tmp_path / "model"), LoraConfig(target_modules=["q_proj"])))


def test_b54_no_more_than_one_layer_is_gathered_at_once(tmp_path, monkeypatch):
    gathered = []

    class Recorded:
        def __init__(self, parameters) -> None:
            self._parameters = parameters

        def __enter__(self):
            gathered.append(list(self._parameters))

        def __exit__(self, *_):
            gathered.append([])

    monkeypatch.setattr(phases, "_gathered", lambda parameters, zero3: Recorded(parameters))
    model = get_peft_model(tiny(tmp_path / "model"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    names = [name for name, _ in merged_weights(model, zero3=True)]
    assert len(names) == len(set(names)) == len(tiny(tmp_path / "model").state_dict())
    largest = max(sum(parameter.numel() for parameter in parameters) for parameters in gathered)
    assert largest == max(p.numel() for p in model.parameters())
    assert max(map(len, gathered)) == 4  # weight, bias, lora_A, lora_B of one layer
    assert all(not after for after in gathered[1::2])  # released before the next is gathered


def test_a_full_disk_is_one_error_and_leaves_the_last_policy(accelerator, tmp_path, monkeypatch):
    model = tiny(tmp_path / "model")
    publish(accelerator, model, TOKENIZER, tmp_path / "policy", untie=False)
    before = bits(reloaded(tmp_path / "policy"))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(phases, "save_file", full)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    with pytest.raises(StageError, match="could not be written.*No space left on device.*Make room"):
        publish(accelerator, model, TOKENIZER, tmp_path / "policy", untie=False)
    assert bits(reloaded(tmp_path / "policy")) == before


KILLED_IN_THE_MIDDLE = """
import sys
from pathlib import Path
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer
from mu_grpo_trl import phases
source, target = map(Path, sys.argv[1:])
phases.MAX_SHARD_BYTES = 1000
model = AutoModelForCausalLM.from_pretrained(source)
save_file, count = phases.save_file, 0
def save_and_stall(*args, **kwargs):
    global count
    count += 1
    if count == 5:
        print("stalled", flush=True)
        import time; time.sleep(60)
    save_file(*args, **kwargs)
phases.save_file = save_and_stall
phases.publish(Accelerator(cpu=True), model, AutoTokenizer.from_pretrained(source), target, untie=False)
"""


def test_b31_killed_while_publishing_leaves_no_policy_and_the_next_publish_is_whole(accelerator, tmp_path):
    source, target = save_tiny_policy(tmp_path / "model"), tmp_path / "stage" / "policy"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED_IN_THE_MIDDLE, str(source), str(target)],
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "stalled\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not target.exists()
    assert list(target.parent.iterdir())  # the unfinished copy, under another name
    model = AutoModelForCausalLM.from_pretrained(source)
    publish(accelerator, model, TOKENIZER, target, untie=False)
    assert [path.name for path in target.parent.iterdir()] == ["policy"]
    assert bits(reloaded(target)) == bits(model)


def test_a_tied_head_is_found_under_its_plain_name_also_in_a_peft_model(tmp_path):
    names = ("model.embed_tokens.weight", "lm_head.weight")
    model = tiny(tmp_path / "model", tied=True)
    assert tied_lm_head(model) == names
    assert tied_lm_head(get_peft_model(model, LoraConfig(target_modules=["q_proj"]))) == names
    assert tied_lm_head(tiny(tmp_path / "untied")) is None


def test_b31_a_stages_folder_that_cannot_be_written_is_one_clear_error(accelerator, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Stages cannot be written to .*file/stages.*Set `stage_dir`"):
        check_shared_folder(accelerator, tmp_path / "file" / "stages")
    started = time.monotonic()
    check_shared_folder(accelerator, tmp_path / "stages")
    assert time.monotonic() - started < 1
    assert list((tmp_path / "stages").iterdir()) == []
