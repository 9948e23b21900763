"""
Writing a stage and reading its updates, beside the plain way: a `datasets.Dataset` written by `from_generator`, saved,
and read by `dataset[rows]`.

One pair is the life of a stage in a fresh process each: write it, open it, read every update once. Before that, stages
of growing size are written and read by fresh processes of their own, and their memory is watched from outside.

    python -m benchmarks.stage_store [--quick] [--powers 12 14 16 18] [--pair-power 14] [--folder DIR]
"""

from __future__ import annotations

import itertools
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from mu_grpo_trl.rollout.fill import FLUSH_GROUPS
from mu_grpo_trl.schedule import Schedule
from mu_grpo_trl.stage import Manifest, StageReader, StageWriter

from .common import make_parser, num_pairs, report, run_pairs
from .synthetic import make_groups, make_manifest

NUM_GENERATIONS = 8
PROMPTS_PER_UPDATE = 32
MEAN_LENGTH = 1000
MAX_READS = 1000
WARM_POWER = 8  # each process first does its work on a stage this small, so that no import is measured
SAMPLE_S = 0.002

spawn = multiprocessing.get_context("spawn")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--powers", type=int, nargs="+", default=[12, 14, 16, 18], help="log2 of responses per stage")
    parser.add_argument("--pair-power", type=int, default=14, help="log2 of responses in the comparison")
    parser.add_argument("--folder", type=Path, help="where stages are written and deleted again (a temporary folder)")
    options = parser.parse_args()
    pairs = num_pairs(options)
    folder = Path(tempfile.mkdtemp(prefix="stage-store-", dir=options.folder))
    try:
        sizes = [_measure_size(folder / f"stage-{power}", power) for power in sorted(options.powers)]
        ratios, parts = _compare(folder, options.pair_power, pairs)
    finally:
        shutil.rmtree(folder)
    report("stage_store", ratios, **_exponents(sizes), sizes=sizes, pair_seconds=parts)


def write_stage(path: Path, power: int) -> dict[str, float]:
    """Write a stage of 2^power responses; seconds in the writer, and bytes on the disk."""
    manifest = _manifest(power)
    groups = make_groups(manifest, MEAN_LENGTH)
    writer, times = StageWriter.create(path, manifest), []
    while flush := list(itertools.islice(groups, FLUSH_GROUPS)):
        times.append(_timed(lambda flush=flush: writer.append(flush)))
    times.append(_timed(writer.complete))
    seconds, cpu_s = np.sum(times, axis=0).tolist()
    size = sum(file.stat().st_size for file in (path / "groups").iterdir())
    return {"write_s": seconds, "write_cpu_s": cpu_s, "bytes": size}


def read_stage(path: Path, power: int) -> dict[str, Any]:
    """Open the stage and read its updates in the order of training, at most `MAX_READS`; seconds of each."""
    started = time.perf_counter()
    reader = StageReader(path)
    open_s = time.perf_counter() - started
    return {"open_s": open_s, **_fetch_times(lambda groups: fetch(reader, groups), power)}


def fetch(reader: StageReader, groups: np.ndarray) -> int:
    """What an update reads of a stage, every byte of it touched; returns its tokens."""
    _, completion_lengths = reader.lengths(groups)
    reader.advantages(groups)
    reader.truncated(groups)
    reader.rewards(groups)
    responses = [
        reader.response(int(group), sample) for group in groups for sample in range(reader.manifest.num_generations)
    ]
    for response in responses:
        _touch(response.prompt_ids, response.completion_ids, response.behavior_logps)
    return int(completion_lengths.sum())


