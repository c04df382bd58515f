"""The example of the docs: silent without its fault, and with it a diagnosis with the right line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ranks.launching import watching

pytestmark = [pytest.mark.full, pytest.mark.alone]

EXAMPLE = Path(__file__).parents[3] / "examples" / "deadlock.py"


def command(folder: Path, *arguments: str) -> list[str]:
    return watching("--stall", 1.5, "--out", folder, EXAMPLE, *arguments)


def findings(folder: Path) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-m", "backlight", "findings", str(folder), "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return json.loads(done.stdout) if done.returncode == 0 else []


def test_control_is_silent(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path / "run"), capture_output=True, text=True, timeout=120, check=True)
    assert "step 10 of 10" in done.stdout
    assert "BLOCKED" not in done.stderr
    assert [f for f in findings(tmp_path / "run") if f["rule"] == "stall"] == []


def test_deadlock_is_diagnosed_while_it_hangs(tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tmp_path / "run", "--plant"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        found: list[dict[str, object]] = []
        deadline = time.monotonic() + 60
        while not found and time.monotonic() < deadline:
            found = [f for f in findings(tmp_path / "run") if f["rule"] == "stall"]
        assert process.poll() is None
    finally:
        process.kill()
        output, _ = process.communicate()
    assert output.startswith(b"step 1 of 10")
    assert b"step 2" not in output
    (finding,) = found
    subject = finding["subject"]
    assert (subject["verdict"], subject["phase"], subject["step"]) == ("BLOCKED", "backward", 1)
    line = int(subject["line"].rpartition(":")[2])
    assert EXAMPLE.read_text().splitlines()[line - 1].strip() == "with STATISTICS:"
    assert subject["parameter"] == "5.outer.weight"
    evidence = (tmp_path / "run" / finding["evidence"][0]["path"]).read_text()
    assert "in report" in evidence
