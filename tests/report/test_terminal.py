"""Findings in a terminal: alignment, width, hostile names."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from synthetic import Plan, finding, write_run

from backlight.records import Evidence, Severity
from backlight.report.terminal import print_findings
from backlight.store.read.run import Run

Written = tuple[Console, io.StringIO]


def console(width: int, colour: bool = False) -> Written:
    text = io.StringIO()
    kind = "truecolor" if colour else None
    return Console(file=text, width=width, force_terminal=colour, color_system=kind), text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    plan = Plan(steps=10, unmeasured={7: "frozen"}, name="small")
    return write_run(tmp_path_factory.mktemp("terminal") / "run", plan)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_output_fits_the_terminal(run: Run, width: int) -> None:
    out, text = console(width)
    long = finding("blocks." + "deep." * 30 + "weight", 3)
    print_findings(run, [long, finding("embed.weight", 4, severity=Severity.WARNING)], out)
    assert max(len(line) for line in text.getvalue().splitlines()) <= width
    assert "deep.deep" in text.getvalue()


def test_title_detail_and_fix_are_aligned(run: Run) -> None:
    out, text = console(100)
    print_findings(run, [finding("embed.weight", 3)], out)
    lines = text.getvalue().splitlines()
    assert lines[0] == "small"
    measured = "Gradients of 50 of 51 parameters and the loss were measured at all 10 steps."
    assert lines[1] == f"✕ 1 error. {measured}"
    assert "✕ error  non finite" in lines
    assert "  The gradient of `embed.weight` is not finite from step 3 on" in lines
    assert "  where     embed.weight  step 3" in lines
    labels = ("where", "evidence", "fix")
    starts = {len(label): line for line in lines for label in labels if line.startswith(f"  {label} ")}
    assert all(line[12] != " " and line[11] == " " for line in starts.values())
    assert "  1 parameter: frozen (blocks.0.ln_2.weight)" in lines
    assert not [line for line in lines if line != line.rstrip()]


def test_fix_comes_before_the_series_and_the_evidence(run: Run) -> None:
    out, text = console(80)
    evidence = (Evidence("parameters/group/a"), Evidence("scalars/loss", 3, 2.0))
    print_findings(run, [finding("embed.weight", 3, evidence=evidence)], out)
    labels = [line.split()[0] for line in text.getvalue().splitlines() if line[:3].strip() == line[2:3] != ""]
    assert [label for label in labels if label in {"fix", "series", "where", "evidence"}] == [
        "fix", "series", "where", "evidence", "evidence",
    ]  # fmt: skip
    (series,) = [line.split()[1] for line in text.getvalue().splitlines() if line.startswith("  series")]
    assert len(series) == 10
    assert set(series) <= set("▁▂▃▄▅▆▇█")


def test_similar_findings_are_counted(run: Run) -> None:
    out, text = console(80)
    print_findings(run, [finding(f"layer.{i}", i) for i in range(40)], out)
    assert text.getvalue().count("✕ error") == 3
    assert "and 37 more findings of non_finite" in text.getvalue()


def test_severity_has_a_colour(run: Run) -> None:
    out, text = console(80, colour=True)
    print_findings(run, [finding("embed.weight", 3, severity=Severity.WARNING)], out)
    assert "\x1b[1;33m! warning" in text.getvalue()


def test_hostile_names_are_text(tmp_path: Path) -> None:
    name = "[bold red]x[/]\x1b[2J\x07"
    run = write_run(tmp_path / "run", Plan(steps=5, name=name, rename={3: name}, unmeasured={3: "frozen"}))
    out, text = console(100)
    print_findings(run, [finding(name, 2, title=name)], out)
    assert "\x1b" not in text.getvalue()
    assert "\x07" not in text.getvalue()
    assert text.getvalue().count("[bold red]x[/]\\x1b[2J\\x07") >= 4
