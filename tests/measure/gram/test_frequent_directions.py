"""The sketch of a stream of rows stays within its own bound."""

from __future__ import annotations

import math

import pytest
import torch

from backlight.measure.gram.frequent_directions import FrequentDirections


def certified(sketch: FrequentDirections, A: torch.Tensor) -> None:
    B = sketch.rows()
    assert B.shape[0] <= sketch.size
    gap = torch.linalg.eigvalsh(A.T @ A - B.T @ B)
    scale = float(torch.linalg.matrix_norm(A, 2)) ** 2
    assert float(gap.min()) >= -1e-10 * scale
    assert float(gap.max()) <= sketch.shrinkage + 1e-10 * scale


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_error_bound_of_sketch_holds(decay: float) -> None:
    A = torch.randn(60, 20, dtype=torch.float64) * torch.exp(-decay * torch.arange(20, dtype=torch.float64))
    sketch = FrequentDirections(6, 20)
    for start in (0, 1, 8, 30):
        sketch.add(A[start : {0: 1, 1: 8, 8: 30, 30: 60}[start]])
        certified(sketch, A[: sketch.seen])
    assert sketch.seen == 60
    # The bound of the algorithm itself: the shrinkage is no more than the squared tail over rows - k.
    tail = torch.linalg.svdvals(A) ** 2
    assert 0 < sketch.shrinkage <= float(tail[3:].sum()) / (6 - 3) + 1e-9


def test_sketch_of_few_rows_is_exact() -> None:
    A = torch.randn(6, 20, dtype=torch.float64)
    sketch = FrequentDirections(6, 20)
    for row in A:
        sketch.add(row)
    assert sketch.shrinkage == 0
    B = sketch.rows()
    torch.testing.assert_close(B.T @ B, A.T @ A)


def test_sketches_merge() -> None:
    A, B = torch.randn(40, 15, dtype=torch.float64), torch.randn(30, 15, dtype=torch.float64)
    one, two = FrequentDirections(5, 15), FrequentDirections(7, 15)
    one.add(A)
    two.add(B)
    one.merge(two)
    assert one.seen == 70
    certified(one, torch.cat([A, B]))
    with pytest.raises(ValueError, match="cannot merge 3 columns into 15"):
        one.merge(FrequentDirections(5, 3))


@pytest.mark.parametrize("taken", [3, 9, 14])
def test_sketch_resumes_from_its_state(taken: int) -> None:
    rows = torch.randn(40, 15, dtype=torch.float64)
    whole = FrequentDirections(5, 15)
    whole.add(rows[:taken])
    state = whole.state()
    resumed = FrequentDirections.from_state(state)
    for sketch in (whole, resumed):
        sketch.add(rows[taken:])
    assert torch.equal(whole.rows(), resumed.rows())
    assert (whole.shrinkage, whole.seen) == (resumed.shrinkage, resumed.seen) == (whole.shrinkage, 40)
    assert len(state["rows"]) == (taken if taken < 11 else 9)  # what was taken is a copy


def test_invalid_input_is_refused() -> None:
    state = FrequentDirections(2, 3).state()
    with pytest.raises(ValueError, match="the state lacks seen, shrinkage"):
        FrequentDirections.from_state({"size": 2, "rows": state["rows"]})
    with pytest.raises(ValueError, match=r"expected at most 4 rows, got \[5, 3\]"):
        FrequentDirections.from_state({**state, "rows": torch.zeros(5, 3)})
    sketch = FrequentDirections(2, 3)
    with pytest.raises(ValueError, match=r"expected rows of 3 numbers, got \[4\]"):
        sketch.add(torch.ones(4))
    with pytest.raises(ValueError, match="not finite; the sketch was left as it was"):
        sketch.add(torch.tensor([1.0, math.inf, 0.0]))
    assert sketch.seen == 0
    with pytest.raises(ValueError, match="at least 1, got 0 and 3"):
        FrequentDirections(0, 3)
