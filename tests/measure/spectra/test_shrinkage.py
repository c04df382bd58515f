"""The spiked model against a simulation and against itself; Muon's curve against torch's own Muon."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.measure.spectra.shrinkage import (
    MUON,
    MUON_STEPS,
    bulk_edge,
    clusters,
    infer,
    mixing,
    muon,
    noise_stable_rank,
    noise_values,
    predict,
    threshold,
    upper_edge,
)

SHAPES = st.tuples(st.integers(1, 2000), st.integers(1, 2000))
STRENGTH = st.floats(1.05, 1e4)
SIGMA = st.floats(1e-12, 1e12)


@settings(deadline=None)
@given(SHAPES, STRENGTH, SIGMA)
def test_infer_inverts_predict(shape, ratio, sigma):
    s = ratio * threshold(sigma, *shape)
    forward = predict(s, sigma, *shape)
    back = infer(forward.value, sigma, *shape)
    np.testing.assert_allclose(back.strength, s, rtol=1e-6)
    np.testing.assert_allclose(back.echo, forward.echo, rtol=1e-5, atol=1e-12)
    # The closed forms of the shrinker and of the echo.
    p, q = shape
    y, n = float(forward.value) / sigma, (p, q)
    delta = (y**2 - sum(n)) ** 2 - 4 * p * q
    np.testing.assert_allclose(back.shrunk, sigma * np.sqrt(max(delta, 0)) / y, rtol=1e-5)
    x = ratio**2 * np.sqrt(p * q)
    echo = (x**2 - p * q) / (x * np.sqrt((x + p) * (x + q)))
    np.testing.assert_allclose(forward.echo, echo, rtol=1e-9)


@pytest.mark.slow
@settings(deadline=None)
@given(SHAPES, STRENGTH, SIGMA)
def test_transposing_swaps_left_and_right(shape, ratio, sigma):
    p, q = shape
    s = ratio * threshold(sigma, p, q)
    one, other = predict(s, sigma, p, q), predict(s, sigma, q, p)
    assert (one.left, one.right) == (other.right, other.left)
    np.testing.assert_allclose(one.value, other.value, rtol=1e-12)


def test_no_direction_below_threshold():
    p, q, sigma = 30, 50, 0.3
    spike = predict([0.0, 0.5 * threshold(sigma, p, q)], sigma, p, q)
    np.testing.assert_array_equal(spike.echo, 0)
    np.testing.assert_array_equal(spike.shrunk, 0)
    np.testing.assert_allclose(spike.value, bulk_edge(sigma, p, q))
    assert infer(0.99 * bulk_edge(sigma, p, q), sigma, p, q).strength == 0
    assert infer(0.0, sigma, p, q).echo == 0


def test_echo_equals_documented_values():
    s = np.array([5, 3, 2]) * threshold(0.01, 300, 1200)
    np.testing.assert_allclose(predict(s, 0.01, 300, 1200).echo, [0.9512, 0.8695, 0.7217], atol=5e-5)


def test_prediction_without_noise_is_input():
    spike = predict([1.0, 3.0], 0.0, 4, 9)
    np.testing.assert_allclose(spike.value, [1, 3])
    np.testing.assert_allclose(spike.echo, 1)


@pytest.mark.slow
def test_shrinker_loses_less_than_its_neighbours():
    """The shrinker minimises the Frobenius loss over the value of the noisy direction."""
    p, q, sigma = 200, 500, 1.0
    generator = np.random.default_rng(0)
    s = 2.5 * threshold(sigma, p, q)
    u, v = (x / np.linalg.norm(x) for x in (generator.normal(size=p), generator.normal(size=q)))
    losses = {0.9: 0.0, 1.0: 0.0, 1.1: 0.0}
    for _ in range(6):
        U, y, Vt = np.linalg.svd(s * np.outer(u, v) + sigma * generator.normal(size=(p, q)))
        chosen = float(infer(y[0], sigma, p, q).shrunk)
        overlap = (u @ U[:, 0]) * (v @ Vt[0])
        for factor in losses:
            losses[factor] += s**2 - 2 * s * factor * chosen * overlap + (factor * chosen) ** 2
    assert losses[1.0] < min(losses[0.9], losses[1.1])


@pytest.mark.slow
@pytest.mark.parametrize(("p", "q"), [(60, 60), (40, 160)])
def test_one_percent_of_noise_matrices_pass_upper_edge(p, q):
    generator = np.random.default_rng(1)
    noise = generator.normal(size=(1000, p, q))
    gram = noise @ noise.swapaxes(1, 2)
    top = np.sqrt(np.linalg.eigvalsh(gram)[:, -1])
    passed = int((top > upper_edge(1.0, p, q)).sum())
    assert 2 <= passed <= 25  # 10 expected
    assert (top > bulk_edge(1.0, p, q)).mean() > 0.05


def test_curve_of_muon_equals_torch():
    """Singular values before and after torch's own iteration; that one runs in bfloat16."""
    from torch.optim import _muon

    assert (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C) == MUON
    assert _muon.DEFAULT_NS_STEPS == MUON_STEPS
    U = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64))[0]
    V = torch.linalg.qr(torch.randn(60, 40, dtype=torch.float64))[0]
    s = torch.logspace(0, -2, 40, dtype=torch.float64)
    G = (U * s) @ V.T
    made = _muon._zeropower_via_newtonschulz(G, MUON, MUON_STEPS, 1e-7).double()
    along = ((U.T @ made) * V.T).sum(1)
    expected = muon(s.numpy(), float(s.norm()))
    np.testing.assert_allclose(along.numpy(), expected, atol=0.05)
    assert expected[0] != pytest.approx(1.0, abs=0.01)  # by design it does not converge to 1


