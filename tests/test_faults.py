"""A few faults of `make faults`, one of each kind: the others need minutes."""

from __future__ import annotations

import pytest
from faults import run
from faults.case import Lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Lab:
    return Lab(tmp_path_factory.mktemp("faults"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fault"),
    [pytest.param(kind, fault, id=f"{fault.name}, {fault.moment}") for kind, fault in run.chosen("", quick=True)],
)
def test_a_fault_has_the_outcome_that_was_fixed_beforehand(kind, fault, lab):
    result = run.run_fault(lab, kind, fault)
    if result.skipped:
        pytest.skip(result.seen)
    assert not result.problem, result.problem


def test_the_table_has_sixty_faults_that_differ():
    entries = [(kind, fault.name, fault.moment) for kind, fault in run.chosen("", quick=False)]
    assert len(entries) == len(set(entries))
    assert len([entry for entry in entries if entry[0] not in ("Random kills", "Kills under ZeRO-3", "Soak")]) >= 60