def write_dataset(path: Path, power: int) -> dict[str, float]:
    """The plain way to keep the same rows."""
    from datasets import Dataset, Features, Sequence, Value, disable_progress_bars

    disable_progress_bars()

    features = Features(
        {
            "group": Value("int64"),
            "prompt_ids": Sequence(Value("int32")),
            "completion_ids": Sequence(Value("int32")),
            "behavior_logps": Sequence(Value("float32")),
            "reward": Value("float64"),
            "advantage": Value("float32"),
            "finish_reason": Value("string"),
        }
    )
    made_s = 0.0

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal made_s
        groups = make_groups(_manifest(power), MEAN_LENGTH)
        while True:
            started = time.perf_counter()
            group = next(groups, None)
            made_s += time.perf_counter() - started
            if group is None:
                return
            for row in group.responses:
                yield {
                    "group": group.group,
                    "prompt_ids": group.prompt_ids,
                    "completion_ids": row.completion_ids,
                    "behavior_logps": row.behavior_logps,
                    "reward": row.reward,
                    "advantage": row.advantage,
                    "finish_reason": row.finish_reason,
                }

    started = time.perf_counter()
    dataset = Dataset.from_generator(rows, features=features, cache_dir=f"{path}.cache", fingerprint=f"stage-{power}")
    dataset.save_to_disk(path)  # type: ignore[union-attr]  # not an iterable one
    return {"write_s": time.perf_counter() - started - made_s}


def read_dataset(path: Path, power: int) -> dict[str, Any]:
    """Open it and read the same updates."""
    from datasets import load_from_disk

    started = time.perf_counter()
    dataset = load_from_disk(path).with_format("numpy")
    open_s = time.perf_counter() - started

    def fetch_rows(groups: np.ndarray) -> int:
        rows = (groups[:, None] * NUM_GENERATIONS + np.arange(NUM_GENERATIONS)).ravel()
        batch = dataset[rows]
        for name in ("prompt_ids", "completion_ids", "behavior_logps"):
            _touch(*batch[name])
        return sum(map(len, batch["completion_ids"]))

    return {"open_s": open_s, **_fetch_times(fetch_rows, power)}


def _measure_size(path: Path, power: int) -> dict[str, float]:
    """Figures of one stage size; the stage is deleted."""
    written = _in_fresh_process(write_stage, path, power)
    read = _in_fresh_process(read_stage, path, power)
    _remove(path)
    fetch_ms, fetch_cpu_ms = 1e3 * np.array(read["fetch_s"]), 1e3 * np.array(read["fetch_cpu_s"])
    num_updates = 2**power // (NUM_GENERATIONS * PROMPTS_PER_UPDATE)
    figures = {
        "responses": 2**power,
        "write_mb_per_s": round(written["bytes"] / written["write_s"] / 1e6, 1),
        "write_s": round(written["write_s"], 3),
        "open_ms": round(1e3 * read["open_s"], 2),
        "fetch_p50_ms": round(float(np.quantile(fetch_ms, 0.5)), 3),
        "fetch_p99_ms": round(float(np.quantile(fetch_ms, 0.99)), 3),
        "fetch_cpu_p99_ms": round(float(np.quantile(fetch_cpu_ms, 0.99)), 3),
        "read_all_s": round(float(fetch_ms.mean()) / 1e3 * num_updates, 3),
        "cpu_s": round(written["write_cpu_s"] + float(fetch_cpu_ms.mean()) / 1e3 * num_updates, 3),
        "write_rss_anon_mib": written["peak_mib"],
        "write_over_start_mib": round(written["peak_mib"] - written["start_mib"], 1),
        "read_rss_anon_mib": read["peak_mib"],
        "read_over_start_mib": round(read["peak_mib"] - read["start_mib"], 1),
    }
    print(figures, flush=True)
    return figures


def _exponents(sizes: list[dict[str, float]]) -> dict[str, float]:
    """Slope of log seconds against log responses (1: constant cost per response), and memory of the largest stage over
    that of the smallest."""
    if len(sizes) < 2:
        return {}
    responses = np.log([size["responses"] for size in sizes])
    total = [size["write_s"] + size["open_ms"] / 1e3 + size["read_all_s"] for size in sizes]
    cpu_s = [size["cpu_s"] for size in sizes]
    return {
        "cost_exponent": round(float(np.polyfit(responses, np.log(total), 1)[0]), 3),
        "cpu_cost_exponent": round(float(np.polyfit(responses, np.log(cpu_s), 1)[0]), 3),
        "write_rss_growth": round(sizes[-1]["write_rss_anon_mib"] / sizes[0]["write_rss_anon_mib"], 3),
        "read_rss_growth": round(sizes[-1]["read_rss_anon_mib"] / sizes[0]["read_rss_anon_mib"], 3),
    }


