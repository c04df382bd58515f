"""Findings that rank 0 stores at its end: none that rows of other ranks refute."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from backlight.records import Layout, ParameterRecord, Placement
from backlight.session import run_directory
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter

STEPS = 12


def ranks(path: Path, trains: int | None = 1) -> list[RunWriter]:
    """Return writers of two ranks: each holds half of ``w``, one trains ``late``, the second is unflushed."""
    writers = [RunWriter.create(path, rank=r, world_size=2, run_id="x", flush_interval=60) for r in range(2)]
    for rank, writer in enumerate(writers):
        half = Placement(Layout.SHARD, (2,), (1,), (rank,))
        records = [
            ParameterRecord("bias", (2,), "float32", "cpu", 2, group="0/0"),
            ParameterRecord("w", (2,), "float32", "cpu", 1, group="0/0", placement=half),
            ParameterRecord("late", (2,), "float32", "cpu", 2, group="0/0"),
        ]
        table = writer.parameter_table(tuple(records))
        for step in range(STEPS):
            floats, integers = [[1.0, 1.0, 1.0]] * 3, [[1, 1, 0, 0, 0]] * 3
            if rank != trains:
                floats[2], integers[2] = [0.0] * 3, [0] * 5
            writer.append("gradient", step, table, floats, integers)
    writers[0].flush()
    return writers


def test_pending_rows_of_other_ranks_are_awaited(tmp_path: Path) -> None:
    first, second = ranks(tmp_path / "run")
    timer = threading.Timer(0.3, second.close)
    timer.start()
    assert not run_directory.final_findings(first, failed=False)
    timer.join()
    first.close()
    assert open_run(tmp_path / "run").frame("gradient", "norm").measured.all()


def test_findings_of_unfinished_ranks_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_directory, "OTHER_RANKS_TIMEOUT_S", 0.0)
    first, second = ranks(tmp_path / "run")
    # The local shard of "w" has a gradient; for "late" no rank has stored one yet.
    (found,) = run_directory.final_findings(first, failed=False)
    assert (found.rule, found.subject.parameter) == ("no_gradient", "late")
    second.close()
    first.close()
    assert open_run(tmp_path / "run").stored_findings() == ()


def test_findings_of_the_complete_run_are_stored(tmp_path: Path) -> None:
    first, second = ranks(tmp_path / "run", trains=None)
    second.close()
    found = run_directory.final_findings(first, failed=False)
    assert [(f.rule, f.subject.parameter) for f in found] == [("no_gradient", "late")]
    first.close()
    assert open_run(tmp_path / "run").stored_findings() == tuple(found)


def test_other_ranks_evaluate_no_rules(tmp_path: Path) -> None:
    first, second = ranks(tmp_path / "run")
    assert run_directory.final_findings(second, failed=False) == []
    for writer in (first, second):
        writer.close()
