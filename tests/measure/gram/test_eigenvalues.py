"""Spectra of a Gram against singular values of the stacked gradients, and derived numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from backlight.measure.gram.eigenvalues import eigenpairs, product_spectrum, spectrum

N, M = 7, 12


def stack(rank: int | None = None) -> torch.Tensor:
    A = torch.randn(N, rank or M, dtype=torch.float64)
    return A if rank is None else A @ torch.randn(rank, M, dtype=torch.float64)


@pytest.mark.parametrize("centred", [False, True])
def test_eigenvalues_are_squared_singular_values(centred: bool) -> None:
    A = stack()
    found = spectrum(A @ A.T, centred=centred)
    B = A - A.mean(0) if centred else A
    values = torch.linalg.svdvals(B).numpy() ** 2 / N
    np.testing.assert_allclose(found.eigenvalues, values, rtol=0, atol=1e-12 * values[0])
    U = (B.T @ B / N).numpy()
    assert found.trace == pytest.approx(np.trace(U), rel=1e-12)
    assert found.frobenius == pytest.approx(np.linalg.norm(U), rel=1e-12)
    assert found.spectral == pytest.approx(np.linalg.norm(U, 2), rel=1e-12)
    assert found.nuclear == pytest.approx(np.linalg.norm(U, "nuc"), rel=1e-12)
    assert found.numerical_rank == np.linalg.matrix_rank(U) == N - centred
    kept = values[: found.numerical_rank]
    assert found.condition == pytest.approx(kept[0] / kept[-1], rel=1e-9)
    assert found.log_pseudo_determinant == pytest.approx(np.log(kept).sum(), rel=1e-9)
    p = kept / kept.sum()
    assert found.effective_rank == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-9)
    assert found.participation_ratio == pytest.approx(kept.sum() ** 2 / (kept**2).sum(), rel=1e-12)
    assert found.explained(3) == pytest.approx(kept[:3].sum() / kept.sum(), rel=1e-12)


def test_coherence_and_noise_scale_follow_their_definitions() -> None:
    A = stack() + 2.0
    found = spectrum(A @ A.T)
    mean = A.mean(0)
    total = float((A**2).sum() / N)
    assert found.coherence == pytest.approx(float(mean @ mean) / total, rel=1e-12)
    # The unbiased estimates of tr Sigma and |G|^2 (McCandlish et al.), from samples one by one.
    variance = float(((A - mean) ** 2).sum() / (N - 1))
    signal = float(mean @ mean) - variance / N
    assert found.noise_scale == pytest.approx(variance / signal, rel=1e-9)
    assert "coherence" not in spectrum(A @ A.T, centred=True).metrics()


def test_extremes() -> None:
    same = torch.ones(N, M, dtype=torch.float64)
    found = spectrum(same @ same.T)
    extremes = (found.coherence, found.noise_scale, found.numerical_rank)
    assert extremes == pytest.approx((1, 0, 1), abs=1e-12)
    opposed = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    assert spectrum(opposed @ opposed.T).noise_scale == math.inf
    zero = spectrum(torch.zeros(N, N, dtype=torch.float64))
    assert zero.numerical_rank == 0
    undefined = ("condition", "log_pseudo_determinant", "effective_rank", "participation_ratio")
    for name in (*undefined, "coherence", "noise_scale"):
        assert math.isnan(getattr(zero, name)), name
    one = spectrum(torch.ones(1, 1, dtype=torch.float64))
    assert math.isnan(one.noise_scale)
    assert one.coherence == 1


def test_small_negative_eigenvalues_are_zero() -> None:
    A = stack(rank=2)
    K = A @ A.T
    values, vectors = torch.linalg.eigh(K)
    values[0] = -1e-9
    found = spectrum(vectors @ torch.diag(values) @ vectors.T)
    assert float(found.eigenvalues.min()) == 0.0


def test_tolerance_follows_type_of_gradients() -> None:
    K = torch.diag(torch.tensor([1.0, 1e-13, 1e-17], dtype=torch.float64))
    assert spectrum(K).numerical_rank == 2
    assert spectrum(K, input_eps=torch.finfo(torch.float32).eps).numerical_rank == 2
    assert spectrum(K, input_eps=1e-6).numerical_rank == 1


@pytest.mark.parametrize(("n", "m"), [(10, 30), (100, 30), (191, 300), (192, 300)])
def test_largest_eigenvalues(n: int, m: int) -> None:
    A = torch.randn(n, m, dtype=torch.float64)
    whole, top = spectrum(A @ A.T), spectrum(A @ A.T, top=5)
    assert len(top.eigenvalues) == 5
    np.testing.assert_allclose(top.eigenvalues, whole.eigenvalues[:5], rtol=1e-12)
    assert top.trace == whole.trace
    assert top.participation_ratio == pytest.approx(whole.participation_ratio)
    assert top.explained(5) == pytest.approx(whole.explained(5))
    metrics = top.metrics(explained=(1, 5, 50))
    assert "effective_rank" not in metrics
    assert "explained_5" in metrics
    assert "explained_50" not in metrics
    with pytest.raises(ValueError, match="effective rank needs all"):
        _ = top.effective_rank
    with pytest.raises(ValueError, match="numerical rank needs all"):
        _ = top.numerical_rank
    with pytest.raises(ValueError, match="k must be between 1 and 5, got 6"):
        top.explained(6)
    if n == 100:  # rank 30: 40 values reach beyond it
        assert spectrum(A @ A.T, top=40).numerical_rank == 30


@pytest.mark.slow
@pytest.mark.parametrize("centred", [False, True])
def test_eigenpairs_beyond_the_rank_are_left_out(centred: bool) -> None:
    A = stack(rank=3)
    values, weights = eigenpairs(A @ A.T, N, centred=centred)
    assert len(values) == 3
    V = weights @ A
    torch.testing.assert_close(V @ V.T, torch.eye(3, dtype=V.dtype), rtol=0, atol=1e-9)
    B = A - A.mean(0) if centred else A
    torch.testing.assert_close(V @ (B.T @ B / N), values[:, None] * V, rtol=0, atol=1e-9 * float(values[0]))


def test_one_eigenpair_is_the_largest() -> None:
    K = torch.diag(torch.tensor([1.0, 9.0, 4.0], dtype=torch.float64))
    values, weights = eigenpairs(K, 1)
    assert values.tolist() == [3.0]  # of K / N
    assert weights.abs().tolist() == [[0.0, pytest.approx(1 / 3), 0.0]]  # 1 / sqrt(N * 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: spectrum(torch.zeros(2, 3, dtype=torch.float64)), r"square float64 matrix, got \[2, 3\]"),
        (lambda: spectrum(torch.zeros(2, 2)), r"square float64 matrix.*float32"),
        (lambda: spectrum(torch.full((2, 2), math.nan, dtype=torch.float64)), r"not finite.*backlight nan"),
        (lambda: spectrum(torch.eye(2, dtype=torch.float64), top=0), "top must be at least 1"),
        (lambda: eigenpairs(torch.eye(2, dtype=torch.float64), 3), "between 1 and the 2 samples, got 3"),
        (lambda: product_spectrum(torch.ones(3)), "rank one; use its norm"),
    ],
)
def test_invalid_input_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (4, 3, 2)])
def test_products_of_matrix_gradient(shape: tuple[int, ...]) -> None:
    G = torch.randn(*shape)
    matrix = G.double().flatten(1)
    singular = np.linalg.svd(matrix.numpy(), compute_uv=False)
    np.testing.assert_allclose(product_spectrum(G).eigenvalues, singular**2, rtol=1e-9)
    assert len(product_spectrum(G, top=2).eigenvalues) == 2
