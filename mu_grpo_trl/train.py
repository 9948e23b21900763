"""
Train from a recipe.

    accelerate launch --config_file recipes/accelerate/zero3.yaml -m mu_grpo_trl.train \
        --config recipes/qwen2.5-math-7b.yaml [--key value …]

One process: `mu-grpo train --config recipes/quickstart.yaml`.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset
from trl import ModelConfig, TrlParser, get_peft_config

from .config import MuGRPOConfig
from .data import PAPER_PROMPT, load_prompts
from .lab import load_task
from .rewards.math import check_golds
from .trainer import MuGRPOTrainer


@dataclass
class ScriptArguments:
    """
    What a recipe says beside the trainer's and the model's options.

    Args:
        dataset_name (`str`): Hub id, a local json/jsonl/parquet/csv file or folder, or `lab:NAME` for a built-in task.
        dataset_config (`str`, *optional*): configuration of a Hub dataset.
        dataset_split (`str`, *optional*, defaults to `"train"`): split to train on.
        prompt_column (`str`, *optional*, defaults to `"problem"`): column with the problem, or with messages.
        answer_column (`str`, *optional*, defaults to `"answer"`): column with the reference answer.
        keep_columns (`list[str]`, *optional*): further columns, passed to the reward functions.
        prompt_template (`str`, *optional*): text around `{problem}`; the paper's by default. `none`: the problem as it is.
        system_prompt (`str`, *optional*): first message of each conversation.
        conversational (`bool`, *optional*, defaults to `True`): prompts as messages for the chat template, or as text.
        max_rows (`int`, *optional*): read at most so many rows.
        bad_rows (`str`, *optional*, defaults to `"error"`): rows without a usable problem or answer: `error` or `drop`.
        reward_funcs (`list[str]`, *optional*, defaults to `["math"]`): `math`, `module:function`, or a reward model's id.
    """

    dataset_name: str | None = field(default=None, metadata={"help": "Hub id, local file or folder, or lab:NAME."})
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a Hub dataset."})
    dataset_split: str = field(default="train", metadata={"help": "Split to train on."})
    prompt_column: str = field(default="problem", metadata={"help": "Column with the problem, or with messages."})
    answer_column: str | None = field(default="answer", metadata={"help": "Column with the reference answer."})
    keep_columns: list[str] | None = field(default=None, metadata={"help": "Columns passed on to reward functions."})
    prompt_template: str = field(default=PAPER_PROMPT, metadata={"help": "Text around {problem}; 'none': as it is."})
    system_prompt: str | None = field(default=None, metadata={"help": "First message of each conversation."})
    conversational: bool = field(default=True, metadata={"help": "Prompts as messages for the chat template."})
    max_rows: int | None = field(default=None, metadata={"help": "Read at most so many rows."})
    bad_rows: str = field(default="error", metadata={"help": "'error' or 'drop'."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["math"], metadata={"help": "math, module:function, or a reward model's id."}
    )
    reward_model_name_or_path: str | None = field(
        default=None, metadata={"help": "A reward model, beside reward_funcs."}
    )
    resume: str | None = field(
        default=None, metadata={"help": "'auto': go on from the newest checkpoint in output_dir, if there is one."}
    )


PARSED_CLASSES = (ScriptArguments, MuGRPOConfig, ModelConfig)


def parse(argv: Sequence[str]) -> tuple[ScriptArguments, MuGRPOConfig, ModelConfig]:
    """
    Options from `--config FILE.yaml` and `--key value` arguments, which win.

    Raises:
        `ValueError`: an unknown key (with the nearest valid one), a value of a wrong type, or what `MuGRPOConfig` refuses.
    """
    argv = list(argv)
    if "--config" in argv:
        check_recipe(Path(argv[argv.index("--config") + 1]))
    parser = TrlParser(PARSED_CLASSES)  # type: ignore[arg-type]
    return parser.parse_args_and_config(argv)  # type: ignore[return-value]


def check_recipe(path: Path) -> dict[str, Any]:
    """
    The mapping in a recipe, every key of it known.

    Raises:
        `ValueError`: the file is missing, is no YAML mapping, or has an unknown key.
    """
    try:
        recipe = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(f"There is no recipe {path}. Recipes are in `recipes/`.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ValueError(f"{path} holds a {type(recipe).__name__}, not `key: value` lines.")
    known = {f.name: str(f.type) for cls in PARSED_CLASSES for f in fields(cls)} | {"env": "dict"}
    for key, value in recipe.items():
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, 1)
            hint = f" Did you mean `{nearest[0]}`?" if nearest else ""
            raise ValueError(f"{path}: unknown key `{key}`.{hint}")
        _check_type(path, key, value, known[key])
    return recipe


def _check_type(path: Path, key: str, value: Any, annotation: str) -> None:
    """Refuse what argparse would let through: it checks no default that is not a string."""
    for kind, name in ((list, "list"), (dict, "dict")):
        if isinstance(value, kind) and name not in annotation:
            raise ValueError(f"{path}: `{key}` is a {name}, but takes {annotation}.")
    number = annotation.removesuffix(" | None")
    if number in ("int", "float") and value is not None:
        try:
            valid = not isinstance(value, bool) and (number == "float" or float(value).is_integer())
            float(value)
        except (TypeError, ValueError):
            valid = False
        if not valid:
            raise ValueError(f"{path}: `{key}: {value!r}` is not of type {number}.")


def load_dataset(script: ScriptArguments) -> Dataset:
    """The recipe's prompts with their answers."""
    if not script.dataset_name:
        raise ValueError("`dataset_name` is not set. Give a Hub id, a local file, or `lab:arithmetic`.")
    if script.dataset_name.startswith("lab:"):
        return load_task(script.dataset_name.removeprefix("lab:"), script.max_rows)
    return load_prompts(
        script.dataset_name,
        conversational=script.conversational,
        split=script.dataset_split,
        config=script.dataset_config,
        prompt_column=script.prompt_column,
        answer_column=script.answer_column,
        prompt_template=None if script.prompt_template.lower() == "none" else script.prompt_template,
        system_prompt=script.system_prompt,
        keep_columns=script.keep_columns or (),
        max_rows=script.max_rows,
        bad_rows=script.bad_rows,  # type: ignore[arg-type]
    )


