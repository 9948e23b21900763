"""`mu-grpo report`: what is read of a run's folder, the numbers in its tables, and what the figures show."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from helpers import PROMPTS, config_options, save_tiny_policy
from matplotlib.backends.backend_agg import FigureCanvasAgg
from workers.train_worker import digit_share
from workers.training_run import make_trainer

from mu_grpo_trl import cli
from mu_grpo_trl.evaluation.policies import Checkpoint
from mu_grpo_trl.evaluation.report import BenchmarkScore, CheckpointScores, Results, as_json
from mu_grpo_trl.report import figures, page
from mu_grpo_trl.report.runs import ReportError, Run, load_run, load_runs

LOG = (
    {
        "loss": 0.1, "reward": 0.25, "ratio/negative_mean": 1.0, "clip/token_fraction": 0.0,
        "veto/token_fraction": 0.0, "completions/mean_length": 20.0, "time/rollout_s": 8.0, "time/reward_s": 1.0,
        "time/optimize_s": 1.0, "time/total_s": 12.0,
    },
    {
        "loss": 0.1, "reward": 0.35, "ratio/negative_mean": 0.9, "clip/token_fraction": 0.01,
        "veto/token_fraction": 0.02, "completions/mean_length": 21.0, "time/rollout_s": 8.0, "time/reward_s": 1.0,
        "time/optimize_s": 3.0, "time/total_s": 14.0,
    },
    {
        "loss": 0.1, "reward": 0.55, "ratio/negative_mean": 1.1, "clip/token_fraction": 0.0,
        "veto/token_fraction": 0.01, "completions/mean_length": 22.0, "time/rollout_s": 16.0, "time/reward_s": 2.0,
        "time/optimize_s": 4.0, "time/total_s": 30.0,
    },
)  # fmt: skip
"""Three updates, the third in another stage."""

SETTINGS = {"stage_updates": 2, "max_steps": 4, "learning_rate": 1e-4, "objective": "mu_grpo", "seed": 0}


def write_run(folder: Path, log: Any = LOG, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({**entry, "step": step}) + "\n" for step, entry in enumerate(log, start=1)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    run = {"model": "tiny", "num_processes": 1, "settings": {**SETTINGS, "output_dir": str(folder), **settings}}
    (folder / "run.json").write_text(json.dumps(run))
    return folder


def write_evaluation(folder: Path, scores: dict[int | None, dict[str, float]]) -> None:
    """As `mu-grpo eval` writes it."""
    measured = [
        CheckpointScores(
            Checkpoint(f"checkpoint-{step}", folder / f"checkpoint-{step}", step, "hash"),
            {name: BenchmarkScore(10, 4, value, (0.0, 1.0), {}, 100.0, 0.0, 0.0) for name, value in values.items()},
        )
        for step, values in scores.items()
    ]
    folder.mkdir(exist_ok=True)
    (folder / "eval.json").write_text(json.dumps(as_json(Results([], measured))))


def table(rows: page.Table) -> dict[str, list[str]]:
    return {name: cells for name, *cells in rows}


# Reading


def test_series_boundaries_and_times_are_those_of_the_log(tmp_path):
    run = load_run(write_run(tmp_path / "a"))
    steps, rewards = run.series("reward")
    assert (steps.tolist(), rewards.tolist()) == ([1, 2, 3], [0.25, 0.35, 0.55])
    assert [len(values) for values in run.series("policy/entropy")] == [0, 0]
    assert (run.label, run.num_updates, run.boundaries()) == ("a", 3, [2])
    assert run.seconds() == {"rollout": 16.0, "reward": 2.0, "optimize": 4.0, "total": 30.0}
    assert run.rollout_seconds() == 18.0
    assert run.seconds_at(np.array([0, 1, 2.5, 3])).tolist() == [0.0, 12.0, 22.0, 30.0]


def test_values_that_are_not_finite_are_left_out_of_a_series(tmp_path):
    run = load_run(write_run(tmp_path, [{"loss": 1.0, "reward": value} for value in (0.5, float("nan"), None, 1.5)]))
    assert run.series("reward")[0].tolist() == [1, 4]


def test_without_a_metrics_file_the_newest_checkpoint_is_read(tmp_path):
    for step in (9, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        history = [{"loss": 0.0, "step": number} for number in range(1, step + 1)]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    assert load_run(tmp_path).num_updates == 10


def test_a_line_cut_by_a_kill_is_left_out_and_any_other_bad_line_is_named(tmp_path):
    metrics = write_run(tmp_path) / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole[:-30])
    assert load_run(tmp_path).num_updates == 2
    metrics.write_text("nonsense\n" + whole)
    with pytest.raises(ReportError, match="line 1: 'nonsense' is no entry of a log"):
        load_run(tmp_path)


def test_what_is_no_run_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(ReportError, match="No run is named"):
        load_runs([])
    with pytest.raises(ReportError, match="nothing is no folder"):
        load_runs([tmp_path / "nothing"])
    write_run(tmp_path / "runs" / "a")
    with pytest.raises(ReportError, match=r"runs is no run.*Name the runs below it: .*runs/a\."):
        load_runs([tmp_path / "runs"])
    with pytest.raises(ReportError, match="is named twice"):
        load_runs([tmp_path / "runs" / "a", tmp_path / "runs" / "b" / ".." / "a"])
    with pytest.raises(ReportError, match="1 runs, but the labels"):
        load_runs([tmp_path / "runs" / "a"], ["one", "two"])


def test_a_log_that_is_empty_has_no_update_or_mixes_runs_is_refused(tmp_path):
    folder = write_run(tmp_path, [])
    with pytest.raises(ReportError, match=r"metrics\.jsonl is empty"):
        load_run(folder)
    write_run(tmp_path, [{"train_runtime": 1.0}])
    with pytest.raises(ReportError, match="has no update yet"):
        load_run(folder)
    lines = [json.dumps({"loss": 0.0, "step": step}) for step in (1, 2, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    with pytest.raises(ReportError, match="goes from update 2 to update 1: it mixes two runs"):
        load_run(folder)


def test_labels_are_the_shortest_ends_of_the_paths_that_differ(tmp_path):
    paths = [write_run(tmp_path / sweep / name) for sweep, name in (("x", "a"), ("y", "a"), ("y", "b"))]
    assert [run.label for run in load_runs(paths)] == ["x/a", "y/a", "y/b"]
    assert [run.label for run in load_runs(paths[1:])] == ["a", "b"]


def test_accuracy_is_pass_at_1_then_the_evaluation_reward_then_the_labs(tmp_path):
    folder = write_run(tmp_path, [*LOG, {"eval_reward": 0.5}])
    lab = {"accuracy_before": 0.25, "accuracy_after": 0.75, "num_updates": 3}
    (folder / "summary.json").write_text(json.dumps(lab))
    scores = {1: {"amc23": 0.0, "gsm8k": 0.9, "math500": 0.5}, 2: {"amc23": 0.25, "gsm8k": 1.0, "math500": 0.75}}
    write_evaluation(folder, {**scores, None: scores[2]})
    accuracy = load_run(folder).accuracy
    assert accuracy is not None
    assert (accuracy.source, accuracy.steps.tolist()) == ("pass@1", [1, 2])  # a model without a step has no place
    assert accuracy.mean.tolist() == [0.25, 0.5]  # of the paper's benchmarks alone
    assert accuracy.benchmarks["gsm8k"].tolist() == [0.9, 1.0]

    (folder / "eval.json").unlink()
    accuracy = load_run(folder).accuracy
    assert accuracy is not None
    assert (accuracy.source, accuracy.steps.tolist(), accuracy.mean.tolist()) == ("evaluation reward", [4], [0.5])

    write_run(folder)
    accuracy = load_run(folder).accuracy
    assert accuracy is not None
    assert (accuracy.source, accuracy.steps.tolist()) == ("held-out accuracy", [0, 3])
    assert accuracy.mean.tolist() == [0.25, 0.75]


def test_evaluations_lie_below_the_run_or_are_named(tmp_path):
    paths = [write_run(tmp_path / name) for name in ("a", "b")]
    write_evaluation(tmp_path / "a" / "evaluation", {2: {"x": 0.5}})
    write_evaluation(tmp_path / "elsewhere", {3: {"x": 0.75}})
    steps = [run.accuracy and run.accuracy.steps.tolist() for run in load_runs(paths)]
    assert steps == [[2], None]
    (run,) = load_runs(paths[1:], evaluations=[tmp_path / "elsewhere"])
    assert run.accuracy is not None and run.accuracy.steps.tolist() == [3]
    with pytest.raises(ReportError, match="2 runs, but 1 evaluations"):
        load_runs(paths, evaluations=[tmp_path / "elsewhere"])
    with pytest.raises(ReportError, match=r"b/eval\.json does not exist"):
        load_runs(paths[:1], evaluations=[paths[1]])
    (tmp_path / "a" / "evaluation" / "eval.json").write_text('{"checkpoints": [{}]}')
    with pytest.raises(ReportError, match="is no result of `mu-grpo eval`"):
        load_run(paths[0])


# Tables


def test_the_summary_has_the_numbers_of_the_log(tmp_path):
    folder = write_run(tmp_path / "a")
    write_evaluation(folder, {0: {"x": 0.1, "y": 0.3}, 2: {"x": 0.5, "y": 0.7}, 3: {"x": 0.4, "y": 0.6}})
    runs = load_runs([folder, write_run(tmp_path / "b", [{"loss": 0.0}])])
    rows = table(page.summary_table(runs))
    assert rows["updates"] == ["3 of 4 in 2 stages", "1 of 4 in 1 stage"]
    assert rows["accuracy, first → last"] == ["20.0% → 50.0%", "–"]
    assert rows["accuracy, best"] == ["60.0% at update 2", "–"]
    assert rows["reward, first → last stage"] == ["0.300 → 0.550", "–"]
    assert rows["E[ρ | A<0], lowest"] == ["0.900", "–"]
    assert rows["vetoed tokens, mean"] == ["1.00%", "–"]
    assert rows["tokens per response, last"] == ["22.0", "–"]
    assert (rows["T_rollout"], rows["T_total"]) == (["18.0 s", "–"], ["30.0 s", "–"])
    assert table(page.benchmark_table(runs))["y"] == ["60.0%", "–"]


def test_settings_are_told_apart_and_folders_are_not(tmp_path):
    paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", learning_rate=3e-4, top_k=0)]
    differing, agreeing = page.settings_tables(load_runs(paths))
    assert differing == [["", "a", "b"], ["learning_rate", "0.0001", "0.0003"], ["top_k", "None", "0"]]
    assert table(agreeing)["objective"] == ["mu_grpo"]
    assert "output_dir" not in table(agreeing)


def test_moving_means_are_over_fewer_values_at_the_ends():
    assert figures.moving_mean(np.array([1.0, 2.0, 6.0]), 1).tolist() == [1.0, 2.0, 6.0]
    assert figures.moving_mean(np.array([1.0, 2.0, 6.0]), 3).tolist() == [1.5, 3.0, 4.0]
    assert figures.moving_mean(np.array([1.0, 2.0, 6.0]), 2).tolist() == [1.0, 1.5, 4.0]


# Figures


def test_long_labels_lose_what_they_have_in_common_and_stay_different():
    names = [f"qwen2.5-math-7b-mu-1024-lr-1e-6-veto-{scope}-clip-5-seed-0" for scope in ("suffix", "sequence")]
    assert figures.short_labels(names) == ["…suffix…", "…sequence…"]
    assert figures.short_labels(["a/b", "a/c"]) == ["a/b", "a/c"]
    assert figures.short_labels(["x" * 50]) == ["x" * 19 + "…" + "x" * 19]
    assert figures.short_labels(["x" * 50, "x" * 51]) == [f"{n}: {'x' * 19}…{'x' * 19}" for n in (1, 2)]


def test_a_moving_mean_never_spans_two_stages(tmp_path):
    log = [{"loss": 0.0, "reward": float(update >= 200)} for update in range(400)]
    _, axes = drawn("reward", [load_run(write_run(tmp_path, log, stage_updates=200))])
    assert axes.lines[1].get_ydata().tolist() == [0.0] * 200 + [1.0] * 200


def drawn(name: str, runs: list[Run]):
    (panel,) = (panel for panel in figures.PANELS if panel.name == name)
    figure = figures.draw_panel(panel, runs)
    return figure, figure.axes[0]


def test_every_run_keeps_its_color_and_stages_are_marked(tmp_path):
    runs = load_runs([write_run(tmp_path / "a"), write_run(tmp_path / "b", LOG[:2])])
    _, axes = drawn("reward", runs)
    lines = [line for line in axes.lines if len(line.get_xdata()) > 2 or line.get_marker() == "o"]
    assert [line.get_color() for line in lines] == [figures.COLORS[0], figures.COLORS[1]]
    assert lines[0].get_ydata().tolist() == [0.25, 0.35, 0.55]
    (boundary,) = (line for line in axes.lines if line not in lines)
    assert boundary.get_xdata() == [2.5, 2.5]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("update", "mean reward")
    _, axes = drawn("clip", runs)
    assert max(axes.lines[0].get_ydata()) == pytest.approx(1.0)  # percent
    assert axes.get_ylim()[0] == 0
    assert [figures.style_of(number)["linestyle"] for number in (0, 6, 7)] == ["-", "-", "--"]


def test_accuracy_is_drawn_at_the_time_when_its_updates_were_done(tmp_path):
    folder = write_run(tmp_path)
    write_evaluation(folder, {0: {"x": 0.1}, 2: {"x": 0.5}})
    _, axes = drawn("accuracy_by_time", [load_run(folder)])
    assert axes.lines[0].get_xdata().tolist() == [0.0, 14.0]
    assert axes.lines[0].get_ydata().tolist() == [10.0, 50.0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("T_total (s), evaluation not counted", "pass@1 (%)")


def test_bars_are_the_parts_of_the_total(tmp_path):
    log = [{**LOG[2], "time/total_s": 3600.0, "time/rollout_s": 1078.0, "time/optimize_s": 1800.0}]
    _, axes = drawn("time", [load_run(write_run(tmp_path, log))])
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([18.0, 30.0, 12.0])
    assert axes.texts[0].get_text() == " 60 min, 30% rollout"


@pytest.mark.parametrize("panel", figures.PANELS, ids=lambda panel: panel.name)
def test_a_series_that_is_missing_says_so(panel, tmp_path):
    figure = figures.draw_panel(panel, [load_run(write_run(tmp_path, [{"loss": 0.0}]))])
    assert [text.get_text() for text in figure.axes[0].texts] == ["not logged"]


@pytest.mark.parametrize("length", [1, 3, 400])
@pytest.mark.parametrize("draw", [figures.draw_sheet, lambda runs: figures.draw_panel(figures.PANELS[3], runs)])
def test_nothing_overlaps_with_five_runs_of_long_names(draw, length, tmp_path):
    names = [f"qwen2.5-math-7b-mu-1024-lr-1e-6-veto-sequence-clip-5-seed-{seed}" for seed in range(5)]
    figure = draw(load_runs([write_run(tmp_path / name, (LOG * 134)[:length]) for name in names]))
    FigureCanvasAgg(figure).draw()
    (legend,) = figure.legends
    legend_box = legend.get_window_extent()
    assert figure.bbox.x0 <= legend_box.x0 and legend_box.x1 <= figure.bbox.x1 and figure.bbox.y0 <= legend_box.y0
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    assert not [box for box in boxes if box.overlaps(legend_box)]
    assert not [(a, b) for number, a in enumerate(boxes) for b in boxes[:number] if a.overlaps(b)]
    assert len({text.get_text() for text in legend.get_texts()}) == 5


# The page


def test_the_page_needs_no_network_and_figures_are_the_same_each_time(tmp_path):
    folder = write_run(tmp_path / "run")
    runs = load_runs([folder, write_run(tmp_path / "other")], ["<one> & only", "two"])
    written = page.write_report(runs, tmp_path / "out")
    text = written.read_text()
    assert "&lt;one&gt; &amp; only" in text and "<one>" not in text
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert len(sources) == len(figures.PANELS)
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert not re.findall(r"https?://|@import|url\(", text)
    files = {path.relative_to(tmp_path / "out"): path.read_bytes() for path in (tmp_path / "out").rglob("*.*")}
    assert {path.suffix for path in files} == {".html", ".md", ".png", ".svg"}
    assert len(files) == 4 + 2 * len(figures.PANELS)
    assert files[Path("report.png")].startswith(b"\x89PNG")
    again = figures.save(figures.draw_panel(figures.PANELS[0], runs), tmp_path / "again.svg")
    assert again.read_bytes() == files[Path("figures/accuracy_by_time.svg")]


def test_the_command_writes_into_the_run_and_prints_its_table(tmp_path, capsys):
    cli.main(["report", str(write_run(tmp_path / "a"))])
    assert "| updates | 3 of 4 in 2 stages |" in capsys.readouterr().out
    assert (tmp_path / "a" / "report" / "report.html").exists()
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", str(tmp_path)])
    assert ended.value.code == 2
    assert "Name the runs below it" in capsys.readouterr().err


# What training writes


def test_a_run_writes_its_log_and_settings_and_a_resumed_one_no_update_twice(tmp_path):
    policy = save_tiny_policy(tmp_path / "policy")
    spec = config_options(
        tmp_path / "run", model=str(policy), prompts=PROMPTS[:12], stage_updates=2, max_steps=4,
        save_strategy="steps", save_steps=1, hub_token="secret", eval_strategy="steps", eval_steps=2,
        per_device_eval_batch_size=4,
    )  # fmt: skip
    evaluation = {"eval_dataset": Dataset.from_dict({"prompt": PROMPTS[40:41]})}
    trainer = make_trainer(spec, digit_share, **evaluation)
    trainer.train()
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert [json.loads(line) for line in metrics.read_text().splitlines()] == trainer.state.log_history

    run = load_run(tmp_path / "run")
    assert (run.num_updates, run.boundaries(), run.settings["learning_rate"]) == (4, [2], 1e-2)
    assert run.settings["model"] == str(policy)
    assert "secret" not in (tmp_path / "run" / "run.json").read_text()
    assert run.accuracy is not None and run.accuracy.steps.tolist() == [2, 4]
    assert run.seconds()["total"] == pytest.approx(trainer.telemetry.total_s(), rel=0.2)

    resumed = make_trainer(spec, digit_share, **evaluation)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert [entry["step"] for entry in load_run(tmp_path / "run").updates] == [1, 2, 3, 4]
    assert [json.loads(line) for line in metrics.read_text().splitlines()] == resumed.state.log_history
