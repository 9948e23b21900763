"""A run before it starts: its stages and tokens, disk, memory of both phases, hours, and what is wrong with it."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig
from transformers.trainer_utils import SaveStrategy

from ..preflight import cpu_server_env
from ..rollout.fill import FLUSH_GROUPS
from ..schedule import Schedule
from ..staging import IN_PROCESS_ROWS
from ..telemetry import peak_flops
from ..train import reward_names
from . import checks, disk, memory
from .architecture import Architecture
from .launch import Launch
from .memory import GIB, Workload
from .options import Findings, Options

DEVICE_BYTES = {
    "H200": 141e9,
    "H100": 80e9,
    "B200": 180e9,
    "A100": 80e9,
    "L40S": 48e9,
    "L4": 24e9,
    "A10G": 24e9,
    "RTX 4090": 24e9,
}
"""Memory of a device (the vendors' data sheets)."""
CPU_FLOPS = 5e10
"""Of two cores; a guess, unlike the data sheets of devices."""
MATH_WORKER_BYTES, REWARD_WORKER_BYTES = 66 * 2**20, 21 * 2**20
"""Resident memory of a reward worker with math-verify loaded, and of one with nothing but the interpreter."""
LARGEST_KEPT_BYTES = 32 * 2**20
"""glibc keeps smaller pieces that are freed for itself (`M_MMAP_THRESHOLD`'s greatest value)."""
VLLM_SERVER_BYTES = 2 * GIB
"""Resident memory of a vLLM server's processes (API server, engine, one worker) before the worker has its weights."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
VLLM_STEP_TOKENS = 8192


@dataclass(frozen=True)
class Assumptions:
    """
    What a plan cannot know. Each is an option of `mu-grpo plan`, and shown with what follows from it.

    Args:
        device (`str`): one of `DEVICE_BYTES`.
        device_gb (`float` or None): its memory, in 10⁹ bytes; None for the data sheet's.
        prompt_tokens (`float` or None): mean length of a prompt; None to measure it here, or for 150.
        response_tokens (`float` or None): mean length of a response; None for half of what it may be.
        skipped_share (`float`): responses without advantage, which are not forwarded.
        rollout_share (`float`), optimize_share (`float`): of the device's peak operations that generation (2 per
            parameter and token) and updates (6, or 8 with gradient checkpointing) reach.
        generated_tokens_per_s, forwarded_tokens_per_s (`float` or None): of all devices together; None for what
            follows from the shares.
        stage_overhead_s (`float`): publishing, waking vLLM, and handing over the device, a stage.
    """

    device: str = "H200"
    device_gb: float | None = None
    prompt_tokens: float | None = None
    response_tokens: float | None = None
    skipped_share: float = 0.3
    rollout_share: float = 0.1
    optimize_share: float = 0.35
    generated_tokens_per_s: float | None = None
    forwarded_tokens_per_s: float | None = None
    stage_overhead_s: float = 120.0

    @property
    def device_bytes(self) -> int:
        """Memory of one device."""
        return int(self.device_gb * 1e9 if self.device_gb else DEVICE_BYTES[self.device])


@dataclass
class Plan:
    """
    What a run will need; a part that is not known is empty. Sizes are in bytes, times in hours.

    Args:
        findings (`Findings`): errors and warnings.
        launch (`dict`), schedule (`dict`), tokens (`dict`), disk (`dict`), hours (`dict`): by name.
        optimization (`dict`), rollout (`dict`): memory of one device in each phase, part by part.
        host (`dict`): memory of one node's host, part by part.
        assumptions (`dict`): as they were used.
    """

    findings: Findings
    launch: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, Any] = field(default_factory=dict)
    disk: dict[str, int] = field(default_factory=dict)
    optimization: dict[str, int] = field(default_factory=dict)
    rollout: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    hours: dict[str, float] = field(default_factory=dict)
    assumptions: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        values = asdict(self)
        return values.pop("findings") | values


def make_plan(
    options: Options,
    model_config: PretrainedConfig | None,
    launch: Launch,
    assumptions: Assumptions,
    findings: Findings,
) -> Plan:
    """
    Args:
        options (`Options`): of the run.
        model_config (`PretrainedConfig` or None): of its policy; None leaves memory, disk of weights and time out.
        launch (`Launch`): processes and sharding.
        assumptions (`Assumptions`): what cannot be known.
        findings (`Findings`): what is wrong so far; the plan adds to it.
    """
    plan = Plan(findings)
    context = checks.check_model_and_context(options, model_config, findings)
    prompts = checks.check_data(options, context, findings)
    checks.check_training(options, launch, findings)
    num_servers = checks.check_servers(options, model_config, launch, findings)
    schedule = checks.check_schedule(options, prompts, findings)
    assumptions = _completed(assumptions, options, context, prompts)
    plan.launch = {"processes": launch.num_processes, "nodes": launch.num_nodes, "sharding": launch.sharding}
    plan.assumptions = asdict(assumptions)
    if schedule is None:
        return plan
    _Planner(plan, options, launch, assumptions, schedule, prompts, context, num_servers).fill(model_config)
    return plan


def _completed(
    assumptions: Assumptions, options: Options, context: int | None, prompts: checks.Prompts
) -> Assumptions:
    prompt = assumptions.prompt_tokens or prompts.mean_tokens or 150.0
    return replace(
        assumptions,
        prompt_tokens=prompt,
        response_tokens=assumptions.response_tokens or _longest_response(options, context, prompt) / 2,
    )


def _longest_response(options: Options, context: int | None, prompt_tokens: float) -> float:
    limit = options.config.max_completion_length or math.inf
    longest = min(limit, max(1.0, (context or math.inf) - prompt_tokens))
    return longest if math.isfinite(longest) else 4096.0


@dataclass
class _Planner:
    """Fills the parts of a plan one after the other."""

    plan: Plan
    options: Options
    launch: Launch
    assumptions: Assumptions
    schedule: Schedule
    prompts: checks.Prompts
    context: int | None
    num_servers: int

    def fill(self, model_config: PretrainedConfig | None) -> None:
        self._schedule_and_tokens()
        findings = self.plan.findings
        if model_config is None:
            name = self.options.model.model_name_or_path
            findings.warnings.append(
                f"The configuration of {name!r} is not on this machine: memory, weights on disk and hours are not "
                "planned. Name its config.json by --model-config."
            )
            self._disk(None)
            return
        with findings.collecting():
            architecture = Architecture.of(model_config)
            self._work = self._workload(architecture)
            self._disk(architecture)
            self._memory(architecture)
            self._hours(architecture)

    # Stages and tokens

    def _schedule_and_tokens(self) -> None:
        config, schedule, assumed = self.options.config, self.schedule, self.assumptions
        groups = schedule.num_updates * schedule.prompts_per_update
        size = config.num_generations or 1
        self.responses = groups * size
        last = schedule.updates_in(schedule.num_stages - 1)
        self.plan.schedule = {
            "stages": schedule.num_stages,
            "updates": schedule.num_updates,
            "updates_per_stage": schedule.updates_in(0),
            "updates_in_last_stage": last,
            "prompt_groups": groups,
            "responses": self.responses,
            "responses_per_stage": schedule.num_groups(0) * size,
            "responses_per_update": schedule.prompts_per_update * size,
            "epochs": groups / self.prompts.number if self.prompts.number else None,
        }
        if last != schedule.updates_in(0):
            self.plan.findings.warnings.append(
                f"`max_steps={schedule.num_updates}` is no multiple of `stage_updates={schedule.stage_updates}`: the "
                f"last stage has {last} updates."
            )
        assert assumed.response_tokens is not None and assumed.prompt_tokens is not None
        longest = _longest_response(self.options, self.context, assumed.prompt_tokens)
        self.plan.tokens = {
            "generated": round(0 if config.train_on_stage else self.responses * assumed.response_tokens),
            "generated_at_most": round(0 if config.train_on_stage else self.responses * longest),
            "forwarded": round(
                self.responses * (1 - assumed.skipped_share) * (assumed.prompt_tokens + assumed.response_tokens)
            ),
        }

    # Disk

    def _disk(self, a: Architecture | None) -> None:
        config, schedule, assumed = self.options.config, self.schedule, self.assumptions
        assert assumed.response_tokens is not None and assumed.prompt_tokens is not None
        stages = 0 if config.train_on_stage else schedule.num_stages
        kept = min(stages, stages if config.keep_stages is None else config.keep_stages + 1)
        share = kept / schedule.num_stages
        rewards, size = len(reward_names(self.options.script)), config.num_generations or 1
        longest = _longest_response(self.options, self.context, assumed.prompt_tokens)

        def rows(response_tokens: float) -> int:
            assert assumed.prompt_tokens is not None
            responses = round(self.responses * share)
            return disk.stage_rows(responses, assumed.prompt_tokens, response_tokens, rewards, FLUSH_GROUPS * size)

        indices = round(schedule.num_updates * schedule.prompts_per_update * share) * 8
        self.plan.disk = {"stages": rows(assumed.response_tokens) + indices, "stages at most": rows(longest) + indices}
        if a is None:
            return
        work, tokenizer = self._work, self._tokenizer_bytes()
        untied = config.starts_vllm and self.options.on_cpu
        policies = min(kept, kept if config.keep_policies is None else max(config.keep_policies, 1))
        masters = self.launch.sharding in ("zero2", "zero3") and work.compute_bytes < 4
        weights = disk.checkpoint(a, work.weight_bytes, work.trainable, tokenizer, not config.save_only_model, masters)
        one = weights + disk.run_state(
            schedule.num_updates / max(1.0, config.logging_steps), self.launch.num_processes
        )
        written = self._checkpoints_written()
        held = min(written, config.save_total_limit or written)
        self.plan.disk |= {
            "policies": policies * disk.policy(a, work.weight_bytes, tokenizer, untied),
            "one checkpoint": one,
            "checkpoints": held * one,
            "final model": disk.policy(a, work.weight_bytes, tokenizer, untied=False),
        }
        self.plan.disk["total"] = sum(
            self.plan.disk[name] for name in ("stages", "policies", "checkpoints", "final model")
        )
        # A checkpoint is written before the one it replaces is removed.
        self.plan.disk["at most"] = (
            self.plan.disk["total"] - self.plan.disk["stages"] + self.plan.disk["stages at most"]
            + (one if held < written else 0)
        )  # fmt: skip
        checks.check_saving(self.options, schedule, written, self.plan.findings)
        folder = next(path for path in (config.output_path, *config.output_path.absolute().parents) if path.exists())
        free = shutil.disk_usage(folder).free
        if free < self.plan.disk["at most"]:
            self.plan.findings.warnings.append(
                f"{config.output_dir!r} has {free / GIB:.0f} GiB free here, but the run may take "
                f"{self.plan.disk['at most'] / GIB:.0f} GiB. Lower `save_total_limit`, `keep_stages` or "
                "`keep_policies`, or choose another `output_dir`."
            )

    def _checkpoints_written(self) -> int:
        config, updates = self.options.config, self.schedule.num_updates
        if config.save_strategy == SaveStrategy.NO:
            return 0
        every = config.save_steps if config.save_steps >= 1 else math.ceil(config.save_steps * updates)
        at = set(range(int(every), updates + 1, int(every))) if config.save_strategy == SaveStrategy.STEPS else set()
        if config.save_at_stage_end:
            at |= set(range(self.schedule.stage_updates, updates + 1, self.schedule.stage_updates))
        return len(at | {updates})

    def _tokenizer_bytes(self) -> int:
        """Of the tokenizer's files where they are on this machine; else of a vocabulary of 150,000, about 11 MB."""
        folder = Path(str(self.options.model.model_name_or_path))
        if not folder.is_dir():
            return 11_000_000
        weights = (".safetensors", ".bin", ".pt", ".md")
        return sum(p.stat().st_size for p in folder.iterdir() if p.is_file() and p.suffix not in weights)

    # Memory

    def _workload(self, a: Architecture) -> Workload:
        options, config = self.options, self.options.config
        named = DTYPE_BYTES.get(str(options.model.dtype).removeprefix("torch."))
        weight_bytes = named or a.dtype_bytes or 4
        ranks = self.launch.num_processes
        rows = min(
            config.per_device_train_batch_size,
            math.ceil(self.schedule.prompts_per_update * (config.num_generations or 1) / ranks),
        )
        tokens = config.max_tokens_per_microbatch
        if self.context is not None:
            longest = self.prompts.longest_tokens or self.context
            row = min(self.context, longest + (config.max_completion_length or self.context))
            tokens = max(min(tokens, rows * row), min(row, self.context))
        return Workload(
            weight_bytes=weight_bytes,
            compute_bytes=2 if options.half else weight_bytes,
            microbatch_tokens=tokens,
            checkpointing=bool(config.gradient_checkpointing),
            trainable=_lora_parameters(a, options) or a.num_parameters,
            reference=bool(config.beta) and not options.model.use_peft,
            sync_once=config.sync_once,
            offload=config.offload,
            on_cpu=options.on_cpu,
        )

    def _memory(self, a: Architecture) -> None:
        plan, work, launch = self.plan, self._work, self.launch
        plan.optimization = memory.optimization(a, work, launch)
        plan.rollout = self._rollout_memory(a)
        if work.on_cpu:
            self._host_of_a_cpu_run(a)
        else:
            self._host_of_a_gpu_run(a)
            self._check_fit(a)

    def _rollout_memory(self, a: Architecture) -> dict[str, int]:
        config, work = self.options.config, self._work
        if config.train_on_stage:
            return {}
        state = memory.training_state(a, work, self.launch)
        if config.rollout_engine == "transformers":
            rows = config.rollout_concurrency or IN_PROCESS_ROWS
            size = config.num_generations or 1
            row = min(self.context or 0, (self.prompts.longest_tokens or self.context or 0) + self._max_response)
            return memory.in_process_rollout(a, work, self.launch, max(rows, size), row)
        if work.on_cpu or config.vllm_mode != "managed":
            return state
        held = {} if work.offload else {f"{name} (offload: false)": size for name, size in state.items()}
        served = self._server(a)
        return held | {
            "vLLM weights": served.weights,
            "vLLM KV cache": served.cache,
            "vLLM activations, logits, CUDA context": served.taken - served.weights - served.cache,
        }

    @property
    def _max_response(self) -> int:
        return self.options.config.max_completion_length or self.context or 0

    def _server(self, a: Architecture) -> memory.ServerMemory:
        config = self.options.config
        return memory.server(
            a,
            self.assumptions.device_bytes,
            config.vllm_gpu_memory_utilization,
            config.vllm_tensor_parallel_size,
            self._served_bytes,
            VLLM_STEP_TOKENS,
        )

    def _host_of_a_cpu_run(self, a: Architecture) -> None:
        """The device is the host: training, and vLLM beside it unless it is stopped in between."""
        config, ranks = self.options.config, self.launch.processes_per_node
        optimization, rollout = sum(self.plan.optimization.values()), sum(self.plan.rollout.values())
        state = sum(memory.training_state(a, self._work, self.launch).values())
        publishing = state + memory.published(a, self._work, untied=config.starts_vllm)
        if self.plan.rollout.get("KV cache", 0) < 2 * a.layers * LARGEST_KEPT_BYTES:
            optimization += max(0, rollout - state)  # freed, and kept by the C library
        servers, together = self._cpu_servers(a), config.vllm_release != "stop"
        optimizing = ranks * optimization + (servers if together else 0)
        generating = ranks * rollout + servers
        self.plan.host = self._processes() | {
            "training": max(publishing, optimization, rollout) * ranks,
            "vLLM servers": servers,
        }
        self.plan.host["total"] = sum(self._processes().values()) + max(optimizing, generating, publishing * ranks)

    def _cpu_servers(self, a: Architecture) -> int:
        if not self.num_servers:
            return 0
        cache = int(cpu_server_env()["VLLM_CPU_KVCACHE_SPACE"]) * GIB
        untied = a.head_parameters if a.tied else 0
        weights = (a.num_parameters + untied) * self._served_bytes
        return self.num_servers * (VLLM_SERVER_BYTES + cache + weights)

    @property
    def _served_bytes(self) -> int:
        """Of a weight in a managed server, whose `--dtype` wins over the trainer's precision."""
        arguments = " ".join(self.options.config.vllm_server_args or ()).replace("=", " ").split()
        named = arguments[arguments.index("--dtype") + 1] if "--dtype" in arguments[:-1] else None
        return DTYPE_BYTES.get(str(named), 2 if self.options.half else 4)

    def _processes(self) -> dict[str, int]:
        """Memory of interpreters and libraries: of the ranks of a node, and of the reward workers."""
        config = self.options.config
        sizes = [
            MATH_WORKER_BYTES if name == "math" else REWARD_WORKER_BYTES
            for name in reward_names(self.options.script)
            if name == "math" or ":" in str(name)
        ]
        return {
            "libraries": self.launch.processes_per_node * resident_bytes(),
            "reward workers": 0 if config.train_on_stage else config.reward_threads * sum(sizes),
        }

    def _host_of_a_gpu_run(self, a: Architecture) -> None:
        work, launch = self._work, self.launch
        parts = self._processes() | {"policy being written": memory.published(a, work, untied=False)}
        if work.offload and not self.options.config.train_on_stage:
            state = sum(memory.training_state(a, work, launch).values())
            parts["training state during the rollout"] = state * launch.processes_per_node
        parts["vLLM servers"] = self.num_servers * VLLM_SERVER_BYTES
        self.plan.host = parts | {"total": sum(parts.values())}

    def _check_fit(self, a: Architecture) -> None:
        findings, limit, config = self.plan.findings, self.assumptions.device_bytes, self.options.config
        needed = sum(self.plan.optimization.values())
        if needed > limit:
            largest = max(self.plan.optimization, key=lambda name: self.plan.optimization[name])
            findings.error(
                f"An update takes {needed / GIB:.0f} GiB a device (most of it {largest}), but a "
                f"{self.assumptions.device} has {limit / GIB:.0f}. {self._mend(a, limit)}"
            )
        if not config.starts_vllm or config.vllm_mode != "managed":
            return
        served, taken = self._server(a), sum(self.plan.rollout.values())
        if taken > limit:
            findings.error(
                f"`vllm_gpu_memory_utilization={config.vllm_gpu_memory_utilization}` and the training state that "
                f"`offload={config.offload}` leaves take {taken / GIB:.0f} GiB of a device's {limit / GIB:.0f}. Set "
                "`offload: true`, or lower `vllm_gpu_memory_utilization`."
            )
        if served.cache_tokens < (self.context or 1):
            findings.error(
                f"`vllm_tensor_parallel_size={config.vllm_tensor_parallel_size}`: beside the weights "
                f"({served.weights / GIB:.0f} GiB a device) a server has KV cache for {served.cache_tokens} tokens, "
                f"less than one context of {self.context}. Raise it, or `vllm_gpu_memory_utilization`."
            )

    def _mend(self, a: Architecture, limit: int) -> str:
        """The smallest change that makes an update fit."""
        work = self._work

        def fits(work: Workload, launch: Launch) -> bool:
            return sum(memory.optimization(a, work, launch).values()) <= limit

        if not work.checkpointing and fits(replace(work, checkpointing=True), self.launch):
            return "Set `gradient_checkpointing: true`."
        smaller = replace(work, checkpointing=True, microbatch_tokens=self.context or 1)
        if fits(smaller, self.launch):
            return (
                f"Set `gradient_checkpointing: true` and lower `max_tokens_per_microbatch="
                f"{self.options.config.max_tokens_per_microbatch}` to {smaller.microbatch_tokens}."
            )
        for ranks in (2, 4, 8, 16, 32, 64):
            for sharding in ("zero3", "fsdp2"):
                if ranks >= self.launch.num_processes and fits(smaller, Launch(ranks, 1, sharding)):
                    return f"Shard it over {ranks} devices (recipes/accelerate/{sharding}.yaml)."
        return "Train a smaller model, or a LoRA adapter (`use_peft: true`)."

    # Time

    def _hours(self, a: Architecture) -> None:
        config, assumed, launch = self.options.config, self.assumptions, self.launch
        peak = CPU_FLOPS if self._work.on_cpu else peak_flops(assumed.device) or 0.0
        generating = launch.num_processes if config.rollout_engine == "transformers" else launch.processes_per_node
        generated_per_s = assumed.generated_tokens_per_s or (
            peak * assumed.rollout_share * generating / (2 * a.num_parameters)
        )
        operations = 8 if self._work.checkpointing else 6
        extra = config.anchor == "trainer" or (config.objective == "m2po" and config.m2po_scope == "update")
        operations += 2 if extra else 0
        forwarded_per_s = assumed.forwarded_tokens_per_s or (
            peak * assumed.optimize_share * launch.num_processes / (operations * a.num_parameters)
        )
        rollout = self.plan.tokens["generated"] / generated_per_s / 3600
        optimize = self.plan.tokens["forwarded"] / forwarded_per_s / 3600
        stages = self.schedule.num_stages if config.starts_vllm else 0
        between = stages * assumed.stage_overhead_s / 3600
        self.plan.hours = {
            "rollout": rollout,
            "optimization": optimize,
            "between": between,
            "total": rollout + optimize + between,
        }
        self.plan.assumptions |= {
            "generated_tokens_per_s": generated_per_s,
            "forwarded_tokens_per_s": forwarded_per_s,
        }


def _lora_parameters(a: Architecture, options: Options) -> int:
    """Parameters of a LoRA on all linear layers, an upper bound where fewer are named; 0 without an adapter."""
    model = options.model
    if not model.use_peft:
        return 0
    widths = 2 * (a.hidden + a.query) + 2 * (a.hidden + a.key_value) + 3 * (a.hidden + a.intermediate)
    return a.layers * widths * (model.lora_r or 0)


def resident_bytes() -> int:
    """Resident memory of this process: the interpreter with the libraries that a trainer imports too."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * memory.PAGE
