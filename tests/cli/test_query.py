"""``backlight query`` prints a table, or each row as a list where a table is too wide."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

Command = Callable[..., tuple[int, str, str]]
Printed = Callable[[str], list[str]]


@pytest.fixture
def printed(
    command: Command, monkeypatch: pytest.MonkeyPatch, run_with_nan: Path
) -> Callable[[str], list[str]]:
    """Query the run on a terminal of 80 columns and return the lines."""
    monkeypatch.setenv("COLUMNS", "80")

    def query(statement: str) -> list[str]:
        code, out, _ = command("query", run_with_nan, statement)
        assert code == 0
        return [line.rstrip() for line in out.splitlines()]

    return query


def test_few_columns_are_printed_as_a_table(printed: Printed) -> None:
    lines = printed("select step, 'x' as name from steps limit 2")
    assert lines == ["step  name", "   0  x", "   1  x"]


def test_long_column_is_folded(printed: Printed) -> None:
    lines = printed("select rule, severity, detail from findings")
    assert lines[0].split() == ["rule", "severity", "detail"]
    assert re.match(r"non_finite  error     \S", lines[1])
    assert len(lines) > 2, "the detail is folded"
    assert max(map(len, lines)) <= 80


def test_wide_rows_are_printed_as_lists(printed: Printed) -> None:
    lines = printed("select * from findings")
    assert lines[0].split() == ["rule", "non_finite"]
    assert lines[1].split() == ["severity", "error"]
    assert len(lines) < 80  # folded to columns of three characters it was 200
    assert max(map(len, lines)) <= 80


def test_times_keep_their_digits_and_no_rows_is_reported(printed: Printed) -> None:
    _, row = printed("select 1795251857.409::double as at, 0.123456789::double as x")
    assert row.split() == ["1795251857.409", "0.123457"]
    assert printed("select step, loss from steps where step < 0") == ["no rows of step, loss"]
