"""The example of the docs: runs under ``backlight run``, one of which hangs in backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from backlight.diagnose.test_matrix.report import MatrixReport, answer
from backlight.diagnose.test_matrix.runner import execute, prepare
from backlight.records import DiagnosisKind

pytestmark = pytest.mark.alone

EXAMPLES = Path(__file__).parents[3] / "examples" / "test_matrix"

Command = Callable[..., tuple[int, str, str]]


def run(folder: Path, *, limit: float, cases: str = "") -> tuple[Path, MatrixReport]:
    """Run the example; with ``cases``, those and no tree."""
    (folder / "train.py").write_bytes((EXAMPLES / "train.py").read_bytes())
    text = (EXAMPLES / "recompute.toml").read_text().replace("time_limit = 20.0", f"time_limit = {limit}")
    text = text.partition("[cases.base]")[0] + cases if cases else text
    # The watchdog reports early; the limit leaves time for imports on a busy machine.
    text = text.replace("[base]\n", '[base]\nrun_options = ["--stall", "1.5"]\n')
    (folder / "recompute.toml").write_text(text)
    return folder / "out", execute(prepare(folder / "recompute.toml"), folder / "out")


@pytest.mark.full
def test_the_example_finds_its_fault(tmp_path: Path) -> None:
    _, report = run(tmp_path, limit=45.0)
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
    todo = next(t for t in answer(report).tables if t.title == "What to do, in this order")
    assert (todo.rows[0][1], todo.rows[0][2][:24]) == ("train.py:41", "recomputation takes a lo")
    assert "with LOCK, torch" in lines[40]


def test_the_finding_of_the_watchdog_is_the_verdict(tmp_path: Path, command: Command) -> None:
    out, report = run(tmp_path, limit=20.0, cases="[cases.hangs]\nlevels = { checkpointing = 'on' }\n")
    blocked = report.cases[0].evaluation
    assert blocked.verdict is DiagnosisKind.BLOCKED
    assert blocked.claim.startswith("stall finding of the run: ")
    assert "Block.forward, train.py:" in blocked.claim
    assert "Block.forward" in (out / report.cases[0].attempt / "evidence.txt").read_text()
    # The kills at its end are no findings: the watchdog process was ended first.
    findings = command("findings", str(out / "cases/hangs/000/run"), "--json")[1]
    assert '"BLOCKED"' in findings
    assert '"DEAD"' not in findings
    assert command("report", str(out), "--format", "md", "--out", str(tmp_path / "ticket.md"))[0] == 0
    assert "## Evidence" in (tmp_path / "ticket.md").read_text()
    assert command("report", str(out), "--out", str(tmp_path / "page.html"))[0] == 0
    assert "Content-Security-Policy" in (tmp_path / "page.html").read_text()


@pytest.mark.full
def test_two_ranks_show_the_same_fault(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes((EXAMPLES / "train.py").read_bytes())
    (tmp_path / "plan.toml").write_text(
        'time_limit = 25\n[base]\ncommand = ["train.py"]\nprogress = "step (\\\\d+)/"\n'
        '[factors.ranks]\none = { ranks = 1 }\ntwo = { ranks = 2 }\n'
        '[factors.checkpointing]\noff = {}\non = { arguments = ["--checkpoint"] }\n'
        '[cases.base]\n[cases.two]\ncontrol = "base"\nlevels = { ranks = "two" }\n'
        '[cases.both]\ncontrol = "two"\nlevels = { ranks = "two", checkpointing = "on" }\n'
    )  # fmt: skip
    report = execute(prepare(tmp_path / "plan.toml"), tmp_path / "out")
    verdicts = {one.case.name: one.evaluation.verdict for one in report.cases}
    assert verdicts == {
        "base": DiagnosisKind.PASS, "two": DiagnosisKind.PASS, "both": DiagnosisKind.BLOCKED
    }  # fmt: skip
    ranks = next(c for c in report.comparisons if c.case == "two")
    assert ranks.outcome == "none"
    assert any("ranks: 2" in text or "world_size" in text for text in ranks.differences)
