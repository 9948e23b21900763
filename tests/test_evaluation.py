"""`mu-grpo eval`: benchmarks, metrics, the choice of the checkpoint, and evaluations that are killed and go on."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import REPOSITORY, make_tokenizer, save_tiny_policy
from peft import LoraConfig, get_peft_model
from processes import start_process
from transformers import AutoModelForCausalLM

from mu_grpo_trl.data import PAPER_PROMPT
from mu_grpo_trl.evaluation.benchmarks import BENCHMARKS, PAPER_BENCHMARKS, find_benchmarks, load_benchmark
from mu_grpo_trl.evaluation.command import main
from mu_grpo_trl.evaluation.metrics import average_interval, interval, pass_at_k
from mu_grpo_trl.evaluation.options import EvaluationConfig, parse
from mu_grpo_trl.evaluation.policies import Checkpoint, eos_token_ids, find_checkpoints, served
from mu_grpo_trl.evaluation.report import BenchmarkScore, CheckpointScores, Results, Setting, as_json, as_markdown
from mu_grpo_trl.evaluation.store import Response, ResponseStore, keep_settings
from mu_grpo_trl.rewards.math import MathReward
from mu_grpo_trl.train import ScriptArguments, load_eval_dataset

STYLE: dict[str, Any] = {"conversational": False, "prompt_template": None}
CPU = ["--use_cpu", "true", "--bf16", "false"]
RECIPE = """
prompt_template: none
conversational: false
rollout_engine: transformers
rollout_concurrency: 8
max_context_length: 40
max_completion_length: 12
use_cpu: true
bf16: false
report_to: none
disable_tqdm: true
"""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# Benchmarks


@pytest.mark.parametrize(
    "name, rows, answers",
    [
        (
            "aime24",
            [
                {"id": 60, "problem": "p", "solution": "s", "answer": "204", "url": "u", "year": "2024"},
                {"id": 61, "problem": "q", "solution": "s", "answer": "025", "url": "u", "year": "2024"},
            ],
            ["204", "25"],
        ),
        (
            "aime25",
            [
                {"problem": "p", "answer": "70", "id": "0"},
                {"problem": "q", "answer": 588, "id": "1"},
                {"problem": "r", "answer": "336^\\circ", "id": "2"},
            ],
            ["70", "588", "336"],
        ),
        (
            "amc23",
            [
                {"id": 0, "question": "p", "answer": 27.0, "url": "u"},
                {"id": 1, "question": "q", "answer": -1.0, "url": "u"},
            ],
            ["27", "-1"],
        ),
        (
            "amc24",
            [
                {"exam": "12B", "problem_number": 4, "problem": "p", "answer": "D"},
                {"exam": "12A", "problem_number": 20, "problem": "q", "answer": "[\\frac{3}{4}, \\frac{7}{8}]"},
            ],
            ["D", "[\\frac{3}{4}, \\frac{7}{8}]"],
        ),
        (
            "math500",
            [
                {
                    "problem": "p", "solution": "s", "answer": "\\text{Evelyn}", "subject": "Algebra", "level": 2,
                    "unique_id": "test/algebra/1.json",
                }
            ],
            ["\\text{Evelyn}"],
        ),
        (
            "gsm8k",
            [
                {"question": "p", "answer": "16 - 3 = 13, 13 * 2 = 26\n#### 26"},
                {"question": "q", "answer": "She earns 17 * 125 = 2,125\n#### 2,125"},
            ],
            ["26", "2125"],
        ),
    ],
)  # fmt: skip
def test_each_benchmark_is_read_in_the_form_of_its_hub_dataset(tmp_path, name, rows, answers):
    dataset = load_benchmark(BENCHMARKS[name], write_rows(tmp_path / f"{name}.jsonl", rows), **STYLE)
    assert dataset["answer"][:] == answers
    assert dataset["prompt"][:] == ["p", "q", "r"][: len(rows)]


def test_the_registry_samples_as_the_paper_says():
    assert {name: benchmark.num_samples for name, benchmark in BENCHMARKS.items()} == {
        "aime24": 16, "aime25": 16, "amc23": 4, "amc24": 4, "math500": 4, "gsm8k": 4,
    }  # fmt: skip
    assert EvaluationConfig().benchmarks == list(PAPER_BENCHMARKS)


@pytest.mark.parametrize(
    "name, rows, message",
    [
        ("amc23", [{"problem": "p", "answer": 1.0}], r"no column 'question'.*Its columns: problem, answer"),
        ("aime24", [{"problem": "p", "answer": ""}], r"row 0, column 'answer': '' is empty"),
        ("aime24", [{"problem": "p", "answer": "x+1"}], r"row 0, column 'answer': 'x\+1' is no whole number"),
        ("amc23", [{"question": "p", "answer": 1.5}], r"'1.5' is no whole number"),
        ("gsm8k", [{"question": "p", "answer": "so 26"}], r"'so 26' is no whole number"),
        (
            "math500",
            [{"problem": "p", "answer": "1"}, {"problem": "q", "answer": "2"}, {"problem": "p", "answer": "1"}],
            r"1 problems come twice \(row 2 repeats row 0\)",
        ),
    ],
)
def test_a_file_that_is_not_the_benchmark_is_refused(tmp_path, name, rows, message):
    with pytest.raises(ValueError, match=f"(?s)Benchmark {name!r}.*{message}"):
        load_benchmark(BENCHMARKS[name], write_rows(tmp_path / "rows.jsonl", rows), **STYLE)


def test_an_empty_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'aime24' from .* has no rows"):
        load_benchmark(BENCHMARKS["aime24"], write_rows(tmp_path / "rows.jsonl", []), **STYLE)


def test_a_folder_gives_files_by_name_and_data_wins_over_it(tmp_path):
    for name in ("aime24.jsonl", "gsm8k_test_200.jsonl"):
        (tmp_path / name).touch()
    columns = "problem", "answer"
    found = find_benchmarks(["aime24", "gsm8k"], {"aime24": "own.jsonl"}, str(tmp_path), *columns)
    assert [source for _, source in found] == ["own.jsonl", str(tmp_path / "gsm8k_test_200.jsonl")]
    assert find_benchmarks(["aime24"], {}, None, *columns)[0][1] == "HuggingFaceH4/aime_2024"
    with pytest.raises(ValueError, match=r"no file for 'amc23' \(looked for amc23.jsonl, amc23.json,"):
        find_benchmarks(["amc23"], {}, str(tmp_path), *columns)
    with pytest.raises(ValueError, match="no benchmark 'amie24'. Did you mean 'aime24'"):
        find_benchmarks(["amie24"], {}, None, *columns)
    with pytest.raises(ValueError, match="`data` gives 'mine', which is not in `benchmarks`"):
        find_benchmarks(["aime24"], {"mine": "x.jsonl"}, None, *columns)
    with pytest.raises(ValueError, match="each once"):
        find_benchmarks(["aime24", "aime24"], {}, None, *columns)


# Metrics


def test_pass_at_k_is_the_unbiased_estimate():
    num_correct = np.array([0, 1, 4])
    assert pass_at_k(num_correct, 4, 1) == pytest.approx((0 + 1 / 4 + 1) / 3)
    assert pass_at_k(num_correct, 4, 2) == pytest.approx((0 + 1 / 2 + 1) / 3)  # 1 − C(3,2)/C(4,2) = 1 − 3/6
    assert pass_at_k(num_correct, 4, 4) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="pass@5 cannot be estimated from 4 samples"):
        pass_at_k(num_correct, 4, 5)


@pytest.mark.parametrize(
    "num_correct, num_samples, expected",
    [
        # Means 0, ½, 1, ½: variance 1/6, SE² 1/24, so ¼ · 24 = 6 trials.
        ([0, 1, 2, 1], 2, (0.187616, 0.812384)),
        ([0] * 30, 16, (0.0, 0.113513)),  # z² / (30 + z²)
        ([16] * 30, 16, (0.886487, 1.0)),
        ([1, 1], 2, (0.150039, 0.849961)),  # problems agree: no more trials than the 4 samples
        ([1], 4, (0.014635, 0.882090)),  # one problem is one trial
    ],
)
def test_the_interval_takes_the_samples_of_a_problem_as_one_cluster(num_correct, num_samples, expected):
    assert interval(np.array(num_correct), num_samples) == pytest.approx(expected, abs=2e-6)


def test_the_interval_of_an_average_adds_the_distances_in_squares():
    # Below: √(0.2² + 0.1²) / 2; above: √(0.3² + 0.3²) / 2.
    low, high = average_interval([0.5, 0.1], [(0.3, 0.8), (0.0, 0.4)])
    assert (low, high) == pytest.approx((0.3 - 0.111803, 0.3 + 0.212132), abs=1e-6)


def score(pass_at_1: float) -> BenchmarkScore:
    return BenchmarkScore(10, 4, pass_at_1, (pass_at_1 - 0.1, pass_at_1 + 0.1), {1: pass_at_1}, 5.0, 0.0, 0.0)


def scores(label: str, **values: float) -> CheckpointScores:
    checkpoint = Checkpoint(label, Path(label), None, "hash")
    return CheckpointScores(checkpoint, {name: score(value) for name, value in values.items()})


def test_the_best_checkpoint_has_the_highest_unweighted_average_of_the_papers_five():
    first = scores("first", amc23=0.6, amc24=0.2, aime24=0.2, aime25=0.1, math500=0.5, gsm8k=0.0)  # 0.32
    second = scores("second", amc23=0.4, amc24=0.2, aime24=0.1, aime25=0.1, math500=0.7, gsm8k=0.9)  # 0.30
    third = scores("third", amc23=0.6, amc24=0.2, aime24=0.2, aime25=0.1, math500=0.5, gsm8k=0.9)  # as the first
    results = Results([Setting("temperature", 1.0, "assumption")], [first, second, third])
    assert [results.average(one) for one in (first, second)] == pytest.approx([0.32, 0.30])
    assert (results.best, results.last) == (first, third)
    written = as_json(results)
    assert (written["best"], written["last"]) == ("first", "third")
    assert written["settings"]["temperature"] == {"value": 1.0, "from": "assumption"}
    lines = as_markdown(results).splitlines()
    assert any(re.match(r"\| first \(best\) .*\*\*32\.0 \[27\.5, 36\.5\]\*\*", line) for line in lines)
    assert any(line.startswith("| third (last)") for line in lines)


def test_without_the_papers_benchmarks_the_average_is_over_all():
    assert Results([], [scores("one", gsm8k=0.5, mine=0.1)]).averaged == ["gsm8k", "mine"]
    partial = Results([], [scores("one", gsm8k=0.5, aime24=0.1)])
    assert partial.averaged == ["aime24"]
    assert "missing: AMC23, AMC24, AIME25, MATH-500" in as_markdown(partial)


# The answer rule


def test_verdicts_on_200_responses_agree_with_those_of_a_reader():
    """The verdicts in the file were decided by reading problem, gold and response, before the code was run on them."""
    rows = [json.loads(line) for line in (REPOSITORY / "tests/data/eval_responses.jsonl").read_text().splitlines()]
    assert len(rows) == 200
    assert Counter(row["correct"] for row in rows) == {True: 124, False: 76}
    reward = MathReward(workers=2)
    try:
        verdicts = reward.score([row["gold"] for row in rows], [row["response"] for row in rows])
    finally:
        reward.close()
    assert [row for row, verdict in zip(rows, verdicts, strict=True) if row["correct"] != (verdict == 1.0)] == []


# What is kept on disk


def response(problem: int, sample: int, **fields: Any) -> Response:
    defaults = {"gold": "1", "answer": "1", "correct": True, "num_tokens": 3, "finish_reason": "stop", "text": "…\n"}
    return Response(problem=problem, sample=sample, **(defaults | fields))


def test_responses_are_read_back_and_a_cut_end_is_dropped(tmp_path):
    store = ResponseStore(tmp_path / "r.jsonl", num_problems=3, num_samples=2)
    for problem in (2, 0):
        store.append([response(problem, 0), response(problem, 1, answer=None, correct=False)])
    whole = store.path.read_bytes()
    for cut in (1, 5, len(whole) // 4 + 3):  # in the last line, and in the one before it
        store.path.write_bytes(whole[:-cut])
        again = ResponseStore(store.path, 3, 2)
        assert again.missing == [0, 1]
        assert again.responses[2] == store.responses[2]
        again.append(store.responses[0])
        assert store.path.read_bytes() == whole
    assert ResponseStore(store.path, 3, 2).missing == [1]


def test_a_damaged_line_before_the_end_is_an_error(tmp_path):
    store = ResponseStore(tmp_path / "r.jsonl", 3, 1)
    for problem in range(3):
        store.append([response(problem, 0)])
    lines = store.path.read_text().splitlines(keepends=True)
    store.path.write_text(lines[0] + lines[1][:20] + "\n" + lines[2])
    with pytest.raises(ValueError, match="r.jsonl, lines 2 to 2: .*Remove the file"):
        ResponseStore(store.path, 3, 1)


def test_changed_settings_are_named_and_further_ones_added(tmp_path):
    keep_settings(tmp_path, {"temperature": 1.0, "aime24: samples": 16})
    keep_settings(tmp_path, {"temperature": 1.0, "amc23: samples": 4})
    stored = json.loads((tmp_path / "settings.json").read_text())
    assert stored == {"temperature": 1.0, "aime24: samples": 16, "amc23: samples": 4}
    with pytest.raises(ValueError, match=r"\(then → now\): temperature: 1.0 → 0.6; amc23: samples: 4 → 8\. Restore"):
        keep_settings(tmp_path, {"temperature": 0.6, "amc23: samples": 8})
    (tmp_path / "settings.json").unlink()
    (tmp_path / "responses/x").mkdir(parents=True)
    (tmp_path / "responses/x/aime24.jsonl").touch()
    with pytest.raises(ValueError, match=r"holds responses but no settings.json"):
        keep_settings(tmp_path, {"temperature": 1.0})


# Checkpoints


def test_checkpoints_come_by_step_and_the_finished_run_last(tmp_path):
    run = save_tiny_policy(tmp_path / "run")
    for step in (10, 2):
        shutil.copytree(run, tmp_path / f"checkpoint-{step}")
        shutil.move(tmp_path / f"checkpoint-{step}", run / f"checkpoint-{step}")
        (run / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    found = find_checkpoints([str(run), str(run / "checkpoint-*"), str(run / "checkpoint-2")])
    assert [one.label for one in found] == ["run/checkpoint-2", "run/checkpoint-10", f"{tmp_path.name}/run"]
    assert [one.step for one in found] == [2, 10, None]
    assert len({one.weights_hash for one in found}) == 1
    (run / "checkpoint-10" / "files.json").write_text(json.dumps({"model.safetensors": 7}))
    with pytest.raises(ValueError, match=r"checkpoint-10 is no whole checkpoint \(model.safetensors was cut\)"):
        find_checkpoints([str(run / "checkpoint-*")])
    (run / "checkpoint-2" / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"checkpoint-2 is no whole checkpoint \(it has no trainer_state.json\)"):
        find_checkpoints([str(run / "checkpoint-2")])


@pytest.mark.parametrize(
    "files, message",
    [
        ([], "holds no model"),
        (["checkpoint-4/model.safetensors"], r"evaluate .*run/checkpoint-\*"),
        (["global_step4/x.pt"], "zero3_save_16bit_model"),
    ],
)
def test_a_folder_without_a_model_is_refused_with_the_way_out(tmp_path, files, message):
    (tmp_path / "run").mkdir()
    for name in files:
        (tmp_path / "run" / name).parent.mkdir()
        (tmp_path / "run" / name).touch()
    with pytest.raises(ValueError, match=message):
        find_checkpoints([str(tmp_path / "run")])


def test_checkpoints_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`checkpoints` is empty"):
        find_checkpoints([])
    with pytest.raises(ValueError, match="No folder matches"):
        find_checkpoints([str(tmp_path / "checkpoint-*")])
    with pytest.raises(ValueError, match="is no folder. Name"):
        find_checkpoints([str(tmp_path / "missing")])
    with pytest.raises(ValueError, match="'no/model' is no folder, and could not be loaded from the Hub"):
        find_checkpoints(["no/model"])


def save_adapter(folder: Path, base: Path, **options: Any) -> Path:
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, **options)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(str(folder))
    make_tokenizer().save_pretrained(folder)
    return folder


def test_an_adapter_is_served_as_a_merged_copy_that_is_removed(tmp_path):
    base = save_tiny_policy(tmp_path / "base")
    (adapter,) = find_checkpoints([str(save_adapter(tmp_path / "adapter", base))])
    ids = torch.tensor([[4, 5, 6, 7]])
    with served(adapter, make_tokenizer(), [[4, 5, 6, 7]], tmp_path / "scratch", untie=False) as policy:
        merged = AutoModelForCausalLM.from_pretrained(policy.folder)
        assert policy.expected is not None
        with torch.no_grad():
            logps = merged(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
            plain = AutoModelForCausalLM.from_pretrained(base)(ids).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(logps, policy.expected[0], atol=1e-5, rtol=0)
        assert (logps - plain.gather(-1, ids[0, 1:, None])[:, 0]).abs().max() > 1e-2
    assert list((tmp_path / "scratch").iterdir()) == []


def test_an_adapter_that_cannot_be_merged_is_refused(tmp_path):
    base = save_tiny_policy(tmp_path / "base")
    (dora,) = find_checkpoints([str(save_adapter(tmp_path / "dora", base, use_dora=True))])
    with (
        pytest.raises(ValueError, match="with DoRA. .*Use plain LoRA"),
        served(dora, make_tokenizer(), [], tmp_path / "scratch", untie=False),
    ):
        pass
    (lost,) = find_checkpoints([str(save_adapter(tmp_path / "lost", base))])
    shutil.rmtree(base)
    with (
        pytest.raises(ValueError, match="could not be put onto its base .*base'"),
        served(lost, make_tokenizer(), [], tmp_path / "scratch", untie=False),
    ):
        pass


def test_a_tied_head_is_written_out_for_the_server_alone(tmp_path):
    (tied,) = find_checkpoints([str(save_tiny_policy(tmp_path / "tied", tied=True))])
    probes = [[4, 5, 6]]
    with served(tied, make_tokenizer(), probes, tmp_path / "scratch", untie=True) as policy:
        assert json.loads((policy.folder / "config.json").read_text())["tie_word_embeddings"] is False
    for untie, sequences in ((False, probes), (True, [])):
        with served(tied, make_tokenizer(), sequences, tmp_path / "scratch", untie=untie) as policy:
            assert policy.folder == tied.folder


def test_eos_ids_are_the_trainers(tmp_path):
    folder, tokenizer = save_tiny_policy(tmp_path / "policy"), make_tokenizer()
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert eos_token_ids(folder, config, tokenizer) == (1,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert eos_token_ids(folder, config, tokenizer) == (1, 5, 6)


# Options


def test_the_papers_protocol_is_the_default_one(tmp_path):
    protocol = REPOSITORY / "recipes/eval/paper.yaml"
    evaluation = parse([*CPU, "--protocol", str(protocol), "--output_dir", str(tmp_path)]).evaluation
    for benchmark in BENCHMARKS.values():
        if benchmark.name in evaluation.benchmarks:
            assert evaluation.num_samples(benchmark) == EvaluationConfig().num_samples(benchmark)
    default = asdict(EvaluationConfig(output_dir=str(tmp_path)))
    assert {**asdict(evaluation), "samples": None} == default
    header = protocol.read_text().split("\n\n")[0]
    assert "mu-grpo eval --protocol recipes/eval/paper.yaml" in header


def test_prompts_context_and_servers_are_those_of_the_recipe(tmp_path):
    recipe = REPOSITORY / "recipes/deepscaler-smollm2-cpu.yaml"
    options = parse(
        ["--config", str(recipe), "--temperature", "0.6", "--max_context_length", "512", "--output_dir", str(tmp_path)]
    )
    assert (options.evaluation.temperature, options.config.temperature) == (0.6, 1.0)
    assert options.config.context_limit == 512
    assert options.config.vllm_server_args == ["--enforce-eager"]
    assert options.script.prompt_template == PAPER_PROMPT
    assert options.config.stages_path.parent == tmp_path


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--temprature", "1"], "Unknown option '--temprature'. Did you mean '--temperature'"),
        (["--top_p", "0"], "`top_p=0.0` must be above 0"),
        (["--engine", "sglang"], "`engine='sglang'` must be"),
        (["--protocol"], "give the file's path"),
    ],
)
def test_wrong_options_are_refused(argv, message):
    with pytest.raises(ValueError, match=message):
        parse([*CPU, *argv])


def test_an_unknown_key_of_a_protocol_is_refused(tmp_path):
    (tmp_path / "protocol.yaml").write_text("temprature: 1.0\n")
    with pytest.raises(ValueError, match="unknown key 'temprature'. Did you mean 'temperature'"):
        parse(["--protocol", str(tmp_path / "protocol.yaml")])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": 0.0}, "gives 16 equal responses"),
        ({"samples": ["0"]}, "must be at least 1"),
        ({"samples": ["4", "8"]}, "several numbers"),
        ({"samples": ["amie24=4"]}, "names 'amie24', no benchmark. Did you mean"),
        ({"samples": ["aime24=4", "aime24=8"]}, "'aime24' more than once"),
        ({"samples": ["aime24="]}, "is not NAME=VALUE"),
        ({"samples": ["x"]}, "is not a whole number"),
    ],
)
def test_wrong_numbers_of_samples_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EvaluationConfig(**options).num_samples(BENCHMARKS["aime24"])


def test_samples_are_for_all_benchmarks_or_for_one():
    config = EvaluationConfig(samples=["2", "aime24=3"], pass_at=[1, 2])
    assert [config.num_samples(BENCHMARKS[name]) for name in ("aime24", "math500")] == [3, 2]
    assert (config.ks(3), EvaluationConfig().ks(16)) == ([1, 2], [1, 16])


def test_a_recipe_can_name_a_benchmark_to_evaluate_on_while_training(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"question": f"p{i}", "answer": float(i)} for i in range(3)])
    script = ScriptArguments(eval_benchmark="amc23", eval_data=path, eval_max_problems=2)
    dataset = load_eval_dataset(script)
    assert dataset is not None
    assert dataset["answer"][:] == ["0", "1"]
    assert dataset["prompt"][0] == [{"role": "user", "content": PAPER_PROMPT.replace("{problem}", "p0")}]
    assert load_eval_dataset(ScriptArguments()) is None


# Whole evaluations, in process


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a quick evaluation of two checkpoints on a benchmark of one's own: 10 problems × 4, in 5 batches."""
    folder = tmp_path_factory.mktemp("setup")
    for seed in (1, 2):
        checkpoint = save_tiny_policy(folder / f"run/checkpoint-{seed}", seed=seed)
        (checkpoint / "trainer_state.json").write_text("{}")
    write_rows(folder / "sums.jsonl", [{"problem": f"{a}+{a * a}=", "answer": a + a * a} for a in range(1, 11)])
    (folder / "recipe.yaml").write_text(RECIPE)
    return [
        "--config", str(folder / "recipe.yaml"), "--checkpoints", str(folder / "run/checkpoint-*"), "--benchmarks",
        "sums", "--data", f"sums={folder / 'sums.jsonl'}",
    ]  # fmt: skip


