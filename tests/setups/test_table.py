"""The table of docs/setups.md equals the stored results of the matrix."""

from __future__ import annotations

import re

import pytest

from setups import table
from setups.cells import IN_PART, TESTED, Outcome
from setups.matrix import ALL, expected


def test_stored_results_cover_the_matrix_as_expected() -> None:
    versions, found = table.stored()
    assert tuple(found) == ALL
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", versions["torch"])
    for cell, outcome in found.items():
        word, pattern = expected(cell)
        assert outcome.word == word, cell
        assert re.search(pattern, outcome.reason), (cell, outcome.reason)


def test_table_equals_the_stored_results() -> None:
    _, inside, _ = table.between(table.PAGE.read_text(encoding="utf-8"))
    assert inside == table.rendered(*table.stored()), "run `python tests/setups/table.py --stored`"


def test_footnotes_are_listed_once_below_the_table() -> None:
    found = {cell: Outcome(TESTED) for cell in ALL}
    found["spectra", "TP"] = found["spectra", "DDP"] = Outcome(IN_PART, "for a reason")
    text = table.rendered({"torch": "2.9.0"}, found)
    assert text.count("in part (1)") == 2
    assert text.count("(1) `for a reason`") == 1
    assert "torch 2.9.0" in text


def test_page_without_markers_is_rejected() -> None:
    with pytest.raises(ValueError, match="no <!-- setups"):
        table.between("# A page\n")


def test_unexpected_result_is_not_stored() -> None:
    found = {cell: Outcome(*("in part", "of something")) for cell in ALL[:1]}
    before = table.RESULTS.read_bytes()
    with pytest.raises(SystemExit, match="where the matrix says tested"):
        table.store(found)
    assert table.RESULTS.read_bytes() == before
