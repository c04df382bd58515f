"""Commands that write are killed at random moments: the check of ``bench/command_kills.py``, with fewer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from processes import run_captured

pytestmark = pytest.mark.slow

BENCH = Path(__file__).parents[1] / "bench" / "command_kills.py"


@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.full)])
def test_killed_command_leaves_nothing_half_written(kills: int) -> None:
    done = run_captured(
        [sys.executable, str(BENCH), "--kills", str(kills), "--seed", str(kills)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    rows = [line for line in done.stdout.splitlines() if f" of {kills} " in line]
    assert len(rows) == 8, done.stdout + done.stderr
    assert all(row.split()[-1] == "0" for row in rows), done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
