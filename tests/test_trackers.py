"""What a run logs is what `metrics.py` says, at every step once, in each tracker's own files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import wandb_file
from datasets import Dataset
from helpers import PROMPTS, config_options, save_tiny_policy
from processes import run_ranks
from workers.training_run import Poison, make_trainer

from mu_grpo_trl import MuGRPOTrainer, preflight
from mu_grpo_trl.metrics import METRICS, TAKEN, Metric, markdown
from mu_grpo_trl.report.progress import in_short, stage_rows
from mu_grpo_trl.schedule import Schedule
from mu_grpo_trl.telemetry import Telemetry, in_words

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = {"stage_updates": 2, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "log_completions": True}
RARE = {
    "beta": 0.04,
    "entropy_coef": 0.01,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "per_device_eval_batch_size": 4,
    "nonfinite": "skip",
}
"""Options whose metrics are logged nowhere else."""
SKIPPED = 1
"""The update that is made to have a loss of NaN."""

pytestmark = pytest.mark.usefixtures("objects_of_the_libraries_are_not_collected")


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def tracked(policy, tmp_path_factory) -> tuple[MuGRPOTrainer, Path]:
    """A run with everything that can be logged, to three trackers, and the folder of their files."""
    import wandb

    folder = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_PROJECT"):
            patch.delenv(name, raising=False)
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DIR", str(folder))
        wandb.teardown()  # it read the environment when it was first used in this process
        patch.setenv("TENSORBOARD_LOGGING_DIR", str(folder / "tensorboard"))
        patch.setattr(preflight, "devices_peak", lambda accelerator: 1e12)
        spec = config_options(folder / "run", report_to=["wandb", "tensorboard"], **OPTIONS, **RARE)
        evaluated = Dataset.from_dict({"prompt": PROMPTS[:2]})
        spec |= {"model": str(policy), "prompts": PROMPTS[:12]}
        trainer = make_trainer(spec, eval_dataset=evaluated)
        Poison(trainer, {SKIPPED})
        trainer.train()
        wandb.finish()
    return trainer, folder


def described(key: str) -> list[Metric]:
    return [metric for metric in METRICS if metric.matches(key)]


def test_the_page_of_metrics_is_up_to_date():
    assert (ROOT / "docs/metrics.md").read_text() == markdown()
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_a_run_logs_exactly_the_documented_metrics(tracked):
    trainer, _ = tracked
    logs = [{key: value for key, value in log.items() if key != "step"} for log in trainer.state.log_history]
    logged = {key for log in logs for key in log}
    assert not {key for key in logged if len(described(key)) != 1}, "logged, but not documented (or twice)"
    assert not [m.name for m in METRICS if not any(map(m.matches, logged))], "documented, but never logged"
    for step, log in enumerate((log for log in logs if "loss" in log), start=1):
        always = [metric for metric in METRICS if not metric.when or metric.when == TAKEN and step != SKIPPED + 1]
        assert not [metric.name for metric in always if not any(map(metric.matches, log))], step


def documented(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a tracker under the documented names."""
    return {
        name.removeprefix("train/") if name.startswith("train/") else name.replace("eval/", "eval_", 1): value
        for name, value in row.items()
    }


def test_the_offline_run_of_wandb_has_every_metric_at_each_step_once(tracked):
    trainer, folder = tracked
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows = [documented(row) for row in wandb_file.history(path) if not any(n.startswith("profiling/") for n in row)]
    tables = [row for row in rows if "completions/_type" in row]
    figures = [row for row in rows if "figures/run/_type" in row]
    *metrics, last = [row for row in rows if row not in tables and row not in figures]
    assert last.keys() == {"epoch", "global_step"}  # W&B has the rest of the last log in its summary
    expected = [log for log in trainer.state.log_history if "train_runtime" not in log]
    assert len(metrics) == len(expected) == 4 + 2
    for row, log in zip(metrics, expected, strict=True):
        wanted = {name: value for name, value in log.items() if name != "step"}
        assert row.pop("global_step") == log["step"]
        assert row.keys() == wanted.keys()
        for name, value in wanted.items():
            assert row[name] == pytest.approx(value, nan_ok=True), name
    assert [(row["global_step"], row["completions/_type"]) for row in tables] == [(0, "table-file"), (2, "table-file")]
    assert [(row["global_step"], row["figures/run/_type"]) for row in figures] == [
        (2, "image-file"),
        (4, "image-file"),
    ]


def test_wandb_gets_the_settings_and_stages_and_checkpoints_by_reference(tracked):
    trainer, folder = tracked
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    settings: dict[str, Any] = {}
    artifacts: dict[str, list[Any]] = {}
    for record in wandb_file.records(path):
        kind = record.WhichOneof("record_type")
        if kind == "config":
            settings |= {item.key: json.loads(item.value_json) for item in record.config.update}
        elif kind == "artifact":
            artifacts.setdefault(record.artifact.type, []).append(record.artifact)
    assert (settings["stage_updates"], settings["veto_scope"], settings["hidden_size"]) == (2, "sequence", 32)
    stages, checkpoints = artifacts["stage"], artifacts["checkpoint"]
    assert [set(stage.aliases) for stage in stages] == [{"stage-000", "latest"}, {"stage-001", "latest"}]
    assert [set(made.aliases) for made in checkpoints] == [{"checkpoint-2", "latest"}, {"checkpoint-4", "latest"}]
    assert json.loads(stages[1].metadata)["policy_hash"] == trainer.stage_callback.policy_hash
    for artifact in [*stages, *checkpoints]:
        assert artifact.manifest.contents
        assert all(entry.ref.startswith("file://") and not entry.local_path for entry in artifact.manifest.contents)