def make_rewards(script: ScriptArguments, config: MuGRPOConfig, dataset: Dataset) -> list[Any]:
    """The recipe's reward functions; golds are checked once if math-verify judges them."""
    if "math" in script.reward_funcs and "answer" in dataset.column_names:
        check_golds(dataset["answer"], workers=config.reward_threads)
    model = script.reward_model_name_or_path
    return [*script.reward_funcs, model] if model else list(script.reward_funcs)


def make_trainer(script: ScriptArguments, config: MuGRPOConfig, model: ModelConfig) -> MuGRPOTrainer:
    """A trainer for a parsed recipe. Data, rewards and servers are checked before the model is loaded."""
    if not model.model_name_or_path:
        raise ValueError("`model_name_or_path` is not set. Give a Hub id or a local folder.")
    if model.load_in_4bit or model.load_in_8bit:
        raise ValueError("`load_in_4bit`/`load_in_8bit`: a quantized policy cannot be published without loss yet.")
    dataset = load_dataset(script)
    config.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(config.model_init_kwargs or {}),
    }
    return MuGRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=make_rewards(script, config, dataset),
        args=config,
        train_dataset=dataset,
        peft_config=get_peft_config(model),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Train, save the model to `output_dir`, and push it to the Hub if asked to."""
    script, config, model = parse(sys.argv[1:] if argv is None else argv)
    trainer = make_trainer(script, config, model)
    resume: Any = config.resume_from_checkpoint
    if script.resume == "auto":
        resume = bool(list(Path(str(config.output_dir)).glob("checkpoint-*")))
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(config.output_dir)
    if config.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main()
