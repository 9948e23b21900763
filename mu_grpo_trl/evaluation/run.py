"""Evaluate checkpoints: generate what is missing, judge it by the math reward, and say what came of it."""

from __future__ import annotations

import logging
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..data import check_prompts, dataset_hash, tokenize_prompts, tokenizer_hash
from ..locks import RunLock
from ..preflight import context_length, load_tokenizer, make_vllm_engine, text_config
from ..rewards.math import MathReward, extract_answer
from ..rollout.engine import Engine, GroupRequest, GroupResult, SamplingParams
from ..rollout.transformers_engine import TransformersEngine
from ..staging import compare_probes, in_process_batches, probe_sequences
from ..train import prompt_style, usable_golds
from .benchmarks import PAPER_BENCHMARKS, Benchmark, find_benchmarks, load_benchmark
from .options import ASSUMPTION, GIVEN, PAPER, RECIPE, EvaluationConfig, Options
from .policies import Checkpoint, eos_token_ids, find_checkpoints, served
from .report import CheckpointScores, Results, Setting, score_benchmark
from .store import RESPONSES_NAME, Response, ResponseStore, keep_settings

logger = logging.getLogger(__name__)

POLICY_NAME = "policy"


@dataclass(frozen=True)
class Task:
    """
    A benchmark as it is evaluated.

    Args:
        benchmark ([`Benchmark`]): which.
        dataset (`datasets.Dataset`): its problems, with the columns `prompt` and `answer`.
        num_samples (`int`): responses to each problem.
    """

    benchmark: Benchmark
    dataset: Dataset
    num_samples: int


@dataclass(frozen=True)
class Model:
    """What of a checkpoint is known without its weights."""

    checkpoint: Checkpoint
    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig
    context_length: int


