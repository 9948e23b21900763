"""What of a run's `output_dir` goes to the Hub: the model and its card, neither stages nor server logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers.trainer
from huggingface_hub import HfApi

from .config import MuGRPOConfig

SERVER_LOGS = "vllm"


@contextmanager
def without_stages(config: MuGRPOConfig) -> Iterator[None]:
    """
    Inside the block the uploads of transformers' `Trainer` leave out the stages (and the policies in them) and logs of
    managed servers. It uploads all of `output_dir` but checkpoints, and takes no patterns.
    """
    output_dir, stages = Path(str(config.output_dir)).resolve(), config.stages_path.resolve()
    ignored = [f"{SERVER_LOGS}/*"]
    if stages.is_relative_to(output_dir):
        ignored.append(f"{stages.relative_to(output_dir)}/*")
    api_of_trainer = transformers.trainer.hf_api
    transformers.trainer.hf_api = lambda: _SelectiveApi(api_of_trainer(), ignored)  # pyright: ignore
    try:
        yield
    finally:
        transformers.trainer.hf_api = api_of_trainer


class _SelectiveApi:
    """`HfApi` whose folder uploads ignore some more patterns."""

    def __init__(self, api: HfApi, ignored: list[str]) -> None:
        self._api = api
        self._ignored = ignored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *, ignore_patterns: list[str] | None = None, **kwargs: Any) -> Any:
        return self._api.upload_folder(ignore_patterns=[*(ignore_patterns or ()), *self._ignored], **kwargs)
