"""Alignments are permutations, the best ones, and the same every time."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from backlight.measure.spectra.echo import align, overlap_scores

SETTINGS = settings(deadline=None, max_examples=80)
SCORES = st.tuples(st.integers(0, 6), st.integers(0, 3)).flatmap(
    lambda n: arrays(np.float64, (n[0] + n[1], n[0]), elements=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
)
METHODS = ["hungarian", "greedy"]


def one_by_one(score):
    """Take the largest score of what is left, lowest candidate first, until every direction has one."""
    left, chosen = score.copy(), np.full(score.shape[1], -1)
    for _ in range(score.shape[1]):
        j, k = np.unravel_index(np.argmax(left), left.shape)
        chosen[k] = j
        left[j], left[:, k] = -1, -1
    return chosen


@SETTINGS
@given(SCORES, st.sampled_from(METHODS))
def test_no_candidate_is_used_twice(score, method):
    found = align(score, method=method)
    assert len(set(found.permutation.tolist())) == score.shape[1]
    assert ((found.permutation >= 0) & (found.permutation < score.shape[0])).all()
    np.testing.assert_array_equal(found.score, score[found.permutation, np.arange(score.shape[1])])
    again = align(score.copy(), method=method)
    np.testing.assert_array_equal(found.permutation, again.permutation)


@SETTINGS
@given(SCORES)
def test_hungarian_is_the_best_there_is(score):
    J, K = score.shape
    best = max(
        (sum(score[j, k] for k, j in enumerate(chosen)) for chosen in itertools.permutations(range(J), K)),
        default=0.0,
    ) if J <= 6 else None  # fmt: skip
    if best is not None:
        assert align(score).score.sum() == pytest.approx(best)


@SETTINGS
@given(st.integers(0, 10_000), st.integers(1, 40), st.integers(0, 5))
def test_greedy_is_the_search_one_by_one(seed, K, extra):
    score = np.random.default_rng(seed).uniform(size=(K + extra, K))
    np.testing.assert_array_equal(align(score, method="greedy").permutation, one_by_one(score))


@SETTINGS
@given(st.integers(0, 10_000), st.integers(2, 30), st.sampled_from(METHODS))
def test_a_permutation_is_found_again(seed, K, method):
    order = np.random.default_rng(seed).permutation(K)
    score = np.full((K, K), 0.01)
    score[order, np.arange(K)] = 0.9
    found = align(score, method=method)
    np.testing.assert_array_equal(found.permutation, order)
    np.testing.assert_allclose(found.ambiguity, 0.89)


def test_ambiguity():
    score = np.array([[0.9, 0.8], [0.7, 0.1], [0.2, 0.75]])
    found = align(score)
    np.testing.assert_array_equal(found.permutation, [0, 2])
    np.testing.assert_allclose(found.ambiguity, [0.2, -0.05])
    np.testing.assert_allclose(align([[0.5]]).ambiguity, 0.5)


def test_the_two_methods_differ_where_they_should():
    score = np.array([[0.9, 0.8], [0.8, 0.0]])
    np.testing.assert_array_equal(align(score).permutation, [1, 0])
    np.testing.assert_array_equal(align(score, method="greedy").permutation, [0, 1])


@pytest.mark.parametrize("method", METHODS)
def test_equal_scores_keep_their_order(method):
    np.testing.assert_array_equal(align(np.zeros((5, 5)), method=method).permutation, np.arange(5))
    np.testing.assert_array_equal(align(np.ones((5, 5)), method=method).permutation, np.arange(5))


def test_scores_are_products_of_magnitudes():
    np.testing.assert_array_equal(overlap_scores([[-0.5, 1.0]], [[0.5, -1.0]]), [[0.25, 1.0]])


def test_bad_scores_are_refused():
    with pytest.raises(ValueError, match="at least K candidates"):
        align(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="must be finite"):
        align([[np.nan]])
    with pytest.raises(ValueError, match="'hungarian' or 'greedy'"):
        align([[1.0]], method="best")
