"""The laboratory's grid and runner: which cells there are, and what becomes of them when runs end badly."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mu_grpo_trl.lab import grid
from mu_grpo_trl.lab.cell import RESULT_NAME, cell_folder
from mu_grpo_trl.lab.cli import main
from mu_grpo_trl.lab.grid import MAIN_COMPARISON, Cell, GridError, lab_folder, load_experiments, load_grid
from mu_grpo_trl.lab.runner import ERROR_NAME, is_finished, reuse, run_cells, seconds_left
from mu_grpo_trl.lab.tasks import LAB_TASKS

ROOT = Path(__file__).resolve().parent.parent


def tiny(cell: Cell, **settings) -> Cell:
    """The cell with 4 updates on two stages, evaluated on 4 problems."""
    small = {"max_steps": 4, "stage_updates": 2, "prompts_per_update": 2, "num_generations": 4}
    return replace(cell, settings=cell.settings | small | settings, evaluation={"every": 2, "num_problems": 4})


def write_experiments(folder: Path, **experiments: dict) -> Path:
    """A lab folder with the real base and the given experiments."""
    folder.mkdir()
    (folder / "base.yaml").write_text((lab_folder() / "base.yaml").read_text())
    defaults = {"title": "t", "paper": "p", "claim": "a", "priority": 1, "tasks": ["sums"], "methods": ["mu_grpo"],
                "learning_rates": [1e-4], "seeds": [0]}  # fmt: skip
    for name, values in experiments.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(defaults | values))
    return folder


def result_of(cell: Cell, accuracy: float = 0.5, cpu_s: float = 8.0) -> dict:
    return {
        "schema": grid.SCHEMA,
        "cell": cell.to_dict(),
        "evaluations": [{"update": 0, "train_cpu_s": 0.0, "train_wall_s": 0.0, "accuracy": accuracy}],
        "times": {"total_cpu_s": cpu_s, "evaluation_cpu_s": 2.0},
    }


# The grid


def test_experiments_that_ask_for_the_same_run_share_its_cell(tmp_path: Path):
    folder = write_experiments(
        tmp_path / "lab",
        first={"seeds": [0, 1]},
        second={"seeds": [1, 2], "vary": [{"veto_threshold": 1e-4}, {"veto_threshold": 0.1}]},
    )
    cells = load_grid(folder=folder)
    assert [(c.seed, c.settings["veto_threshold"], c.experiments) for c in cells] == [
        (0, 1e-4, ("first",)),
        (1, 1e-4, ("first", "second")),
        (1, 0.1, ("second",)),
        (2, 1e-4, ("second",)),
        (2, 0.1, ("second",)),
    ]
    assert [cell.id for cell in load_grid(["second"], folder)] == [cell.id for cell in cells[1:]]


def test_a_cell_is_named_by_all_that_decides_its_result():
    cell = load_grid(["main"])[0]
    others = [
        replace(cell, seed=17),
        replace(cell, task="sorting"),
        replace(cell, settings=cell.settings | {"learning_rate": 3e-4}),
        replace(cell, settings=cell.settings | {"adam_beta2": 0.98}),
        replace(cell, evaluation=cell.evaluation | {"num_problems": 10}),
    ]
    assert len({cell.id, *(other.id for other in others)}) == 6
    assert replace(cell, experiments=("x",), priority=(9,)).id == cell.id
    assert replace(cell, settings=cell.settings | {"epsilon_high": 4}).id == cell.id  # 4.0 in the YAML


def test_a_new_schema_renames_every_cell(monkeypatch):
    cell = load_grid(["main"])[0]
    before = cell.id
    monkeypatch.setattr(grid, "SCHEMA", grid.SCHEMA + 1)
    assert replace(cell).id != before


def test_cells_run_by_priority_and_then_seed_by_seed(tmp_path: Path):
    folder = write_experiments(
        tmp_path / "lab",
        later={"priority": 2, "seeds": [5]},
        sooner={"seeds": [7, 3], "methods": ["mu_grpo", "grpo_low"]},
    )
    assert [(c.seed, c.method) for c in load_grid(folder=folder)] == [
        (7, "mu_grpo"), (7, "grpo_low"), (3, "mu_grpo"), (3, "grpo_low"), (5, "mu_grpo")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"methods": ["ppo"]}, r"unknown methods \['ppo'\]: base.yaml has .*'mu_grpo'"),
        ({"tasks": ["chess"]}, r"unknown tasks \['chess'\]"),
        ({"vary": [{"stage_updates": 100}]}, "updates are no multiple of 100"),
        ({"colour": "red"}, "unexpected keyword argument 'colour'"),
    ],
)
def test_what_cannot_run_is_refused_when_the_grid_is_read(tmp_path: Path, values: dict, message: str):
    with pytest.raises(GridError, match=message):
        load_grid(folder=write_experiments(tmp_path / "lab", wrong=values))


def test_two_names_for_one_run_are_refused(tmp_path: Path):
    folder = write_experiments(tmp_path / "lab", first={})
    base = yaml.safe_load((folder / "base.yaml").read_text())
    base["methods"]["nav"] = base["methods"]["mu_grpo"]
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    write = (folder / "first.yaml").read_text().replace("mu_grpo", "nav")
    (folder / "second.yaml").write_text(write)
    with pytest.raises(GridError, match="second.yaml: sums nav .* is the run that first.yaml calls 'mu_grpo'"):
        load_grid(folder=folder)


def test_every_cell_of_the_grid_is_a_run_the_trainer_takes(tmp_path: Path):
    from mu_grpo_trl.train import parse

    seen = {}
    for cell in load_grid():
        shape = {name: value for name, value in cell.settings.items() if name != "learning_rate"}
        seen.setdefault(json.dumps(shape, sort_keys=True), cell)
    assert len(seen) > 20
    for number, cell in enumerate(seen.values()):
        recipe = tmp_path / f"{number}.yaml"
        run = {"seed": cell.seed, "model_name_or_path": "m", "output_dir": str(tmp_path / "run")}
        recipe.write_text(yaml.safe_dump(cell.settings | run))
        script, config, _ = parse(["--config", str(recipe)])
        assert cell.num_updates % cell.stage_updates == 0, cell
        assert cell.num_updates % cell.evaluation["every"] == 0, cell
        assert (config.stage_updates, config.learning_rate) == (cell.stage_updates, cell.learning_rate)
        assert script.dataset_name and not script.conversational
        assert config.collapse_watch == config.no_signal == "warn"


def test_methods_are_the_papers():
    from mu_grpo_trl.train import parse

    relaxed, tight = (0.0, 5.0), (0.8, 1.2)
    expected = {  # objective, clip, veto scope, low staleness
        "mu_grpo": ("mu_grpo", relaxed, "sequence", False),
        "no_veto": ("mu_grpo", relaxed, "none", False),
        "trigger": ("mu_grpo", relaxed, "trigger", False),
        "non_trigger_suffix": ("mu_grpo", relaxed, "non_trigger_suffix", False),
        "suffix": ("mu_grpo", relaxed, "suffix", False),
        "grpo_high": ("grpo", tight, "none", False),
        "grpo_low": ("grpo", tight, "none", True),
        "mu_grpo_low": ("mu_grpo", relaxed, "sequence", True),
        "m2po": ("m2po", tight, "none", False),
    }
    cells = {cell.method: cell for cell in load_grid(["main", "low_staleness"])}
    assert cells.keys() == expected.keys()
    for method, (objective, clip, scope, low) in expected.items():
        settings = cells[method].settings
        asked = {"objective", "epsilon_high", "veto_scope", "veto_threshold"} & settings.keys()
        argv = [part for name in asked for part in (f"--{name}", str(settings[name]))]
        _, config, _ = parse(["--output_dir", "x", "--use_cpu", "true", "--bf16", "false", *argv])
        assert (config.objective, config.veto_scope, config.veto_threshold) == (objective, scope, 1e-4)
        if method != "m2po":  # which finds its own
            assert config.clip_range == pytest.approx(clip)
        assert (cells[method].stage_updates == 4) == low


def test_learning_rates_are_tuned_on_equal_budgets_and_on_other_seeds():
    experiments = load_experiments()
    reported = {seed for e in experiments.values() if e.claim != "tuning" for seed in e.seeds}
    for names in (MAIN_COMPARISON, ("other_tasks_tuning", "other_tasks")):
        tuning, compared = (experiments[name] for name in names)
        assert tuning.seeds == experiments["tuning"].seeds and not set(tuning.seeds) & reported
        # The scopes of the veto take μ-GRPO's learning rate.
        assert set(compared.methods) - set(tuning.methods) == {"no_veto", "trigger", "non_trigger_suffix", "suffix"}
        assert tuning.learning_rates == compared.learning_rates and len(compared.learning_rates) >= 2
        assert len(compared.seeds) >= 5
        cells = Counter((cell.task, cell.method, cell.learning_rate) for cell in load_grid([tuning.name]))
        assert set(cells.values()) == {len(tuning.seeds)}


def test_a_fixed_generation_budget_generates_the_same_responses_in_one_stage():
    cells = load_grid(["fixed_generation_budget"])
    assert {cell.num_updates * cell.settings["prompts_per_update"] for cell in cells} == {1280}
    assert all(cell.stage_updates == cell.num_updates for cell in cells)


def test_every_task_of_the_grid_can_be_evaluated():
    assert {cell.task for cell in load_grid()} == LAB_TASKS.keys()


# Running


def without_clocks(root: Path, cell: Cell) -> dict:
    result = json.loads((cell_folder(cell, root) / RESULT_NAME).read_text())
    assert result.pop("times")["total_cpu_s"] > 0
    for evaluation in result["evaluations"]:
        assert evaluation.pop("train_cpu_s") >= 0 and evaluation.pop("train_wall_s") >= 0
    return result


RUN_TINY = """
import json, sys
from pathlib import Path
from mu_grpo_trl.lab.runner import run_cells
from tests.test_lab_run import tiny_cells