@pytest.mark.parametrize("frobenius", [0.0, -1.0, float("nan"), float("inf")])
def test_muon_needs_norm(frobenius):
    with pytest.raises(ValueError, match="Frobenius norm must be positive"):
        muon([1.0], frobenius)


@pytest.mark.parametrize("sigma", [-1.0, float("nan"), float("inf")])
def test_bad_noise_is_refused(sigma):
    with pytest.raises(ValueError, match="sigma must be finite and not negative"):
        predict(1.0, sigma, 2, 3)
    with pytest.raises(ValueError, match="shape must not be empty"):
        infer(1.0, 1.0, 0, 3)


def test_mixing_is_angle_caused_by_noise():
    """Two directions, perturbed many times: the rotation of the first into the second."""
    generator = np.random.default_rng(0)
    s, sigma, angles = np.array([10.0, 8.0]), 0.1, []
    for _ in range(2000):
        U, _, _ = np.linalg.svd(np.diag(s) + sigma * generator.normal(size=(2, 2)))
        angles.append(np.arcsin(np.clip(U[1, 0] * np.sign(U[0, 0]), -1, 1)))
    np.testing.assert_allclose(np.std(angles), mixing(s, sigma)[0], rtol=0.05)


def test_clusters_cover_every_direction_once():
    assert clusters([9.0, 8.99, 5.0, 1.0, 1.0], 0.1) == ((0, 2), (2, 3), (3, 5))
    assert clusters([9.0, 5.0], 0.0) == ((0, 1), (1, 2))
    assert clusters([3.0, 3.0], 0.0) == ((0, 2),)
    assert clusters([4.0], 1.0) == ((0, 1),)
    assert clusters([], 1.0) == ()


@pytest.mark.parametrize(("p", "q"), [(200, 300), (60, 400), (400, 60)])
def test_noise_values_are_the_means_of_drawn_noise(p, q):
    torch.manual_seed(0)
    drawn = torch.linalg.svdvals(0.3 * torch.randn(40, p, q, dtype=torch.float64)).mean(0).numpy()
    expected = noise_values(0.3, p, q)
    assert expected.shape == (min(p, q),)
    strongest = slice(0, 9 * len(expected) // 10)  # the edge at the other end is softer in a finite matrix
    np.testing.assert_allclose(expected[strongest], drawn[strongest], rtol=0.01)
    assert expected[0] < bulk_edge(0.3, p, q)
    assert (drawn**2).sum() / drawn[0] ** 2 == pytest.approx(noise_stable_rank(p, q), rel=0.03)


@given(SHAPES, SIGMA)
@settings(deadline=None, max_examples=20)
def test_noise_values_hold_the_norm_of_noise(shape, sigma):
    p, q = shape
    values = noise_values(sigma, p, q)
    assert (np.diff(values) <= 0).all()
    if min(p, q) >= 20:
        assert (values**2).sum() == pytest.approx(sigma**2 * p * q, rel=0.01)


def test_noise_of_bad_shape_or_level_is_refused():
    with pytest.raises(ValueError, match="sigma must be finite and not negative, got -1"):
        noise_values(-1, 3, 4)
    with pytest.raises(ValueError, match="the shape must not be empty, got 0 x 4"):
        noise_values(1.0, 0, 4)
