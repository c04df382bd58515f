"""The example of the docs: runs under ``backlight run``, one of which hangs in backward."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from backlight.diagnose.matrix.report import MatrixReport
from backlight.diagnose.matrix.runner import execute, prepare
from backlight.records import DiagnosisKind

pytestmark = pytest.mark.alone

EXAMPLES = Path(__file__).parents[3] / "examples" / "matrix"

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MatrixReport]:
    folder = tmp_path_factory.mktemp("example")
    (folder / "train.py").write_bytes((EXAMPLES / "train.py").read_bytes())
    plan = folder / "recompute.toml"
    # The watchdog reports early; the limit leaves time for imports on a busy machine.
    text = (EXAMPLES / "recompute.toml").read_text()
    text = text.replace("time_limit = 15.0", "time_limit = 45.0")
    plan.write_text(text.replace("[base]\n", '[base]\nrun_options = ["--stall", "1.5"]\n'))
    return folder / "out", execute(prepare(plan), folder / "out")


def test_the_example_finds_its_fault(done: tuple[Path, MatrixReport]) -> None:
    _, report = done
    verdicts = {one.case.name: one.evaluation.verdict for one in report.cases}
    assert verdicts == {
        "base": DiagnosisKind.PASS,
        "checkpointing": DiagnosisKind.BLOCKED,
        "lock": DiagnosisKind.PASS,
    }
    assert {c.case: (c.factor, c.outcome) for c in report.comparisons} == {
        "checkpointing": ("checkpointing", "causes"),
        "lock": ("lock", "cures"),
    }
    assert report.headline == "recomputation takes a lock that the forward it runs takes again"
    lines = (EXAMPLES / "train.py").read_text().splitlines()
    blocked = report.cases[1]
    line = int(blocked.evaluation.line.rpartition(":")[2])
    assert "with LOCK" in lines[line - 1]
    assert int(report.actions[0].at.rpartition(":")[2]) == 1 + next(
        i for i, text in enumerate(lines) if "with LOCK, torch" in text
    )


def test_the_finding_of_the_watchdog_is_the_verdict(done: tuple[Path, MatrixReport]) -> None:
    out, report = done
    blocked = report.cases[1].evaluation
    assert blocked.because[0] == "finding of rule stall in the run directory"
    assert "Block.forward, train.py:" in blocked.claim
    kept = next(
        out / report.cases[1].attempt / name
        for name in report.cases[1].observation.files
        if "/stacks-" in name
    )
    assert "Block.forward" in kept.read_text()
    # The kills at its end are no findings: the watchdog process was ended first.
    findings = subprocess.run(
        [sys.executable, "-m", "backlight", "findings", str(out / "cases/checkpointing/000/run"), "--json"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert '"BLOCKED"' in findings
    assert '"DEAD"' not in findings


def test_report_renders_a_matrix(done: tuple[Path, MatrixReport], tmp_path: Path, command: Command) -> None:
    out, _ = done
    code, said, _ = command("report", str(out), "--format", "md", "--out", str(tmp_path / "ticket.md"))
    assert (code, said.strip()) == (0, str(tmp_path / "ticket.md"))
    assert "## Decision tree" in (tmp_path / "ticket.md").read_text()
    assert command("report", str(out), "--out", str(tmp_path / "page.html"))[0] == 0
    assert "Content-Security-Policy" in (tmp_path / "page.html").read_text()


@pytest.mark.full
def test_two_ranks_show_the_same_fault(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes((EXAMPLES / "train.py").read_bytes())
    (tmp_path / "plan.toml").write_text(
        'time_limit = 25\ndesign = "product"\n[base]\nscript = "train.py"\n'
        'progress = "step (\\\\d+)/(\\\\d+)"\n'
        '[factors.ranks]\none = { ranks = 1 }\ntwo = { ranks = 2 }\n'
        '[factors.checkpointing]\noff = {}\non = { arguments = ["--checkpoint"] }\n'
    )  # fmt: skip
    report = execute(prepare(tmp_path / "plan.toml"), tmp_path / "out")
    verdicts = {one.case.name: one.evaluation.verdict for one in report.cases}
    assert verdicts == {
        "base": DiagnosisKind.PASS,
        "checkpointing=on": DiagnosisKind.BLOCKED,
        "ranks=two": DiagnosisKind.PASS,
        "ranks=two,checkpointing=on": DiagnosisKind.BLOCKED,
    }
    ranks = next(c for c in report.comparisons if c.case == "ranks=two")
    assert ranks.outcome == "none"
    assert any("ranks: 2" in text or "world_size" in text for text in ranks.differences)
