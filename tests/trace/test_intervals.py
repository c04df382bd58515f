"""Unions, overlaps and divided time against sets of single nanoseconds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backlight.trace.events import Integers
from backlight.trace.intervals import shares, union

INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    max_size=12,
)


def arrays(pairs: list[tuple[int, int]]) -> tuple[Integers, Integers]:
    both = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def points(pairs: list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in pairs for moment in range(start, end)}


@given(INTERVALS, INTERVALS, st.integers(0, 50), st.integers(0, 50))
def test_intervals_equal_sets(
    some: list[tuple[int, int]], others: list[tuple[int, int]], one: int, other: int
) -> None:
    start, end = min(one, other), max(one, other)
    whole = union(*arrays(some))
    covered = points(some)
    window = set(range(start, end))
    assert whole.length == len(covered)
    assert (whole.start[1:] > whole.end[:-1]).all()
    assert whole.within(start, end).length == len(covered & window)
    gaps = whole.gaps(start, end)
    assert points(list(zip(gaps.start.tolist(), gaps.end.tolist(), strict=True))) == window - covered
    measured = whole.covered(*arrays(others)).tolist()
    assert measured == [len(covered & set(range(a, b))) for a, b in others]


@pytest.mark.slow
@given(INTERVALS, st.data())
def test_shares_add_up_and_go_by_priority(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    levels = data.draw(st.lists(st.integers(0, 2), min_size=len(pairs), max_size=len(pairs)))
    parts = shares(*arrays(pairs), np.array(levels, dtype=np.int64))
    owner: dict[int, int] = {}
    order = sorted(range(len(pairs)), key=lambda row: (levels[row], pairs[row][0], row))
    for row in order:
        for moment in range(*pairs[row]):
            owner.setdefault(moment, row)
    assert parts.tolist() == [sum(1 for who in owner.values() if who == row) for row in range(len(pairs))]
    assert parts.sum() == union(*arrays(pairs)).length
