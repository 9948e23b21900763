"""
Train from a recipe.

    accelerate launch --config_file recipes/accelerate/zero3.yaml -m mu_grpo_trl.train \
        --config recipes/qwen2.5-math-7b.yaml [--key value …]

One process: `mu-grpo train --config recipes/quickstart.yaml`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from datasets import Dataset
from httpx import HTTPError
from trl import GRPOConfig, ModelConfig, TrlParser, get_peft_config

from .checkpoints import CheckpointError, last_whole_checkpoint
from .config import TAKES_BOOL_TOO, MuGRPOConfig
from .data import PAPER_PROMPT, load_prompts
from .evaluation.benchmarks import find_benchmarks, load_benchmark
from .guards import LearningError
from .lab import load_task
from .locks import FolderInUseError
from .options import as_declared, nearest
from .preflight import check_rewards
from .recipe import Setting, read_recipe
from .rewards.functions import RewardError
from .rewards.math import check_golds
from .rollout.engine import EngineError
from .stage.schema import StageError
from .trainer import MuGRPOTrainer

logger = logging.getLogger(__name__)

DEBUG_VARIABLE = "MU_GRPO_DEBUG"
PUSH_FAILED = 4
"""Exit code of a run that is trained and saved, but could not be pushed to the Hub."""


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
        prompt_template (`str`, *optional*): text around `{problem}` (the paper's by default); `none` for nothing.
        system_prompt (`str`, *optional*): first message of each conversation.
        conversational (`bool`, *optional*, defaults to `True`): prompts as messages for the chat template, or as text.
        max_rows (`int`, *optional*): read at most so many rows.
        bad_rows (`str`, *optional*, defaults to `"error"`): rows without usable problem or answer: `error` or `drop`.
        reward_funcs (`list[str]`, *optional*, defaults to `["math"]`): `math`, `module:function`, a reward model's id.
        reward_model_name_or_path (`str`, *optional*): a reward model, beside `reward_funcs`.
        resume (`str`, *optional*): `auto` goes on from the newest whole checkpoint in `output_dir`, if there is one.
        eval_benchmark (`str`, *optional*): benchmark to evaluate on while training (`eval_stage_ends`,
            `eval_strategy`), a name of `mu-grpo eval`.
        eval_data (`str`, *optional*): file or Hub id to take it from; for a benchmark of your own.
        eval_max_problems (`int`, *optional*): its first so many problems alone.
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
    eval_benchmark: str | None = field(default=None, metadata={"help": "Benchmark to evaluate on while training."})
    eval_data: str | None = field(default=None, metadata={"help": "File or Hub id to take it from."})
    eval_max_problems: int | None = field(default=None, metadata={"help": "Its first so many problems alone."})
    resume: str | None = field(
        default=None, metadata={"help": "'auto': go on from the newest checkpoint in output_dir, if there is one."}
    )


HELP = """train from a recipe

  mu-grpo train --config RECIPE.yaml [--key value ...]
  accelerate launch --config_file recipes/accelerate/ddp.yaml -m mu_grpo_trl.train --config RECIPE.yaml

