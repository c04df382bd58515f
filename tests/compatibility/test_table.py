"""The table of docs/compatibility.md equals the stored results; the last outcome of a test counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from backlight.cli import doctor
from compatibility import table
from compatibility.cells import CELLS, FRAMEWORK_CELLS, TORCH_CELLS, TORCHES, Cell
from compatibility.table import Result


def report(name: str, outcome: str, when: str = "call") -> str:
    return json.dumps({"$report_type": "TestReport", "nodeid": name, "outcome": outcome, "when": when})


def cell_folder(folder: Path) -> Path:
    (folder / "venv").symlink_to(sys.prefix)
    return folder


def test_table_equals_the_stored_results() -> None:
    _, inside, _ = table.between(table.PAGE.read_text(encoding="utf-8"))
    assert inside == table.rendered(table.stored()), "run `python tests/compatibility/table.py --stored`"
    assert set(table.stored()) <= set(CELLS)


def test_doctor_takes_the_releases_of_the_table() -> None:
    tested = {
        tuple(int(part) for part in result.versions["torch"].split(".")[:2])
        for name, result in table.stored().items()
        if result.passed and name.startswith("torch")
    }
    assert max(tested) == doctor.NEWEST_TORCH
    assert tuple(int(part) for part in TORCHES[0].split(".")) == doctor.OLDEST_TORCH


def test_the_last_outcome_of_a_test_counts(tmp_path: Path) -> None:
    folder = cell_folder(tmp_path)
    first = [
        *(report(name, "passed", "setup") for name in "abc"),
        *(report("a", "passed"), report("b", "failed"), report("c", "passed")),
        *(report("a", "passed", "teardown"), report("c", "failed", "teardown")),
        report("d", "skipped", "setup"),
        report("e", "failed", "setup"),
        '{"$report_type": "TestRep',
    ]
    (folder / "1.jsonl").write_text("\n".join(first))
    result = table.read(folder)
    assert result is not None
    assert (result.passed, result.skipped, result.failures) == (1, 1, ("b", "c", "e"))
    assert result.versions["torch"]
    again = [report(name, "passed", when) for name in "bc" for when in ("setup", "call", "teardown")]
    (folder / "2.jsonl").write_text("\n".join(again))
    result = table.read(folder)
    assert result is not None
    assert (result.passed, result.skipped, result.failures) == (3, 1, ("e",))


def test_file_that_cannot_be_collected_is_a_failure(tmp_path: Path) -> None:
    line = {"$report_type": "CollectReport", "nodeid": "tests/test_x.py", "outcome": "failed"}
    (cell_folder(tmp_path) / "1.jsonl").write_text(json.dumps(line))
    result = table.read(tmp_path)
    assert result is not None
    assert result.failures == ("tests/test_x.py",)


def test_cell_that_was_not_run_reads_so() -> None:
    run, broken = TORCH_CELLS[0].name, FRAMEWORK_CELLS[0].name
    text = table.rendered(
        {
            run: Result(
                "2026-01-02",
                {"Python": "3.11.7", "torch": "2.9.1"},
                1234,
                5,
                ("tests/a.py::test_b",),
                note="half",
            ),
            broken: Result("2026-01-02", {}, problem="no matching distribution"),
        }
    )
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert rows[run].endswith("| 2026-01-02 | Python 3.11.7, torch 2.9.1, half | 1,234 | 1 | 5 |")
    assert "not run: no matching distribution" in rows[broken]
    others = [row for name, row in rows.items() if name in CELLS and name not in {run, broken}]
    assert len(others) == len(CELLS) - 2
    assert all("| not run |" in row for row in others)
    assert f"- {run}: `tests/a.py::test_b`" in text


def test_interpreter_that_is_missing_is_the_problem_of_its_cell(tmp_path: Path) -> None:
    assert table.install(Cell("x", "2.99", ()), tmp_path) == "no python2.99 in PATH"


@pytest.mark.parametrize("cell", FRAMEWORK_CELLS, ids=lambda cell: cell.name)
def test_tests_of_a_framework_exist(cell: Cell) -> None:
    folder, _, words = cell.tests
    files = list((table.ROOT / folder).glob("test_*.py"))
    assert any(words in file.name or f"def test_{words}" in file.read_text() for file in files)
