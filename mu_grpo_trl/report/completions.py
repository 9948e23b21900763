"""A bounded sample of a stage's responses: printed, written as parquet, and sent to W&B or trackio, once a stage."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedTokenizerBase
from transformers.utils import is_rich_available
from trl.trainer.utils import print_prompt_completions_sample

from ..config import MuGRPOConfig
from ..stage.reader import StageReader

MAX_ROWS = 256
MAX_PRINTED_ROWS = 16
MAX_CELL_CHARACTERS = 2000


def log_stage_completions(reader: StageReader, tokenizer: PreTrainedTokenizerBase, config: MuGRPOConfig) -> Path:
    """
    Print and store a sample of a complete stage; call it on the main process, where the stage was made.

    At most `MAX_ROWS` responses, of prompt groups evenly spaced over the stage (one of each prompt with
    `log_unique_prompts`), and cells of at most `MAX_CELL_CHARACTERS`: the stage on disk is the record. Printed are
    `num_completions_to_print` of them.

    Returns:
        `Path`: `<output_dir>/completions/stage-000.parquet`, replaced if it was there.
    """
    table = completions_table(reader, tokenizer, one_per_prompt=config.log_unique_prompts)
    path = Path(str(config.output_dir)) / "completions" / f"{reader.path.name}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    table.to_parquet(path)
    if is_rich_available():
        _print(table, reader, config.num_completions_to_print or MAX_PRINTED_ROWS)
    for backend in _active_backends(config.report_to):
        step = {"train/global_step": reader.manifest.published_step}
        backend.log({"completions": backend.Table(dataframe=table)} | (step if backend.__name__ == "wandb" else {}))
    return path


def completions_table(
    reader: StageReader, tokenizer: PreTrainedTokenizerBase, *, one_per_prompt: bool = False
) -> pd.DataFrame:
    """
    The sample as a frame, one response a row: `stage`, `group`, `sample`, `prompt`, `completion`, a column per reward
    function, `reward`, `advantage`; unscorable is NaN.
    """
    manifest = reader.manifest
    samples = 1 if one_per_prompt else min(manifest.num_generations, MAX_ROWS)
    groups = _evenly_spaced(manifest.num_groups, max(1, MAX_ROWS // samples))
    if one_per_prompt:
        first = {manifest.prompt_indices[group]: group for group in reversed(groups.tolist())}
        groups = np.array(sorted(first.values()))
    rows = [(group, sample) for group in groups.tolist() for sample in range(samples)]
    responses = [reader.response(*row) for row in rows]

    def texts(ids: Sequence[np.ndarray]) -> list[str]:
        decoded = tokenizer.batch_decode([sequence.tolist() for sequence in ids])
        return [f"{text[:MAX_CELL_CHARACTERS]}…" if len(text) > MAX_CELL_CHARACTERS else text for text in decoded]

    return pd.DataFrame(
        {
            "stage": manifest.stage,
            "group": [group for group, _ in rows],
            "sample": [sample for _, sample in rows],
            "prompt": texts([response.prompt_ids for response in responses]),
            "completion": texts([response.completion_ids for response in responses]),
            **{name: reader.rewards(groups, name)[:, :samples].ravel() for name in manifest.reward_names},
            "reward": reader.rewards(groups)[:, :samples].ravel(),
            "advantage": [response.advantage for response in responses],
        }
    )


def _evenly_spaced(size: int, count: int) -> np.ndarray:
    return np.unique(np.linspace(0, size - 1, min(size, count)).round().astype(np.int64))


def _print(table: pd.DataFrame, reader: StageReader, count: int) -> None:
    shown = table.iloc[_evenly_spaced(len(table), count)]
    print_prompt_completions_sample(
        shown["prompt"].tolist(),
        shown["completion"].tolist(),
        {name: shown[name].tolist() for name in reader.manifest.reward_names},
        shown["advantage"].tolist(),
        reader.manifest.published_step,
    )


def _active_backends(report_to: str | Sequence[str] | None) -> list[Any]:
    names = [report_to] if isinstance(report_to, str) else report_to or ()
    backends = [importlib.import_module(name) for name in ("wandb", "trackio") if name in names]
    return [backend for backend in backends if backend.__name__ != "wandb" or backend.run is not None]
