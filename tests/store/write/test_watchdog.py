"""Files of the watchdog, and their join with the files of the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from backlight.records import Evidence, Finding, Severity, Subject
from backlight.store.format.schema import WATCHDOG_RANK
from backlight.store.read.run import open_run
from backlight.store.write.watchdog import WatchdogWriter
from backlight.store.write.writer import RunWriter

FINDING = Finding(
    rule="stall",
    severity=Severity.ERROR,
    title="BLOCKED",
    detail="BLOCKED",
    subject=Subject(step=3, rank=1),
    evidence=(Evidence("x"),),
    fix="look",
    refuted_if="moves",
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    with_rank = RunWriter.create(path, step_offset=10)
    with_rank.scalar(0, "loss", 1.0)
    with_rank.flush()
    yield path
    with_rank.close()


def test_findings_and_events_are_readable_during_writing(run: Path) -> None:
    assert not list(run.glob("attempt-000/watchdog-*"))
    writer = WatchdogWriter(run, run / "attempt-000")
    writer.event(3, "stall", {"claim": "x"})
    writer.finding(FINDING)
    cited = writer.evidence("stack.txt", "a line")
    read = open_run(run)
    assert read.stored_findings() == (FINDING,)
    (event,) = read.events("stall")
    assert (event.step, event.rank, dict(event.payload)) == (13, WATCHDOG_RANK, {"claim": "x"})
    assert read.read_evidence(cited) == b"a line"
    assert read.attempts[0].ranks == (0,)
    assert read.losses == ()
    writer.close()
    assert open_run(run).stored_findings() == (FINDING,)
    assert writer.lost is None


def test_second_watchdog_of_a_host_has_its_own_file(run: Path) -> None:
    for _ in range(2):
        writer = WatchdogWriter(run, run / "attempt-000")
        writer.finding(FINDING)
        writer.close()
    assert len(open_run(run).stored_findings()) == 2


def test_deleted_directory_is_a_loss_and_no_error(tmp_path: Path) -> None:
    writer = WatchdogWriter(tmp_path, tmp_path / "gone")
    writer.finding(FINDING)
    assert writer.lost is not None
    assert not writer.evidence("a", "b")


def test_damaged_watchdog_file_is_reported_lost(run: Path) -> None:
    (run / "attempt-000" / "watchdog-here.db").write_bytes(b"nonsense")
    assert any("watchdog-here.db" in loss for loss in open_run(run).losses)
