"""Truncated decompositions against full ones in float64, and their failures."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.measure.spectra import decomposition
from backlight.measure.spectra.decomposition import DecompositionError, count_above, decompose
from backlight.measure.spectra.shrinkage import threshold, upper_edge

METHODS = ["svd", "gram", "randomized"]


def spiked(p, q, ratios, count=1, dtype=torch.float32):
    """Return matrices with injected directions, strengths in units of the threshold, noise of variance 1."""
    s = torch.tensor(ratios, dtype=torch.float64) * threshold(1.0, p, q)
    U = torch.linalg.qr(torch.randn(p, len(ratios), dtype=torch.float64))[0]
    V = torch.linalg.qr(torch.randn(q, len(ratios), dtype=torch.float64))[0]
    return ((U * s) @ V.T + torch.randn(count, p, q, dtype=torch.float64)).to(dtype)


def overlaps(found, A):
    U, _, Vt = torch.linalg.svd(A.double(), full_matrices=False)
    K = found.values.shape[1]
    left = (found.left.double() * U[..., :K]).sum(1)
    return left * (found.right.double() * Vt.mT[..., :K]).sum(1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("p", "q"), [(120, 120), (100, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_strongest_directions_equal_full_svd(method, p, q, dtype):
    A = spiked(p, q, [9, 5, 3, 2, 1.5], 3, dtype)
    edge = upper_edge(1.0, p, q)
    found = decompose(A, 5, method=method, edge=edge)
    assert found.left.shape == (3, p, 5)
    assert found.right.shape == (3, q, 5)
    assert found.left.dtype == dtype
    expected = torch.linalg.svdvals(A.double())[:, :5]
    # A value is better than its direction: its error is quadratic.
    torch.testing.assert_close(found.values[:, :4], expected[:, :4], rtol=1e-4, atol=0.0)
    assert float(overlaps(found, A)[:, :4].min()) > 1 - 3e-4
    left, right = found.left.double(), found.right.double()
    sides = (
        A.double() @ right - left * found.values[:, None],
        A.double().mT @ left - right * found.values[:, None],
    )
    residual = torch.maximum(*(torch.linalg.vector_norm(side, dim=1) for side in sides))
    torch.testing.assert_close(residual, found.residual, rtol=0.05, atol=3e-5 * float(expected.max()))


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(st.integers(1, 30), st.integers(0, 20), st.integers(0, 99), st.sampled_from(METHODS))
def test_all_directions_of_any_matrix(p, more, seed, method):
    q = p + more
    torch.manual_seed(seed)
    A = torch.randn(2, p, q, dtype=torch.float64)
    found = decompose(A, method=method)
    rebuilt = (found.left * found.values[:, None]) @ found.right.mT
    torch.testing.assert_close(rebuilt, A, atol=1e-6, rtol=1e-6)
    eye = torch.eye(p, dtype=torch.float64).expand(2, -1, -1)
    torch.testing.assert_close(found.left.mT @ found.left, eye, atol=1e-8, rtol=0)
    torch.testing.assert_close(found.right.mT @ found.right, eye, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_low_rank_matrix_has_unit_directions(method):
    A = torch.randn(1, 12, 2) @ torch.randn(1, 2, 20)
    found = decompose(A, 5, method=method)
    norms = torch.linalg.vector_norm(found.right, dim=1)
    torch.testing.assert_close(norms, torch.ones_like(norms), atol=1e-4, rtol=0)
    assert float(found.values[0, 2]) < 1e-4 * float(found.values[0, 0])


def test_weak_directions_next_to_huge_one_are_accurate():
    """Values below sqrt(eps) of the largest, which a float32 Gram matrix loses."""
    s = torch.tensor([1.0, 2e-4, 1e-4], dtype=torch.float64)
    U = torch.linalg.qr(torch.randn(100, 3, dtype=torch.float64))[0]
    V = torch.linalg.qr(torch.randn(160, 3, dtype=torch.float64))[0]
    A = ((U * s) @ V.T + 1e-7 * torch.randn(100, 160, dtype=torch.float64)).float()[None]
    in_single = torch.linalg.eigvalsh(A[0] @ A[0].T).clamp(min=0).sqrt().flip(0)
    assert abs(float(in_single[2]) / 1e-4 - 1) > 0.05  # the error that the methods below avoid
    for method in METHODS:
        found = decompose(A, 3, method=method, edge=upper_edge(1e-7, 100, 160))
        torch.testing.assert_close(found.values[0], s, rtol=2e-2, atol=0.0)
        assert float((found.left[0].double() * U).sum(0).abs().min()) > 0.999


@pytest.mark.parametrize("method", METHODS)
def test_equal_singular_values_converge(method):
    A = torch.diag(torch.tensor([3.0, 3.0, 3.0, 1.0, 1.0, 0.5] + [0.1] * 40))[None]
    found = decompose(A, 4, method=method)
    torch.testing.assert_close(found.values[0].float(), torch.tensor([3.0, 3.0, 3.0, 1.0]))


def test_results_do_not_depend_on_batch():
    A = spiked(90, 200, [8, 4, 2], 4)
    edge = upper_edge(1.0, 90, 200)
    together = decompose(A, 3, method="randomized", edge=edge)
    for c in range(4):
        alone = decompose(A[c : c + 1], 3, method="randomized", edge=edge)
        same = (alone.left[0] * together.left[c]).sum(0) * (alone.right[0] * together.right[c]).sum(0)
        assert float(same.min()) > 1 - 1e-3


@pytest.mark.slow
def test_count_of_directions_above_edge():
    A = spiked(150, 300, [12, 8, 5, 3, 2, 1.6] + [0.5] * 4)[0]
    count, found = count_above(A, upper_edge(1.0, 150, 300), limit=150)
    assert count == 6
    assert found.values.shape[1] >= 7
    assert count_above(torch.randn(150, 300), upper_edge(1.0, 150, 300) * 1.02, limit=150)[0] == 0
    many = spiked(150, 300, [20 - i / 4 for i in range(40)])[0]
    assert count_above(many, upper_edge(1.0, 150, 300), limit=150)[0] == 40
    assert count_above(many, upper_edge(1.0, 150, 300), limit=20)[0] == 20


def failing(monkeypatch, *, until):
    """Make LAPACK fail on the first calls."""
    real, calls = torch.linalg.svd, itertools.count()

    def svd(*arguments, **options):
        if next(calls) < until:
            raise decomposition.LinAlgError("did not converge")
        return real(*arguments, **options)

    monkeypatch.setattr(torch.linalg, "svd", svd)


def test_unconverged_matrices_are_repeated_in_float64(monkeypatch):
    A = spiked(20, 24, [5, 3], 2)
    expected = torch.linalg.svdvals(A.double())
    failing(monkeypatch, until=2)  # the batch, then the first replicate in float32
    found = decompose(A, method="svd")
    torch.testing.assert_close(found.values, expected, rtol=1e-4, atol=1e-4)
    assert found.left.dtype == torch.float32


def test_matrices_that_never_converge_are_reported(monkeypatch):
    failing(monkeypatch, until=99)
    with pytest.raises(DecompositionError, match=r"layer 'w': .* replicate 7 \(20 x 24\) did not converge"):
        decompose(spiked(20, 24, [5.0]), method="svd", layer="w", names=[7])


def test_unresolved_search_falls_back_to_all_directions(monkeypatch):
    """With a single block nothing converges, but the result is correct."""
    A = spiked(200, 200, [2.0, 1.9, 1.8])
    real = decomposition.strongest
    monkeypatch.setattr(decomposition, "strongest", lambda *a, **k: real(*a, **{**k, "columns": 16}))
    found = decompose(A, 3, method="randomized", edge=upper_edge(1.0, 200, 200))
    assert bool(found.converged.all())
    assert float(overlaps(found, A).min()) > 0.999


def test_only_the_matrix_that_did_not_converge_is_repeated(monkeypatch):
    A = spiked(40, 60, [6.0, 4.0, 3.0], 3)
    real = decomposition.strongest

    def doubtful(*arguments, **options):
        found = real(*arguments, **options)
        count = len(found.converged)
        return replace(found, converged=torch.arange(count) != count // 2)  # of one matrix, and of three

    monkeypatch.setattr(decomposition, "strongest", doubtful)
    found = decompose(A, 3, method="randomized", edge=upper_edge(1.0, 40, 60))
    assert found.values.shape == (3, 3)
    torch.testing.assert_close(found.values, torch.linalg.svdvals(A.double())[:, :3], rtol=1e-4, atol=0.0)
    assert float(overlaps(found, A).min()) > 0.999

    def fail(*_):
        raise decomposition.LinAlgError("did not converge")

    for name in ("_gram", "_svd"):
        monkeypatch.setattr(decomposition, name, fail)
    with pytest.raises(DecompositionError, match=r"layer 'w': .* replicate b \(40 x 60\)"):
        decompose(A, 3, method="randomized", edge=upper_edge(1.0, 40, 60), layer="w", names=["a", "b", "c"])


def test_unknown_method_is_refused():
    with pytest.raises(ValueError, match="'svd', 'gram' or 'randomized'"):
        decompose(torch.ones(1, 2, 2), method="qr")


def test_completing_directions_keeps_global_random_state() -> None:
    draw = torch.Generator().manual_seed(0)
    low = torch.randn(1, 12, 3, generator=draw) @ torch.randn(1, 3, 20, generator=draw)
    before = torch.get_rng_state()
    one, other = decompose(low, method="gram"), decompose(low, method="gram")
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.right, other.right)
    gram = one.right[0].T @ one.right[0]
    torch.testing.assert_close(gram, torch.eye(12), rtol=0.0, atol=1e-5)
