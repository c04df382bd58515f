"""The framework examples run and print their findings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import backlight
from integrations.torchrun import environment

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "arguments", "steps"),
    [
        ("with_lightning.py", ("--epochs", "1"), 16),
        ("with_huggingface.py", ("--steps", "6"), 6),
        ("with_accelerate.py", ("--epochs", "1"), 8),
    ],
)
def test_example(tmp_path: Path, script: str, arguments: tuple[str, ...], steps: int) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), "--out", str(tmp_path / "run"), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("next: backlight report") == 1
    run = backlight.open_run(tmp_path / "run")
    assert run.status.value == "finished"
    assert run.last_step() + 1 == steps
    assert ("`sign.weight` and `sign.bias` never received a gradient" in done.stderr) == (
        "lightning" in script
    )