def run_child(argv: list[str], folder: Path, kill_at: int | None = None) -> tuple[int | None, str]:
    from workers import evaluation_run

    log = folder.with_suffix(".log")
    process = start_process(evaluation_run.child, [*argv, "--output_dir", str(folder)], str(log), kill_at)
    process.join(120)
    return process.exitcode, log.read_text()


def results_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "run.lock"
    }


@pytest.mark.parametrize("kill_at", [5, 14])
def test_killed_and_started_again_it_ends_with_the_same_bytes(setup, tmp_path, kill_at):
    """SIGKILL within the second batch of the first checkpoint, and within the second checkpoint, in a write."""
    code, log = run_child(setup, tmp_path / "whole")
    assert code == 0, log
    folder = tmp_path / "killed"
    code, log = run_child(setup, folder, kill_at)
    assert code == -signal.SIGKILL, log
    stored = {name: content for name, content in results_of(folder).items() if name.startswith("responses")}
    assert sum(content.count(b"\n") for content in stored.values()) == 4 * kill_at - 1
    assert "eval.json" not in results_of(folder)
    code, log = run_child(setup, folder)
    assert code == 0, log
    assert results_of(folder) == results_of(tmp_path / "whole")


def test_an_evaluation_says_what_it_was_and_goes_on_only_with_the_same_settings(setup, tmp_path, capsys, monkeypatch):
    argv = [*setup, "--output_dir", str(tmp_path), "--samples", "2", "--pass_at", "2", "--max_problems", "3"]
    main(argv)
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "eval.json").read_text())
    assert printed.strip().startswith((tmp_path / "eval.md").read_text().strip())
    assert [one["label"] for one in result["checkpoints"]] == ["run/checkpoint-1", "run/checkpoint-2"]
    assert result["last"] == "run/checkpoint-2"
    settings = {name: (setting["value"], setting["from"]) for name, setting in result["settings"].items()}
    assert settings["temperature"] == (1.0, "assumption")
    assert settings["context_length"] == (40, "recipe (paper: as in training)")
    assert settings["max_tokens"] == (12, "recipe")
    assert settings["max_problems"] == (3, "given")
    rows = [
        json.loads(line) for line in (tmp_path / "responses/run--checkpoint-1/sums.jsonl").read_text().splitlines()
    ]
    one = result["checkpoints"][0]["benchmarks"]["sums"]
    assert (one["num_problems"], one["num_samples"], len(rows)) == (3, 2, 6)
    assert one["mean_length"] == pytest.approx(sum(row["num_tokens"] for row in rows) / 6)
    assert one["truncated_share"] == sum(row["finish_reason"] == "length" for row in rows) / 6
    assert one["unanswered_share"] == sum(row["answer"] is None for row in rows) / 6
    assert {"pass@1", "pass@2"} <= set(one)

    monkeypatch.setattr("mu_grpo_trl.rollout.transformers_engine.TransformersEngine.generate", None)
    main(argv)  # nothing is missing, so that nothing is generated
    with pytest.raises(SystemExit):
        main([*argv, "--temperature", "0.5"])
    assert "other settings (then → now): temperature: 1.0 → 0.5." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*argv, "--pass_at", "3"])
    assert "pass@3 cannot be estimated from the 2 samples of 'sums'" in capsys.readouterr().err


