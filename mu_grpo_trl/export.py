"""`mu-grpo merge RUN OUT` and `mu-grpo push RUN REPO`: what becomes of a finished run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from httpx import HTTPError
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from .checkpoints import last_whole_checkpoint
from .hub import push_run
from .phases import check_publishable, publish

ADAPTER_CONFIG = "adapter_config.json"


def adapter_folder(run: Path) -> Path:
    """
    Where the adapter of a run lies: in the folder itself, or in its newest whole checkpoint.

    Raises:
        `ValueError`: there is none.
    """
    if (run / ADAPTER_CONFIG).is_file():
        return run
    checkpoint = last_whole_checkpoint(run) if any(run.glob("checkpoint-*")) else None
    if checkpoint is not None and (checkpoint / ADAPTER_CONFIG).is_file():
        return checkpoint
    raise ValueError(
        f"{run} holds no LoRA adapter ({ADAPTER_CONFIG}). Name a LoRA run's `output_dir`, or one of its checkpoints; "
        "a run without adapter has its whole model there already."
    )


def merge(run: Path, out: Path, base: str | None = None, dtype: str = "auto") -> str:
    """
    Write base and adapter of a LoRA run to `out` as one plain model, as the rollout engine got it:
    `W + scaling · B @ A` in float32, rounded once. Neither the base nor the run is written to.

    Args:
        run (`Path`): its `output_dir` or a checkpoint.
        out (`Path`): a new or empty folder.
        base (`str`, *optional*): the base model, where it is not any more what the adapter names.
        dtype (`str`, *optional*, defaults to `"auto"`): of the merged weights; by default the base's.

    Returns:
        `str`: hash of the weights, as a stage's manifest has it.

    Raises:
        `ValueError`: there is no adapter, or `out` is not empty.
    """
    adapter = adapter_folder(run)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty. Name a new folder.")
    named: Any = PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path
    model: Any = AutoModelForCausalLM.from_pretrained(base or named, dtype=dtype)
    model = PeftModel.from_pretrained(model, str(adapter))
    check_publishable(model)
    tokenizer = AutoTokenizer.from_pretrained(str(adapter))
    return publish(Accelerator(cpu=True), model, tokenizer, out, untie=False)


def make_parsers() -> dict[str, argparse.ArgumentParser]:
    """The two command lines."""
    merging = argparse.ArgumentParser(
        prog="mu-grpo merge", description="write a LoRA run as a model without adapter; base and run stay as they are"
    )
    merging.add_argument("run", metavar="RUN", type=Path, help="the run's output_dir, or one of its checkpoints")
    merging.add_argument("out", metavar="OUT", type=Path, help="a new folder")
    merging.add_argument("--base", help="the base model, if it is not where it was")
    merging.add_argument("--dtype", default="auto", help="of the merged weights, such as bfloat16 (the base's)")
    pushing = argparse.ArgumentParser(
        prog="mu-grpo push",
        description="upload the model of a finished run to the Hub, with its card and nothing else",
    )
    pushing.add_argument("run", metavar="RUN", type=Path, help="the run's output_dir, or one of its checkpoints")
    pushing.add_argument("repo", metavar="REPO", help="name or organization/name on the Hub")
    pushing.add_argument("--public", action="store_true", help="make the repository public, or accept that it is")
    return {"merge": merging, "push": pushing}


def main(argv: Sequence[str]) -> None:
    """Run `merge` or `push`, the first of `argv`. Exit code 2: nothing to do it with; 4: the Hub was not reached."""
    command, *rest = argv
    options = make_parsers()[command].parse_args(rest)
    try:
        if command == "merge":
            print(f"{options.out}: policy {merge(options.run, options.out, options.base, options.dtype)}")
        else:
            print(push_run(options.run, options.repo, private=not options.public))
    except (HTTPError, OSError, ValueError) as error:
        print(f"mu-grpo {command}: {error}", file=sys.stderr)
        sys.exit(4 if command == "push" and not isinstance(error, ValueError) else 2)