A recipe is a flat YAML of the options below and of TRL's GRPOConfig and ModelConfig (learning_rate, max_steps,
output_dir, report_to, ...: --help-all shows them). --key value wins over the recipe. --resume auto goes on with a run
that was stopped. docs/guarantees.md has the exit codes."""

PARSED_CLASSES = (ScriptArguments, MuGRPOConfig, ModelConfig)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Names each option once: `HfArgumentParser` knows `--max_steps` and `--max-steps`."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        kinds = ", ".join(map(str, action.choices or ())) or (action.metavar or action.dest.upper())
        return f"{action.option_strings[0]} {kinds}"


class RecipeParser(TrlParser):
    """
    Raises what argparse would print below hundreds of lines of usage. `--help` shows the options of this package, of
    data and of LoRA; `--help-all` shows those of TRL and transformers too.
    """

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def format_help(self) -> str:
        inherited = {option.name for option in fields(GRPOConfig)}
        groups: dict[str, list[argparse.Action]] = {title: [] for title in ("data and rewards", "stages", "LoRA")}
        own = {option.name for option in fields(ScriptArguments)}
        added = {option.name for option in fields(MuGRPOConfig)} - inherited
        for action in self._actions:
            if action.dest in own:
                groups["data and rewards"].append(action)
            elif action.dest in added:
                groups["stages"].append(action)
            elif action.dest.startswith("lora_") or action.dest in ("model_name_or_path", "use_peft"):
                groups["LoRA"].append(action)
        formatter = _Formatter(prog=self.prog, max_help_position=44)
        formatter.add_text(HELP)
        for title, actions in groups.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()

    def format_all_help(self) -> str:
        """All options, as argparse would show them."""
        return super().format_help()


def parse(argv: Sequence[str]) -> tuple[ScriptArguments, MuGRPOConfig, ModelConfig]:
    """
    Options from `--config FILE.yaml` and `--key value` arguments, which win.

    Raises:
        `ValueError`: an unknown key (with the nearest valid one), a value of a wrong type, or what `MuGRPOConfig`
            refuses.
    """
    launcher = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    launcher.add_argument("--config", type=Path)
    try:
        known, rest = launcher.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}: give the recipe's path after it.") from error
    if not argv:
        raise ValueError("No recipe is named: give `--config recipes/NAME.yaml`, or options as `--help` lists them.")
    recipe = {} if known.config is None else check_recipe(known.config)
    os.environ.update({name: str(value) for name, value in (recipe.pop("env", None) or {}).items()})
    return parse_options(recipe, rest)


def parse_options(
    recipe: dict[str, Any], arguments: Sequence[str]
) -> tuple[ScriptArguments, MuGRPOConfig, ModelConfig]:
    """
    Options from a checked recipe (without its `env`) and `--key value` arguments, which win.

    Raises:
        `ValueError`: as [`parse`].
    """
    parser = make_parser()
    if "--help-all" in arguments:
        print(parser.format_all_help())
        raise SystemExit(0)
    parser.set_defaults_with_config(**recipe)
    *parsed, unknown = parser.parse_args_into_dataclasses(list(arguments), return_remaining_strings=True)
    if unknown:
        options = [option for option in parser._option_string_actions if option.startswith("--")]
        raise ValueError(f"Unknown option {unknown[0]!r}.{nearest(unknown[0].partition('=')[0], options)}")
    script, config, model = parsed
    return script, config, model


def make_parser() -> RecipeParser:
    """All options of a recipe, as a command line."""
    parser = RecipeParser(PARSED_CLASSES, prog="mu-grpo train", allow_abbrev=False)  # type: ignore[arg-type]  # any iterable of classes
    # The trainer turns dropout off; a bar would fill a log file with its states.
    parser.set_defaults(lora_dropout=0.0, disable_tqdm=not sys.stderr.isatty())
    return parser


def check_recipe(path: Path, classes: Iterable[type] = PARSED_CLASSES) -> dict[str, Any]:
    """
    The options in a recipe and its bases, every key of them one of `classes` and every value of its type.

    Raises:
        `ValueError`: what [`~mu_grpo_trl.recipe.read_recipe`] refuses, an unknown key, or a wrong value.
    """
    types = option_types(classes)
    return {key: check_setting(key, setting, types) for key, setting in read_recipe(path).items()}


def option_types(classes: Iterable[type] = PARSED_CLASSES) -> dict[str, Any]:
    """Declared types of all that a recipe may hold, by name."""
    types = {name: kind for options in classes for name, kind in get_type_hints(options).items()}
    return types | {"env": dict[str, Any] | None}


def check_setting(key: Any, setting: Setting, types: dict[str, Any]) -> Any:
    """
    The value of a setting, as one of `types` says.

    Raises:
        `ValueError`: naming the recipe, when there is no such option, or the value is not of its type.
    """
    if key not in types:
        raise ValueError(f"{setting.path}: unknown key {key!r}.{nearest(key, types)}")
    if key in TAKES_BOOL_TOO:
        return setting.value
    try:
        return as_declared(key, setting.value, types[key])
    except ValueError as error:
        raise ValueError(f"{setting.path}: {error}") from error


def recipe_path(name: str) -> Path:
    """A recipe of this project by its file name: in the installed package, or in the checkout beside it."""
    package = Path(__file__).parent
    return next(path for path in (package / "recipes" / name, package.parent / "recipes" / name) if path.exists())


def load_dataset(script: ScriptArguments) -> Dataset:
    """The recipe's prompts with their answers."""
    if not script.dataset_name:
        raise ValueError("`dataset_name` is not set. Give a Hub id, a local file, or `lab:arithmetic`.")
    if script.dataset_name.startswith("lab:"):
        return load_task(script.dataset_name.removeprefix("lab:"), script.max_rows)
    return load_prompts(
        script.dataset_name,
        split=script.dataset_split,
        config=script.dataset_config,
        prompt_column=script.prompt_column,
        answer_column=script.answer_column,
        keep_columns=script.keep_columns or (),
        max_rows=script.max_rows,
        bad_rows=script.bad_rows,  # type: ignore[arg-type]
        **prompt_style(script),
    )


