"""Failures of the system around a watched training run: the same checks as in ``bench/reliability.py``."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.targets import TARGETS

BENCH = Path(__file__).parents[1] / "bench"
PAGE = BENCH.parent / "docs" / "reliability.md"
QUICK = {"stuck_watchdog", "watchdog_ends_at_once"}


def failures() -> list[str]:
    """Return the failures of ``bench/failures.py``, which take the folder alone, without importing it."""
    tree = ast.parse((BENCH / "failures.py").read_text())
    found = next(n.value for n in tree.body if isinstance(n, ast.AnnAssign) and n.target.id == "FAILURES")
    return [one.id for one in found.generators[0].iter.elts]


def rows(heading: str) -> list[str]:
    """Return the first column of the table of the page below a heading."""
    table = PAGE.read_text().split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    return [line.split("|")[1].strip() for line in table.splitlines()[2:]]


def test_page_lists_what_the_bench_tries() -> None:
    assert sorted(rows("kind")) == sorted(TARGETS)
    tree = ast.parse((BENCH / "failures.py").read_text())
    said = {n.name: ast.get_docstring(n) or "" for n in tree.body if isinstance(n, ast.FunctionDef)}
    expected = [said[name].rstrip(".").replace("``", "`") for name in failures()]
    listed = rows("failure")
    assert len(listed) == len(expected)
    for row, text in zip(listed, expected, strict=True):
        assert row.replace("`", "").startswith(text.replace("`", ""))


@pytest.mark.slow
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
