"""A command prints each panel warning once and does not change other warnings."""

from __future__ import annotations

import warnings

import pytest

from backlight.report.panel import PanelWarning, report_panel_warnings


def test_panel_warnings_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="of another kind") as others, report_panel_warnings() as printed:
        for _ in range(2):
            warnings.warn("one panel", PanelWarning, stacklevel=1)
        warnings.warn("of another kind", UserWarning, stacklevel=1)
    assert printed == ["one panel"]
    assert capsys.readouterr().err == "one panel\n"
    assert [str(other.message) for other in others] == ["of another kind"]


def test_panel_warnings_are_printed_despite_an_error_filter(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(action="error"), report_panel_warnings() as printed:
        warnings.warn("one panel", PanelWarning, stacklevel=1)
    assert printed == ["one panel"]
    assert capsys.readouterr().err == "one panel\n"
