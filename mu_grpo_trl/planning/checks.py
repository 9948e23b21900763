"""What can be found wrong with a run before anything is loaded, beside what its options refuse by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase
from transformers.trainer_utils import SaveStrategy

from ..preflight import check_adapter, check_dataset, check_evaluation, check_rewards, context_length, make_schedule
from ..rollout.vllm_process import device_sets
from ..schedule import Schedule
from ..train import adapter, check_model, load_dataset, resume_point, reward_names
from .launch import Launch
from .options import Findings, Options

KNOWN_ROWS = {"agentica-org/DeepScaleR-Preview-Dataset": 40315}
"""Rows of the training split, for a machine without a network."""
_DATA_FILES = (".jsonl", ".json", ".parquet", ".csv")


@dataclass(frozen=True)
class Prompts:
    """
    What is known of the training prompts.

    Args:
        number (`int` or None): usable prompts.
        mean_tokens (`float` or None), longest_tokens (`int` or None): where data and tokenizer are on this machine.
    """

    number: int | None = None
    mean_tokens: float | None = None
    longest_tokens: int | None = None


def check_model_and_context(options: Options, config: PretrainedConfig | None, findings: Findings) -> int | None:
    """The limit on prompt and response together, in tokens; None if it is not known."""
    with findings.collecting():
        check_model(options.model)
    if config is None:
        return options.config.context_limit
    with findings.collecting():
        return context_length(options.config, config)
    return options.config.context_limit


def check_data(options: Options, context: int | None, findings: Findings) -> Prompts:
    """Read the data if it is on this machine, and the prompts with the tokenizer if that is as well."""
    script, config = options.script, options.config
    name = script.dataset_name
    columns: list[str] = ["prompt", *filter(None, ["answer" if script.answer_column else None])]
    columns += script.keep_columns or []
    prompts = Prompts(KNOWN_ROWS.get(str(name)))
    if not name or name.startswith("lab:") or Path(name).exists():
        with findings.collecting():
            dataset = load_dataset(script)
            columns, prompts = dataset.column_names, Prompts(len(dataset))
            tokenizer = _tokenizer(options)
            if tokenizer is not None and context is not None:
                prompts = _measured(dataset, options, tokenizer, context)
    elif name.count("/") > 1 or name.startswith((".", "/", "~")) or name.endswith(_DATA_FILES):
        findings.error(f"`dataset_name={name!r}` is no file or folder here. Name one, a Hub id, or `lab:arithmetic`.")
    if script.max_rows is not None and prompts.number is not None:
        prompts = Prompts(min(prompts.number, script.max_rows), prompts.mean_tokens, prompts.longest_tokens)
    with findings.collecting():
        check_rewards(reward_names(script), columns)
    names = reward_names(script)
    if config.reward_weights is not None and len(config.reward_weights) != len(names):
        findings.error(
            f"`reward_weights={config.reward_weights}` has {len(config.reward_weights)} entries for {len(names)} "
            f"reward(s) ({', '.join(names)}). Give one weight for each."
        )
    return prompts


def _measured(dataset: Dataset, options: Options, tokenizer: PreTrainedTokenizerBase, context: int) -> Prompts:
    _, report = check_dataset(dataset, options.config, tokenizer, context)
    return Prompts(report.num_prompts, report.mean_tokens, report.longest_tokens)


def _tokenizer(options: Options) -> PreTrainedTokenizerBase | None:
    name = str(options.model.model_name_or_path)
    if Path(name).is_dir() and not any(Path(name, file).exists() for file in ("tokenizer.json", "tokenizer.model")):
        return None  # transformers would make one without a vocabulary
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True, padding_side="left")
    except (OSError, ValueError, TypeError):  # it is not here; what needs it stays unknown
        return None


def check_training(options: Options, launch: Launch, findings: Findings) -> None:
    """Launcher, ranks, adapter, evaluation, checkpoints."""
    config = options.config
    for problem in launch.problems(options.on_cpu):
        findings.error(problem)
    with findings.collecting():
        config.check_ranks(launch.num_processes)
    with findings.collecting():
        check_evaluation(config, None)
    with findings.collecting():
        if (peft_config := adapter(options.model)) is not None:
            check_adapter(peft_config)
    with findings.collecting():
        resume_point(options.script, config)
    attention = options.model.attn_implementation
    if config.share_prompts and attention not in (None, "sdpa"):
        findings.error(
            f"`share_prompts=True` needs full attention by 'sdpa', but `attn_implementation={attention!r}`. Leave one "
            "out."
        )
    if launch.mixed_precision == "fp16" and config.bf16 or launch.mixed_precision == "bf16" and config.fp16:
        findings.error(
            f"`mixed_precision: {launch.mixed_precision}` in the launcher's configuration contradicts the recipe's "
            f"`bf16={config.bf16}`. Make them agree."
        )
    rows = config.prompts_per_update * (config.num_generations or 1)
    if rows % launch.num_processes:
        findings.warnings.append(
            f"{rows} responses an update do not divide among {launch.num_processes} ranks: some have one more. It is "
            "exact, and slower if responses are few."
        )
    if config.padding_free and attention == "sdpa":
        findings.warnings.append("`padding_free=True` is exact with 'sdpa', but slow: use flash_attention_2.")


def check_schedule(options: Options, prompts: Prompts, findings: Findings) -> Schedule | None:
    """The run's schedule; None if its length is not known."""
    config = options.config
    if config.train_on_stage and not Path(config.train_on_stage).exists():
        findings.warnings.append(f"The stage {config.train_on_stage!r} is not here yet: `max_steps` is taken for it.")
        if config.max_steps <= 0:
            return None
        config.stage_updates, config.train_on_stage = config.max_steps, None
    if prompts.number is None and config.max_steps <= 0 and not config.train_on_stage:
        findings.warnings.append("How many prompts there are is not known here, so neither is the number of updates.")
        return None
    number = prompts.number or config.prompts_per_update
    if number < config.prompts_per_update:
        findings.error(
            f"The dataset has {number} usable prompts, fewer than one update takes (`prompts_per_update="
            f"{config.prompts_per_update}`). Lower `prompts_per_update` to at most {number}, or add prompts."
        )
        return None
    with findings.collecting():
        return make_schedule(config, number)
    return None


