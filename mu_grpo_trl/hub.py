"""What of a run's `output_dir` goes to the Hub: the model and its card, neither stages nor server logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers.trainer
from huggingface_hub import HfApi

from .config import MuGRPOConfig

NOT_UPLOADED = ["vllm/*", "nonfinite/*", "run.lock", "run.json", "wandb_run_id"]
"""Of `output_dir`, beside the stages: logs of servers, rows of rejected updates, and what is of this machine alone."""


@contextmanager
def without_stages(config: MuGRPOConfig) -> Iterator[None]:
    """
    Inside the block the uploads of transformers' `Trainer` leave out the stages (and the policies in them) and
    `NOT_UPLOADED`. It uploads all of `output_dir` but checkpoints, and takes no patterns.
    """
    output_dir, stages = Path(str(config.output_dir)).resolve(), config.stages_path.resolve()
    ignored = [*NOT_UPLOADED]
    if stages.is_relative_to(output_dir):
        ignored.append(f"{stages.relative_to(output_dir)}/*")
    api_of_trainer = transformers.trainer.hf_api
    transformers.trainer.hf_api = lambda: _SelectiveApi(api_of_trainer(), ignored)  # pyright: ignore
    try:
        yield
    finally:
        transformers.trainer.hf_api = api_of_trainer


class PushesWithoutStages:
    """Mixin of a `Trainer` whose uploads leave the stages out."""

    args: MuGRPOConfig

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        with without_stages(self.args):
            return super().push_to_hub(*args, **kwargs)  # type: ignore[misc]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with without_stages(self.args):
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]


class _SelectiveApi:
    """`HfApi` whose folder uploads ignore some more patterns."""

    def __init__(self, api: HfApi, ignored: list[str]) -> None:
        self._api = api
        self._ignored = ignored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *, ignore_patterns: list[str] | None = None, **kwargs: Any) -> Any:
        return self._api.upload_folder(ignore_patterns=[*(ignore_patterns or ()), *self._ignored], **kwargs)
