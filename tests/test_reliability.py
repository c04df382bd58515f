"""Failures of the system around a watched training run: the same checks as in ``bench/reliability.py``."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
QUICK = {"stuck_watchdog", "watchdog_ends_at_once"}


def failures() -> list[str]:
    """Return the failures of ``bench/failures.py``, which take the folder alone, without importing it."""
    tree = ast.parse((BENCH / "failures.py").read_text())
    found = next(n.value for n in tree.body if isinstance(n, ast.AnnAssign) and n.target.id == "FAILURES")
    return [one.id for one in found.generators[0].iter.elts]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.full]) for n in failures()]
)
def test_failure_is_survived_and_stated(name: str) -> None:
    command = [sys.executable, str(BENCH / "reliability.py"), "--only", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    (outcome,) = json.loads(done.stdout)
    if outcome["skipped"]:
        pytest.skip(outcome["skipped"])
    assert outcome["problems"] == []
