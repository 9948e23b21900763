"""What people see of the command line: help, completion, progress."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers import config_options

from mu_grpo_trl import MuGRPOConfig, completion, train
from mu_grpo_trl.report.progress import RunProgress
from mu_grpo_trl.schedule import Schedule
from mu_grpo_trl.telemetry import Telemetry


def printed_by(capsys, command: Any, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        command(list(arguments))
    assert not ended.value.code
    return capsys.readouterr().out


def test_the_help_of_train_shows_what_this_package_adds_and_where_the_rest_is(capsys):
    text = printed_by(capsys, train.main, "--help")
    for shown in ("--stage_updates", "--reward_funcs", "--lora_r", "--veto_scope", "accelerate launch", "--help-all"):
        assert shown in text, shown
    for inherited in ("--learning_rate", "--stage-updates", "--fp16_full_eval"):
        assert inherited not in text, inherited
    assert max(map(len, text.splitlines())) <= 140
    assert "--learning_rate" in printed_by(capsys, train.main, "--help-all")


def test_bash_completes_commands_and_options(capsys, tmp_path):
    completion.main(["bash"])
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)

    def completed(*words: str) -> set[str]:
        program = (
            f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
            '$(complete -p mu-grpo | sed "s/.*-F \\([^ ]*\\).*/\\1/"); printf "%s\\n" "${COMPREPLY[@]}"'
        )
        run = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60, check=True)
        return set(run.stdout.split())

    assert completed("mu-grpo", "st") == {"stage"}
    assert completed("mu-grpo", "stage", "pu") == {"push"}
    assert completed("mu-grpo", "train", "--stage_up") == {"--stage_updates"}
    assert "--public" in completed("mu-grpo", "push", "--")


def test_zsh_gets_a_completion_too(capsys):
    completion.main(["zsh"])
    assert capsys.readouterr().out.startswith("#compdef mu-grpo")


def show_two_stages(tmp_path: Path, disable_tqdm: bool) -> None:
    """Four updates in two stages, as the training loop would report them."""
    args: Any = MuGRPOConfig(**config_options(tmp_path, disable_tqdm=disable_tqdm, max_steps=4))
    schedule = Schedule(num_prompts=8, prompts_per_update=4, stage_updates=2, num_updates=4, seed=0)
    telemetry = Telemetry()
    telemetry.restore({"seconds": {"rollout": 8.0, "optimize": 2.0}, "counts": {"generated_groups": 8, "updates": 1}})
    progress = RunProgress(schedule, telemetry)
    state: Any = SimpleNamespace(global_step=0, max_steps=4, is_world_process_zero=True, log_history=[])
    progress.on_train_begin(args, state, Any)
    for update in range(4):
        progress.on_step_begin(args, state, Any)
        state.global_step = update + 1
        progress.on_step_end(args, state, Any)
        log = {"loss": 0.0, "step": update + 1, "reward": 0.25, "grad_norm": 1.5}
        state.log_history.append(log)
        progress.on_log(args, state, Any, logs=log)
    progress.on_train_end(args, state, Any)


def test_in_a_terminal_there_is_a_bar_with_the_end_of_the_run_and_a_table_a_stage(tmp_path, capsys):
    show_two_stages(tmp_path, disable_tqdm=False)
    out, err = capsys.readouterr()
    assert not out
    assert "stage 1 of 2: optimize" in err and "stage 2 of 2: optimize" in err
    assert "4/4" in err
    # after update 2 there are 8 groups at 1 s and 2 updates at 2 s to go
    assert "2/4 [00:00, run ends in 0:00:12]" in err
    assert err.count("stage 0 (1 of 2)") == err.count("stage 1 (2 of 2)") == 1
    assert "1.5 → 1.5" in err


def test_in_a_log_file_there_is_a_line_a_log_and_a_line_a_stage(tmp_path, capsys):
    show_two_stages(tmp_path, disable_tqdm=True)
    out, err = capsys.readouterr()
    assert not err
    lines = out.splitlines()
    assert lines[1] == "update 2/4, stage 0: reward 0.250, grad norm 1.5, run ends in 0:00:12"
    assert [line.partition(":")[0] for line in lines] == [
        "update 1/4, stage 0", "update 2/4, stage 0", "stage 0 (1 of 2) is done", "update 3/4, stage 1",
        "update 4/4, stage 1", "stage 1 (2 of 2) is done",
    ]  # fmt: skip
