"""The runs of a directory as a table: state, start, duration, steps, last loss and findings."""

from __future__ import annotations

import time
from collections.abc import Sequence

from backlight.answer import Answer, Column, Table, word
from backlight.records import RunStatus, Severity
from backlight.store.read.run_list import ListedRun
from backlight.text import number, visible

_STATES = {RunStatus.RUNNING: "bold green", RunStatus.FAILED: "bold red", RunStatus.KILLED: "bold red"}


def answer(runs: Sequence[ListedRun]) -> Answer:
    """Return one row for each run, and as notes what is no run or could not be read."""
    rows = [run for run in runs if run.started is not None]
    columns = (
        word("run", lambda run: run.path.name, "text"),  # whole, to be copied
        Column(
            "state", lambda run: run.state.value, str, "word", style=lambda run: _STATES.get(run.state, "")
        ),
        Column("started", "started", _moment, spare=True),
        Column("took", "seconds", _span, spare=True),
        Column("steps", "steps", "{:,}".format),
        Column("loss", _loss, str),
        Column("findings", _findings, str, "word", style=_findings_style),
    )
    return Answer(
        "" if rows else "no run here; record one: backlight run train.py",
        runs,
        tables=(Table(columns, rows, brief=len(rows)),) if rows else (),
        notes=tuple(visible(run.problem) for run in runs if run.problem),
    )


def _loss(run: ListedRun) -> str | None:
    """Return the last loss, and what it is where that is not plain: ``4.2 (sum of 8)``."""
    if run.loss is None:
        return None
    label = "" if run.loss_label == "loss" else f" ({run.loss_label.removesuffix(' losses')})"
    return number(run.loss) + label


def _findings(run: ListedRun) -> str | None:
    if run.worst is not None:
        return f"{run.worst.value} ({run.findings})"
    return None if not run.evaluated else "incomplete" if run.lacks else "none"


def _findings_style(run: ListedRun) -> str:
    if run.worst is not None:
        return "bold red" if run.worst is Severity.ERROR else "bold yellow"
    if run.evaluated and run.lacks:
        return "yellow"
    return "green" if run.evaluated and run.state is RunStatus.FINISHED else ""


def _moment(seconds: float) -> str:
    then = time.localtime(seconds)
    return time.strftime("%m-%d %H:%M" if then.tm_year == time.localtime().tm_year else "%Y-%m-%d", then)


def _span(seconds: float) -> str:
    """Return a time span in at most seven characters: ``12 s``, ``4m 05s``, ``31h 02m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return (
        f"{whole // 60}m {whole % 60:02}s" if whole < 3600 else f"{whole // 3600}h {whole % 3600 // 60:02}m"
    )
