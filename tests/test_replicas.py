"""Copies of a stage between two ranks that stand for two nodes: each has a folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY
from processes import rank_environments
from test_stage import fill_stage

from mu_grpo_trl.stage import StageReader

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

RANK = REPOSITORY / "tests" / "workers" / "replica_rank.py"


def copy_between(folders: tuple[Path, Path], fault: str = "none") -> list[tuple[int, str]]:
    """Exit code and output of each rank."""
    alone_on_its_node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PYTHONPATH": str(REPOSITORY)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(folder), fault],
            env={**os.environ, **launched, **alone_on_its_node},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for launched, folder in zip(rank_environments(2), folders, strict=True)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("fault", "message"), [("read", "Input/output error"), ("short", "could not broadcast")])
def test_a_copy_that_could_not_be_read_whole_does_not_appear_and_is_made_again(fault, message, tmp_path: Path):
    here, there = tmp_path / "here" / "stage-000", tmp_path / "there" / "stage-000"
    fill_stage(here)
    there.parent.mkdir()

    (code, said), (other_code, other_said) = copy_between((here, there), fault)
    assert (code, other_code) == (3, 3), said + other_said
    assert message in said
    assert "another rank says why" in other_said
    assert not there.exists()

    assert [code for code, _ in copy_between((here, there))] == [0, 0]
    copied = content(there)
    assert copied == {name: data for name, data in content(here).items() if name in copied}
    assert len(StageReader(there)) == len(StageReader(here))
