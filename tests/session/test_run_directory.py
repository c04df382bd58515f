"""Findings that rank 0 stores at its end: none that rows of other ranks refute."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import backlight
from backlight.records import Layout, ParameterRecord, Placement
from backlight.session import run_directory
from backlight.session.watch import Watch
from backlight.store.errors import RunExistsError
from backlight.store.read.run import open_run
from backlight.store.write.attempt import own_path
from backlight.store.write.writer import RunWriter

STEPS = 12
NOW, BEFORE = "job+1111111122222222", "job+0000000033333333"


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


# Where the launcher has chosen the directory


def train(watch: Watch, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        watch.log(own=1.0)


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory that the launcher of this process has chosen."""
    monkeypatch.setenv("BACKLIGHT_RUN_ID", NOW)
    monkeypatch.setenv("BACKLIGHT_RUN_DIR", str(tmp_path / "results" / "run"))
    return tmp_path / "results" / "run"


@pytest.mark.slow
def test_launch_whose_predecessor_still_writes_takes_a_directory_of_its_own(chosen: Path) -> None:
    before = RunWriter.create(chosen, world_size=2, run_id=BEFORE)
    model = nn.Linear(4, 1)
    train(first := backlight.watch(model, summary=False), model)
    train(second := backlight.watch(model, summary=False), model)  # as for each fold
    assert [first.path.name, second.path.name] == ["run-11111111", "run-11111111-2"]
    assert [open_run(watch.path).last_step() for watch in (first, second)] == [2, 2]
    before.close()
    assert [attempt.status.value for attempt in open_run(chosen).attempts] == ["finished"]


def test_all_ranks_take_the_directory_of_their_launch(tmp_path: Path) -> None:
    path = tmp_path / "run"
    before = RunWriter.create(path, world_size=2, run_id=BEFORE)
    otherwise = own_path(path, NOW)
    now = [
        RunWriter.create(path, rank=r, world_size=2, run_id=NOW, otherwise=otherwise, join_timeout=0.0)
        for r in range(2)
    ]
    assert [writer.path for writer in now] == [otherwise, otherwise]
    assert [writer.part_reason for writer in now] == ["", ""]
    for writer in (before, *now):
        writer.close()
    assert own_path(otherwise, NOW) == otherwise


def test_directory_of_the_launcher_that_cannot_be_written_costs_no_training(chosen: Path) -> None:
    chosen.parent.touch()  # a file
    torch.manual_seed(0)
    model, control = nn.Linear(4, 1), nn.Linear(4, 1)
    control.load_state_dict(model.state_dict())
    with pytest.warns(RuntimeWarning, match=r"this training is not watched: .*: cannot be written"):
        train(watch := backlight.watch(model, summary=False), model)
    assert not watch.is_recorded
    assert str(watch.findings).startswith(f"not recorded: {chosen}: cannot be written")
    optimizer = torch.optim.SGD(control.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        control(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, control.weight)


def test_directory_that_the_user_has_chosen_is_refused_nevertheless(chosen: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(RunExistsError, match="mine: is a file"):
        backlight.watch(nn.Linear(4, 1), run=tmp_path / "mine").start()
