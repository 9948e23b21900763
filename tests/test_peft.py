"""LoRA in one process, and in two of DDP, FSDP2 and ZeRO-3: published, saved, resumed, exported; the base stays."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PROMPTS, config_options, save_tiny_policy
from processes import run_alone, run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from workers.training_run import train, whole_weights

from mu_grpo_trl import MuGRPOTrainer, export
from mu_grpo_trl.stage.schema import read_manifest

LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}

pytestmark = pytest.mark.usefixtures("objects_of_the_libraries_are_not_collected")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


def spec(policy: Path, output_dir: Path) -> dict[str, Any]:
    """Two stages of two updates by plain SGD with long steps, so that the weights tell gradients apart."""
    options = config_options(
        output_dir, stage_updates=2, max_steps=4, save_strategy="steps", save_steps=1, optim="sgd", learning_rate=2.0,
        max_grad_norm=0.0,
    )  # fmt: skip
    return options | {"model": str(policy), "prompts": PROMPTS[:12], "lora": LORA}


def digest(policy: Path) -> str:
    return hashlib.sha256((policy / "model.safetensors").read_bytes()).hexdigest()


class Single:
    """The run of one process."""

    def __init__(self, policy: Path, folder: Path) -> None:
        self.folder = folder
        self.digest = digest(policy)
        self.trainer: MuGRPOTrainer = train(spec(policy, folder))
        self.trainer.save_model(str(folder))
        self.weights = whole_weights(self.trainer)


@pytest.fixture(scope="module")
def single(policy, tmp_path_factory) -> Single:
    return Single(policy, tmp_path_factory.mktemp("single"))


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([(one[name] - other[name]).norm() for name in one]).norm())


def test_the_base_keeps_every_bit_in_memory_and_on_disk(policy, single):
    base = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    kept = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): tensor
        for name, tensor in single.trainer.model.state_dict().items()
        if ".lora_" not in name
    }
    assert_equal_weights(kept, base)
    assert digest(policy) == single.digest
    assert distance(single.weights, base) > 1e-2


def test_a_killed_lora_run_ends_with_the_bits_of_the_undisturbed_one(policy, single, tmp_path):
    killed = run_alone(spec(policy, tmp_path), fault={"kind": "die", "at": "step", "number": 3})
    assert killed.exitcode == -9
    resumed = train(spec(policy, tmp_path), resume=True)
    assert resumed.state.global_step == 4
    assert_equal_weights(whole_weights(resumed), single.weights)


def test_a_merged_export_is_the_policy_bit_by_bit(policy, single, tmp_path, capsys):
    export.main(["merge", str(single.folder), str(tmp_path / "merged")])
    assert_equal_weights(load_file(tmp_path / "merged/model.safetensors"), single.weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(model, "peft_config") and (tmp_path / "merged/tokenizer.json").exists()
    # the checkpoint at the end of stage 0 is what stage 1 was generated with, and what the manifest calls it
    export.main(["merge", str(single.folder / "checkpoint-2"), str(tmp_path / "second")])
    policy_hash = read_manifest(single.folder / "stages/stage-001").policy_hash
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path}/second: policy {policy_hash}"
    assert digest(policy) == single.digest


@pytest.mark.parametrize(
    ("run", "out", "message"),
    [
        ("run", "full", "full is not empty"),
        ("stages", "new", "holds no LoRA adapter"),
        ("none", "new", "no LoRA adapter"),
    ],
)
def test_what_cannot_be_merged_is_refused(run, out, message, single, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    folder = single.folder / run if run != "run" else single.folder
    with pytest.raises(SystemExit) as ended:
        export.main(["merge", str(folder), str(tmp_path / out)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_without_the_final_adapter_the_newest_checkpoint_is_merged(single, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for step in (2, 3):
        (run / f"checkpoint-{step}").symlink_to(single.folder / f"checkpoint-{step}")
    assert export.adapter_folder(run) == run / "checkpoint-3"


@pytest.mark.distributed
@pytest.mark.parametrize("backend", ["ddp", "fsdp2", "zero3"])
def test_b54_b55_two_ranks_publish_and_save_the_adapter_whole(backend, policy, single, tmp_path):
    two = spec(policy, tmp_path / "run") | {"save_steps": 2}
    ended = run_ranks([two, two], zero3=backend == "zero3", fsdp2=backend == "fsdp2", timeout_s=240)
    assert [rank.exitcode for rank in ended] == [0, 0], ended[0].log[-4000:]
    base = AutoModelForCausalLM.from_pretrained(policy).state_dict()
    final = torch.load(tmp_path / "run/final.pt")  # gathered in memory, merged
    for saved in ("saved", "checkpoint-4"):
        adapter = load_file(tmp_path / "run" / saved / "adapter_model.safetensors")
        assert len(adapter) == 8 and min(float(tensor.abs().max()) for tensor in adapter.values()) > 1e-3
        export.merge(tmp_path / "run" / saved, tmp_path / f"merged-{saved}")
        assert_equal_weights(load_file(tmp_path / f"merged-{saved}/model.safetensors"), final)
    published = load_file(tmp_path / "run/stages/stage-001/policy/model.safetensors")
    alone = load_file(single.folder / "stages/stage-001/policy/model.safetensors")
    assert distance(alone, base) > 1e-2
    assert distance(published, alone) < 1e-3 * distance(alone, base)
    assert distance(final, single.weights) < 1e-3 * distance(single.weights, base)
    assert digest(policy) == single.digest
