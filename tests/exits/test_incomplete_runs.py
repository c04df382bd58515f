"""A run that was not recorded to its end is never reported as free of findings, in no output."""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import backlight
from backlight import codec
from backlight.analysis.compare import compare
from backlight.analysis.comparison_answer import answer
from backlight.analysis.run_table import answer as run_table
from backlight.cli.console import Page
from backlight.notifier import Notifier
from backlight.records import EVERYTHING, FROM_HERE_ON, OTHERS, ParameterRecord, RunStatus
from backlight.report.annotations import render_annotations
from backlight.report.live.terminal import _findings as live_findings
from backlight.report.markdown import render_markdown
from backlight.report.notebook import live_cell, run_html
from backlight.report.page import model
from backlight.report.source import Source
from backlight.report.terminal import print_findings
from backlight.report.verdict import lacking, outcome
from backlight.session.run_directory import final_findings
from backlight.session.script_end import print_result
from backlight.store.errors import RunFormatError
from backlight.store.format.manifest import Progress
from backlight.store.format.schema import DISK_LIMIT, DROPPED, NOT_STORED
from backlight.store.read.run import Run, open_run
from backlight.store.read.run_list import list_runs
from backlight.store.write.writer import RunWriter

Lose = Callable[[RunWriter], None]

STEPS = 10


def write_steps(writer: RunWriter, first: int = 0) -> None:
    record = ParameterRecord("weight", (2,), "float32", "cpu", 2, group="0/0")
    table = writer.parameter_table((record,))
    for step in range(first, STEPS):
        writer.append("gradient", step, table, np.ones((1, 3)), np.array([[1, 2, 0, 0, 0]]))
        writer.scalar(step, "loss", 1.0)
        writer.reach(step)
    writer.flush()


def end(writer: RunWriter, status: RunStatus = RunStatus.FINISHED) -> None:
    writer.flush()
    final_findings(writer, failed=False)
    writer.close(status)


def kill(writer: RunWriter) -> None:
    writer.close(RunStatus.KILLED)


def go_on(writer: RunWriter) -> None:
    writer.flush()


def fill_the_disk(writer: RunWriter) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    writer._db.write = full  # type: ignore[method-assign]
    writer.scalar(STEPS, "loss", 1.0)
    writer.reach(2499)
    writer.flush()
    writer.reach(2500)
    assert writer.lost
    end(writer)


def event(kind: str, step: int | None = None, **payload: Any) -> Lose:
    def lose(writer: RunWriter) -> None:
        writer.event(step, kind, payload)
        end(writer)

    return lose


def trouble(lost: str) -> Lose:
    def lose(writer: RunWriter) -> None:
        notifier = Notifier(writer.path)
        notifier.writer = writer
        with pytest.warns(RuntimeWarning, match="not measured"):
            notifier.trouble(ZeroDivisionError("injected"), lost)
        end(writer)

    return lose


SHORTFALLS: dict[str, tuple[Lose, str]] = {
    "killed": (kill, "recording stopped at step 9"),
    "running": (go_on, "still running, at step 9"),
    "full disk": (fill_the_disk, "recording stopped at step 9 of 2,501"),
    "slow disk": (event(DROPPED, steps=3), "3 recorded steps could not be stored: the disk is too slow"),
    "buffer": (event(NOT_STORED, rows={"scalar": 2}), "a part of what was recorded could not be stored"),
    "disk limit": (event(DISK_LIMIT, 5, stride=0), "recording stopped at the disk limit, at step 5"),
    "monitor": (trouble(f"gradient statistics{FROM_HERE_ON}"), "recording of gradient statistics stopped"),
    "writer thread": (trouble(EVERYTHING), "recording stopped"),
    "other ranks": (event("unmeasured", what=OTHERS, reason="none"), "other ranks were not recorded"),
}  # fmt: skip


@pytest.fixture(params=SHORTFALLS)
def short(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Run, str, Progress]:
    """Return a run that lacks something, what it lacks, and its progress as its process knows it."""
    lose, lacks = SHORTFALLS[request.param]
    writer = RunWriter.create(tmp_path / "runs" / "short", name="short", monitors=("health",))
    write_steps(writer)
    lose(writer)
    run = open_run(writer.path, writer.progress if request.param != "running" else None)
    assert run.shortfall == lacks
    return run, lacks, writer.progress


def printed(show: Callable[[Console], None]) -> str:
    text = io.StringIO()
    show(Console(file=text, width=400))
    return text.getvalue()


def test_no_output_calls_an_incomplete_run_free_of_findings(
    short: tuple[Run, str, Progress], capsys: pytest.CaptureFixture[str]
) -> None:
    run, lacks, progress = short
    source = Source(run)
    print_result(run.path, (), STEPS, progress)
    closing_line = capsys.readouterr().err
    page = model(source)
    comparison = compare([run, run])
    junit = render_annotations("junit", run, (), lambda finding: False)
    texts = {
        "terminal": printed(lambda console: print_findings(run, (), console)),
        "closing line": closing_line,
        "page": json.dumps(page["verdict"], default=str),
        "markdown": render_markdown(run, ()),
        "notebook": run_html(run, ()),
        "live cell": live_cell(run.path, "finished", STEPS, {}, (), lacking(run))["text/plain"],
        "compare": printed(lambda console: Page(console).answer(answer(comparison), full=True))
        + capsys.readouterr().out,
        "facts of compare": " ".join(answer(comparison).facts),
        "compare --json": codec.encode(comparison),
        "junit": junit,
        "github": render_annotations("github", run, (), lambda finding: False),
    }  # fmt: skip
    for name, text in texts.items():
        assert lacks in text, name
        assert "✓" not in text, name
        assert "No findings" not in text.replace("No findings in what was recorded", ""), name
    assert outcome(source).tone == page["verdict"]["tone"] != "clear"
    assert junit.count("<testcase") == junit.count("<skipped"), "nothing passes"
    (sarif,) = json.loads(render_annotations("sarif", run, (), lambda finding: False))["runs"]
    assert sarif["invocations"][0]["executionSuccessful"] is False
    (line,) = live_findings(source, 80)
    assert lacks in str(line)


