"""The report and the terminal state how much of the cost of watching was its start and its end."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

import backlight
from backlight.report.source import Source
from backlight.report.terminal import print_findings
from backlight.report.verdict import describe_cost
from cases import build, loop
from run_builder import build_run


@pytest.mark.slow
def test_start_and_end_of_a_watch_are_stated(tmp_path: Path) -> None:
    model = build()
    with backlight.watch(model, run=tmp_path / "run", quiet=True):
        loop(model, steps=5)
    run = backlight.open_run(tmp_path / "run")
    payloads = [event.payload for event in run.events("cost")]
    assert [payload["part"] for payload in payloads] == ["start", "end"]
    assert all(payload["seconds"] > 0 for payload in payloads)
    text = describe_cost(Source(run))
    assert re.match(r".+ at the start, .+ at the end, .+ per recorded step \(median\), .+ of the time", text)
    for full in (True, False):
        page = io.StringIO()
        print_findings(run, [], Console(file=page, width=400), full=full)
        assert (text in page.getvalue()) is full


def test_what_is_not_a_number_of_seconds_is_left_out(tmp_path: Path) -> None:
    assert describe_cost(Source(build_run(tmp_path / "empty"))) == ""
    parts = ("start", 0.25), ("end", float("nan")), ("end", "soon"), ("middle", 1.0)
    events = [(None, "cost", {"part": part, "seconds": seconds}) for part, seconds in parts]
    assert describe_cost(Source(build_run(tmp_path / "run", events=events))) == "250 ms at the start"
