"""Reduction of series without loss of extremes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from backlight.report.source import cut, extremes, keep, quantiles

VALUES = st.one_of(
    st.floats(0, 1e6, width=32), st.sampled_from([0.0, float("nan"), float("inf"), 1e300, 1e-300])
)


@st.composite
def frames(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values [S, P], which of them were measured, and strictly increasing steps [S]."""
    shape = draw(st.tuples(st.integers(1, 60), st.integers(1, 4)))
    values = draw(hnp.arrays(np.float64, shape, elements=VALUES))
    measured = draw(hnp.arrays(np.bool_, shape))
    gaps = draw(hnp.arrays(np.int64, shape[0], elements=st.integers(1, 50)))
    return values, measured, np.cumsum(gaps) - 1


@settings(deadline=None)
@given(st.integers(1, 500), st.integers(1, 600))
def test_buckets_cover_every_step_once(amount: int, most: int) -> None:
    steps = np.arange(amount) * 3
    buckets = cut(steps, most)
    assert len(buckets) == min(amount, most)
    assert buckets.recorded.sum() == amount
    assert (buckets.first[1:] > buckets.last[:-1]).all()
    assert (buckets.first[0], buckets.last[-1]) == (steps[0], steps[-1])
    assert buckets.exact == (most >= amount)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(frames(), st.integers(1, 70))
def test_reduction_keeps_extremes_and_non_finite_counts(
    frame: tuple[np.ndarray, np.ndarray, np.ndarray], most: int
) -> None:
    values, measured, steps = frame
    buckets = cut(steps, most)
    reduced = extremes(values, measured, steps, buckets)
    for b in range(len(buckets)):
        inside = (steps >= buckets.first[b]) & (steps <= buckets.last[b])
        for p in range(values.shape[1]):
            recorded = values[inside & measured[:, p], p]
            finite = recorded[np.isfinite(recorded)]
            assert reduced.measured[b, p] == len(recorded)
            assert reduced.broken[b, p] == len(recorded) - len(finite)
            if len(finite):
                assert reduced.low[b, p] == finite.min()
                assert reduced.high[b, p] == finite.max()
            else:
                assert np.isnan(reduced.low[b, p])
                assert np.isnan(reduced.high[b, p])


def test_coarser_series_leaves_buckets_unmeasured() -> None:
    buckets = cut(np.arange(0, 100), 50)
    steps = np.arange(0, 100, 10)
    reduced = extremes(np.ones((10, 1)), np.ones((10, 1), bool), steps, buckets)
    assert reduced.measured.sum() == 10
    assert np.isnan(reduced.high[1, 0])
    assert reduced.high[5, 0] == 1


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3).flatmap(
        lambda k: st.integers(1, 300).flatmap(
            lambda s: st.tuples(hnp.arrays(np.float64, (k, s), elements=VALUES), hnp.arrays(np.bool_, (k, s)))
        )
    ),
    st.integers(4, 320),
)
def test_reduced_chart_keeps_extremes_ends_and_non_finite(
    drawn: tuple[np.ndarray, np.ndarray], most: int
) -> None:
    values, present = drawn
    length = values.shape[1]
    kept = keep(list(values), list(present), most)
    assert (np.diff(kept) > 0).all()
    assert {0, length - 1} <= set(kept.tolist())
    if length <= most:
        assert len(kept) == length
    for column, there in zip(values, present, strict=True):
        finite = column[there & np.isfinite(column)]
        left = column[kept][there[kept]]
        if len(finite):
            assert left[np.isfinite(left)].max() == finite.max()
            assert left[np.isfinite(left)].min() == finite.min()
        assert np.isfinite(left).all() == np.isfinite(column[there]).all()


def test_long_chart_is_shortened() -> None:
    noise = np.random.default_rng(0).normal(size=100_000)
    kept = keep([noise], [np.ones(100_000, bool)], 4000)
    assert len(kept) <= 4002


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_quantiles_are_measured_values(share: float) -> None:
    draw = np.random.default_rng(3)
    values = draw.normal(size=(7, 41))
    values[2] = np.nan
    values[3, ::2] = np.nan
    values[4, 0] = np.inf
    found = quantiles(values, (share,))[0]
    assert np.isnan(found[2])
    for row in (0, 1, 3, 4, 5, 6):
        finite = np.sort(values[row][np.isfinite(values[row])])
        assert found[row] == finite[round(share * (len(finite) - 1))]