def test_a_list_of_runs_shows_what_is_lacking(
    short: tuple[Run, str, Progress], command: Callable[..., tuple[int, str, str]]
) -> None:
    run, lacks, _ = short
    (listed,) = list_runs(run.path.parent)
    shown = printed(lambda console: Page(console).answer(run_table([listed]), full=True))
    assert "none" not in shown
    _, out, _ = command("ls", run.path.parent, "--json")
    if listed.lacks:  # what a killed run lost is not known before it is read as a whole
        assert json.loads(out)[0]["lacks"] == listed.lacks == lacks
    else:
        assert not listed.evaluated
    _, out, _ = command("findings", run.path, "--json")
    answer = json.loads(out)
    assert answer["findings"] == []
    assert answer["lacks"] == open_run(run.path).shortfall != ""


def test_answers_for_assistants_name_what_is_lacking(short: tuple[Run, str, Progress]) -> None:
    mcp = pytest.importorskip("mcp", reason="needs the MCP SDK")
    from backlight.analysis.mcp_server import build_server

    run, _, _ = short

    async def ask() -> list[Any]:
        async with mcp.Client(build_server(run.path.parent)) as client:
            tools = [("run_summary", {"run": "short"}), ("findings", {"run": "short"})]
            tools.append(("compare_runs", {"a": "short", "b": "short"}))
            return [(await client.call_tool(*tool)).structured_content["recorded"] for tool in tools]

    summary, found, compared = asyncio.run(ask())
    lacks = open_run(run.path).shortfall
    assert summary["lacks"] == found["lacks"] == lacks
    for result in (summary["result"], found["result"]):
        assert lacks in result
        assert "No findings" not in result
    assert any(lacks in note for note in compared["notes"])


@pytest.mark.parametrize("is_joined", [True, False])
def test_a_run_without_all_its_ranks_is_incomplete(tmp_path: Path, is_joined: bool) -> None:
    writers = [
        RunWriter.create(tmp_path / "run", rank=rank, world_size=3, run_id="one", monitors=("health",))
        for rank in range(3 if is_joined else 1)
    ]
    for writer in reversed(writers):
        write_steps(writer)
        writer.close()
    run = open_run(tmp_path / "run")
    assert run.shortfall == ("" if is_joined else "2 of 3 ranks were not recorded")
    assert (outcome(Source(run)).tone == "clear") == is_joined


def test_a_loss_names_the_last_step_that_is_stored(tmp_path: Path) -> None:
    stored, nothing = (RunWriter.create(tmp_path / name, monitors=("health",)) for name in ("a", "b"))
    write_steps(stored)
    fill_the_disk(stored)
    fill_the_disk(nothing)
    (loss,) = open_run(stored.path).losses
    assert "recording stopped after step 9: " in loss
    (loss,) = open_run(nothing.path).losses
    assert "recording stopped before its first step: " in loss


def test_what_the_disk_refuses_at_the_end_is_lost_before_the_rules_read_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise sqlite3.OperationalError("disk I/O error")  # which is tried again

    def fail(*_: object, **__: object) -> None:
        raise RunFormatError("nothing in this run can be read")

    monkeypatch.setattr("backlight.session.attached_run.final_findings", fail)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        pytest.warns(RuntimeWarning, match="can no longer be written") as warned,
        backlight.watch(model, optimizer, run=tmp_path / "run", flush_interval=600.0) as watch,
    ):
        monkeypatch.setattr(watch._attached.writer._db, "write", refuse)
        monkeypatch.setattr(watch._attached.writer._db, "reopen", lambda: None)
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
    assert len(warned) == 1


def test_a_truncated_file_makes_a_run_incomplete(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", monitors=("health",))
    write_steps(writer)
    writer.close()
    progress = writer.progress
    progress.files = {
        name: {table: rows + 1 for table, rows in of.items()} for name, of in progress.files.items()
    }
    run = open_run(tmp_path / "run", progress)
    assert run.shortfall == "a part of what was stored is missing"


def test_a_killed_attempt_that_another_one_continues_does_not_count(tmp_path: Path) -> None:
    first = RunWriter.create(tmp_path / "run", script="train.py", monitors=("health",))
    write_steps(first)
    first.close(RunStatus.KILLED)
    assert open_run(tmp_path / "run").shortfall
    second = RunWriter.create(tmp_path / "run", script="train.py", monitors=("health",), resume=True)
    write_steps(second)
    second.close()
    assert open_run(tmp_path / "run").shortfall == ""
    assert open_run(tmp_path / "run").losses
