"""Texts from runs and scripts cannot act on a terminal; CSV cells are no formulas."""

from __future__ import annotations

import ast
import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

import backlight
from backlight.store.export import write_rows
from backlight.terminal import make_console, write
from run_builder import build_run

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202egpj\x9b31m\rover"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\u202egpj\x9b31m\rover"


def test_write_escapes_all_but_line_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    write("first", f"{HOSTILE}\nsecond", sep=": ")
    assert capsys.readouterr().out == f"first: {SHOWN}\nsecond\n"


def test_console_escapes_names_and_keeps_its_own_styles() -> None:
    out = io.StringIO()
    console = make_console(file=out, force_terminal=True, width=200, color_system="standard")
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(Text(HOSTILE, style="bold"))
    console.print(HOSTILE, table)
    text = out.getvalue()
    assert "\x1b[1m" in text
    for name in ("\x1b]", "\x1b[2J", "\x07", "\u202e", "\x9b", "\r"):
        assert name not in text
    assert text.count(r"\x1b]0;owned") == 4


@pytest.mark.slow
def test_there_is_no_other_way_to_the_terminal() -> None:
    """``print`` and rich's own console are used in one module; a script's exit message is Python's."""
    source = Path(backlight.__file__).parent
    allowed = {"terminal.py": {"print", "Console"}, "launch/script.py": {"print"}}
    for path in source.rglob("*.py"):
        name = path.relative_to(source).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id in {"print", "Console"}:
                assert called.id in allowed.get(name, set()), f"{name}:{called.lineno}"


@pytest.fixture
def hostile_run(tmp_path: Path) -> Path:
    events = [(0, HOSTILE, {HOSTILE: HOSTILE})]
    scalars = {HOSTILE: [1.0], "=1+1": [-2.5]}
    return build_run(tmp_path / "run", name=HOSTILE, scalars=scalars, events=events).path


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["findings"],
        ["query", "select * from scalars"],
        ["query", "select * from events", "--json"],
        ["query", f"select '{HOSTILE}' as x"],
        ["query", f"select {HOSTILE} from nothing"],
        ["compact"],
        ["ls"],
        ["export", f"{HOSTILE}.xyz"],
    ],
)
def test_commands_print_no_control_character(
    arguments: list[str], hostile_run: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    name, *rest = arguments
    _, output, errors = command(name, hostile_run.parent if name == "ls" else hostile_run, *rest)
    text = output + errors
    assert text
    assert "Traceback" not in text
    for character in HOSTILE:
        assert character.isprintable() or character not in text, repr(text)


def test_csv_cells_are_no_formulas() -> None:
    row = ["=1+1", "+x", "-cmd", "@SUM(A1)", "\tx", "\rx", "-1.5e3", "+inf", "a=b", -2.5, None]
    out = io.StringIO(newline="")
    write_rows(out, [row])
    (found,) = csv.reader(io.StringIO(out.getvalue(), newline=""))
    assert found == [
        "'=1+1", "'+x", "'-cmd", "'@SUM(A1)", "'\tx", "'\rx", "-1.5e3", "+inf", "a=b", "-2.5", "",
    ]  # fmt: skip
    raw = io.StringIO(newline="")
    write_rows(raw, [row], raw=True)
    (kept,) = csv.reader(io.StringIO(raw.getvalue(), newline=""))
    assert kept[:6] == row[:6]


@pytest.mark.slow
@pytest.mark.parametrize("raw", [False, True])
def test_exported_csv(raw: bool, hostile_run: Path, command: Callable[..., tuple[int, str, str]]) -> None:
    out = hostile_run.parent / "out.csv"
    assert command("export", hostile_run, out, "--table", "scalars", *["--raw"] * raw)[0] == 0
    with out.open(newline="") as file:
        names = {row["name"] for row in csv.DictReader(file)}
    assert ("=1+1" if raw else "'=1+1") in names
