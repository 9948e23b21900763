"""`MuGRPOConfig`: the options μ-GRPO adds to TRL's `GRPOConfig`, and what it refuses of the inherited ones."""

from __future__ import annotations

import copy
import json
import math
import os
import sys
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

import torch
from trl import GRPOConfig

from .options import as_declared, nearest

OBJECTIVES = ("mu_grpo", "grpo", "m2po")
VETO_SCOPES = ("sequence", "suffix", "non_trigger_suffix", "trigger", "none")

_BIASES_RATIO = (
    "it changes the distribution the engine samples from, so the engine's log-probs would no longer be the "
    "denominator of the trainer's ratio; leave it at its default"
)
_OTHER_LOSS = "it belongs to a loss type other than 'grpo'; leave it at its default"
_STAGED = "μ-GRPO generates a stage at a time; set `stage_updates` (μ) and `prompts_per_update` instead"
_TEACHER_FORCING = (
    "it makes the forward pass of training another function than the one that sampled, so the ratio is biased"
)

REFUSED: dict[str, str] = {
    "num_iterations": "each response is used by exactly one update; TRL's other μ is `stage_updates` here",
    "steps_per_generation": _STAGED,
    "generation_batch_size": _STAGED,
    "gradient_accumulation_steps": (
        "an update is split into micro-batches by `max_tokens_per_microbatch` and `per_device_train_batch_size`; set "
        "`prompts_per_update` to the product of per-device batch size, accumulation steps and processes, divided by "
        "`num_generations`"
    ),
    "top_p": _BIASES_RATIO,
    "top_k": _BIASES_RATIO,
    "min_p": _BIASES_RATIO,
    "repetition_penalty": _BIASES_RATIO,
    "vllm_structured_outputs_regex": _BIASES_RATIO,
    "vllm_group_port": "weights reach the servers by disk (`reload_weights`), not by a process group",
    "vllm_importance_sampling_correction": (
        "the ratio already has the engine's log-probs as its denominator; a second correction would count it twice"
    ),
    "vllm_importance_sampling_mode": "there is no second importance-sampling correction to configure",
    "vllm_importance_sampling_clip_max": "there is no second importance-sampling correction to configure",
    "vllm_importance_sampling_clip_min": "there is no second importance-sampling correction to configure",
    "vllm_importance_sampling_cap": "there is no second importance-sampling correction to configure",
    "use_transformers_continuous_batching": "it returns no log-probs of the sampled tokens; leave it off",
    "transformers_continuous_batching_config": "continuous batching is not used",
    "use_transformers_paged": "continuous batching is not used",
    "delta": "the design has no dual clip; bound the ratio with `epsilon_high`",
    "loss_type": "the objective averages over the tokens of a response, then over responses, which is 'grpo'",
    "importance_sampling_level": "the clip and the veto act on token ratios; leave it at 'token'",
    "multi_objective_aggregation": "rewards are summed by weight, then normalized; leave it at 'sum_then_normalize'",
    "top_entropy_quantile": "a quantile over the update would need every token's entropy before the first backward",
    "use_adaptive_entropy": "only a fixed `entropy_coef` is supported",
    "entropy_coef_min": "only a fixed `entropy_coef` is supported",
    "entropy_coef_max": "only a fixed `entropy_coef` is supported",
    "entropy_coef_delta": "only a fixed `entropy_coef` is supported",
    "entropy_target": "only a fixed `entropy_coef` is supported",
    "max_tool_calling_iterations": "tools are not supported yet",
    "off_policy_mask_threshold": "the veto takes its place; set `veto_scope` and `veto_threshold`",
    "sapo_temperature_neg": _OTHER_LOSS,
    "sapo_temperature_pos": _OTHER_LOSS,
    "vespo_k_pos": _OTHER_LOSS,
    "vespo_lambda_pos": _OTHER_LOSS,
    "vespo_k_neg": _OTHER_LOSS,
    "vespo_lambda_neg": _OTHER_LOSS,
    "router_aux_loss_coef": "the load-balancing loss of mixture-of-experts models is not supported yet; set it to 0.0",
    "pad_to_multiple_of": "rows are padded to the longest of their micro-batch only",
    "log_multimodal": "vision is not supported yet",
    "auto_find_batch_size": "an update holds whole prompt groups; lower `max_tokens_per_microbatch` instead",
    "ignore_data_skip": "it breaks the position within a stage on resume",
    "label_smoothing_factor": "the objective has no labels to smooth",
    "neftune_noise_alpha": _TEACHER_FORCING,
    "use_liger_kernel": "it replaces the forward that gives log-probs; set `model_init_kwargs={'use_kernels': True}`",
    "liger_kernel_config": "it configures `use_liger_kernel`, which replaces the forward that returns log-probs",
    "average_tokens_across_devices": "the objective always averages over all responses of the update, on all ranks",
    "data_seed": "the order of the prompts follows from `seed` alone, so that a stage can be made again",
    "train_sampling_strategy": "epochs are permuted by `seed`; `shuffle_dataset=False` keeps the dataset's own order",
    "include_num_input_tokens_seen": "the log already has the tokens generated, forwarded and trained on",
    "remove_unused_columns": "reward functions read the dataset's columns",
    "enable_jit_checkpoint": "SIGTERM always ends a run with a checkpoint; leave it off",
    "restore_callback_states_from_checkpoint": (
        "the stage and the timers are taken from every checkpoint already; other callbacks are your script's to build"
    ),
}
"""Inherited options that cannot be honored, with the reason. A value other than the default raises `ValueError`."""

