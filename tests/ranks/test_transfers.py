"""Data that changes between ranks is found, whatever operation carries it."""

from __future__ import annotations

from pathlib import Path

import pytest

from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.correctness.model.replicas import Transferred, differing
from backlight.records import Severity
from backlight.store.read.run import Run, open_run
from ranks.launching import HERE, torchrun
from ranks.transfers import BEGIN, LOOPS, STEPS

FAULTS = {
    "allreduce": "`all_reduce` gave rank 2 other results from step 2 on",
    "broadcast": "`broadcast` gave rank 2 other results from step 2 on",
    "allgather": "`all_gather` gave rank 2 other results from step 2 on",
    **dict.fromkeys(
        ("send", "alltoall", "all_to_all_single", "scatter", "gather"),
        "Rank 2 received other values than were sent, from step 2 on",
    ),
}

COMPARED = {"send": 4, "alltoall": 6, "all_to_all_single": 6, "scatter": 2, "gather": 2}
"""Transfers that are compared at each step; one where not listed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run all loops in one launch."""
    made = tmp_path_factory.mktemp("transfers")
    torchrun(3, HERE / "transfers.py", made)
    return made


def run_of(folder: Path, name: str) -> Run:
    unsupported = folder / "unsupported"
    if unsupported.exists() and name.removesuffix("-control") == unsupported.read_text():
        pytest.skip("gloo of this torch has no all_to_all of lists")
    return open_run(folder / name)


@pytest.mark.parametrize("name", FAULTS)
def test_changed_data_is_found(name: str, folder: Path) -> None:
    run = run_of(folder, name)
    (found,) = evaluate_rules(run)
    assert (found.rule, found.severity, found.title) == ("replicas_differ", Severity.ERROR, FAULTS[name])
    assert (found.subject.step, found.subject.rank) == (BEGIN, 2)
    changed, compared = differing(run)
    per_step = 2 if name == "send" else 1
    assert len(changed) == per_step * (STEPS - BEGIN)
    assert compared == STEPS * COMPARED.get(name, 1)


@pytest.mark.parametrize("name", [*(f"{name}-control" for name in LOOPS), "sound"])
def test_sound_transfers_have_no_finding(name: str, folder: Path) -> None:
    run = run_of(folder, name)
    assert evaluate_rules(run) == []
    assert differing(run)[1] > 0
    assert not run.events("unmeasured")
    assert {event.step for event in run.events(Transferred.event)} == set(range(STEPS))
