"""``backlight ls``, and commands that take the latest run, through the installed console script."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

import backlight
from backlight.analysis.run_table import answer
from backlight.cli.console import Page
from backlight.records import Evidence, Finding, RunStatus, Severity, Subject
from backlight.store.format.manifest import ListedSummary, read_manifest
from backlight.store.format.schema import EVALUATED
from backlight.store.read.run_list import ListedRun, list_runs
from cases import build, loop
from run_builder import build_run

ConsoleScript = Callable[..., subprocess.CompletedProcess[str]]


def train(path: Path, *, frozen: bool) -> None:
    model = build()
    optimizer = torch.optim.SGD((model.first if frozen else model).parameters(), lr=0.1)
    with backlight.watch(model, optimizer, run=path, every=1, monitors=("health",)):
        loop(model, optimizer, steps=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with runs in ``runs``: one with a finding, a later one without, and what is no run."""
    folder = tmp_path_factory.mktemp("cwd")
    train(folder / "runs" / "with-finding", frozen=True)
    train(folder / "runs" / "a-run-with-the-time-in-its-name-20260101-000000", frozen=False)
    (folder / "runs" / "foreign").mkdir()
    (folder / "runs" / "foreign" / "notes.txt").write_text("mine")
    (folder / "runs" / "damaged").mkdir()
    (folder / "runs" / "damaged" / "manifest.json").write_text("{")
    return folder


@pytest.mark.slow
def test_ls_lists_the_newest_first_in_80_columns(console_script: ConsoleScript, folder: Path) -> None:
    done = console_script(folder, "ls")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines if not line.startswith("note: ")) <= 80
    newest = next(i for i, line in enumerate(lines) if line.startswith("a-run"))
    older = next(i for i, line in enumerate(lines) if line.startswith("with-finding"))
    assert newest < older
    assert lines[newest].split()[-1] == "none"
    assert "finished" in lines[older]
    assert "error (" in lines[older] or "warning (" in lines[older]
    assert "note: runs/foreign: is not a run" in lines
    assert any(line.startswith("note: runs/damaged/manifest.json: is not valid JSON") for line in lines)


@pytest.mark.parametrize(
    ("scalars", "shown"),
    [
        ({}, "0.5"),
        ({"losses": 8.0}, "0.5 (sum of 8)"),
        ({"loss/0": 0.5, "loss/1": 0.25}, "0.5 (one of 2)"),
    ],
)
def test_ls_says_what_the_loss_is(scalars: dict[str, float], shown: str, tmp_path: Path) -> None:
    build_run(tmp_path / "run", scalars={0: {"loss": 0.5} | scalars})
    stream = io.StringIO()
    Page(Console(file=stream, width=100)).answer(answer(list_runs(tmp_path)), full=True)
    assert f" {shown}  " in stream.getvalue()


@pytest.mark.slow
def test_a_run_without_a_step_is_not_measured(tmp_path: Path) -> None:
    with backlight.watch(build(), run=tmp_path / "run", quiet=True):
        pass
    (run,) = list_runs(tmp_path)
    assert (run.steps, run.evaluated) == (0, False)


@pytest.mark.slow
def test_ls_prints_json(console_script: ConsoleScript, folder: Path) -> None:
    newest, older, *others = json.loads(console_script(folder, "ls", "--json").stdout)
    assert newest["steps"] == older["steps"] == 30
    run = backlight.open_run(folder / "runs" / "with-finding")
    assert older["loss"] == run.scalar("loss").values[-1]
    assert older["findings"] == len(run.stored_findings()) > 0
    assert (newest["worst"], newest["evaluated"]) == (None, True)
    assert {Path(other["path"]).name for other in others} == {"foreign", "damaged"}


@pytest.mark.slow
def test_commands_take_the_latest_run_and_name_it(console_script: ConsoleScript, folder: Path) -> None:
    name = "runs/a-run-with-the-time-in-its-name-20260101-000000"
    for arguments in (
        ("findings",), ("report",), ("top", "--once"), ("export", "out.csv"), ("query", "select 1"),
        ("query", "--tables"),
    ):  # fmt: skip
        done = console_script(folder, *arguments)
        assert (done.returncode, done.stderr) == (0, f"backlight: {name}, the latest run\n"), arguments
        assert done.stdout
    assert (folder / name / "report.html").is_file()
    assert (folder / "out.csv").is_file()