def test_tensorboard_has_every_metric_at_each_step_once(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer, folder = tracked
    (path,) = {file.parent for file in folder.glob("tensorboard/**/events.out.*") if file.stat().st_size > 1000}
    events = EventAccumulator(str(path)).Reload()
    for name in events.Tags()["scalars"]:
        key = next(iter(documented({name: 0})))
        logged = [(log["step"], log[key]) for log in trainer.state.log_history if key in log]
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(step, pytest.approx(value, rel=1e-5, nan_ok=True)) for step, value in logged], name
    assert {"train/ratio/negative_mean", "train/stage/reward", "eval/reward"} <= set(events.Tags()["scalars"])


def test_trackio_has_every_metric_at_each_step_once(policy, tmp_path, monkeypatch):
    from trackio import sqlite_storage, utils

    for module in (utils, sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    spec = config_options(tmp_path / "run", report_to="trackio", run_name="tiny", project="here", **OPTIONS)
    trainer = make_trainer(spec | {"model": str(policy), "prompts": PROMPTS[:12]})
    trainer.train()
    rows = [documented(row) for row in sqlite_storage.SQLiteStorage.get_logs("here", "tiny")]
    metrics = [row for row in rows if "loss" in row]
    expected = [log for log in trainer.state.log_history if "loss" in log]
    assert [row["global_step"] for row in metrics] == [log["step"] for log in expected] == [1, 2, 3, 4]
    for row, log in zip(metrics, expected, strict=True):
        assert {name for name in row if described(name)} == {name for name in log if name != "step"}
        assert row["reward"] == pytest.approx(log["reward"])
    assert sum("completions" in row for row in rows) == 2


@pytest.mark.distributed
def test_of_two_ranks_one_logs(policy, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    spec = config_options(tmp_path / "run", report_to="wandb", stage_updates=2, max_steps=2)
    spec |= {"model": str(policy), "prompts": PROMPTS[:12]}
    ended = run_ranks([spec, spec], env={"WANDB_DIR": str(tmp_path)}, timeout_s=240)
    assert [rank.exitcode for rank in ended] == [0, 0], ended[0].log[-3000:]
    assert [rank.log.count("update 2/2, stage 0: ") for rank in ended] == [1, 0]
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows = [row for row in wandb_file.history(path) if "train/loss" in row]
    assert [row["train/global_step"] for row in rows] == [1, 2]


def test_the_end_of_the_run_is_reckoned_from_rollouts_and_the_rest_each_by_its_own_pace():
    schedule = Schedule(num_prompts=100, prompts_per_update=4, stage_updates=10, num_updates=40, seed=0)
    telemetry = Telemetry()
    assert telemetry.remaining_s(schedule, 0, 0) is None
    telemetry.restore({"seconds": {"rollout": 80.0, "optimize": 9.0, "sync": 1.0, "evaluation": 50.0}, "counts": {}})
    telemetry.count("generated_groups", 40)
    assert telemetry.remaining_s(schedule, 0, 40) is None  # no update was taken
    telemetry.count("updates", 5)
    # 120 groups at 2 s, and 35 updates at (9 + 1) / 5 s
    assert telemetry.remaining_s(schedule, 5, 40) == pytest.approx(240 + 70)
    # within the second rollout: 20 more groups are there, which the counter does not have
    telemetry.restore(
        {"seconds": {"rollout": 120.0, "optimize": 20.0}, "counts": dict(telemetry.counts) | {"updates": 10}}
    )
    assert telemetry.remaining_s(schedule, 10, 60, added=20) == pytest.approx(100 * 2 + 30 * 2)
    assert telemetry.remaining_s(schedule, 40, 160) == 0
    assert in_words(3725.4) == ", run ends in 1:02:05" and in_words(None) == ""


def test_a_stage_is_summed_up_in_words():
    schedule = Schedule(num_prompts=100, prompts_per_update=4, stage_updates=2, num_updates=4, seed=0)
    made = {
        "stage/responses": 1600,
        "stage/truncated_share": 0.25,
        "stage/zero_advantage_share": 0.5,
        "stage/reward": 0.3,
    }
    logs = [
        {"step": 2, "loss": 0.0, "grad_norm": 9.0},
        {"step": 3, "loss": 0.0, "ratio/negative_mean": 1.0, "grad_norm": 2.5} | made,
        {"step": 4, "loss": 0.0, "ratio/negative_mean": 0.75, "grad_norm": 2.0},
    ]
    assert stage_rows(logs, schedule, 1, {"rollout": 12.34, "optimize": 3.0, "evaluation": 0.0}) == {
        "updates": "3–4 of 4",
        "responses": "1,600, 25.0% cut",
        "groups without signal": "50.0%",
        "reward": "0.300",
        "E[ρ | A<0]": "1.000 → 0.750",
        "grad norm": "2.5 → 2",
        "seconds": "rollout 12.3, optimize 3.0",
    }
    assert in_short(logs[1]) == "E[ρ | A<0] 1.000, grad norm 2.5"
