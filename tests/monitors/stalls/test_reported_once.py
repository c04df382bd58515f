"""Rule ``stall``: one finding for each stall."""

from __future__ import annotations

from pathlib import Path

from backlight.findings.evaluate import findings_of
from backlight.records import Finding, Severity, Subject
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter
from health_runs import write_synthetic


def diagnosis(seconds: int, line: str | None, step: int = 20) -> Finding:
    return Finding(
        severity=Severity.WARNING, rule="stall", monitor="stalls", title=f"between steps for {seconds} s",
        detail="detail", subject=Subject(step=step, rank=1, line=line, verdict="PHASE", phase="other"),
        evidence=(), fix="fix", refuted_if="never",
    )  # fmt: skip


def test_a_stall_at_one_line_is_reported_once(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", name="run", monitors=("stalls",))
    other_line, other_step = diagnosis(12, "train.py:40"), diagnosis(10, "train.py:39", step=21)
    for found in (diagnosis(10, "train.py:39"), diagnosis(17, "train.py:39"), other_line, other_step):
        writer.finding(found)
    write_synthetic(tmp_path / "run", {"weight": [1.0] * 20}, writer=writer)
    found = [f for f in findings_of(open_run(tmp_path / "run")) if f.rule == "stall"]
    assert [(f.title, f.subject.line, f.subject.step) for f in found] == [
        ("between steps for 10 s", "train.py:39", 20),
        ("between steps for 12 s", "train.py:40", 20),
        ("between steps for 10 s", "train.py:39", 21),
    ]
