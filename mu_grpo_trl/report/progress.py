"""What a run says while it trains: a bar in a terminal, a line a log elsewhere, and a summary at each stage's end."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm.auto import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..schedule import Schedule
from ..telemetry import Telemetry, in_words

SHOWN = {
    "reward": ("reward", ".3f"),
    "ratio/negative_mean": ("E[ρ | A<0]", ".3f"),
    "veto/token_fraction": ("vetoed", ".2%"),
    "clip/token_fraction": ("clipped", ".2%"),
    "grad_norm": ("grad norm", ".3g"),
}
"""What of the log is shown: its word, and how it is written."""


def in_short(log: Mapping[str, Any]) -> str:
    """
    One log of training, on one line.

    >>> in_short({"reward": 0.25, "grad_norm": 1.5, "loss": 0.0})
    'reward 0.250, grad norm 1.5'
    """
    return ", ".join(f"{word} {log[key]:{form}}" for key, (word, form) in SHOWN.items() if log.get(key) is not None)


def stage_rows(
    logs: Sequence[Mapping[str, Any]], schedule: Schedule, stage: int, seconds: Mapping[str, float]
) -> dict[str, str]:
    """
    A summary of one stage, as words and their values.

    Args:
        logs (`Sequence[Mapping]`): `trainer.state.log_history`.
        schedule (`Schedule`): of the run.
        stage (`int`): its number.
        seconds (`Mapping[str, float]`): what it took, by the telemetry's kinds.
    """
    first, updates = schedule.first_update(stage), schedule.updates_in(stage)
    mine = [log for log in logs if "loss" in log and first < log["step"] <= first + updates]
    rows = {"updates": f"{first + 1}–{first + updates} of {schedule.num_updates}"}
    made = next((log for log in mine if "stage/responses" in log), None)
    if made is not None:
        rows["responses"] = f"{made['stage/responses']:,.0f}, {made['stage/truncated_share']:.1%} cut"
        rows["groups without signal"] = f"{made['stage/zero_advantage_share']:.1%}"
        if made.get("stage/reward") is not None:
            rows["reward"] = f"{made['stage/reward']:.3f}"
    for key, (word, form) in list(SHOWN.items())[1:]:
        values = [log[key] for log in mine if log.get(key) is not None and math.isfinite(log[key])]
        if values:
            rows[word] = f"{values[0]:{form}} → {values[-1]:{form}}"
    shown = ("rollout", "optimize", "checkpoint", "evaluation")
    rows["seconds"] = ", ".join(f"{kind} {seconds[kind]:.1f}" for kind in shown if seconds.get(kind, 0) >= 0.05)
    return rows


class RunProgress(TrainerCallback):
    """
    Shows the run on the main process. With `disable_tqdm` there is no bar and no table, but a line a log and a line a
    stage.

    Args:
        schedule (`Schedule`): where stages end.
        telemetry (`Telemetry`): the timers, for the end of the run.
        has_bar (`bool`): False leaves bar and lines to another callback, as in a notebook.
    """

    def __init__(self, schedule: Schedule, telemetry: Telemetry, has_bar: bool = True) -> None:
        self._schedule = schedule
        self._telemetry = telemetry
        self._has_bar = has_bar
        self._bar: Any = None
        self._before = dict(telemetry.seconds)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._before = dict(self._telemetry.seconds)
        if state.is_world_process_zero and self._has_bar and not args.disable_tqdm:
            # The bar's own estimate would take rollouts for slow updates; the run's is in the postfix.
            self._bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc=self._description(state.global_step),
                unit="update", mininterval=0, dynamic_ncols=True,
                bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
            )  # fmt: skip

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._bar is not None:
            self._bar.set_description_str(self._description(state.global_step), refresh=False)
        stage = self._schedule.stage_of(state.global_step)
        if stage and state.global_step == self._schedule.first_update(stage):
            self._end_stage(args, state, stage - 1)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(self._run_ends(state.global_step).removeprefix(", "), refresh=False)
            self._bar.update(state.global_step - self._bar.n)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not self._has_bar or logs is None:
            return
        if any(name.startswith("eval_") for name in logs):
            self._say(f"update {state.global_step}: evaluation: reward {logs.get('eval_reward', math.nan):.3f}")
        elif "loss" in logs and self._bar is None:
            stage = self._schedule.stage_of(state.global_step - 1)
            done = f"update {state.global_step}/{self._schedule.num_updates}, stage {stage}"
            self._say(f"{done}: {in_short(logs)}{self._run_ends(state.global_step)}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == self._schedule.num_updates:
            self._end_stage(args, state, self._schedule.num_stages - 1)
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _run_ends(self, updates: int) -> str:
        """In words; groups of the stage that is being optimized are all there."""
        stages = -(-updates // self._schedule.stage_updates)
        ready = min(stages * self._schedule.stage_updates, self._schedule.num_updates)
        groups = ready * self._schedule.prompts_per_update
        return in_words(self._telemetry.remaining_s(self._schedule, updates, groups))

    def _description(self, update: int) -> str:
        stage = min(update // self._schedule.stage_updates, self._schedule.num_stages - 1)
        return f"stage {stage + 1} of {self._schedule.num_stages}: optimize"

    def _end_stage(self, args: TrainingArguments, state: TrainerState, stage: int) -> None:
        self._telemetry.total_s()  # charges what runs
        now = dict(self._telemetry.seconds)
        seconds = {kind: now[kind] - self._before[kind] for kind in now}
        self._before = now
        if not state.is_world_process_zero:
            return
        rows = stage_rows(state.log_history, self._schedule, stage, seconds)
        title = f"stage {stage} ({stage + 1} of {self._schedule.num_stages})"
        if args.disable_tqdm:
            self._say(f"{title} is done: " + "; ".join(f"{word} {value}" for word, value in rows.items()))
            return
        table = Table(title=title, title_justify="left", show_header=False)
        for row in rows.items():
            table.add_row(*row)
        with tqdm.external_write_mode(file=sys.stderr):
            Console(stderr=True).print(table)

    def _say(self, text: str) -> None:
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text)
