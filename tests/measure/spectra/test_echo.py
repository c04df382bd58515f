"""Estimators against algebra, against their definitions, and against injected echoes."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from backlight.measure.spectra import echo

SETTINGS = settings(deadline=None, max_examples=60)
ZETAS = st.lists(st.floats(0.02, 1.0), min_size=3, max_size=12)


def outer(zeta):
    zeta = np.asarray(zeta, dtype=np.float64)
    return zeta[..., :, None] * zeta[..., None, :]


def noisy(R=6, size=None, seed=0):
    Z = np.random.default_rng(seed).normal(size=(*(size or ()), R, R))
    return Z + Z.swapaxes(-1, -2)


@SETTINGS
@given(ZETAS)
def test_oracle_a_recovers_the_echo_of_every_replicate(zeta):
    np.testing.assert_allclose(echo.triple(outer(zeta)), zeta, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(echo.triple_mean(outer(zeta)), np.mean(zeta), rtol=1e-12)


@pytest.mark.slow
@SETTINGS
@given(ZETAS, st.floats(-5, 5))
def test_diagonal_does_not_matter(zeta, diagonal):
    Z = outer(zeta)
    np.fill_diagonal(Z, diagonal)
    np.testing.assert_allclose(echo.triple(Z), zeta, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(echo.pooled(Z), echo.pooled(outer(zeta)))


@SETTINGS
@given(st.floats(0.05, 1.0), st.integers(3, 20))
def test_estimate_without_subtraction_is_biased_low(zeta, R):
    """Without the subtraction, the estimator has a known bias."""
    Z = outer(np.full(R, zeta))
    np.fill_diagonal(Z, 0)
    common = np.sqrt(((Z @ Z) * Z).sum(1) / (Z**2).sum())
    np.testing.assert_allclose(common, zeta * np.sqrt((R - 2) / R), rtol=1e-10)
    np.testing.assert_allclose(echo.triple(Z), zeta, rtol=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_triples_against_their_definition(seed):
    """Least squares over every pair of other replicates, one by one."""
    R = 5
    Z, expected = noisy(R, seed=seed), []
    for a in range(R):
        pairs = [(b, c) for b, c in itertools.permutations(range(R), 2) if a not in {b, c}]
        above = sum(Z[a, b] * Z[a, c] * Z[b, c] for b, c in pairs)
        below = sum(Z[b, c] ** 2 for b, c in pairs)
        expected.append(np.sign(above) * np.sqrt(abs(above / below)))
    np.testing.assert_allclose(echo.triple(Z), expected, rtol=1e-12)
    mean = np.mean([Z[a, b] for a, b in itertools.permutations(range(R), 2)])
    np.testing.assert_allclose(echo.pooled(Z), np.sign(mean) * np.sqrt(abs(mean)), rtol=1e-12)


@pytest.mark.slow
@SETTINGS
@given(st.integers(0, 1000), st.floats(1e-150, 1e150))
def test_scaling_and_order(seed, factor):
    Z = noisy(7, (3,), seed)
    order = np.random.default_rng(seed).permutation(7)
    moved = Z[:, order][:, :, order]
    np.testing.assert_allclose(echo.triple(moved), echo.triple(Z)[:, order], rtol=1e-9)
    np.testing.assert_allclose(echo.pooled(moved), echo.pooled(Z), rtol=1e-9)
    np.testing.assert_allclose(echo.triple(Z * factor), echo.triple(Z) * np.sqrt(factor), rtol=1e-9)


def test_without_reverb_there_is_no_estimate():
    assert np.isnan(echo.triple(np.zeros((4, 4)))).all()
    assert np.isnan(echo.triple_mean(np.zeros((4, 4))))
    assert echo.pooled(np.zeros((4, 4))) == 0
    assert np.isnan(echo.residual(np.zeros((4, 4)), np.zeros(4)))


def test_pure_noise_has_no_sign():
    """The signed root keeps noise on both sides of 0."""
    found = echo.triple_mean(noisy(8, (400,)) / 500)
    assert abs((found > 0).mean() - 0.5) < 0.1


def test_residual_shows_whether_model_holds():
    zeta = np.array([0.9, 0.7, 0.8, 0.6])
    assert echo.residual(outer(zeta), zeta) < 1e-12
    swapped = outer(zeta)
    swapped[:2, 2:] = swapped[2:, :2] = 0.02  # two replicates have another direction
    assert echo.residual(swapped, echo.triple(swapped)) > 0.25


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_replicates(count):
    with pytest.raises(ValueError, match=f"{count} replicate.s., at least 3 are needed"):
        echo.triple(np.zeros((count, count)))
    if count < 2:
        with pytest.raises(ValueError, match="at least 2 are needed"):
            echo.pooled(np.zeros((count, count)))
    with pytest.raises(ValueError, match="expected reverbs"):
        echo.triple(np.zeros((4, 3)))


def columns(R, n, K, dtype=torch.float64):
    return torch.linalg.qr(torch.randn(R, n, K, dtype=dtype))[0]


def test_reverb_against_its_definition():
    U, V = columns(4, 9, 3), columns(4, 7, 3)
    Z = echo.reverb(U, V)
    assert Z.shape == (3, 4, 4)
    for k, a, b in itertools.product(range(3), range(4), range(4)):
        expected = 0.0 if a == b else float((U[a, :, k] @ U[b, :, k]) * (V[a, :, k] @ V[b, :, k]))
        assert Z[k, a, b] == pytest.approx(expected, abs=1e-14)


def test_signs_cancel():
    U, V = columns(4, 9, 3), columns(4, 7, 3)
    signs = torch.randint(0, 2, (4, 1, 3)) * 2.0 - 1
    np.testing.assert_allclose(echo.reverb(U * signs, V * signs), echo.reverb(U, V), atol=1e-14)


def test_block_reverb_ignores_rotations_inside_block():
    U, V = columns(4, 9, 5), columns(4, 7, 5)
    blocks = [(0, 1), (1, 4), (4, 5)]
    Z, singles = echo.block_reverb(U, V, blocks), echo.reverb(U, V)
    np.testing.assert_allclose(Z[[0, 2]], singles[[0, 4]], atol=1e-14)
    turn = columns(4, 3, 3)
    U2, V2 = U.clone(), V.clone()
    U2[..., 1:4], V2[..., 1:4] = U[..., 1:4] @ turn, V[..., 1:4] @ turn
    np.testing.assert_allclose(echo.block_reverb(U2, V2, blocks)[1], Z[1], atol=1e-14)
    assert np.abs(echo.reverb(U2, V2)[1] - singles[1]).max() > 0.01
    polar = U[..., 1:4] @ V[..., 1:4].mT
    assert Z[1, 0, 2] == pytest.approx(float((polar[0] * polar[2]).sum()) / 3, abs=1e-14)


@pytest.mark.slow
def test_cross_diagonal_is_unbiased_for_any_directions():
    """For pure noise the singular value is far from 0, but this mean is not."""
    R, p, q, draws = 6, 12, 20, 300
    torch.manual_seed(3)
    found, own = [], []
    for _ in range(draws):
        G = torch.randn(R, p, q, dtype=torch.float64)
        U, s, Vt = torch.linalg.svd(G, full_matrices=False)
        D = echo.cross_diagonal(U, Vt.mT, G)[0]
        np.testing.assert_allclose(np.diagonal(D), s[:, 0], rtol=1e-10)
        found.append((D.sum(1) - np.diagonal(D)) / (R - 1))
        own.append(s[:, 0].numpy())
    assert abs(np.mean(found)) < 4 / np.sqrt((R - 1) * draws)
    np.testing.assert_allclose(np.std(found), 1 / np.sqrt(R - 1), rtol=0.06)
    assert np.mean(own) > 6


def coverage(p, q, R, ratio, trials, seed):
    """Return how often the intervals of diagonal, pooled echo and echo contain the truth of these replicates.

    One direction of ``ratio`` times the threshold in noise of variance 1.
    """
    torch.manual_seed(seed)
    hits, strength = np.zeros(3), ratio * (p * q) ** 0.25
    u, v = torch.zeros(p, dtype=torch.float64), torch.zeros(q, dtype=torch.float64)
    u[0] = v[0] = 1.0
    for _ in range(trials):
        G = strength * torch.outer(u, v) + torch.randn(R, p, q, dtype=torch.float64)
        U, _, Vt = torch.linalg.svd(G, full_matrices=False)
        U, V = U[..., :1], Vt.mT[..., :1]
        zeta = float(((u @ U) * (v @ V)).mean())
        Z = echo.reverb(U, V)[0]
        diagonal = echo.pair_interval(echo.cross_diagonal(U, V, G)[0])
        found = (diagonal, echo.interval_of_pooled(Z), echo.interval_of_echo(Z))
        for which, ((low, high), truth) in enumerate(zip(found, (strength * zeta, zeta, zeta), strict=True)):
            hits[which] += low <= truth <= high
    return hits / trials


@pytest.mark.slow
@pytest.mark.parametrize(("R", "ratio"), [(3, 3), (5, 2), (5, 8), (8, 3)])
def test_intervals_cover_the_truth(R, ratio):
    assert (coverage(24, 40, R, ratio, trials=150, seed=R) >= 0.9).all()


@pytest.mark.full
@pytest.mark.parametrize("ratio", [2, 3, 5, 8])
@pytest.mark.parametrize("R", [3, 4, 5, 8, 16])
@pytest.mark.parametrize(("p", "q"), [(40, 60), (30, 120)])
def test_intervals_cover_the_truth_everywhere(p, q, R, ratio):
    assert (coverage(p, q, R, ratio, trials=300, seed=R) >= 0.9).all()


def test_intervals_narrow_with_replicates_and_need_three():
    few, many = (outer(np.random.default_rng(1).normal(0.7, 0.1, R))[None] for R in (4, 64))
    assert np.ptp(echo.interval_of_echo(many)) < np.ptp(echo.interval_of_echo(few))
    assert echo.interval_of_echo(np.zeros((0, 4, 4))).shape == (0, 2)
    assert np.isnan(echo.interval_of_echo(np.zeros((2, 4, 4)))).all()
    assert np.isnan(echo.pair_interval(np.ones((3, 2, 2)))).all()


SCORES = st.tuples(st.integers(0, 6), st.integers(0, 3)).flatmap(
    lambda n: arrays(np.float64, (n[0] + n[1], n[0]), elements=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
)


@pytest.mark.slow
@SETTINGS
@given(SCORES)
def test_alignment_is_optimal_and_permutation(score):
    J, K = score.shape
    found = echo.align(score)
    assert len(set(found.permutation.tolist())) == K
    np.testing.assert_array_equal(found.score, score[found.permutation, np.arange(K)])
    np.testing.assert_array_equal(found.permutation, echo.align(score.copy()).permutation)
    if J <= 6:
        chosen = itertools.permutations(range(J), K)
        best = max((sum(score[j, k] for k, j in enumerate(order)) for order in chosen), default=0.0)
        assert found.score.sum() == pytest.approx(best)


@SETTINGS
@given(st.integers(0, 10_000), st.integers(2, 30))
def test_permutation_is_found_again(seed, K):
    order = np.random.default_rng(seed).permutation(K)
    score = np.full((K, K), 0.01)
    score[order, np.arange(K)] = 0.9
    found = echo.align(score)
    np.testing.assert_array_equal(found.permutation, order)
    np.testing.assert_allclose(found.ambiguity, 0.89)


@SETTINGS
@given(SCORES)
def test_greedy_alignment_takes_the_largest_score_that_is_left(score):
    K = score.shape[1]
    greedy = echo.align(score, "greedy")
    assert len(set(greedy.permutation.tolist())) == K
    assert greedy.score.sum() >= echo.align(score, "hungarian").score.sum() / 2 - 1e-12
    distinct = score + np.random.default_rng(0).uniform(0, 1e-3, score.shape)  # without ties
    left, expected = distinct.copy(), np.zeros(K, dtype=int)
    for _ in range(K):
        j, k = np.unravel_index(left.argmax(), left.shape)
        expected[k], left[j, :], left[:, k] = j, -1, -1
    np.testing.assert_array_equal(echo.align(distinct, "greedy").permutation, expected)


def test_alignment_is_greedy_for_many_directions_only(monkeypatch):
    score = np.array([[0.9, 0.8], [0.85, 0.1]])  # the best sum leaves the best pair
    np.testing.assert_array_equal(echo.align(score).permutation, [1, 0])
    np.testing.assert_array_equal(echo.align(score, "greedy").permutation, [0, 1])
    monkeypatch.setattr(echo, "GREEDY_ABOVE", 1)
    np.testing.assert_array_equal(echo.align(score).permutation, [0, 1])
    with pytest.raises(ValueError, match="matching must be one of auto, hungarian, greedy, got 'best'"):
        echo.align(score, "best")


def test_ambiguity_is_lead_over_next_candidate():
    score = np.array([[0.9, 0.8], [0.7, 0.1], [0.2, 0.75]])
    found = echo.align(score)
    np.testing.assert_array_equal(found.permutation, [0, 2])
    np.testing.assert_allclose(found.ambiguity, [0.2, -0.05])
    np.testing.assert_allclose(echo.align([[0.5]]).ambiguity, 0.5)


def test_equal_scores_keep_their_order():
    for score in (np.zeros((5, 5)), np.ones((5, 5))):
        np.testing.assert_array_equal(echo.align(score).permutation, np.arange(5))


def test_overlaps_are_magnitudes_on_both_sides():
    U, V, refs = columns(2, 9, 3), columns(2, 7, 3), (columns(1, 9, 2)[0], columns(1, 7, 2)[0])
    found = echo.overlaps(U[0], V[0], *refs)
    assert found.shape == (2, 3, 2)
    for side, reference, overlap in zip((U[0], V[0]), refs, found, strict=True):
        np.testing.assert_allclose(overlap, (side.T @ reference).abs().numpy())


def test_bad_scores_are_refused():
    with pytest.raises(ValueError, match="at least K candidates"):
        echo.align(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="must be finite"):
        echo.align([[np.nan]])
