"""The frame of ``backlight top``: content, width and hostile names."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from growing import Grow
from rich.console import Console
from synthetic import Plan, finding

from backlight.analysis.live import followed
from backlight.records import Finding, Severity
from backlight.report.live.follower import EMPTY, FollowedRun
from backlight.report.live.terminal import frame, show
from backlight.report.source import Source
from backlight.report.sparkline import outstanding, sparkline
from backlight.store.read.run import open_run

HOSTILE = "[red]\x1b[2J\u202e[/]\nname"


def printed(source: Source | None, view: FollowedRun, width: int) -> str:
    text = io.StringIO()
    Console(file=text, width=width, force_terminal=False).print(frame(view.name, view.stand, source, width))
    return text.getvalue()


def followed_once(path: Path, findings: Sequence[Finding] = ()) -> FollowedRun:
    view = FollowedRun(path, lambda run: findings, Source, open_run)
    view.look()
    return view


@pytest.mark.parametrize("width", [30, 48, 64, 80, 200])
def test_frame_fits_the_width(grow: Grow, width: int) -> None:
    run = grow(50, broken=4, plan=Plan(steps=60, blocks=1))
    view = followed_once(run.path, [finding(run.names[4], 49)])
    text = printed(view.source, view, width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert "● running" in text
    assert " 49" in text
    assert "1 error" in text
    if width >= 80:
        assert f"non finite  step 49  The gradient of `{run.names[4]}`" in text
    if width >= 64:
        assert run.names[4] in text
        assert "backward" in text
        assert "32.3 steps/s" in text  # 31 ms: forward 10, backward 20 to 22


def test_failing_section_is_named_and_the_others_stay(grow: Grow, monkeypatch: pytest.MonkeyPatch) -> None:
    run = grow(12, plan=Plan(steps=20, blocks=1))
    view = followed_once(run.path, [finding(run.names[1], 11)])

    def broken(*_: object) -> None:
        raise LookupError("no [bold]rows")

    monkeypatch.setattr(Source, "scalar_names", broken)
    text = printed(view.source, view, 80)
    assert "status could not be shown: LookupError: no [bold]rows" in text
    assert "phases could not be shown: LookupError" in text
    assert "furthest from their median" in text
    assert "1 error" in text


@pytest.mark.slow
def test_hostile_name_is_plain_text(grow: Grow) -> None:
    run = grow(12, broken=2, plan=Plan(steps=20, blocks=1, rename={2: HOSTILE}))
    source = Source(open_run(run.path), [finding(HOSTILE, 11, rule="[bold]x", severity=Severity.WARNING)])
    view = followed_once(run.path)
    text = printed(source, view, 100)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[red]" in text
    assert "[bold]x" in text


def test_empty_run_shows_waiting(tmp_path: Path) -> None:
    view = followed_once(tmp_path)
    assert view.stand == EMPTY
    assert "Waiting for the first step" in printed(view.source, view, 80)


def test_one_frame_is_printed_without_a_terminal(grow: Grow) -> None:
    run = grow(5)
    text = io.StringIO()
    (view,) = followed([run.path])
    show(view, Console(file=text, width=80))
    assert text.getvalue().count("backlight run") == 1
    assert "\x1b" not in text.getvalue()


def test_outstanding_values_are_kept() -> None:
    values = np.ones(100)
    values[[7, 55, 91]] = 9.0, -3.0, np.nan
    assert outstanding(values, 10).tolist()[:9] == [9, 1, 1, 1, 1, -3, 1, 1, 1]
    assert np.isnan(outstanding(values, 10)[9])
    assert outstanding(np.array([1.0, 2.0]), 10).tolist() == [1, 2]


def test_sparklines() -> None:
    assert sparkline(np.array([0.0, 1.0]), 10) == "▁█"
    assert sparkline(np.arange(800.0), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(10.0 ** np.arange(8), 8) == "▁▂▃▄▅▆▇█"  # decades are even steps
    assert sparkline(np.array([1.0, np.nan, 3.0, np.inf]), 4) == "▁x█x"
    assert sparkline(np.array([2.0, 2.0]), 4) == "▄▄"
    assert sparkline(np.array([np.nan]), 4) == "x"
    assert sparkline(np.array([]), 4) == sparkline(np.array([1.0]), 0) == ""
