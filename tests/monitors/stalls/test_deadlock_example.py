"""The deadlock example: its control is silent, its deadlock is diagnosed with the correct line."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from faults.stall_faults import found
from ranks.launching import watching

pytestmark = [pytest.mark.full, pytest.mark.alone]

EXAMPLE = Path(__file__).parents[3] / "examples" / "deadlock.py"


def command(folder: Path, *arguments: str) -> list[str]:
    return watching("--stall", 1.5, "--out", folder, EXAMPLE, *arguments)


def test_control_is_silent(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path / "run"), capture_output=True, text=True, timeout=120, check=True)
    assert "step 10 of 10" in done.stdout
    assert "BLOCKED" not in done.stderr
    assert found(tmp_path / "run") == []


def test_deadlock_is_diagnosed_while_it_hangs(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path / "run", "--plant"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 60
        while not (findings := found(tmp_path / "run")) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert process.poll() is None
    finally:
        process.kill()
        output, _ = process.communicate()
    assert output.startswith(b"step 1 of 10")
    assert b"step 2" not in output
    (finding,) = findings
    subject = finding.subject
    assert (subject.verdict, subject.phase, subject.step) == ("BLOCKED", "backward", 1)
    line = int(subject.line.rpartition(":")[2])
    assert EXAMPLE.read_text().splitlines()[line - 1].strip() == "with STATISTICS:"
    assert subject.parameter == "5.outer.weight"
    evidence = (tmp_path / "run" / finding.evidence[0].path).read_text()
    assert "in report" in evidence