_ALSO_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "router_aux_loss_coef": (0.0,),
    "top_k": (-1,),
    "min_p": (0.0,),
    "pad_to_multiple_of": (None,),
    "average_tokens_across_devices": (None,),
    "include_num_input_tokens_seen": (False,),
}
"""Values that ask for what the default does, and become it."""

_REFUSED_SERVER_ARGS = {
    "--host": (
        "managed servers listen on 127.0.0.1 alone, since vLLM's key does not guard the addresses that load weights; "
        "for servers elsewhere use `vllm_mode: server`, in a network of your own"
    ),
    "--port": "the trainer chooses a free one",
    "--api-key": "keys on a command line are seen by everyone; give it in the environment variable VLLM_API_KEY",
    "--model": "it is the stage's policy",
    "--served-model-name": "requests carry the trainer's own name for the policy",
    "--logprobs-mode": "the ratio needs the log-probs of the sampled distribution",
}
"""Of managed servers, with the reason."""

_SECRET = "<VLLM_API_KEY>"
_SECRETS = ("vllm_api_key", "hub_token")
TAKES_BOOL_TOO = ("scale_rewards", "resume_from_checkpoint")  # TRL and transformers take bools for these as well


@dataclass
class MuGRPOConfig(GRPOConfig):
    r"""
    Configuration of [`MuGRPOTrainer`]: TRL's [`~trl.GRPOConfig`] with the options below added, and the paper's
    defaults (AdamW, constant learning rate 1e-6, betas (0.9, 0.999), weight decay 0.01, no KL, temperature 1.0,
    8 generations; Appendix B.1).

    Inherited options are honored, or refused at construction with the reason (see `REFUSED`).

    Parameters:
        objective (`str`, *optional*, defaults to `"mu_grpo"`):
            `"mu_grpo"` (relaxed clip and veto), `"grpo"` (clip `[0.8, 1.2]`, no veto, unless set otherwise) or
            `"m2po"` (second-moment trust region).
        anchor (`str`, *optional*, defaults to `"engine"`):
            Whose log-probs are the ratio's denominator: those the `"engine"` returned while sampling, or those the
            `"trainer"` recomputes at the start of the stage (one more forward over the stage).
        prompts_per_update (`int`, *optional*, defaults to `32`):
            B_mini, prompt groups of one optimizer step over all ranks. The per-device batch size only caps
            micro-batches.
        stage_updates (`int`, *optional*, defaults to `1024`):
            μ, optimizer updates on one stage, so a stage holds `stage_updates × prompts_per_update` prompt groups.
        shuffle_stage (`bool`, *optional*, defaults to `False`):
            Permute the prompt groups among the updates of their stage, beyond the permutation of each epoch.
        train_on_stage (`str`, *optional*):
            Folder of a complete stage to take all updates on, once, instead of generating: no engine starts.
            `prompts_per_update` may be another than the stage was filled for; prompt groups that fill no update are
            left out. The number of updates follows, and `max_steps` can only lower it. What the stage was generated
            with (dataset, tokenizer, sampling, rewards) must be the same.
        save_at_stage_end (`bool`, *optional*, defaults to `True`):
            Write a checkpoint at the end of every stage, beside those of `save_steps`. Off where stages are short.
        epsilon (`float`, *optional*):
            The ratio is clipped below at `1 − epsilon`. Defaults to 1.0, and to 0.2 for `objective="grpo"`.
        epsilon_high (`float`, *optional*):
            The ratio is clipped above at `1 + epsilon_high`; `inf` is no upper bound. Defaults to 4.0, and to
            `epsilon` for `objective="grpo"`.
        veto_scope (`str`, *optional*):
            Tokens masked in a response of negative advantage once one of its ratios falls below `veto_threshold`:
            `"sequence"`, `"suffix"`, `"non_trigger_suffix"`, `"trigger"` or `"none"`. Defaults to `"sequence"`, and
            to `"none"` for the other objectives.
        veto_threshold (`float`, *optional*, defaults to `1e-4`):
            τ_c, the ratio below which a token of negative advantage is a trigger; in (0, 1).
        m2po_threshold (`float`, *optional*, defaults to `0.04`):
            Limit on the mean squared log-ratio of M2PO.
        m2po_scope (`str`, *optional*, defaults to `"microbatch"`):
            Tokens over which M2PO finds its clip: `"microbatch"`, or the whole `"update"` over all ranks (one more
            forward).
        advantage_eps (`float`, *optional*, defaults to `1e-6`):
            Added to the standard deviation of a group's rewards (TRL's is 1e-4).
        rollout_engine (`str`, *optional*, defaults to `"vllm"`):
            What generates: `"vllm"` servers over HTTP, or `"transformers"` in the training process.
        vllm_mode (`str`, *optional*, defaults to `"managed"`):
            `"managed"`: the trainer starts, feeds and sleeps or stops the servers. `"server"`: they are yours, at
            `vllm_server_urls`.
        vllm_server_urls (`list[str]`, *optional*):
            Addresses of external servers, e.g. `["http://localhost:8000"]`. Defaults to TRL's
            `vllm_server_base_url`, or `vllm_server_host` and `vllm_server_port`.
        vllm_num_servers (`int`, *optional*):
            Managed servers side by side, each on `vllm_tensor_parallel_size` devices. Defaults to as many as the
            visible devices allow (one on CPU).
        vllm_release (`str`, *optional*, defaults to `"sleep"`):
            What a managed server does during optimization: `"sleep"` (level 2), `"stop"`, or `"keep"` the device.
        vllm_python (`str`, *optional*):
            Interpreter that runs managed servers, with vLLM installed. Defaults to this one.
        vllm_server_args (`list[str]`, *optional*):
            More command-line arguments of managed servers, e.g. `["--enforce-eager"]`.
        vllm_api_key (`str`, *optional*):
            Key sent to the servers as a bearer token, and required by managed ones; never logged, written or pickled.
            Defaults to the environment's `VLLM_API_KEY`.
        max_context_length (`int`, *optional*):
            Limit on prompt and response together, in tokens. Defaults to `vllm_max_model_length`, then to what the
            model supports.
        overlong_prompts (`str`, *optional*, defaults to `"error"`):
            A prompt that leaves no token for the response: `"error"` names the rows, `"drop"` leaves them out.
        eval_stage_ends (`bool`, *optional*, defaults to `False`):
            Evaluate on `eval_dataset` at the end of every stage, whatever `eval_strategy` says. TRL's evaluation in
            process, `num_generations_eval` responses to a prompt; its time is outside T_total.
        stage_dir (`str`, *optional*):
            Folder of the stages, shared by all nodes and servers. Defaults to `<output_dir>/stages`.
        replicate_stages (`bool`, *optional*, defaults to `False`):
            Nodes do not share `stage_dir`: the first one fills a stage, and copies it to the others when it is
            complete. `output_dir` must be shared all the same; servers must see the first node's `stage_dir`.
        keep_stages (`int`, *optional*):
            Finished stages kept on disk. Defaults to all of them.
        keep_policies (`int`, *optional*, defaults to `1`):
            Behavior policies (weights) kept on disk, the newest first.
        offload (`bool`, *optional*, defaults to `True`):
            Whether parameters and optimizer state leave the accelerator while the engine generates.
        max_tokens_per_microbatch (`int`, *optional*, defaults to `16384`):
            Padded tokens (prompt and response) a rank forwards at once; a longer response goes alone.
        skip_zero_advantage (`bool`, *optional*, defaults to `True`):
            Leave responses of zero advantage out of the forward pass: they add nothing to the gradient.
        sort_by_length (`bool`, *optional*, defaults to `True`):
            Cut an update into micro-batches of rows of like length and equal cost per rank. Off, rows keep their
            order.
        share_prompts (`bool`, *optional*):
            Forward the responses to one prompt as one row behind a single copy of it (needs `sdpa` attention). By
            default in updates where that costs less: long prompts, short responses.
        padding_free (`bool`, *optional*):
            Pack the sequences of a micro-batch into one row. By default where the attention is a kernel for varying
            lengths (`attn_implementation: flash_attention_2`); with `sdpa` it is exact, but slow.
        read_ahead (`bool`, *optional*, defaults to `True`):
            Read and collate the next update on a thread while one is optimized.
        lean_head (`bool`, *optional*, defaults to `True`):
            Leave entropies out of the LM head in training, unless `entropy_coef` needs them. On a CPU it then holds
            a few hundred rows of logits at a time, and of completions alone.
        sync_once (`bool`, *optional*, defaults to `True`):
            Synchronize gradients between ranks once an update, where the backend can (DDP, FSDP2).
        reward_workers (`int`, *optional*):
            Processes (and threads) that score rewards beside generation. Defaults to the number of CPUs, 8 at most.
        reward_timeout_s (`float`, *optional*, defaults to `30.0`):
            Seconds one reward call may take; beyond it its responses are unscorable. A math answer takes 5 at most,
            and is wrong beyond it.
        reward_error (`str`, *optional*, defaults to `"stop"`):
            A reward function that raises: `"stop"` the run (the stage stays on disk), or count its responses as
            `"unscorable"`.
        no_signal (`str`, *optional*, defaults to `"warn"`):
            A stage in which 95% of the groups have equal rewards, or of the responses were cut: `"warn"`, or `"stop"`
            before its updates are spent.
        nonfinite (`str`, *optional*, defaults to `"stop"`):
            An update whose loss or gradient norm is not finite never changes the weights; its rows are written to
            `<output_dir>/nonfinite`. `"stop"` the run then, or `"skip"` the update. In fp16 the loss scaler decides.
        max_nonfinite_skips (`int`, *optional*, defaults to `8`):
            Updates in a row that `nonfinite="skip"` skips before it stops after all.
        collapse_watch (`str`, *optional*, defaults to `"warn"`):
            When one of the three figures below passes its limit: `"warn"` once, `"stop"` the run without a further
            checkpoint, or `"off"`.
        collapse_window (`int`, *optional*, defaults to `20`):
            Updates of one stage over which the figures are taken.
        collapse_negative_ratio (`float`, *optional*, defaults to `0.5`):
            Lowest E[ρ | A<0] (`ratio/negative_mean`); None does not look.
        collapse_veto_share (`float`, *optional*, defaults to `0.25`):
            Highest share of responses the veto touches (`veto/response_fraction`); None does not look.
        collapse_entropy (`float`, *optional*, defaults to `0.01`):
            Lowest mean entropy in nats (`policy/entropy`), where `entropy_coef` has it computed; None does not look.
        rollout_concurrency (`int`, *optional*):
            Responses in flight per vLLM server (default 1024), or rows of one generation batch in process
            (default 256).
        rollout_timeout_s (`float`, *optional*, defaults to `1800.0`):
            Seconds without any finished group after which the servers are declared stuck.
        probe_tolerance (`float`, *optional*):
            Largest mean absolute difference between log-probs of engine and trainer at the start of a stage, in
            nats. Defaults to 0.002 in float32 and 0.05 in half precision.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS]

    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate of AdamW."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "Learning-rate schedule."})
    weight_decay: float = field(default=0.01, metadata={"help": "Decoupled weight decay of AdamW."})
    loss_type: str = field(default="grpo", metadata={"help": "Only 'grpo'; choose `objective` instead."})
    num_generations: int | None = field(default=8, metadata={"help": "G, responses per prompt."})
    per_device_train_batch_size: int = field(
        default=64, metadata={"help": "Most rows of a micro-batch. The update's size is `prompts_per_update`."}
    )
    epsilon: float = field(  # type: ignore[assignment]  # unset until the objective is known
        default=None, metadata={"help": "Ratios are clipped below at 1 − epsilon."}
    )
    epsilon_high: float | None = field(
        default=None, metadata={"help": "Ratios are clipped above at 1 + epsilon_high; `inf`: no upper bound."}
    )
    vllm_mode: str = field(default="managed", metadata={"help": "'managed' or 'server'.", "choices": None})
    vllm_gpu_memory_utilization: float = field(
        default=0.92, metadata={"help": "Share of the device memory a managed server takes."}
    )
    vllm_importance_sampling_correction: bool = field(
        default=False, metadata={"help": "Must stay off: the ratio's denominator is the engine's log-prob."}
    )

    objective: str = field(default="mu_grpo", metadata={"help": f"One of {OBJECTIVES}."})
    anchor: str = field(default="engine", metadata={"help": "'engine' or 'trainer': whose log-probs are b_t."})
    prompts_per_update: int = field(default=32, metadata={"help": "B_mini, prompt groups per update over all ranks."})
    stage_updates: int = field(default=1024, metadata={"help": "μ, updates per stage."})
    shuffle_stage: bool = field(default=False, metadata={"help": "Permute groups among the updates of a stage."})
    train_on_stage: str | None = field(default=None, metadata={"help": "A complete stage to train on, once."})
    save_at_stage_end: bool = field(default=True, metadata={"help": "A checkpoint at the end of every stage."})
    veto_scope: str | None = field(default=None, metadata={"help": f"One of {VETO_SCOPES}."})
    veto_threshold: float = field(default=1e-4, metadata={"help": "τ_c, ratio below which a token triggers the veto."})
    m2po_threshold: float = field(default=0.04, metadata={"help": "Limit on the mean squared log-ratio of M2PO."})
    m2po_scope: str = field(default="microbatch", metadata={"help": "'microbatch' or 'update'."})
    advantage_eps: float = field(default=1e-6, metadata={"help": "Added to the std of a group's rewards."})
    rollout_engine: str = field(default="vllm", metadata={"help": "'vllm' or 'transformers'."})
    vllm_server_urls: list[str] | None = field(default=None, metadata={"help": "Addresses of external servers."})
    vllm_num_servers: int | None = field(default=None, metadata={"help": "Managed servers side by side."})
    vllm_release: str = field(default="sleep", metadata={"help": "'sleep', 'stop' or 'keep'."})
    vllm_python: str | None = field(default=None, metadata={"help": "Interpreter that runs managed servers."})
    vllm_server_args: list[str] | None = field(default=None, metadata={"help": "More arguments of managed servers."})
    vllm_api_key: str | None = field(default=None, repr=False, metadata={"help": "Key sent to the servers."})
    max_context_length: int | None = field(
        default=None, metadata={"help": "Limit on prompt and response together, in tokens."}
    )
    overlong_prompts: str = field(default="error", metadata={"help": "'error' or 'drop'."})
    eval_stage_ends: bool = field(default=False, metadata={"help": "Evaluate at the end of every stage."})
    stage_dir: str | None = field(default=None, metadata={"help": "Folder of the stages, shared by all nodes."})
    replicate_stages: bool = field(
        default=False, metadata={"help": "Copy each finished stage to the nodes, which do not share `stage_dir`."}
    )
    keep_stages: int | None = field(default=None, metadata={"help": "Finished stages kept on disk (default all)."})
    keep_policies: int | None = field(default=1, metadata={"help": "Behavior policies kept on disk."})
    offload: bool = field(default=True, metadata={"help": "Training state off the device during the rollout."})
    max_tokens_per_microbatch: int = field(default=16384, metadata={"help": "Padded tokens per forward and rank."})
    skip_zero_advantage: bool = field(
        default=True, metadata={"help": "Leave responses of zero advantage out of the forward pass."}
    )
    sort_by_length: bool = field(default=True, metadata={"help": "Micro-batches of like length, balanced over ranks."})
    share_prompts: bool | None = field(
        default=None, metadata={"help": "One copy of a prompt for its responses; by default where that costs less."}
    )
    padding_free: bool | None = field(
        default=None, metadata={"help": "Pack micro-batches without padding; by default with varlen attention."}
    )
    read_ahead: bool = field(default=True, metadata={"help": "Prepare the next update on a thread."})
    lean_head: bool = field(default=True, metadata={"help": "No entropies in training unless needed."})
    sync_once: bool = field(default=True, metadata={"help": "One gradient synchronization an update (DDP, FSDP2)."})
    reward_workers: int | None = field(default=None, metadata={"help": "Processes that score rewards."})
    reward_timeout_s: float = field(default=30.0, metadata={"help": "Seconds one reward call may take."})
    reward_error: str = field(default="stop", metadata={"help": "'stop' or 'unscorable'."})
    no_signal: str = field(default="warn", metadata={"help": "'warn' or 'stop'."})
    nonfinite: str = field(default="stop", metadata={"help": "'stop' or 'skip' updates that are not finite."})
    max_nonfinite_skips: int = field(default=8, metadata={"help": "Skips in a row before nonfinite='skip' stops."})
    collapse_watch: str = field(default="warn", metadata={"help": "'warn', 'stop' or 'off'."})
    collapse_window: int = field(default=20, metadata={"help": "Updates the figures of collapse are taken over."})
    collapse_negative_ratio: float | None = field(default=0.5, metadata={"help": "Lowest E[ρ | A<0]."})
    collapse_veto_share: float | None = field(default=0.25, metadata={"help": "Highest share of vetoed responses."})
    collapse_entropy: float | None = field(default=0.01, metadata={"help": "Lowest mean entropy, in nats."})
    rollout_concurrency: int | None = field(default=None, metadata={"help": "Responses in flight per server."})
    rollout_timeout_s: float = field(default=1800.0, metadata={"help": "Seconds without a finished group."})
    probe_tolerance: float | None = field(default=None, metadata={"help": "Mean |Δ log-prob| allowed, in nats."})

    def __post_init__(self) -> None:
        self._convert_values()
        self._refuse_what_cannot_be_honored()
        self._check_choices()
        self._fill_defaults_of_objective()
        self._check_ranges()
        self._check_layout()
        # The parent derives its generation batch from these; both are meaningless here and are set back below.
        self.steps_per_generation, self.generation_batch_size = self.num_generations, None
        super().__post_init__()
        self.steps_per_generation = self.generation_batch_size = None
        self.generation_kwargs = _as_dict("generation_kwargs", self.generation_kwargs)
        self.chat_template_kwargs = self.template_kwargs
        self.check_ranks(self.world_size)
        self._check_accelerator()
        self._check_generation_kwargs()
        self._check_vllm()

    def _convert_values(self) -> None:
        for name, annotation in get_type_hints(type(self)).items():
            if name in self.__dataclass_fields__ and name not in TAKES_BOOL_TOO:
                setattr(self, name, as_declared(name, getattr(self, name), annotation))
        if self.vllm_api_key == _SECRET:  # what `to_dict` writes in its place
            self.vllm_api_key = None

    def _refuse_what_cannot_be_honored(self) -> None:
        defaults = {f.name: f.default if f.default is not MISSING else None for f in fields(self)}
        for name, reason in REFUSED.items():
            value = getattr(self, name)
            if value in _ALSO_ACCEPTED.get(name, ()):
                setattr(self, name, defaults[name] if name != "router_aux_loss_coef" else value)
            elif value != defaults[name]:
                raise ValueError(f"`{name}={value!r}` cannot be honored by μ-GRPO: {reason}.")
        if self.scale_rewards not in (True, False, "group", "none"):
            raise ValueError(
                f"`scale_rewards={self.scale_rewards!r}` cannot be honored by μ-GRPO: advantages are computed as each "
                "group finishes, from that group alone. Use 'group' or 'none'."
            )

    def _fill_defaults_of_objective(self) -> None:
        relaxed = self.objective == "mu_grpo"
        if self.epsilon is None:
            self.epsilon = 1.0 if relaxed else 0.2
        if self.epsilon_high is None:
            self.epsilon_high = 4.0 if relaxed else self.epsilon
        self.epsilon_high = float(self.epsilon_high)
        if self.veto_scope is None:
            self.veto_scope = "sequence" if relaxed else "none"

    def _check_choices(self) -> None:
        choices = {
            "objective": OBJECTIVES,
            "anchor": ("engine", "trainer"),
            "veto_scope": (None, *VETO_SCOPES),
            "m2po_scope": ("microbatch", "update"),
            "rollout_engine": ("vllm", "transformers"),
            "vllm_mode": ("managed", "server"),
            "vllm_release": ("sleep", "stop", "keep"),
            "vllm_model_impl": ("vllm", "transformers"),
            "overlong_prompts": ("error", "drop"),
            "reward_error": ("stop", "unscorable"),
            "no_signal": ("warn", "stop"),
            "nonfinite": ("stop", "skip"),
            "collapse_watch": ("warn", "stop", "off"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                named = [choice for choice in allowed if choice is not None]
                hint = " TRL's 'colocate' is called 'managed' here." if value == "colocate" else nearest(value, named)
                raise ValueError(f"`{name}={value!r}` is not one of {', '.join(map(repr, named))}.{hint}")

    def _check_ranges(self) -> None:
        for name in (
            "prompts_per_update", "stage_updates", "max_tokens_per_microbatch", "max_completion_length",
            "per_device_train_batch_size", "vllm_tensor_parallel_size", "max_nonfinite_skips", "collapse_window",
        ):  # fmt: skip
            _require(self, name, lambda v: v >= 1, "at least 1")
        for name in ("keep_stages", "keep_policies", "reward_workers"):
            _require(self, name, lambda v: v is None or v >= 0, "0 or more, or unset")
        for name in ("vllm_num_servers", "rollout_concurrency", "max_context_length", "vllm_max_model_length"):
            _require(self, name, lambda v: v is None or v >= 1, "at least 1, or unset")
        for name in ("reward_timeout_s", "rollout_timeout_s", "m2po_threshold", "vllm_server_timeout"):
            _require(self, name, lambda v: v > 0 and math.isfinite(v), "a positive number")
        for name in ("learning_rate", "weight_decay", "beta", "advantage_eps", "seed"):
            _require(self, name, lambda v: v >= 0 and math.isfinite(v), "0 or more")
        for name in ("adam_beta1", "adam_beta2"):
            _require(self, name, lambda v: 0 <= v < 1, "at least 0 and below 1")
        _require(self, "num_generations", lambda v: v >= 2, "at least 2: advantages compare responses to one prompt")
        _require(
            self, "temperature", lambda v: v > 0 and math.isfinite(v), "positive: ratios need a sampling temperature"
        )
        _require(self, "veto_threshold", lambda v: 0 < v < 1, "between 0 and 1")
        _require(self, "epsilon", lambda v: 0 <= v <= 1, "between 0 and 1: the lower clip is 1 − epsilon")
        _require(self, "epsilon_high", lambda v: v >= 0, "0 or more (`inf` for no upper bound)")
        _require(self, "probe_tolerance", lambda v: v is None or v > 0, "positive, or unset")
        for name in ("collapse_negative_ratio", "collapse_veto_share", "collapse_entropy"):
            _require(self, name, lambda v: v is None or v >= 0 and math.isfinite(v), "0 or more, or unset")
        _require(self, "vllm_gpu_memory_utilization", lambda v: 0 < v <= 1, "a share above 0, at most 1")
        if self.objective == "m2po" and self.veto_scope != "none":
            raise ValueError(
                f"`veto_scope={self.veto_scope!r}` contradicts `objective='m2po'`, which has no veto. Leave it out."
            )
        if self.sync_ref_model and not self.beta:
            raise ValueError(
                "`sync_ref_model=True` needs a reference model, but `beta=0.0` has none. Set `beta`, or leave it out."
            )
        limit = self.context_limit
        if limit is not None and limit < 2:
            raise ValueError(f"A context of {limit} tokens leaves no room for a prompt and a response.")

    def _check_layout(self) -> None:
        if self.share_prompts and self.padding_free:
            raise ValueError(
                "`share_prompts=True` contradicts `padding_free=True`: a shared prompt needs an attention mask, and "
                "packed rows must have none. Leave one out."
            )
        if self.replicate_stages and self.rollout_engine != "vllm":
            raise ValueError(
                f"`replicate_stages=True` contradicts `rollout_engine={self.rollout_engine!r}`: in process, every "
                "rank writes its share of a stage. Share `stage_dir` between the nodes, or use `rollout_engine: vllm`."
            )
        if self.replicate_stages and not self.stage_dir:
            raise ValueError(
                "`replicate_stages=True` without `stage_dir`: stages would lie in `output_dir`, which the nodes "
                "share. Name a folder on each node's own disk, or leave `replicate_stages` out."
            )

        if self.train_on_stage and self.anchor == "trainer":
            raise ValueError(
                f"`anchor='trainer'` contradicts `train_on_stage={self.train_on_stage!r}`: its log-probs are kept in "
                "the stage's folder, which belongs to the run that filled it. Use `anchor: engine`."
            )

    def check_ranks(self, num_ranks: int) -> None:
        """
        Raises:
            `ValueError`: an update has fewer responses than there are ranks.
        """
        assert self.num_generations is not None
        rows = self.prompts_per_update * self.num_generations
        if rows < num_ranks:
            raise ValueError(
                f"`prompts_per_update={self.prompts_per_update}` × `num_generations={self.num_generations}` gives "
                f"{rows} responses an update, fewer than the {num_ranks} ranks that share it: some would never "
                "have work. Raise `prompts_per_update` to at least "
                f"{math.ceil(num_ranks / self.num_generations)}, or launch fewer processes."
            )

    def _check_accelerator(self) -> None:
        config: Any = self.accelerator_config
        for name, value in (
            ("split_batches", config.split_batches),
            ("dispatch_batches", config.dispatch_batches),
            ("gradient_accumulation_kwargs", config.gradient_accumulation_kwargs),
        ):
            if value:
                raise ValueError(
                    f"`{name}={value!r}` in `accelerator_config` cannot be honored by μ-GRPO: every rank reads its "
                    "own rows of an update from the stage. Leave it out."
                )

    def _check_generation_kwargs(self) -> None:
        unknown = sorted(set(self.generation_kwargs or {}) - {"stop"})
        if unknown:
            raise ValueError(
                f"`generation_kwargs` key {unknown[0]!r} cannot be honored: {_BIASES_RATIO}. Only `stop` (a list of "
                "strings that end a response) is supported."
            )

    def _check_vllm(self) -> None:
        if self.use_vllm and self.rollout_engine == "transformers":
            raise ValueError(
                "`use_vllm=True` contradicts `rollout_engine='transformers'`. Leave `use_vllm` out and choose the "
                "engine with `rollout_engine`."
            )
        if self.rollout_engine == "transformers" and self.stop_strings:
            raise ValueError(
                f"`generation_kwargs={{'stop': {list(self.stop_strings)!r}}}` needs `rollout_engine='vllm'`: the "
                "in-process engine ends responses at EOS tokens only."
            )
        if self.vllm_enable_sleep_mode and self.vllm_release != "sleep":
            raise ValueError(
                f"`vllm_enable_sleep_mode=True` contradicts `vllm_release={self.vllm_release!r}`. Leave one out."
            )
        managed = self.vllm_mode == "managed"
        names = ("vllm_server_urls", "vllm_server_base_url") if managed else ("vllm_num_servers", "vllm_server_args")
        for name in names:
            if value := getattr(self, name):
                means = "starts its own servers" if managed else "starts no server"
                raise ValueError(
                    f"`{name}={value!r}` contradicts `vllm_mode={self.vllm_mode!r}`, which {means}. Set "
                    f"`vllm_mode: {'server' if managed else 'managed'}`, or leave it out."
                )
        self._check_server_args()
        for url in self.server_urls if self.vllm_mode == "server" else ():
            parts = urlsplit(url)
            if parts.username is not None or parts.password is not None:
                raise ValueError(
                    f"The address of {parts.hostname!r} in `vllm_server_urls` holds credentials, which would reach "
                    "logs. Give the key in the environment variable VLLM_API_KEY."
                )
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(
                    f"{url!r} in `vllm_server_urls` is not an http(s) address such as http://localhost:8000."
                )

    def _check_server_args(self) -> None:
        for argument in self.vllm_server_args or ():
            name = argument.partition("=")[0].replace("_", "-")
            if reason := _REFUSED_SERVER_ARGS.get(name):
                raise ValueError(f"`{name}` in `vllm_server_args` cannot be honored: {reason}.")

    @property
    def context_limit(self) -> int | None:
        """The configured limit on prompt and response together, in tokens; None leaves it to the model."""
        limits = [limit for limit in (self.max_context_length, self.vllm_max_model_length) if limit is not None]
        return min(limits, default=None)

    @property
    def clip_range(self) -> tuple[float, float]:
        """`(lowest, highest)` ratio the clip lets pass."""
        assert self.epsilon_high is not None
        return 1.0 - self.epsilon, 1.0 + self.epsilon_high

    def probe_tolerance_for(self, dtype: torch.dtype) -> float:
        """Largest mean |Δ log-prob| allowed between engine and trainer, in nats, for a policy stored in `dtype`."""
        if self.probe_tolerance is not None:
            return self.probe_tolerance
        full_precision = dtype == torch.float32 and not (self.bf16 or self.fp16)
        return 0.002 if full_precision else 0.05

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end a response."""
        stop = (_as_dict("generation_kwargs", self.generation_kwargs) or {}).get("stop") or ()
        return (stop,) if isinstance(stop, str) else tuple(stop)

    @property
    def server_urls(self) -> list[str]:
        """Addresses of the external vLLM servers."""
        if self.vllm_server_urls:
            return [url.rstrip("/") for url in self.vllm_server_urls]
        if self.vllm_server_base_url:
            return [self.vllm_server_base_url.rstrip("/")]
        host = "127.0.0.1" if self.vllm_server_host == "0.0.0.0" else self.vllm_server_host
        return [f"http://{host}:{self.vllm_server_port}"]

    @property
    def output_path(self) -> Path:
        """The folder `output_dir`."""
        return Path(str(self.output_dir))

    @property
    def model_kwargs(self) -> dict[str, Any]:
        """`model_init_kwargs`, which TRL also takes as JSON."""
        return _as_dict("model_init_kwargs", self.model_init_kwargs) or {}

    @property
    def template_kwargs(self) -> dict[str, Any] | None:
        """`chat_template_kwargs`, which TRL also takes as JSON."""
        return _as_dict("chat_template_kwargs", self.chat_template_kwargs)

    @property
    def stages_path(self) -> Path:
        """Folder that holds `stage-000`, `stage-001`, …"""
        return Path(self.stage_dir) if self.stage_dir else self.output_path / "stages"

    @property
    def meetings_path(self) -> Path:
        """Folder shared by all ranks, where they tell each other how they are."""
        return self.output_path if self.replicate_stages else self.stages_path

    @property
    def starts_vllm(self) -> bool:
        """Whether the main process talks to vLLM servers in this run."""
        return self.rollout_engine == "vllm" and not self.train_on_stage

    @property
    def reward_threads(self) -> int:
        """Groups scored at once."""
        return self.reward_workers or min(os.cpu_count() or 1, 8)

    @property
    def vllm_interpreter(self) -> str:
        """Interpreter that runs managed servers."""
        return self.vllm_python or sys.executable

    def to_dict(self) -> dict[str, Any]:
        """As the parent's, without secrets."""
        values = super().to_dict()
        values["vllm_api_key"] = self.vllm_api_key and _SECRET
        return values

    def __str__(self) -> str:
        return super(MuGRPOConfig, copy.copy(self)).__str__()  # a copy has no key

    __repr__ = __str__

    def __getstate__(self) -> dict[str, Any]:
        """Without secrets: every checkpoint holds the pickled configuration, and may go to the Hub."""
        return {name: None if name in _SECRETS else value for name, value in self.__dict__.items()}


def _require(config: MuGRPOConfig, name: str, holds, requirement: str) -> None:
    value = getattr(config, name)
    try:
        valid = holds(value)
    except TypeError:
        valid = False
    if not valid:
        raise ValueError(f"`{name}={value!r}` must be {requirement}.")


def _as_dict(name: str, value: Any) -> dict[str, Any] | None:
    """Options TRL takes as a dict or as a JSON string."""
    if value is None or isinstance(value, dict):
        return value
    try:
        parsed = json.loads(value)
    except (TypeError, ValueError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError(f"`{name}={value!r}` is not a mapping (or a JSON object given as a string).")
    return parsed
