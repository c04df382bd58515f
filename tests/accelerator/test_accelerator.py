"""Each file of tests/accelerator/on_device, in a process of its own: torch cannot unload a back-end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation_needs import NEEDS_SIMULATION

HERE = Path(__file__).parent
FILES = sorted(path.name for path in (HERE / "on_device").glob("test_*.py"))

pytestmark = NEEDS_SIMULATION


def run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments],
        cwd=HERE.parents[1], env={**os.environ, "SIMULATED_ACCELERATOR": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_on_device() -> None:
    run("-m", "not full", str(HERE / "on_device"))


@pytest.mark.full
@pytest.mark.parametrize("file", FILES)
def test_on_device_in_full(file: str) -> None:
    run(str(HERE / "on_device" / file))
