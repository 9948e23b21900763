"""What goes to the Hub: a run's model with its card, and a stage as a dataset. Nothing else of `output_dir` does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import transformers.trainer
from huggingface_hub import HfApi
from trl.trainer.utils import get_config_model_id

from .config import MuGRPOConfig
from .report.card import RunFacts, model_card, stage_card
from .report.tracking import FIGURE_NAME, wandb_url
from .stage.reader import StageReader
from .stage.schema import GROUPS_NAME, MANIFEST_NAME

logger = logging.getLogger(__name__)

UPLOADED = (
    "README.md",
    FIGURE_NAME,
    "summary.json",
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "adapter_config.json",
    "adapter_model*.safetensors",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.jinja",
)
"""Files of a run's folder that make its model. All else stays: stages, policies, checkpoints, rows of rejected
updates, logs, the pickled configuration, and whatever else lies there."""

STAGE_FILES = [MANIFEST_NAME, f"{GROUPS_NAME}/*.arrow"]


def uploaded_files(output_dir: Path) -> list[str]:
    """Names of the files of `output_dir` that go to the Hub."""
    names = [path.name for path in output_dir.iterdir() if path.is_file()]
    return sorted(name for name in names if any(fnmatch(name, pattern) for pattern in UPLOADED))


@contextmanager
def only_the_model(config: MuGRPOConfig) -> Iterator[None]:
    """
    Inside the block the uploads of `output_dir` by transformers' `Trainer`, which takes no patterns and would send all
    but checkpoints, send [`uploaded_files`] alone; and one that fails in the background is logged.
    """
    api_of_trainer = transformers.trainer.hf_api
    transformers.trainer.hf_api = lambda: _SelectiveApi(api_of_trainer(), config.output_path)  # pyright: ignore
    try:
        yield
    finally:
        transformers.trainer.hf_api = api_of_trainer


class PushesOnlyTheModel:
    """Mixin of a `Trainer`: its uploads hold the model and a card that says how it was trained, nothing else."""

    args: MuGRPOConfig
    model: Any
    state: Any

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        with only_the_model(self.args):
            return super().push_to_hub(*args, **kwargs)  # type: ignore[misc]

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with only_the_model(self.args):
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write `README.md` to `output_dir`; arguments as TRL's. `dataset_name` is an id of the Hub."""
        if not self.state.is_world_process_zero:
            return
        name = (
            getattr(self, "hub_model_id", None) or self.args.hub_model_id or model_name or self.args.output_path.name
        )
        more = [tags] if isinstance(tags, str) else tags or []
        model_card(self._run_facts(dataset_name, more), name).save(self.args.output_path / "README.md")

    def _run_facts(self, dataset: str | None, tags: list[str]) -> RunFacts:
        trainer: Any = self
        base = get_config_model_id(self.model.config)
        configs = getattr(self.model, "peft_config", {})
        return RunFacts(
            config=self.args,
            schedule=trainer.schedule,
            updates=self.state.global_step,
            logs=self.state.log_history,
            rewards=trainer.rewards.names,
            total_s=trainer.telemetry.total_s(),
            rollout_s=trainer.telemetry.rollout_s,
            base_model=base if base and not Path(base).is_dir() else None,
            dataset=dataset,
            lora=configs.get("default"),
            wandb_url=wandb_url(self.args),
            tags=[*trainer._tag_names, *tags],
        )


class _SelectiveApi:
    """`HfApi` whose uploads of one folder hold [`uploaded_files`] alone."""

    def __init__(self, api: HfApi, output_dir: Path) -> None:
        self._api = api
        self._output_dir = output_dir.resolve()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *, folder_path: str | Path, run_as_future: bool = False, **kwargs: Any) -> Any:
        if Path(folder_path).resolve() == self._output_dir:
            kwargs["allow_patterns"] = uploaded_files(self._output_dir)
        done: Any = self._api.upload_folder(folder_path=folder_path, run_as_future=run_as_future, **kwargs)
        if run_as_future:
            done.add_done_callback(_log_failure)
        return done


def _log_failure(done: Future[Any]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        logger.warning("An upload to the Hub failed (%s: %s). Training goes on.", type(error).__name__, error)


def push_run(output_dir: Path, repo_id: str, private: bool = True) -> str:
    """
    Upload the model of a finished run, with the card that is there, and return its address.

    Args:
        output_dir (`Path`): of the run.
        repo_id (`str`): `name` or `organization/name`; made if it is not there.
        private (`bool`): see [`_make_repo`].

    Raises:
        `ValueError`: there is no model in the folder, or the repository is public.
    """
    files = uploaded_files(output_dir) if output_dir.is_dir() else []
    if not any(name.endswith(".safetensors") for name in files):
        raise ValueError(
            f"{output_dir} holds no model. Name a run's `output_dir` (written when training ends), or a checkpoint."
        )
    api = HfApi()
    repo_id = _make_repo(api, repo_id, "model", private)
    api.upload_folder(
        repo_id=repo_id, folder_path=output_dir, allow_patterns=files, commit_message="Trained with mu-grpo-trl"
    )
    return f"{api.endpoint}/{repo_id}"


def push_stage(reader: StageReader, repo_id: str, private: bool = True) -> str:
    """
    Upload a complete stage as a dataset with a card, and return its address: its shards and manifest, neither its
    policy nor anything that was set aside.

    Args:
        reader (`StageReader`): of the stage, its bytes verified.
        repo_id (`str`): as above.
        private (`bool`): see [`_make_repo`].
    """
    api = HfApi()
    repo_id = _make_repo(api, repo_id, "dataset", private)
    api.upload_file(
        path_or_fileobj=str(stage_card(reader, repo_id)).encode(),
        path_in_repo="README.md",
        repo_id=repo_id,
        repo_type="dataset",
        commit_message="Card",
    )
    api.upload_folder(
        repo_id=repo_id,
        repo_type="dataset",
        folder_path=reader.path,
        allow_patterns=STAGE_FILES,
        commit_message=f"Stage {reader.manifest.stage}",
    )
    return f"{api.endpoint}/datasets/{repo_id}"


def _make_repo(api: HfApi, repo_id: str, repo_type: str, private: bool) -> str:
    """
    Make the repository unless it is there, and return its full name.

    Raises:
        `ValueError`: it is there and public, and `private` is asked for.
    """
    repo_id = api.create_repo(repo_id, repo_type=repo_type, private=private, exist_ok=True).repo_id
    if private and api.repo_info(repo_id, repo_type=repo_type).private is False:
        raise ValueError(f"{repo_id} is public. Give --public to push to it all the same, or name another.")
    return repo_id