def prompt_style(script: ScriptArguments) -> dict[str, Any]:
    """How the recipe puts a problem into a prompt, as arguments of [`~mu_grpo_trl.data.load_prompts`]."""
    return {
        "conversational": script.conversational,
        "prompt_template": None if script.prompt_template.lower() == "none" else script.prompt_template,
        "system_prompt": script.system_prompt,
    }


def load_eval_dataset(script: ScriptArguments) -> Dataset | None:
    """The recipe's benchmark to evaluate on while training, if it names one."""
    if script.eval_benchmark is None:
        return None
    data = {script.eval_benchmark: script.eval_data} if script.eval_data else {}
    columns = script.prompt_column, script.answer_column or "answer"
    ((benchmark, source),) = find_benchmarks([script.eval_benchmark], data, None, *columns)
    return load_benchmark(benchmark, source, max_problems=script.eval_max_problems, **prompt_style(script))


def usable_golds(dataset: Dataset, bad_rows: str, workers: int) -> Dataset:
    """
    The rows whose gold math-verify can find equal to an answer; the others are refused or dropped, as `bad_rows` says.

    Raises:
        `ValueError`: there are others, and `bad_rows` is `"error"`, or none is left.
    """
    report = check_golds(dataset["answer"], workers=workers)
    bad = {row: gold for row, gold, kind in report.rows if kind in ("empty", "unreachable")}
    if not bad:
        return dataset
    named = "; ".join(f"row {row}: {gold[:60]!r}" for row, gold in list(bad.items())[:10])
    finding = f"{len(bad)} of {len(dataset)} answers can be matched by no response ({named})"
    if bad_rows == "error" or len(bad) == len(dataset):
        raise ValueError(
            f"{finding}. Mend them, drop the rows by `bad_rows: drop`, or choose another `answer_column`."
        )
    logger.warning("%s; these rows are dropped.", finding)
    return dataset.select([row for row in range(len(dataset)) if row not in bad])


def make_trainer(script: ScriptArguments, config: MuGRPOConfig, model: ModelConfig) -> MuGRPOTrainer:
    """A trainer for a parsed recipe. Data, rewards and servers are checked before the model is loaded."""
    check_model(model)
    dataset = load_dataset(script)
    rewards = reward_names(script)
    check_rewards(rewards, dataset.column_names)
    if "math" in rewards:
        dataset = usable_golds(dataset, script.bad_rows, config.reward_threads)
    config.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **config.model_kwargs,
    }
    return MuGRPOTrainer(
        model=str(model.model_name_or_path),
        reward_funcs=rewards,
        args=config,
        train_dataset=dataset,
        eval_dataset=load_eval_dataset(script),
        peft_config=adapter(model),
    )


def check_model(model: ModelConfig) -> None:
    """
    Raises:
        `ValueError`: no model is named, or one to be quantized.
    """
    if not model.model_name_or_path:
        raise ValueError("`model_name_or_path` is not set. Give a Hub id or a local folder.")
    if model.load_in_4bit or model.load_in_8bit:
        raise ValueError(
            "`load_in_4bit`/`load_in_8bit`: QLoRA is not supported (docs/peft.md says why). Use LoRA on a base in "
            "half precision: `use_peft: true`, `dtype: bfloat16`."
        )


