"""What ``backlight query`` prints: a table where it fits, each row as a list where it does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backlight.cli import app as application
from spoiled import write_spoiled


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_spoiled(tmp_path_factory.mktemp("runs") / "sick", monitors=("health",))


def printed(
    run: Path, statement: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as leaving:
        application.main(["query", str(run), statement])
    assert not leaving.value.code
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_few_columns_are_a_table(
    sick: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(sick, "select step, 'x' as name from steps limit 2", capsys, monkeypatch)
    assert lines == ["step  name", "   0  x", "   1  x"]


def test_one_long_column_is_folded_and_no_name_is_broken(
    sick: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(sick, "select rule, severity, detail from findings", capsys, monkeypatch)
    assert lines[0].split() == ["rule", "severity", "detail"]
    assert re.match(r"non_finite  error     \S", lines[1])
    assert len(lines) > 2, "the detail is folded"
    assert max(map(len, lines)) <= 80


def test_rows_that_are_too_wide_are_listed(
    sick: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(sick, "select * from findings", capsys, monkeypatch)
    assert lines[0].split() == ["rule", "non_finite"]
    assert lines[1].split() == ["severity", "error"]
    assert len(lines) < 80  # folded to columns of three characters it was 200
    assert max(map(len, lines)) <= 80


def test_a_time_keeps_its_digits_and_no_row_is_said(
    sick: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert printed(
        sick, "select 1795251857.409::double as at, 0.123456789::double as x", capsys, monkeypatch
    )[1].split() == ["1795251857.409", "0.123457"]
    assert printed(sick, "select step, loss from steps where step < 0", capsys, monkeypatch) == [
        "no rows of step, loss"
    ]