def _compare(folder: Path, power: int, pairs: int) -> tuple[list[float], dict[str, list[float]]]:
    """Ratios of the lives of equal stages, and the seconds of their parts."""
    parts: dict[str, list[float]] = {}

    def life(name: str, write: Callable[..., Any], read: Callable[..., Any]) -> float:
        path = folder / name
        written, then_read = _in_fresh_process(write, path, power), _in_fresh_process(read, path, power)
        _remove(path)
        seconds = {"write": written["write_s"], "open": then_read["open_s"], "read": sum(then_read["fetch_s"])}
        for part, value in seconds.items():
            parts.setdefault(f"{name}_{part}", []).append(round(value, 4))
        return sum(seconds.values())

    ratios = run_pairs(
        lambda: life("ours", write_stage, read_stage), lambda: life("datasets", write_dataset, read_dataset), pairs
    )
    return ratios, parts


def _manifest(power: int) -> Manifest:
    per_update = NUM_GENERATIONS * PROMPTS_PER_UPDATE
    if 2**power < per_update:
        raise SystemExit(f"2^{power} responses are less than one update of {per_update}.")
    return make_manifest(2**power // per_update, PROMPTS_PER_UPDATE, NUM_GENERATIONS)


def _fetch_times(read: Callable[[np.ndarray], int], power: int) -> dict[str, list[float]]:
    """Wall-clock and CPU seconds of reading each update, in the shuffled order of a schedule."""
    num_updates = _manifest(power).num_updates
    schedule = Schedule(2**power, PROMPTS_PER_UPDATE, num_updates, num_updates, seed=0, shuffle_stage=True)
    updates = (schedule.update_groups(update) for update in range(min(num_updates, MAX_READS)))
    times = [_timed(lambda groups=groups: read(groups)) for groups in updates]
    return {"fetch_s": [seconds for seconds, _ in times], "fetch_cpu_s": [cpu_s for _, cpu_s in times]}


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock and CPU seconds of `work`."""
    started, cpu_started = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - cpu_started


def _touch(*arrays: np.ndarray) -> None:
    for array in arrays:
        array.sum()


def _in_fresh_process(work: Callable[..., dict[str, Any]], path: Path, power: int) -> dict[str, Any]:
    """`work(path, power)` in a process of its own, with its anonymous memory at the start and at its peak, in MiB.

    What is written lies in `path` and beside it.
    """
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_send_result, args=(theirs, work, path, power))
    process.start()
    theirs.close()
    peak = 0.0
    while not ours.poll(SAMPLE_S):
        peak = max(peak, _rss_anon_mib(process.pid))
    try:
        result = ours.recv()
    except EOFError:
        raise SystemExit(f"{work.__name__} failed; its traceback stands above.") from None
    process.join()
    return {**result, "peak_mib": round(max(peak, result["end_mib"]), 1)}


def _send_result(connection: Connection, work: Callable[..., dict[str, Any]], path: Path, power: int) -> None:
    work(_warm(path), WARM_POWER)
    start = _rss_anon_mib("self")
    result = work(path, power)
    connection.send({**result, "start_mib": round(start, 1), "end_mib": _rss_anon_mib("self")})


def _warm(path: Path) -> Path:
    return path.with_name(f"{path.name}.warm")


def _remove(path: Path) -> None:
    """Delete a stage and all that was written beside it."""
    for leftover in path.parent.glob(f"{path.name}*"):
        shutil.rmtree(leftover)


def _rss_anon_mib(process: int | str | None) -> float:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), 0.0)


if __name__ == "__main__":
    main()