def reward_names(script: ScriptArguments) -> list[Any]:
    """The recipe's rewards, the reward model among them."""
    return [*script.reward_funcs, *filter(None, [script.reward_model_name_or_path])]


def adapter(model: ModelConfig) -> Any:
    """The recipe's `LoraConfig`, or None. TRL turns one target module into text, which PEFT reads as a pattern."""
    config: Any = get_peft_config(model)
    if config is not None and isinstance(config.target_modules, str) and config.target_modules.isidentifier():
        config.target_modules = {config.target_modules}
    return config


def resume_point(script: ScriptArguments, config: MuGRPOConfig) -> str | None:
    """
    The checkpoint to go on from.

    Raises:
        `ValueError`: one is asked for that is not there, or `resume` is unknown.
    """
    wanted = str(config.resume_from_checkpoint or "false")
    if script.resume not in (None, "auto"):
        raise ValueError(
            f"`resume={script.resume!r}` is unknown: use 'auto', or name a folder in `resume_from_checkpoint`."
        )
    if wanted.lower() == "false":
        any_there = any(config.output_path.glob("checkpoint-*"))
        wanted = "true" if script.resume == "auto" and any_there else ""
    if wanted.lower() == "true":
        newest = last_whole_checkpoint(config.output_path)
        wanted = str(newest or "")
    if wanted and not Path(wanted, "trainer_state.json").is_file():
        raise ValueError(
            f"`resume_from_checkpoint={wanted!r}` is no checkpoint: it has no `trainer_state.json`. Name a "
            "`checkpoint-*` folder, or 'true' for the newest one."
        )
    return wanted or None


@contextmanager
def message_only(*mendable: type[Exception]) -> Iterator[None]:
    """
    End the program with the message of what a user can mend, and exit code 2 (3 for what training itself did wrong);
    with `MU_GRPO_DEBUG`, with a traceback.
    """
    try:
        yield
    except mendable as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        print(f"mu-grpo: {error}\n(For the traceback, set {DEBUG_VARIABLE}=1.)", file=sys.stderr)
        raise SystemExit(3 if isinstance(error, LearningError) else 2) from error


def log_to_stderr(config: MuGRPOConfig) -> None:
    """Show what this package logs, from `log_level` (`info`) or, beside the main process, `log_level_replica` on."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    is_set = config.log_level != "passive" or config.process_index > 0
    logging.getLogger(__package__).setLevel(config.get_process_log_level() if is_set else logging.INFO)


def push(trainer: MuGRPOTrainer, dataset_name: str | None) -> None:
    """
    Push the saved model. What goes wrong costs nothing but the push.

    Raises:
        `SystemExit`: with exit code 4, when it failed.
    """
    try:
        trainer.push_to_hub(dataset_name=dataset_name)
    except (HTTPError, OSError, ValueError) as error:  # the network's, the disk's, and what the Hub finds in a name
        folder, repo = trainer.args.output_dir, trainer.args.hub_model_id or trainer.args.output_path.name
        logger.error(
            "The push to the Hub failed: %s: %s. The model is in %s; push it later by `mu-grpo push %s %s`.",
            type(error).__name__, error, folder, folder, repo,
        )  # fmt: skip
        raise SystemExit(PUSH_FAILED) from error


def main(argv: Sequence[str] | None = None) -> None:
    """Train, save the model to `output_dir`, and push it to the Hub if asked to."""
    with message_only(EngineError, RewardError, StageError, ValueError, TypeError, OSError, ImportError):
        script, config, model = parse(sys.argv[1:] if argv is None else argv)
        log_to_stderr(config)
        resume = resume_point(script, config)
        trainer = make_trainer(script, config, model)
    with message_only(CheckpointError, EngineError, FolderInUseError, LearningError, RewardError, StageError):
        trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(config.output_dir, _internal_call=True)  # else it would push
    name = script.dataset_name or ""
    dataset_name = None if name.startswith("lab:") or Path(name).exists() else name
    trainer.create_model_card(dataset_name=dataset_name)
    if config.push_to_hub:
        push(trainer, dataset_name)


if __name__ == "__main__":
    main()
