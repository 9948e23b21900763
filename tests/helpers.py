"""What several test modules build: a tiny policy on disk, and runs of the training worker in own processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

REPOSITORY = Path(__file__).resolve().parent.parent
WORKER = REPOSITORY / "tests" / "workers" / "train_worker.py"
PROMPTS = [f"{a}+{b}{'=' * (1 + a % 3)}" for a in range(1, 9) for b in range(3, 11)]

ACCELERATE = {
    "ddp": {"distributed_type": "MULTI_CPU"},
    "fsdp2": {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_state_dict_type": "FULL_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": False,
        },
    },
    "zero3": {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "zero_stage": 3,
            "zero3_init_flag": True,
            "zero3_save_16bit_model": True,
            "gradient_accumulation_steps": 1,
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
        },
    },
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; pad and EOS differ."""
    characters = "0123456789+-*=;?.,: abcdefghijklmnopqrstuvwxyz\\{}\n"
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def save_tiny_policy(
    folder: Path, *, seed: int = 0, tied: bool = False, scale: float = 0.2, hidden_size: int = 32
) -> Path:
    """
    A random two-layer Qwen2 with its tokenizer in `folder`; `scale` widens its logits. Attention heads have half of
    `hidden_size`; vLLM on a CPU has no kernel for less than 32.
    """
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=scale,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config_options(output_dir: Path, **options: Any) -> dict[str, Any]:
    """Options of a quick run on the CPU, in process."""
    return {
        "output_dir": str(output_dir),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "rollout_engine": "transformers",
        "prompts_per_update": 4,
        "num_generations": 4,
        "stage_updates": 4,
        "max_steps": 8,
        "max_completion_length": 20,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **options,
    }


def run_worker(folder: Path, launcher: str | None, spec: dict[str, Any], timeout_s: float = 240) -> None:
    """Run the worker on `spec`, alone or in two processes under the launcher `"ddp"`, `"fsdp2"` or `"zero3"`."""
    folder.mkdir(parents=True, exist_ok=True)
    spec_path = folder / "spec.json"
    spec_path.write_text(json.dumps(spec))
    command = [sys.executable, str(WORKER), str(spec_path)]
    if launcher is not None:
        config = {
            "compute_environment": "LOCAL_MACHINE",
            "num_processes": 2,
            "num_machines": 1,
            "machine_rank": 0,
            "mixed_precision": "no",
            "use_cpu": True,
            **ACCELERATE[launcher],
        }
        config_path = folder / "accelerate.json"
        config_path.write_text(json.dumps(config))
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config_path)]
        command = [*launch, str(WORKER), str(spec_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


def free_port() -> int:
    """A port nothing listens on."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def displacement_errors(
    reference: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]], step: int
) -> dict[str, float]:
    """For each tensor, ‖θ_step − θ'_step‖ relative to the reference's displacement ‖θ_step − θ_0‖."""
    errors = {}
    for name, start in reference[0].items():
        moved = (reference[step][name] - start).norm()
        errors[name] = float((reference[step][name] - other[step][name]).norm() / moved.clamp(min=1e-12))
    return errors