if __name__ == "__main__":
    run_cells(tiny_cells(), Path(sys.argv[1]), num_workers=1, say=lambda line: print(line, flush=True))
"""


def tiny_cells() -> list[Cell]:
    first = [cell for cell in load_grid(["main"]) if cell.seed == 0][:3]
    return [tiny(cell, learning_rate=rate) for cell, rate in zip(first, (1e-4, 2e-4, 3e-4), strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_run_goes_on_with_what_is_missing_and_ends_with_the_same_results(tmp_path: Path):
    psutil = pytest.importorskip("psutil")
    cells, killed, whole = tiny_cells(), tmp_path / "killed", tmp_path / "whole"
    runner = subprocess.Popen(
        [sys.executable, "-c", RUN_TINY, str(killed)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert runner.stdout is not None
    lines = iter(runner.stdout.readline, "")
    assert any(line.startswith("[1/3]") for line in lines)
    second = killed / "work" / cells[1].id
    while not second.exists():  # the next one has begun
        time.sleep(0.05)
    children = psutil.Process(runner.pid).children(recursive=True)
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    ended = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    _, alive = psutil.wait_procs(children, timeout=120)  # nobody reaps orphans in some containers
    assert not [child for child in alive if child.is_running() and child.status() not in ended]
    assert children

    assert [is_finished(cell, killed) for cell in cells] == [True, False, False]
    first = (cell_folder(cells[0], killed) / RESULT_NAME).stat().st_mtime_ns
    progress: list[str] = []
    assert run_cells(cells, killed, num_workers=1, say=progress.append) == []
    assert progress[0].startswith("2 of 3 cells to run")
    assert (cell_folder(cells[0], killed) / RESULT_NAME).stat().st_mtime_ns == first
    assert run_cells(cells, whole, num_workers=2, say=progress.append) == []
    for cell in cells:
        assert without_clocks(killed, cell) == without_clocks(whole, cell)
        assert [path.name for path in cell_folder(cell, killed).iterdir()] == [RESULT_NAME]
    assert not list((killed / "work").iterdir())  # no stage, no checkpoint

    result = without_clocks(whole, cells[0])
    assert result["cell"] == cells[0].to_dict()
    assert [entry["update"] for entry in result["evaluations"]] == [0, 2, 4]
    assert result["metrics"]["step"] == [1, 2, 3, 4]
    assert result["metrics"]["ratio/negative_mean"][0] == pytest.approx(1.0, abs=1e-4)  # on fresh data
    assert len(result["stages"]) == 2
    rewards = result["metrics"]["reward"]
    assert result["stages"][1]["mean_reward"] == pytest.approx((rewards[2] + rewards[3]) / 2, rel=1e-5)
    assert result["num_responses"] == 4 * 2 * 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_failing_cell_is_recorded_and_the_rest_goes_on(tmp_path: Path):
    good = tiny_cells()[0]
    bad = tiny(good, learning_rate=-1.0)
    progress: list[str] = []
    assert run_cells([bad, good], tmp_path, num_workers=1, say=progress.append) == [bad]
    assert "`learning_rate=-1.0` must be 0 or more" in (cell_folder(bad, tmp_path) / ERROR_NAME).read_text()
    assert [line.split()[0] for line in progress[1:]] == ["FAILED", "[1/2]"]
    assert is_finished(good, tmp_path) and not is_finished(bad, tmp_path)


def test_published_results_are_taken_instead_of_running_the_cells(tmp_path: Path):
    cells, root, published = load_grid(["main"])[:3], tmp_path / "lab", tmp_path / "cells.jsonl.gz"
    old = result_of(cells[0]) | {"schema": grid.SCHEMA - 1}
    renamed = result_of(cells[1], accuracy=0.7)
    renamed["cell"]["experiments"] = ["an_experiment_that_is_gone"]
    stranger = result_of(replace(cells[2], seed=12345))
    with gzip.open(published, "wt") as file:
        file.writelines(json.dumps(result) + "\n" for result in (old, renamed, stranger))
    assert reuse(published, cells, root) == 1
    assert [is_finished(cell, root) for cell in cells] == [False, True, False]
    stored = json.loads((cell_folder(cells[1], root) / RESULT_NAME).read_text())
    assert stored["evaluations"][0]["accuracy"] == 0.7
    assert stored["cell"]["experiments"] == list(cells[1].experiments)
    assert reuse(published, cells, root) == 0


def test_the_time_left_follows_from_what_finished_cells_of_the_task_took(tmp_path: Path):
    cells = load_grid(["main"])[:3]
    folder = cell_folder(cells[0], tmp_path)
    folder.mkdir(parents=True)
    (folder / RESULT_NAME).write_text(json.dumps(result_of(cells[0], cpu_s=8.0)))
    assert seconds_left(cells, tmp_path) == pytest.approx(2 * (8.0 + 2.0))


def test_list_counts_each_experiments_cells(tmp_path: Path, capsys):
    cell = load_grid(["tuning"])[0]
    folder = cell_folder(cell, tmp_path / "lab")
    folder.mkdir(parents=True)
    (folder / RESULT_NAME).write_text(json.dumps(result_of(cell)))
    main(["list", "--runs", str(tmp_path)])
    rows = {line.split()[0]: line.split()[1:3] for line in capsys.readouterr().out.splitlines()}
    assert rows["tuning"] == [str(len(load_grid(["tuning"]))), "1"]
    assert rows["main"] == [str(len(load_grid(["main"]))), "0"]
    assert rows.keys() >= load_experiments().keys()


def test_an_unknown_experiment_is_refused_with_the_known_ones(tmp_path: Path, capsys):
    with pytest.raises(SystemExit) as error:
        main(["run", "mian", "--runs", str(tmp_path)])
    assert error.value.code == 2
    assert "There is no experiment 'mian'. Choose among" in capsys.readouterr().err


# The tasks


def test_long_solutions_are_worked_step_by_step_and_fit():
    from mu_grpo_trl.lab.arithmetic import LONG_OPERANDS, MAX_LONG_RESPONSE_TOKENS, make_problems, make_tokenizer
    from mu_grpo_trl.lab.rewards import arithmetic_reward
    from mu_grpo_trl.lab.warm_start import worked_solution

    assert worked_solution((12, 7, 5, 1, 3)) == r"12+7=19;19+5=24;24+1=25;25+3=28;\boxed{28}"
    assert arithmetic_reward([worked_solution((12, 7, 5, 1, 3))], ["28"]) == [1.0]
    longest = make_tokenizer()(worked_solution((99,) * LONG_OPERANDS) + "<eos>").input_ids
    assert len(longest) == MAX_LONG_RESPONSE_TOKENS
    prompts = [problem["prompt"] for problem in make_problems(50, num_operands=LONG_OPERANDS)]
    assert all(prompt.count("+") == LONG_OPERANDS - 1 for prompt in prompts)


def test_sorting_is_judged_as_reasoning_gym_judges_it():
    gym = pytest.importorskip("reasoning_gym")
    from mu_grpo_trl.lab import sorting
    from mu_grpo_trl.lab.arithmetic import make_tokenizer
    from mu_grpo_trl.lab.rewards import exact_reward

    held_out = sorting.make_lists(20, split="held_out")
    tokenizer, judge = make_tokenizer(sorting.VOCABULARY), gym.create_dataset("number_sorting", size=1)
    for row in held_out:
        numbers, sign = row["prompt"][:-1].split(","), row["prompt"][-1]
        assert len(numbers) == sorting.NUM_NUMBERS and sign in "<>"
        direction = "descending" if sign == ">" else "ascending"
        entry = {"answer": str(row["answer"].split(",")), "metadata": {"direction": direction}}
        assert judge.score_answer(str(row["answer"].split(",")), entry) == 1.0
        wrong = ",".join(reversed(row["answer"].split(",")))
        assert judge.score_answer(str(wrong.split(",")), entry) == 0.0
        assert exact_reward([row["answer"], wrong], [row["answer"]] * 2) == [1.0, 0.0]
        assert len(tokenizer(row["prompt"]).input_ids) <= sorting.MAX_PROMPT_TOKENS
        assert len(tokenizer(row["answer"] + "<eos>").input_ids) <= sorting.MAX_RESPONSE_TOKENS


def test_sorting_splits_share_no_numbers_and_careless_solutions_only_mistake_a_decade():
    pytest.importorskip("reasoning_gym")
    from mu_grpo_trl.lab import sorting

    def multisets(split) -> set[tuple[int, ...]]:
        return {tuple(sorted(numbers)) for numbers, _ in sorting.draw_lists(200, 0, split)}

    assert not multisets("train") & multisets("held_out")
    for row in sorting.make_solutions(50, seed=0, careless=1.0):
        tens = [int(number) // 10 for number in row["completion"].split(",")]
        assert tens == sorted(tens, reverse=row["prompt"].endswith(">"))
        assert sorted(row["completion"].split(",")) == sorted(row["prompt"][:-1].split(","))
    careful = sorting.make_solutions(20, seed=0, careless=0.0)
    answers = [sorting.answer_of(*entry) for entry in sorting.draw_lists(20, 1, "train")]
    assert careful["completion"] == answers
