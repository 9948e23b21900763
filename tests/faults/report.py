"""`docs/reliability.md`, as a run of the harness found it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence

from helpers import REPOSITORY

from .case import Result
from .kills import MAX_DELAY_S, RANDOM_KILLS, ZERO3_KILLS
from .soak import MAX_RSS_GROWTH

PATH = REPOSITORY / "docs" / "reliability.md"

_HEAD = """# Reliability

Written by `make faults`, which injects each fault below into a real training run and compares what comes of it with
the outcome fixed in its table in [`tests/faults`](../tests/faults): real processes, signals, sockets, servers and
file systems. Do not edit it.

{verdict} Seed {seed}, {minutes:.0f} minutes, {cores} cores, Python {python}.

| kind | entries | as required |
|---|---|---|
{summary}

*Recovers bitwise*: the run ends, by itself or after `--resume auto`, and its final weights are bit by bit those of the
undisturbed run. In every case that recovers, rows that were flushed before a restart are unchanged at the end, and
none of them was asked of an engine again. A stub server samples from the prompt and the published weights alone, so
that runs through it are compared bit by bit too; a real vLLM server samples anew what was not flushed.

What the runs are: a random model of two layers (none where a stub serves it), ten updates in stages of 4, 4 and 2,
four prompts of four responses each, a checkpoint every two updates.
"""

_NOTES = {
    "Random kills": (
        f"`kill -9` of a single process with the in-process engine: one in each of {RANDOM_KILLS} equal slices of "
        "what the undisturbed run notes in its journal (each batch generated, group scored, file written, update, "
        "micro-batch, part of a checkpoint), at an entry drawn from the seed and up to "
        f"{MAX_DELAY_S * 1000:.0f} ms after it."
    ),
    "Kills under ZeRO-3": (
        f"Two processes under DeepSpeed ZeRO-3, {ZERO3_KILLS} slices; rank 0, rank 1 or both are killed. Nobody ends "
        "the ranks that are left: they must end by themselves."
    ),
    "Soak": (
        "Required: after stage 2 the process never has more open files or threads than it had then, and its memory "
        f"grows by less than {MAX_RSS_GROWTH:.0%}."
    ),
}


def write(results: Sequence[Result], seed: int, seconds: float) -> None:
    """Write the report of a whole run."""
    kinds = list(dict.fromkeys(result.kind for result in results))
    of_kind = {kind: [result for result in results if result.kind == kind] for kind in kinds}
    passed = {kind: sum(not r.problem and not r.skipped for r in rows) for kind, rows in of_kind.items()}
    good, skipped = sum(passed.values()), sum(result.skipped for result in results)
    verdict = f"**{good} of {len(results)} entries ended as required**"
    verdict += f", {skipped} could not be injected on this machine." if skipped else "."
    summary = "\n".join(f"| {kind} | {len(rows)} | {passed[kind]} |" for kind, rows in of_kind.items())
    parts = [
        _HEAD.format(
            verdict=verdict, seed=seed, minutes=seconds / 60, cores=os.cpu_count(), python=platform.python_version(),
            summary=summary,
        )
    ]  # fmt: skip
    for kind, rows in of_kind.items():
        parts.append(f"## {kind}\n\n{_NOTES.get(kind, '')}".rstrip() + "\n\n" + _table(rows))
    PATH.write_text("\n".join(parts))


def _table(results: Sequence[Result]) -> str:
    lines = ["| fault | moment | required | seen | s |", "|---|---|---|---|---|"]
    for result in results:
        seen = f"**NOT AS REQUIRED**: {result.problem.splitlines()[0][:200]}" if result.problem else result.seen
        cells = [result.fault.name, result.fault.moment, str(result.fault.required), seen, f"{result.seconds:.0f}"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