def test_two_evaluations_in_one_folder_are_refused(setup, tmp_path, capsys):
    descriptor = os.open(tmp_path / "run.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as another process would have it
    try:
        with pytest.raises(SystemExit) as ended:
            main([*setup, "--output_dir", str(tmp_path)])
    finally:
        os.close(descriptor)
    assert ended.value.code == 2
    assert "is in use by another run" in capsys.readouterr().err
    assert not (tmp_path / "responses").exists()


def test_a_prompt_without_room_for_a_response_is_refused(setup, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([*setup, "--output_dir", str(tmp_path), "--context_length", "5"])
    assert "leave fewer than min_response_tokens=1 within context_length=5" in capsys.readouterr().err


# Through vLLM


@pytest.mark.vllm
def test_checkpoints_with_tied_heads_are_evaluated_by_one_server_and_resumed(tmp_path, vllm_python):
    """The probe compares each one's log-probs with the server's: a head kept from the first would not pass."""
    for seed in (1, 2):
        checkpoint = save_tiny_policy(tmp_path / f"run/checkpoint-{seed}", seed=seed, tied=True, hidden_size=64)
        (checkpoint / "trainer_state.json").write_text("{}")
    write_rows(tmp_path / "sums.jsonl", [{"problem": f"{a}+{a * a}=", "answer": a + a * a} for a in range(1, 7)])
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("transformers", "vllm"))
    folder = tmp_path / "out"
    argv = [
        "--config", str(tmp_path / "recipe.yaml"), "--checkpoints", str(tmp_path / "run/checkpoint-*"), "--benchmarks",
        "sums", "--data", f"sums={tmp_path / 'sums.jsonl'}", "--samples", "3", "--top_p", "0.9", "--vllm_python",
        vllm_python, "--vllm_server_args=--enforce-eager", "--output_dir", str(folder),
    ]  # fmt: skip
    main(argv)
    files = sorted((folder / "responses").rglob("*.jsonl"))
    assert [len(path.read_text().splitlines()) for path in files] == [18, 18]
    assert not (folder / "policy").exists()
    assert (folder / "vllm/vllm-0.log").read_text().count("Starting vLLM API server") <= 1

    stored = [path.read_bytes() for path in files]
    cut = stored[1][: len(stored[1]) // 2]
    files[1].write_bytes(cut)
    main(argv)
    assert files[0].read_bytes() == stored[0]
    kept = b"".join(stored[1].splitlines(keepends=True)[: cut.count(b"\n") // 3 * 3])
    assert files[1].read_bytes().startswith(kept)
    assert len(ResponseStore(files[1], 6, 3).missing) == 0
