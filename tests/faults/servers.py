"""Servers of the harness: the stub in a process of its own or in vLLM's place, and policies they can serve."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import torch
from helpers import REPOSITORY, free_port, make_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

VLLM_PYTHON = os.environ.get("MU_GRPO_VLLM_PYTHON", str(REPOSITORY / ".venv-vllm/bin/python"))


class ServerProcess:
    """
    The stub as a server that someone else runs: always at the same address.

    Args:
        policy (`Path`): the weights it starts with.
    """

    def __init__(self, policy: Path) -> None:
        self._policy = policy
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        script = REPOSITORY / "tests" / "stub_vllm.py"
        command = [sys.executable, str(script), "--model", str(self._policy), "--port", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while not self._answers():
            if time.monotonic() > deadline:
                raise TimeoutError("the stub server did not start")
            time.sleep(0.05)

    def send(self, number: int) -> None:
        """Send it a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """End it, also when it is frozen."""
        if self._process is not None:
            self.send(signal.SIGKILL)
            self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=1) as response:
                return response.status == 200
        except OSError:
            return False


def save_policy(folder: Path, layers: int, hidden: int = 32) -> Path:
    """
    A random Qwen2 of two heads.

    Without layers the next token depends on the last one alone, which is what the stub serves.
    """
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128, tie_word_embeddings=False,
        initializer_range=0.2, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def fake_vllm(package: Path) -> Path:
    """A folder for PYTHONPATH in which vLLM's server module runs the stub."""
    (package / "vllm" / "entrypoints" / "openai").mkdir(parents=True)
    (package / "vllm" / "__init__.py").write_text("__version__ = '0.31.0'\n")
    tests = str(Path(__file__).resolve().parents[1])
    server = f"import sys; sys.path.insert(0, {tests!r}); import stub_vllm; stub_vllm.main()"
    (package / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text(server)
    return package
