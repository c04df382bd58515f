"""The text of a run for a language model: what it holds, and that no run makes it longer than its limit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from backlight.findings.evaluate import findings_of
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.report.llms import BARS, MAX_BYTES, render_llms
from backlight.store.read.run import Run
from run_builder import build_run, build_steptime_run

STEPS = 200


def finding(number: int, text: str) -> Finding:
    return Finding(
        severity=Severity.ERROR if number == 0 else Severity.WARNING, title=f"finding {number} {text}",
        detail=f"{text} in detail.", subject=Subject(step=number, line=f"/home/ann/train.py:{number}"),
        evidence=(Evidence("scalars/loss", number, 1.0),), fix=f"mend {text}", refuted_if="it is meant.",
        rule="spike", monitor="health",
    )  # fmt: skip


def big(path: Path, text: str) -> Run:
    """Return a run with many scalars, each of which varies, and names of ``text``."""
    random = np.random.default_rng(0)
    logged = {f"{text}{number}": list(random.normal(0, 1, STEPS)) for number in range(100)}
    return build_run(path / "run", scalars={"loss": list(np.linspace(2, 1, STEPS))} | logged)


@pytest.mark.parametrize(
    "text", ["word", "\N{SNOWMAN}" * 300, "\n\x1b[31m" * 60], ids=["plain", "wide", "control"]
)
def test_no_run_is_longer_than_the_limit(text: str, tmp_path: Path) -> None:
    run = big(tmp_path, text[:60])
    shown = render_llms(run, [finding(number, text) for number in range(200)])
    assert len(shown.encode()) <= MAX_BYTES
    assert shown.count("\nwarning: ") + shown.count("\nerror: ") >= 1
    assert "\x1b" not in shown
    lines = shown.splitlines()
    assert any(line.startswith("loss [200 steps] 2 to 1 (1 to 2) ") for line in lines)
    assert any(line.startswith("and ") and "more findings: backlight findings " in line for line in lines)
    assert any(line.startswith("and ") and "more lines: backlight query " in line for line in lines)
    assert "## Not measured" in lines


def test_a_finding_is_whole_and_the_facts_come_first(tmp_path: Path) -> None:
    times = {"data": 0.06, "forward": 0.01, "backward": 0.02, "optimizer": 0.006, "other": 0.004}
    run = build_steptime_run(tmp_path / "run", times)
    lines = render_llms(run, findings_of(run)).splitlines()
    facts, findings, series = (
        next(at for at, line in enumerate(lines) if line.startswith(f"## {title}"))
        for title in ("Facts", "Findings", "Series")
    )
    assert facts < findings < series
    assert lines[facts + 1].startswith("step 100 ms: 60 % waiting for data")
    assert lines[findings + 1] == "warning: bottleneck: Waiting for data takes 60 % of a step"
    assert [line.split()[0] for line in lines[findings + 2 : series - 1]] == [
        "Waiting", "fix:", "where:", "evidence:", "refuted",
    ]  # fmt: skip
    bars = next(line for line in lines if line.startswith("phase/data [60 steps]")).split()[-1]
    assert len(bars) == BARS


def test_a_constant_series_has_no_bars(tmp_path: Path) -> None:
    run = build_run(tmp_path / "run", scalars={"loss": [2.0, 1.0, 0.5], "lr/0/0": [0.1] * 3})
    lines = render_llms(run, []).splitlines()
    (constant,) = [line for line in lines if line.startswith("constant: ")]
    assert "lr/0/0 0.1" in constant
    assert not any(line.startswith("lr/0/0 [") for line in lines)
