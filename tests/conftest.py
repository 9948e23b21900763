"""What all tests share: an offline, single-threaded environment, `hypothesis` profiles, and the vLLM interpreter."""

from __future__ import annotations

import gc
import os
from pathlib import Path

# Before any import that reads them. Child processes inherit them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

REPOSITORY = Path(__file__).resolve().parent.parent

# HYPOTHESIS_PROFILE=long tries 10,000 inputs for each property.
settings.register_profile("short", deadline=None)
settings.register_profile("long", deadline=None, max_examples=10_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """Interpreter with vLLM; a test that takes it carries `@pytest.mark.vllm`."""
    interpreter = Path(os.environ.get("MU_GRPO_VLLM_PYTHON", REPOSITORY / ".venv-vllm/bin/python"))
    if not interpreter.exists():
        pytest.fail(
            f"{interpreter} does not exist, so no vLLM server can be started. Run `make .venv-vllm`, name another "
            "interpreter in MU_GRPO_VLLM_PYTHON, or leave these tests out with -m 'not vllm'."
        )
    return str(interpreter)


@pytest.fixture(scope="module")
def objects_of_the_libraries_are_not_collected():
    """`Trainer` collects garbage at its start: more than a second with all that is imported here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
