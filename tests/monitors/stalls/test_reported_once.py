"""Rule ``stall``: one finding for each stall."""

from __future__ import annotations

from pathlib import Path

from backlight.findings.evaluate import findings_of
from backlight.records import Finding, Severity, Subject
from run_builder import build_health_run


def diagnosis(seconds: int, line: str | None, step: int = 20) -> Finding:
    return Finding(
        severity=Severity.WARNING, rule="stall", monitor="stalls", title=f"between steps for {seconds} s",
        detail="detail", subject=Subject(step=step, rank=1, line=line, verdict="PHASE", phase="other"),
        evidence=(), fix="fix", refuted_if="never",
    )  # fmt: skip


def test_a_stall_at_one_line_is_reported_once(tmp_path: Path) -> None:
    other_line, other_step = diagnosis(12, "train.py:40"), diagnosis(10, "train.py:39", step=21)
    stalls = diagnosis(10, "train.py:39"), diagnosis(17, "train.py:39"), other_line, other_step
    run = build_health_run(
        tmp_path / "run", {"weight": [1.0] * 20}, findings=stalls, name="run", monitors=("stalls",)
    )
    found = [f for f in findings_of(run) if f.rule == "stall"]
    assert [(f.title, f.subject.line, f.subject.step) for f in found] == [
        ("between steps for 10 s", "train.py:39", 20),
        ("between steps for 12 s", "train.py:40", 20),
        ("between steps for 10 s", "train.py:39", 21),
    ]
