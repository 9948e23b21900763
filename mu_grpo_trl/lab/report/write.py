"""From cells to files: the published cells, the verdicts, the figures, the page."""

from __future__ import annotations

import gzip
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..grid import Cell
from . import page
from .claims import judge_all
from .comparison import compare_grid
from .figures import Figure, draw_all
from .results import Failure, parse_result, read_cells
from .selection import Lab

SIGNIFICANT_DIGITS = 5


def write_report(cells: Path, output: Path, planned: Sequence[Cell], tuning_seeds: frozenset[int]) -> str:
    """
    Write the whole report into `output`; what a former report left in its `figures/` is removed.

    Args:
        cells (`Path`): a folder of cells, or a published `cells.jsonl.gz`.
        output (`Path`): the folder to write.
        planned (`Sequence[Cell]`): all cells of the experiments, finished or not; results of others are left out.
        tuning_seeds (`frozenset[int]`): seeds that chose the learning rates.

    Returns:
        `str`: one line on what was written.

    Raises:
        `ValueError`: no finished cell, or one that this version cannot read.
    """
    listed = {cell.id for cell in planned}
    found = read_published(cells) if cells.is_file() else read_cells(cells)
    raws = [rounded(raw) for raw in found if raw["cell"]["id"] in listed]
    failures = [Failure(raw["cell"]["id"], raw["error"]) for raw in raws if "error" in raw]
    results = [parse_result(raw) for raw in raws if "error" not in raw]
    if not results:
        raise ValueError(
            f"{cells} has no finished cell of the experiments, and {len(found)} others: run `mu-grpo lab run`."
        )
    lab = Lab(results, planned, tuning_seeds)
    judged = judge_all(lab)
    output.mkdir(parents=True, exist_ok=True)
    (output / "cells.jsonl.gz").write_bytes(published(raws))
    claims = json.dumps([rounded(entry.entry()) for entry in judged], indent=1, ensure_ascii=False, allow_nan=False)
    (output / "claims.json").write_text(claims + "\n", encoding="utf-8")

    figures = {task: _figures(lab, task) for task in lab.tasks}
    for old in (output / "figures").glob("*"):
        if old.suffix in (".png", ".svg"):
            old.unlink()
    svgs = {figure.name: figure.save(output / "figures") for drawn in figures.values() for figure in drawn}
    blocks = page.build(lab, judged, failures, figures)
    (output / "README.md").write_text(page.to_markdown(blocks), encoding="utf-8")
    (output / "page.html").write_text(page.to_html("mu-grpo-trl: the laboratory", blocks, svgs), encoding="utf-8")
    counts = Counter(entry.finding.verdict for entry in judged if entry.main)
    verdicts = ", ".join(f"{counts[name]} {text}" for name, text in page.VERDICTS.items())
    return f"{len(results)} cells, {len(failures)} failed; main verdicts: {verdicts}; {output}/README.md, page.html"


def _figures(lab: Lab, task: str) -> list[Figure]:
    grids = {"the same lr": compare_grid(lab, task, True), "its tuned lr": compare_grid(lab, task, False)}
    return draw_all(lab, task, grids)


def rounded(value: Any) -> Any:
    """JSON values with floats at five significant digits; what is not finite becomes text (`"inf"`, `"nan"`)."""
    if isinstance(value, dict):
        return {key: rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(entry) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") if math.isfinite(value) else str(value)
    return value


def published(raws: Iterable[dict[str, Any]]) -> bytes:
    """Every cell a line, compressed; the same bytes for the same cells."""
    lines = (json.dumps(raw, sort_keys=True, ensure_ascii=False, separators=(",", ":")) + "\n" for raw in raws)
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=buffer, mode="wb", compresslevel=9, mtime=0) as file:
        file.write("".join(lines).encode())
    return buffer.getvalue()


def read_published(path: Path) -> list[dict[str, Any]]:
    """The cells of a published `cells.jsonl.gz`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]
