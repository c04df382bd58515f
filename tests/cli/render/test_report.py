"""A command tells of panels in one line each, and leaves other warnings as they are."""

from __future__ import annotations

import warnings

import pytest

from backlight.cli.render.report import report_panel_warnings
from backlight.report.panel import PanelWarning


def test_panels_are_told_once_and_other_warnings_as_always(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="of another kind") as others, report_panel_warnings() as printed:
        for _ in range(2):
            warnings.warn("one panel", PanelWarning, stacklevel=1)
        warnings.warn("of another kind", UserWarning, stacklevel=1)
    assert printed == ["one panel"]
    assert capsys.readouterr().err == "one panel\n"
    assert [str(other.message) for other in others] == ["of another kind"]


def test_a_filter_that_makes_errors_of_warnings_takes_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with report_panel_warnings() as printed:
            warnings.warn("one panel", PanelWarning, stacklevel=1)
    assert printed == ["one panel"]
    assert capsys.readouterr().err == "one panel\n"
