"""Kill a writer at random moments: the same checks as in ``bench/kills.py``, with fewer kills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCH = Path(__file__).parents[2] / "bench" / "kills.py"


def kill(times: int, seed: int) -> dict[str, object]:
    command = [sys.executable, str(BENCH), "--kills", str(times), "--seed", str(seed), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.stdout, done.stderr
    result: dict[str, object] = json.loads(done.stdout)
    assert result["failures"] == []
    assert result["lost more than one flush interval"] == 0
    assert done.returncode == 0, done.stderr
    return result


def test_ten_kills() -> None:
    where = kill(10, seed=1)["where"]
    assert isinstance(where, dict)
    assert sum(where.values()) == 10
    assert where.get("while recording", 0) >= 2


@pytest.mark.full
@pytest.mark.timeout(300)
def test_five_hundred_kills() -> None:
    kill(500, seed=1000)
