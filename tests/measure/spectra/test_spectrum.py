"""Singular values and stable rank of one matrix against full decompositions; drift of subspaces."""

import math

import numpy as np
import pytest
import torch

from backlight.measure.spectra.randomized_svd import (
    singular_values,
    stable_rank,
    stable_rank_of_values,
    subspace_overlap,
)
from backlight.measure.spectra.replicates import ReplicateError


@pytest.mark.parametrize("shape", [(1, 5), (3, 3), (64, 40), (330, 700), (4, 3, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_stable_rank_against_all_singular_values(shape, dtype):
    x = torch.randn(shape).to(dtype)
    s = torch.linalg.svdvals(x.double().flatten(1))
    expected = float((s**2).sum() / s[0] ** 2)
    assert stable_rank(x) == pytest.approx(expected, rel=1e-6)
    assert stable_rank_of_values(s) == pytest.approx(expected, rel=1e-9)


def test_stable_rank_of_known_matrices():
    assert stable_rank(torch.eye(7)) == pytest.approx(7)
    assert stable_rank(torch.ones(4, 9)) == pytest.approx(1)


def test_zero_matrix_has_no_rank():
    assert stable_rank(torch.zeros(3, 4)) is None
    assert stable_rank_of_values([]) is None


@pytest.mark.parametrize("measure", [stable_rank, singular_values])
def test_vectors_and_nan_are_refused(measure):
    with pytest.raises(ReplicateError, match=r"layer 'b': has shape \(5,\); singular directions need"):
        measure(torch.ones(5), layer="b")
    with pytest.raises(ReplicateError, match="layer 'b': the matrix holds NaN"):
        measure(torch.full((2, 2), math.nan), layer="b")


def test_subspace_overlap_is_mean_squared_cosine():
    e = torch.eye(10)
    assert subspace_overlap(e[:, :3], e[:, :3]) == pytest.approx(1)
    assert subspace_overlap(e[:, :3], e[:, 3:6]) == 0
    angle = 0.3
    turned = e[:, :2].clone()
    turned[:, 1] = math.cos(angle) * e[:, 1] + math.sin(angle) * e[:, 5]
    expected = pytest.approx((1 + math.cos(angle) ** 2) / 2, rel=1e-6)
    assert subspace_overlap(e[:, :2], turned) == expected
    rotation = torch.linalg.qr(torch.randn(2, 2))[0]
    assert subspace_overlap(e[:, :2] @ rotation, turned) == expected


def test_random_subspaces_overlap_by_chance():
    pairs = [[torch.linalg.qr(torch.randn(50, 5, dtype=torch.float64))[0] for _ in "ab"] for _ in range(60)]
    assert np.mean([subspace_overlap(a, b) for a, b in pairs]) == pytest.approx(0.1, rel=0.1)


def test_columns_that_are_not_orthonormal_are_refused():
    with pytest.raises(ValueError, match=r"two matrices .* of one shape"):
        subspace_overlap(torch.eye(4)[:, :2], torch.eye(4)[:, :3])
    with pytest.raises(ValueError, match="columns of 'after' are not orthonormal"):
        subspace_overlap(torch.eye(4)[:, :2], torch.ones(4, 2))


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_singular_values_by_gram_are_nan_where_lost(shape: tuple[int, int], size: float) -> None:
    draw = torch.Generator().manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(shape[0], 6, generator=draw, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(shape[1], 6, generator=draw, dtype=torch.float64))
    expected = torch.tensor([1.0, 0.5, 1e-2, 1e-4, 1e-6, 1e-11], dtype=torch.float64) * size
    found = singular_values(left @ torch.diag(expected) @ right.T)
    np.testing.assert_allclose(found[:5], expected[:5], rtol=1e-3)
    assert math.isnan(found[5])
    assert singular_values(torch.zeros(shape)).tolist() == [0.0] * 6
