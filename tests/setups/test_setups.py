"""Every monitor in every training setup: measured or refused with a reason; training is unchanged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from setups.cells import TESTED, Outcome, measure
from setups.matrix import ALL, Cell, expected, launch
from setups.training_setups import OTHERS, SETUPS

ALONE = {cell for cell in ALL if SETUPS[cell[1]].ranks == 1}
DIAGONAL: tuple[Cell, ...] = (
    ("steptime", "plain"),
    ("spectra", "accumulation"),
    ("health", "AMP fp16"),
    ("health", "bf16 autocast"),
    ("correctness", "AMP fp16"),
    ("grokking", "compile"),
    ("stalls", "checkpointing"),
    ("grokking", "checkpointing, re-entrant"),
    ("identical", "bf16 autocast"),
)
RANKS: tuple[Cell, ...] = (("spectra", "FSDP2"), ("grokking", "TP"), ("correctness", "FSDP2"))
"""``ranks/test_statistics.py`` covers gradients and identity on several ranks."""


def check(cell: Cell, outcome: Outcome) -> None:
    word, pattern = expected(cell)
    assert outcome.word == word, outcome.reason
    assert re.search(pattern, outcome.reason), outcome.reason


def marked_cell(cell: Cell) -> Any:
    marks = [] if cell in DIAGONAL else [pytest.mark.full]
    if cell[0] == "stalls":
        marks.append(pytest.mark.alone)
    return pytest.param(cell, id=f"{cell[0]}-{cell[1]}", marks=marks)


@pytest.mark.parametrize("cell", [marked_cell(cell) for cell in ALL if cell in ALONE])
def test_setups_in_one_process(cell: Cell, tmp_path: Path) -> None:
    check(cell, measure(*cell, tmp_path))


def test_matrix_diagonal_on_two_ranks(tmp_path: Path) -> None:
    for cell, outcome in launch(RANKS, tmp_path).items():
        check(cell, outcome)


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.parametrize("setup", [setup.name for setup in SETUPS.values() if setup.ranks > 1])
def test_setups_on_several_ranks(setup: str, tmp_path: Path) -> None:
    cells = [cell for cell in ALL if cell[1] == setup]
    found = launch(cells, tmp_path)
    assert list(found) == cells
    for cell, outcome in found.items():
        check(cell, outcome)


@pytest.mark.full
@pytest.mark.alone
def test_setup_combinations_on_two_ranks(tmp_path: Path) -> None:
    monitors = ("health", "grokking", "spectra", "identical")
    names = [name for name in OTHERS if "offloaded" not in name and "bf16" not in name]
    cells = [(monitor, name) for name in names for monitor in monitors]
    found = launch(cells, tmp_path)
    assert list(found) == cells
    assert {outcome.word for outcome in found.values()} == {TESTED}
