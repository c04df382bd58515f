"""Lines about findings: worst first, not too many, above progress bars, never inside a line of the script."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import tqdm

from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import RULES
from backlight.session import outputs
from backlight.session.outputs import PrintOutput, print_line
from backlight.session.settings import Settings

ONE = Finding(
    severity=Severity.WARNING,
    title="`head.weight` is not\x1b[31m in any optimizer",
    detail="detail",
    subject=Subject(parameter="head.weight"),
    evidence=(Evidence("series/gradient/norm/head.weight", 1),),
    fix="fix",
    refuted_if="refuted",
    rule="no_update",
)


@pytest.fixture
def monitor(monkeypatch: pytest.MonkeyPatch) -> tuple[PrintOutput, io.StringIO, list[float]]:
    clock, stream = [0.0], io.StringIO()
    monkeypatch.setattr(outputs, "clock", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr("sys.stderr", stream)
    made = PrintOutput.from_settings(Settings())
    run: Any = SimpleNamespace(path="runs/first", rank=0)
    made.check_process(is_script=True)
    made.attach(run)
    monkeypatch.undo()
    monkeypatch.setattr(outputs, "clock", SimpleNamespace(monotonic=lambda: clock[0]))
    return made, stream, clock


def new_lines(stream: io.StringIO) -> list[str]:
    lines = stream.getvalue().splitlines()
    stream.seek(0)
    stream.truncate()
    return lines


def test_lines_name_directory_and_findings_worst_first(monitor: Any) -> None:
    made, stream, _ = monitor
    assert new_lines(stream) == ["backlight: recording in runs/first; live page: backlight open runs/first"]
    stalled = replace(ONE, rule=next(name for name, rule in RULES.items() if rule.logged))
    made.on_new_findings([
        ONE,
        replace(ONE, title="another"),
        replace(ONE, rule="non_finite", severity=Severity.ERROR, title="NaN"),
        replace(ONE, severity=Severity.INFO, title="a note"),
        stalled,  # printed by the watchdog process
    ])  # fmt: skip
    assert new_lines(stream) == [
        "backlight: error: NaN (non_finite)",
        r"backlight: warning: `head.weight` is not\x1b[31m in any optimizer (no_update, and 1 more)",
    ]


def test_more_lines_than_a_minute_may_have_are_counted(monitor: Any) -> None:
    made, stream, clock = monitor
    new_lines(stream)
    rules = [f"rule_{n}" for n in range(outputs.MAX_LINES + 2)]
    many = [replace(ONE, rule=rule) for rule in rules]
    known = {rule: RULES["no_update"] for rule in rules}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outputs, "RULES", known)
        made.on_new_findings(many)
        first = new_lines(stream)
        assert len(first) == outputs.MAX_LINES + 1
        assert first[-1] == "backlight: and 2 more findings: backlight findings runs/first"
        clock[0] += outputs.WINDOW_S / 2
        made.on_new_findings(many[:1])
        made.on_flush()
        assert new_lines(stream) == []
        clock[0] += outputs.WINDOW_S
        made.on_flush()
        assert new_lines(stream) == ["backlight: and 1 more finding: backlight findings runs/first"]
        made.on_new_findings(many[:1])
        assert len(new_lines(stream)) == 1


def test_quiet_prints_nothing_and_other_ranks_do_not_either(capsys: pytest.CaptureFixture[str]) -> None:
    assert PrintOutput.from_settings(Settings.of({"quiet": True})) is None
    made = PrintOutput()
    made.check_process(is_script=True)
    made.attach(SimpleNamespace(path="run", rank=1))
    assert capsys.readouterr().err == ""


def test_a_progress_bar_stays_below_the_lines() -> None:
    stream = io.StringIO()
    with tqdm.tqdm(total=3, file=stream, ascii=True) as bar:
        bar.update()
        print_line("a finding", stream)
    assert "\nbacklight: a finding\n" in "\n" + stream.getvalue().replace("\r", "\n")


def test_a_terminal_gets_a_line_of_its_own_and_a_closed_stream_nothing() -> None:
    terminal = io.StringIO("epoch 1 ...")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    terminal.seek(0, io.SEEK_END)
    print_line("a finding", terminal)
    assert terminal.getvalue() == "epoch 1 ...\nbacklight: a finding\n"
    terminal.close()
    print_line("another", terminal)


def test_a_process_without_standard_error_prints_nothing_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = PrintOutput()
    made.check_process(is_script=True)
    monkeypatch.setattr("sys.stderr", None)
    made.attach(SimpleNamespace(path="run", rank=0))
    made.on_new_findings([ONE])
    assert capsys.readouterr().out == ""
