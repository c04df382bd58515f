"""Processes that tests start and wait for."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from os import PathLike
from typing import Any


def run_captured(command: Sequence[str | PathLike[str]], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command, whatever its exit code, and return what it printed."""
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)