@pytest.mark.slow
def test_without_a_run_there_is_one_clear_line(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("findings", "top", "report"):
        code, _, errors = command(name)
        assert code == 2
        assert errors.startswith(f"backlight: {tmp_path}/runs: there is no such directory; name a RUN")
        assert errors.count("\n") == 1
    (tmp_path / "runs").mkdir()
    assert "holds no run" in command("findings")[2]
    assert command("ls")[1] == "no run here; record one: backlight run train.py\n"
    assert "expected a directory of runs" in command("ls", "nowhere")[2]


def test_a_run_that_was_not_evaluated_does_not_read_as_healthy(tmp_path: Path) -> None:
    build_run(tmp_path / "run")
    (listed,) = list_runs(tmp_path)
    assert (listed.worst, listed.evaluated, listed.loss, listed.steps) == (None, False, None, 0)


@pytest.mark.slow
def test_steps_that_were_not_recorded_count(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with backlight.watch(
        model, optimizer, run=tmp_path / "run", every=4, monitors=("health",), summary=False
    ):
        for _ in range(11):  # recorded are 0, 4, 8 and the last one
            model(torch.ones(2)).backward()
            optimizer.step()
    (listed,) = list_runs(tmp_path)
    run = backlight.open_run(tmp_path / "run")
    assert (listed.steps, run.last_step(), [s.last_step for s in run.ranks()]) == (11, 10, [10])
    assert run.series_steps("gradient").tolist() == [0, 4, 8, 10]
    backlight.watch(model, optimizer, run=tmp_path / "run", resume=True, summary=False).start().stop()
    assert [a.step_offset for a in backlight.open_run(tmp_path / "run").attempts] == [0, 11]


def test_only_the_first_rank_is_read(tmp_path: Path) -> None:
    build_run(tmp_path / "run", scalars={"loss": [3.0, 2.0, math.nan]})
    (tmp_path / "run" / "attempt-000" / "rank-00001.db").write_bytes(b"not a database")
    (listed,) = list_runs(tmp_path)
    assert isinstance(listed, ListedRun)
    assert (listed.problem, listed.steps) == ("", 3)
    assert listed.loss != listed.loss  # the last loss is NaN, as it was logged


def test_a_name_is_whole_and_what_has_no_space_is_left_out(tmp_path: Path) -> None:
    name = "train_gpt-20260101-000000"
    build_run(tmp_path / name)
    runs = list_runs(tmp_path)
    headers = {}
    for width in (100, 72, 60):
        output = io.StringIO()
        Page(Console(file=output, width=width)).answer(answer(runs), full=True)
        header, row = output.getvalue().splitlines()
        assert row.startswith(name)
        headers[width] = header.split()
    assert headers[100] == ["run", "state", "started", "took", "steps", "loss", "findings"]
    assert headers[72] == ["run", "state", "started", "steps", "loss", "findings"]
    assert headers[60] == ["run", "state", "steps", "loss", "findings"]


FINDINGS = tuple(
    Finding(
        severity=severity, title="A title", detail="A detail.", subject=Subject(parameter=name),
        evidence=(Evidence("scalars/loss"),), fix="A fix", refuted_if="something else", rule="a_rule",
    )
    for severity, name in ((Severity.WARNING, "a"), (Severity.ERROR, "b"))
)  # fmt: skip


def summarised(path: Path, values: dict[str, float], *findings: Finding) -> ListedRun:
    """Write a run whose manifest has a summary, and return what a list shows of it."""
    events = [(None, EVALUATED, {"findings": len(findings), "lacks": ""})]
    build_run(path, scalars={0: values}, findings=findings, events=events)
    assert read_manifest(path).attempts[0].summary is not None
    (listed,) = list_runs(path)
    return listed


@pytest.mark.parametrize("values", [{}, {"loss": math.nan}, {"loss": 0.5, "losses": 3.0, "loss/0": 0.5}])
@pytest.mark.parametrize("findings", [(), FINDINGS])
def test_a_summary_is_what_the_database_holds(
    values: dict[str, float], findings: tuple[Finding, ...], tmp_path: Path
) -> None:
    listed = summarised(tmp_path / "run", values, *findings)
    database = tmp_path / "run" / "attempt-000" / "rank-00000.db"
    os.utime(database)  # now the database is read
    assert repr(list_runs(tmp_path)) == repr([listed])  # NaN differs from itself
    assert (listed.evaluated, listed.findings, listed.loss is None) == (
        bool(values), len(findings), not values,  # without a step, nothing was there to evaluate
    )  # fmt: skip


def test_a_summary_counts_only_while_the_files_are_those_of_the_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    listed = summarised(run, {"loss": 0.5})
    folder = run / "attempt-000"
    database = folder / "rank-00000.db"
    manifest = read_manifest(run)
    summary = dataclasses.replace(manifest.attempts[0].summary or ListedSummary(), loss=7.0)
    for stated, loss in (
        (summary, 7.0), (dataclasses.replace(summary, size=summary.size + 1), 0.5),
        (dataclasses.replace(summary, changed=summary.changed + 1), 0.5),
    ):  # fmt: skip
        manifest.attempts[0].summary = stated
        manifest.write(run)
        assert list_runs(run) == [dataclasses.replace(listed, loss=loss)]
    manifest.attempts[0].summary = summary
    manifest.write(run)
    for name in ("rank-00000.db-wal", "rank-00000.000001.db", "watchdog-host.db", "watchdog-host.db-wal"):
        (folder / name).write_bytes(b"")
        assert list_runs(run)[0].loss != 7.0, name
        (folder / name).unlink()
    assert list_runs(run)[0].loss == 7.0
    manifest.attempts[0].progress.status = RunStatus.RUNNING
    manifest.write(run)
    assert list_runs(run)[0].loss == 0.5
    manifest.attempts[0].progress.status = RunStatus.FINISHED
    manifest.write(run)
    aside = database.rename(tmp_path / "aside")
    assert list_runs(run)[0].loss is None
    database.symlink_to(aside)
    assert "symbolic link" in list_runs(run)[0].problem
