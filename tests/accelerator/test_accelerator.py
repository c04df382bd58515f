"""Each file of tests/accelerator/on_device, in a process of its own: torch cannot unload a back-end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from packaging.version import Version

HERE = Path(__file__).parent
FILES = sorted(path.name for path in (HERE / "on_device").glob("test_*.py"))

pytestmark = [
    pytest.mark.skipif(
        shutil.which(os.environ.get("CXX", "g++")) is None or sys.platform != "linux",
        reason="the simulated accelerator needs Linux and a C++ compiler (g++, or CXX)",
    ),
    pytest.mark.skipif(
        Version(torch.__version__) < Version("2.12"),
        reason="the simulated accelerator has functions that no back-end of torch 2.11 has",
    ),
]


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