def check_saving(options: Options, schedule: Schedule, checkpoints: int, findings: Findings) -> None:
    """Whether the run saves what a failure would cost, and not more."""
    config = options.config
    if config.save_strategy == SaveStrategy.NO:
        findings.warnings.append("`save_strategy='no'`: a run that is interrupted starts anew.")
    elif schedule.num_stages > 64 and config.save_at_stage_end:
        findings.warnings.append(
            f"`save_at_stage_end=True` writes {checkpoints} checkpoints, one for each of {schedule.num_stages} "
            "stages. `save_at_stage_end: false` leaves those of `save_steps`."
        )


def check_servers(options: Options, config: PretrainedConfig | None, launch: Launch, findings: Findings) -> int:
    """Managed vLLM servers; 0 where none is started."""
    run = options.config
    if not run.starts_vllm or run.vllm_mode != "managed":
        return 0
    size = run.vllm_tensor_parallel_size
    heads = getattr(config, "num_attention_heads", None)
    if heads is not None and heads % size:
        findings.error(
            f"`vllm_tensor_parallel_size={size}` does not divide the model's {heads} attention heads. Use one of "
            f"{', '.join(str(n) for n in (1, 2, 4, 8, 16) if heads % n == 0)}."
        )
    if options.on_cpu:
        return run.vllm_num_servers or 1
    devices = [str(number) for number in range(launch.processes_per_node)]
    if launch.num_nodes > 1:
        findings.warnings.append(
            f"Managed servers run on the first of {launch.num_nodes} nodes alone: for the others, start servers there "
            "and use `vllm_mode: server`."
        )
    with findings.collecting():
        return len(device_sets(run.vllm_num_servers, size, devices))
    return 0
