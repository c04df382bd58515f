"""Noise, signal share and noise scale against their definitions, and the spectrum of one matrix."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.measure.spectra.noise import Noise, critical_batch, noise
from backlight.measure.spectra.replicates import ReplicateError, Replicates, check_distinct
from backlight.measure.spectra.spectrum import (
    aspect_ratio,
    gaps,
    spectrum,
    stable_rank,
    stable_rank_of,
    values_by_gram,
)
from backlight.measure.spectra.subspace import drift

SETTINGS = settings(deadline=None, max_examples=40)


def by_definition(G):
    G = G.to(torch.float64).numpy()
    R, p, q = G.shape
    mean = G.mean(0)
    T = (G**2).sum((1, 2)).mean()
    return ((G - mean) ** 2).sum() / ((R - 1) * p * q), (R * (mean**2).sum() - T) / ((R - 1) * T)


@SETTINGS
@given(
    st.integers(2, 7), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99), st.integers(-60, 60),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_noise_against_its_definition(R, p, q, seed, exponent, dtype):
    torch.manual_seed(seed)
    exponent = max(-8, min(exponent, 8)) if dtype == torch.float16 else exponent
    G = ((torch.randn(p, q) + torch.randn(R, p, q)) * 2.0**exponent).to(dtype)
    found = noise(G)
    variance, share = by_definition(G)
    assert found.variance == pytest.approx(variance, rel=1e-9)
    assert found.signal_share == pytest.approx(share, rel=1e-9, abs=1e-9)
    assert found.edge == pytest.approx(math.sqrt(variance) * (math.sqrt(p) + math.sqrt(q)))
    again = noise(list(G.flip(0)))  # a list, in another order
    assert again.variance == pytest.approx(found.variance, rel=1e-12)


def test_little_noise_beside_much_signal_is_not_lost():
    """Where the difference of two sums of squares has no digits left."""
    G = 1e3 + 1e-6 * torch.randn(5, 30, 40, dtype=torch.float64)
    assert noise(G).variance == pytest.approx(by_definition(G)[0], rel=1e-6)
    assert noise(G).signal_share == pytest.approx(1.0)
    assert noise(torch.ones(3, 2, 2)).variance == 0


def test_the_noise_scale_of_a_quadratic():
    """Per-sample gradients g + e: the noise scale is tr(cov)/|g|^2 by definition, whatever the batch."""
    p, q, R = 40, 60, 200
    g = torch.randn(p, q, dtype=torch.float64)
    true = p * q * 3.0**2 / float((g**2).sum())
    for batch in (1, 16):
        found = noise(g + 3.0 / math.sqrt(batch) * torch.randn(R, p, q, dtype=torch.float64))
        assert found.noise_scale(batch) == pytest.approx(true, rel=0.05)
    assert found.signal_share == pytest.approx(1 / (1 + true / 16), rel=0.05)
    assert found.share_at(16) == pytest.approx(1 / (1 + true / 256), rel=0.05)


def test_layers_together_are_one_gradient():
    G = torch.randn(6, 4, 10, dtype=torch.float64) + 0.3
    parts = [noise(G[..., :3]), noise(G[..., 3:])]
    assert critical_batch(parts, 8) == pytest.approx(noise(G).noise_scale(8), rel=1e-12)
    with pytest.raises(ValueError, match="same number of replicates"):
        critical_batch([parts[0], noise(G[:3])], 8)
    with pytest.raises(ValueError, match="batch size of a replicate must be positive"):
        parts[0].noise_scale(0)


def test_no_signal_has_no_finite_noise_scale():
    level = Noise(4, (3, 3), 1.0, 9.0, 2.0, -0.01)
    assert level.noise_scale(32) == math.inf
    assert level.share_at(4) == 0


@pytest.mark.parametrize(
    ("G", "message"),
    [
        (torch.ones(1, 2, 3), "layer 'w': 1 replicate.*at least 2"),
        (torch.ones(4, 3), r"layer 'w': expected replicates \[R, p, q\], got shape \(4, 3\)"),
        ([torch.ones(3), torch.ones(3)], r"replicate 0 has shape \(3,\); expected a matrix"),
        ([torch.ones(2, 3), torch.ones(3, 2)], "replicate 1 is .* they must be alike"),
        ([torch.ones(2, 3), torch.ones(2, 3).half()], "replicate 1 is torch.float16"),
        (torch.ones(3, 2, 2, dtype=torch.int64), "expected real floating values"),
        (torch.ones(3, 2, 2, dtype=torch.complex64), "expected real floating values"),
        (torch.zeros(3, 2, 2), "layer 'w': all 3 replicates are zero"),
        (torch.ones(3, 0, 2), "expected a matrix"),
    ],
)
def test_bad_replicates_are_refused(G, message):
    with pytest.raises(ReplicateError, match=message):
        noise(G, layer="w")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_replicate_with_a_bad_value_is_named(bad):
    G = torch.randn(5, 40, 30)
    G[3, 17, 2] = bad
    with pytest.raises(ReplicateError, match="layer 'w': replicate 3 holds NaN or infinite values"):
        noise(G, layer="w")


@pytest.mark.parametrize("change", [0.0, 1e-7])
def test_the_same_data_twice_is_detected(change):
    G = 0.1 + torch.randn(6, 40, 30)
    G[4] = G[1] * (1 + change)
    replicates = Replicates.of(G, layer="w")
    with pytest.raises(ReplicateError, match="layer 'w': replicates 1 and 4 are the same"):
        check_distinct(replicates, noise(G).variance)
    distinct = Replicates.of(G[:4])
    check_distinct(distinct, noise(G[:4]).variance)
    mirrored = Replicates.of(torch.stack([G[0], -G[0], G[2]]))  # equal norms, but not the same
    check_distinct(mirrored, noise(torch.stack([G[0], -G[0], G[2]])).variance)


@SETTINGS
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 99))
def test_the_spectrum_of_a_matrix(p, q, seed):
    torch.manual_seed(seed)
    W = torch.randn(p, q)
    found = spectrum(W)
    expected = np.linalg.svd(W.double().numpy(), compute_uv=False)
    np.testing.assert_allclose(found.values, expected, rtol=1e-10, atol=1e-12)
    assert found.frobenius == pytest.approx(float(W.norm()), rel=1e-6)
    rank = float((W.double() ** 2).sum()) / expected[0] ** 2
    assert found.stable_rank == pytest.approx(rank, rel=1e-9)
    assert stable_rank_of(W) == pytest.approx(rank, rel=1e-6)
    assert 1 - 1e-12 <= found.effective_rank <= min(p, q) + 1e-9
    assert len(found.gaps) == min(p, q) - 1
    assert found.aspect_ratio == min(p, q) / max(p, q)


def test_ranks_of_known_matrices():
    assert spectrum(torch.eye(7)).stable_rank == pytest.approx(7)
    assert spectrum(torch.eye(7)).effective_rank == pytest.approx(7)
    assert spectrum(torch.ones(4, 9)).stable_rank == pytest.approx(1)
    np.testing.assert_allclose(gaps([4.0, 3.0, 1.0]), [0.25, 0.5])
    assert aspect_ratio(8, 2) == 0.25
    assert spectrum(torch.randn(4, 3, 2, 2)).shape == (4, 12)  # a convolution


def test_a_zero_matrix_has_no_rank():
    zero = spectrum(torch.zeros(3, 4))
    assert zero.stable_rank is None
    assert zero.effective_rank is None
    assert stable_rank_of(torch.zeros(3, 4)) is None
    assert stable_rank([]) is None
    assert gaps([0.0, 0.0]).size == 0


@pytest.mark.parametrize("measure", [spectrum, stable_rank_of, values_by_gram])
def test_what_has_no_spectrum_is_refused(measure):
    with pytest.raises(ReplicateError, match=r"layer 'b': has shape \(5,\); singular directions need"):
        measure(torch.ones(5), layer="b")
    with pytest.raises(ReplicateError, match="layer 'b': the matrix holds NaN"):
        measure(torch.full((2, 2), math.nan), layer="b")


def test_drift_of_subspaces():
    e = torch.eye(10)
    same = drift(e[:, :3], e[:, :3])
    assert (same.overlap, same.distance, same.chance) == (pytest.approx(1), pytest.approx(0, abs=1e-7), 0.3)
    away = drift(e[:, :3], e[:, 3:6])
    assert (away.overlap, away.angle) == (0, pytest.approx(math.pi / 2))
    angle = 0.3
    turned = e[:, :2].clone()
    turned[:, 1] = math.cos(angle) * e[:, 1] + math.sin(angle) * e[:, 5]
    found = drift(e[:, :2], turned)
    np.testing.assert_allclose(found.cosines, [1, math.cos(angle)], rtol=1e-6)
    assert found.angle == pytest.approx(angle, rel=1e-5)
    rotation = torch.linalg.qr(torch.randn(2, 2))[0]
    np.testing.assert_allclose(drift(e[:, :2] @ rotation, turned).cosines, found.cosines, rtol=1e-5)


def test_random_subspaces_overlap_by_chance():
    pairs = [[torch.linalg.qr(torch.randn(50, 5, dtype=torch.float64))[0] for _ in "ab"] for _ in range(60)]
    assert np.mean([drift(a, b).overlap for a, b in pairs]) == pytest.approx(0.1, rel=0.1)


def test_what_is_no_subspace_is_refused():
    with pytest.raises(ValueError, match=r"two matrices .* of one shape"):
        drift(torch.eye(4)[:, :2], torch.eye(4)[:, :3])
    with pytest.raises(ValueError, match="columns of 'after' are not orthonormal"):
        drift(torch.eye(4)[:, :2], torch.ones(4, 2))


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_the_gram_gives_singular_values_and_says_which_it_lost(shape: tuple[int, int], size: float) -> None:
    draw = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(shape[0], 6, generator=draw, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(shape[1], 6, generator=draw, dtype=torch.float64))
    expected = torch.tensor([1.0, 0.5, 1e-2, 1e-4, 1e-6, 1e-11], dtype=torch.float64) * size
    found = values_by_gram(left @ torch.diag(expected) @ right.T)
    np.testing.assert_allclose(found[:5], expected[:5], rtol=1e-3)
    assert math.isnan(found[5])
    assert values_by_gram(torch.zeros(shape)).tolist() == [0.0] * 6