def evaluate(options: Options) -> Results:
    """
    Evaluate every checkpoint on every benchmark, or go on with an evaluation that was killed.

    Raises:
        `ValueError`: an option, a benchmark, a checkpoint or what the folder already holds does not fit.
        `FolderInUseError`: another evaluation works in `output_dir`.
        `EngineError`: the engine fails, or has other weights than the checkpoint.
    """
    evaluation = options.evaluation
    checkpoints = find_checkpoints(evaluation.checkpoints)
    tasks = load_tasks(options)
    models = [_describe(options, checkpoint) for checkpoint in checkpoints]
    for model in models:
        for task in tasks:
            check_prompts(
                task.dataset, model.tokenizer, model.context_length, 1, "error",
                chat_template_kwargs=options.config.template_kwargs,
            )  # fmt: skip
    folder = Path(evaluation.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock([folder])
    lock.acquire()
    try:
        keep_settings(folder, _binding_settings(options, tasks, models))
        engines, reward = _Engines(options), MathReward(workers=options.config.reward_threads)
        try:
            scores = [_evaluate_checkpoint(options, model, tasks, engines, reward) for model in models]
        finally:
            engines.close()
            reward.close()
            shutil.rmtree(folder / POLICY_NAME, ignore_errors=True)  # also what a killed start left there
        return Results(settings=_settings(options, tasks, models), checkpoints=scores)
    finally:
        lock.release()


def load_tasks(options: Options) -> list[Task]:
    """
    The benchmarks asked for, every row of them usable.

    Raises:
        `ValueError`: naming the benchmark and what is wrong with it.
    """
    evaluation, script = options.evaluation, options.script
    chosen = find_benchmarks(
        evaluation.benchmarks, evaluation.sources, evaluation.data_dir, script.prompt_column,
        script.answer_column or "answer",
    )  # fmt: skip
    tasks = []
    for benchmark, source in chosen:
        num_samples = evaluation.num_samples(benchmark)
        if evaluation.pass_at and max(evaluation.pass_at) > num_samples:
            raise ValueError(
                f"`pass_at={evaluation.pass_at}`: pass@{max(evaluation.pass_at)} cannot be estimated from the "
                f"{num_samples} samples of {benchmark.name!r}. Raise `samples`, or lower it."
            )
        dataset = load_benchmark(benchmark, source, max_problems=evaluation.max_problems, **prompt_style(script))
        try:
            dataset = usable_golds(dataset, "error", options.config.reward_threads)
        except ValueError as error:
            raise ValueError(f"Benchmark {benchmark.name!r} from {source!r}: {error}") from error
        tasks.append(Task(benchmark, dataset, num_samples))
    return tasks


def _describe(options: Options, checkpoint: Checkpoint) -> Model:
    config = options.config
    if checkpoint.is_adapter and not (checkpoint.folder / "config.json").exists():
        from peft import PeftConfig

        model_config = text_config(PeftConfig.from_pretrained(str(checkpoint.folder)).base_model_name_or_path, config)
    else:
        model_config = text_config(str(checkpoint.folder), config)
    tokenizer = load_tokenizer(None, str(checkpoint.folder), config)
    return Model(checkpoint, tokenizer, model_config, context_length(config, model_config))


def _evaluate_checkpoint(
    options: Options, model: Model, tasks: list[Task], engines: _Engines, reward: MathReward
) -> CheckpointScores:
    folder = Path(options.evaluation.output_dir)
    stores = [
        ResponseStore(
            folder / RESPONSES_NAME / model.checkpoint.file_name / f"{task.benchmark.name}.jsonl",
            len(task.dataset),
            task.num_samples,
        )
        for task in tasks
    ]
    if any(store.missing for store in stores):
        prompts = [_prompt_ids(options, model, task) for task in tasks]
        with engines.opened(model, [ids for task in prompts for ids in task]) as engine:
            for task, ids, store in zip(tasks, prompts, stores, strict=True):
                _fill(options, engine, model, task, ids, store, reward)
    return CheckpointScores(
        model.checkpoint,
        {
            task.benchmark.name: score_benchmark(task.benchmark, store, options.evaluation.ks(task.num_samples))
            for task, store in zip(tasks, stores, strict=True)
        },
    )


def _prompt_ids(options: Options, model: Model, task: Task) -> list[list[int]]:
    return tokenize_prompts(task.dataset["prompt"], model.tokenizer, options.config.template_kwargs)


def _fill(
    options: Options,
    engine: Engine,
    model: Model,
    task: Task,
    prompt_ids: list[list[int]],
    store: ResponseStore,
    reward: MathReward,
) -> None:
    """Generate, judge and keep the responses that `store` lacks."""
    sampling = _sampling(options, model, task)
    progress = tqdm(
        desc=f"{model.checkpoint.label}: {task.benchmark.title}", total=store.num_problems,
        initial=store.num_problems - len(store.missing), unit="problem", dynamic_ncols=True,
        disable=options.config.disable_tqdm,
    )  # fmt: skip
    with progress:
        for batch in _batches(options, prompt_ids, task.num_samples, set(store.missing)):
            for result in engine.generate(batch, sampling):
                if result.group not in store.responses:
                    store.append(_judge(result, task.dataset[result.group]["answer"], model.tokenizer, reward))
                    progress.update()


def _batches(
    options: Options, prompt_ids: list[list[int]], num_samples: int, missing: set[int]
) -> Iterator[list[GroupRequest] | Iterator[GroupRequest]]:
    """One stream for servers. In process, fixed batches, made again whole where a part is missing."""
    if options.config.rollout_engine == "vllm":
        yield (GroupRequest(problem, prompt_ids[problem]) for problem in sorted(missing))
        return
    for batch in in_process_batches(prompt_ids, num_samples, options.config.rollout_concurrency):
        if missing.intersection(batch):
            yield [GroupRequest(problem, prompt_ids[problem]) for problem in batch]


def _judge(result: GroupResult, gold: str, tokenizer: PreTrainedTokenizerBase, reward: MathReward) -> list[Response]:
    texts = tokenizer.batch_decode(
        [completion.token_ids.tolist() for completion in result.completions], skip_special_tokens=True
    )
    verdicts = reward.score([gold] * len(texts), texts)
    return [
        Response(
            problem=result.group,
            sample=sample,
            gold=gold,
            answer=extract_answer(text),
            correct=verdict == 1.0,
            num_tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
            text=text,
        )
        for sample, (completion, text, verdict) in enumerate(zip(result.completions, texts, verdicts, strict=True))
    ]


def _sampling(options: Options, model: Model, task: Task) -> SamplingParams:
    evaluation = options.evaluation
    return SamplingParams(
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        max_tokens=_max_tokens(options) or model.context_length,
        context_length=model.context_length,
        num_generations=task.num_samples,
        eos_token_ids=eos_token_ids(model.checkpoint.folder, model.config, model.tokenizer),
        stop=options.config.stop_strings,
        seed=zlib.crc32(f"{evaluation.seed}:{task.benchmark.name}".encode()),
    )


def _max_tokens(options: Options) -> int | None:
    """Limit on a response; None leaves it to the context."""
    from_recipe = options.config.max_completion_length if options.recipe else None
    return options.evaluation.max_tokens or from_recipe


class _Engines:
    """The engine of the evaluation, started when first needed, and anew for a model of another shape."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._engine: Engine | None = None
        self._shape: dict[str, Any] = {}

    @contextmanager
    def opened(self, model: Model, prompt_ids: list[list[int]]) -> Iterator[Engine]:
        """
        An engine with the weights of `model`, proved by the log-probs of a few prompts where it is another process.

        Raises:
            `EngineError`: it has others.
        """
        config = self._options.config
        is_server = config.rollout_engine == "vllm"
        probes = probe_sequences([np.asarray(ids) for ids in prompt_ids]) if is_server else []
        scratch = Path(self._options.evaluation.output_dir) / POLICY_NAME
        untie = is_server and not torch.cuda.is_available()
        with served(model.checkpoint, model.tokenizer, probes, scratch, untie=untie) as policy:
            engine = self._for(model)
            engine.open(policy.folder, model.checkpoint.weights_hash)
            if policy.expected is not None and policy.dtype is not None:
                compare_probes(engine, probes, policy.expected, config.probe_tolerance_for(policy.dtype))
            yield engine

    def close(self) -> None:
        """End what was started."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _for(self, model: Model) -> Engine:
        passing = ("_name_or_path", "transformers_version", "dtype", "use_cache")
        shape = {name: value for name, value in model.config.to_dict().items() if name not in passing}
        if self._engine is None or shape != self._shape:
            self.close()
            self._engine, self._shape = self._made(model), shape
        return self._engine

    def _made(self, model: Model) -> Engine:
        config = self._options.config
        if config.rollout_engine == "vllm":
            return make_vllm_engine(config, model.config, model.context_length)
        accelerator = Accelerator(cpu=config.use_cpu)
        return TransformersEngine(None, accelerator.device, pad_token_id=0, autocast=lambda: accelerator.autocast())


def _binding_settings(options: Options, tasks: list[Task], models: list[Model]) -> dict[str, Any]:
    """All that the stored responses depend on, by name."""
    evaluation, config = options.evaluation, options.config
    settings: dict[str, Any] = {
        "engine": config.rollout_engine,
        "temperature": evaluation.temperature,
        "top_p": evaluation.top_p,
        "max_tokens": _max_tokens(options),
        "stop": list(config.stop_strings),
    }
    if config.rollout_engine == "transformers":
        settings |= {"seed": evaluation.seed, "rollout_concurrency": config.rollout_concurrency}
    for task in tasks:
        name = task.benchmark.name
        settings |= {
            f"{name}: samples": task.num_samples,
            f"{name}: problems": len(task.dataset),
            f"{name}: hash of its prompts and answers": dataset_hash(task.dataset),
        }
    for model in models:
        label = model.checkpoint.label
        settings |= {
            f"{label}: hash of the weights": model.checkpoint.weights_hash,
            f"{label}: hash of the tokenizer": tokenizer_hash(model.tokenizer),
            f"{label}: context_length": model.context_length,
            f"{label}: chat_template_kwargs": config.template_kwargs,
            f"{label}: EOS ids": eos_token_ids(model.checkpoint.folder, model.config, model.tokenizer),
        }
    return settings


def _settings(options: Options, tasks: list[Task], models: list[Model]) -> list[Setting]:
    """The settings of the evaluation, each with where its value comes from."""
    evaluation, script, config = options.evaluation, options.script, options.config
    prompts_from = RECIPE if options.recipe else ASSUMPTION
    contexts = sorted({model.context_length for model in models})
    if evaluation.context_length is not None:
        context_from = GIVEN
    else:
        context_from = f"{RECIPE} ({PAPER}: as in training)" if config.context_limit is not None else "model"
    max_tokens = _max_tokens(options)
    samples = {task.benchmark.name: task.num_samples for task in tasks}
    samples_from = PAPER if set(samples) <= set(PAPER_BENCHMARKS) else ASSUMPTION
    if any(task.num_samples != task.benchmark.num_samples for task in tasks):
        samples_from = GIVEN
    return [
        Setting("metric", "pass@1, averaged over the samples", PAPER),
        Setting("samples", samples, samples_from),
        Setting("context_length", contexts[0] if len(contexts) == 1 else contexts, context_from),
        Setting(
            "max_tokens",
            max_tokens or "what the prompt leaves of the context",
            GIVEN if evaluation.max_tokens else RECIPE if max_tokens else ASSUMPTION,
        ),
        Setting("temperature", evaluation.temperature, evaluation.origin("temperature", ASSUMPTION)),
        Setting("top_p", evaluation.top_p, evaluation.origin("top_p", ASSUMPTION)),
        Setting("prompt_template", script.prompt_template, prompts_from),
        Setting("system_prompt", script.system_prompt, prompts_from),
        Setting("conversational", script.conversational, prompts_from),
        Setting("answer rule", "the math reward's: the last box, compared by Math-Verify", ASSUMPTION),
        Setting("choice of the checkpoint", "highest unweighted average of the benchmarks", PAPER),
        Setting("max_problems", evaluation.max_problems or "all", evaluation.origin("max_problems", PAPER)),
        Setting("benchmarks", {task.benchmark.name: _where(evaluation, task) for task in tasks}, ASSUMPTION),
        Setting("engine", config.rollout_engine, GIVEN if evaluation.engine else prompts_from),
        Setting(
            "seed", evaluation.seed if config.rollout_engine == "transformers" else "the server's own", ASSUMPTION
        ),
    ]


def _where(evaluation: EvaluationConfig, task: Task) -> str:
    """Which data set a benchmark is, in words."""
    benchmark = task.benchmark
    problems = f"{len(task.dataset)} problems"
    if benchmark.size is not None:
        problems = f"{len(task.dataset)} of {benchmark.size} problems of {benchmark.source}"
    local = benchmark.name in evaluation.sources or evaluation.data_dir is not None
    return f"{problems}, from a file" if local else problems
