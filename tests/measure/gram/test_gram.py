"""Kernels of the Gram against dense per-sample gradients in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backlight.measure.gram import gram as kernels
from backlight.measure.gram.factors import Factors, LookupFactors, MatrixFactors, VectorFactors
from backlight.measure.gram.layers import convolution, kernel_of, unfold

N = 5


def matrix_factors(x: Tensor, delta: Tensor, *, held: bool = False) -> MatrixFactors:
    return MatrixFactors(delta, lambda a, b: x[a:b], lambda: x.norm(dim=-1), x.shape[-1], in_memory=held)


def factors(
    t: int, g: int, i: int, o: int, dtype: torch.dtype = torch.float64
) -> tuple[MatrixFactors, Tensor]:
    """Return a use and its per-sample gradients [N, g o i]."""
    x, d = torch.randn(N, t, g, i, dtype=dtype), torch.randn(N, t, g, o, dtype=dtype)
    dense = torch.einsum("ntgo,ntgi->ngoi", d.double(), x.double()).reshape(N, -1)
    return matrix_factors(x, d), dense


def lookup(t: int, rows: int, d: int) -> tuple[LookupFactors, Tensor]:
    ids, delta = torch.randint(0, rows, (N, t)), torch.randn(N, t, d, dtype=torch.float64)
    dense = torch.einsum("ntr,ntd->nrd", F.one_hot(ids, rows).double(), delta).reshape(N, -1)
    return LookupFactors(ids, delta, rows), dense


@pytest.mark.parametrize("kernel", ["ghost", "chunked"])
@pytest.mark.parametrize("scratch", [1, 700, kernels.SCRATCH_BYTES])
@pytest.mark.parametrize(("t", "g", "i", "o"), [(1, 1, 3, 40), (4, 1, 3, 40), (3, 4, 2, 5), (2, 8, 1, 1)])
def test_gram_of_matrix_factors(kernel: str, scratch: int, t: int, g: int, i: int, o: int) -> None:
    use, A = factors(t, g, i, o)
    second, B = factors(2, g, i, o)
    K, used, _ = kernels.gram([use], kernel=kernel, scratch=scratch)
    assert used == kernel
    torch.testing.assert_close(K, A @ A.T, rtol=1e-12, atol=1e-12)
    K, *_ = kernels.gram([use, second], kernel=kernel, scratch=scratch)
    torch.testing.assert_close(K, (A + B) @ (A + B).T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", ["ghost", "chunked"])
@pytest.mark.parametrize("scratch", [1, 300, kernels.SCRATCH_BYTES])
def test_lookups_and_their_sum_with_product(kernel: str, scratch: int) -> None:
    use, A = lookup(6, 9, 4)
    other, B = lookup(3, 9, 4)
    K, *_ = kernels.gram([use, other], kernel=kernel, scratch=scratch)
    torch.testing.assert_close(K, (A + B) @ (A + B).T, rtol=1e-12, atol=1e-12)
    product, C = factors(2, 1, 4, 9)
    K, used, _ = kernels.gram([use, product], kernel=kernel, scratch=scratch)
    assert used == "chunked"  # uses of two kinds are walked together, row by row
    torch.testing.assert_close(K, (A + C) @ (A + C).T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("samples", [31, 32, 33, 70])
@pytest.mark.parametrize("kernel", ["ghost", "chunked"])
@pytest.mark.parametrize("t", [1, 2])
def test_many_samples_use_symmetry(samples: int, kernel: str, t: int) -> None:
    x, d = torch.randn(samples, t, 1, 6), torch.randn(samples, t, 1, 7)
    A = torch.einsum("ntgo,ntgi->noi", d.double(), x.double()).flatten(1)
    use = matrix_factors(x, d)
    for products, rtol in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        K, *_ = kernels.gram([use], kernel=kernel, products=products)
        assert K.dtype == torch.float64
        assert float((K - A @ A.T).norm()) <= rtol * float((A @ A.T).norm())
        assert torch.equal(K, K.T) or float((K - K.T).abs().max()) < rtol * float(K.diagonal().max())


@pytest.mark.slow
def test_small_eigenvalues_need_products_in_float64() -> None:
    base = torch.randn(1, 1, 1, 64)
    x = base + 1e-4 * torch.randn(40, 1, 1, 64)
    d = torch.ones(40, 1, 1, 1)
    use = matrix_factors(x, d)
    exact = torch.linalg.eigvalsh(x.double().flatten(1) @ x.double().flatten(1).T)
    double, *_ = kernels.gram([use], products=torch.float64)
    single, *_ = kernels.gram([use], products=torch.float32)
    torch.testing.assert_close(torch.linalg.eigvalsh(double)[5:], exact[5:], rtol=1e-6, atol=0)
    off = (torch.linalg.eigvalsh(single)[5:] - exact[5:]).abs() / exact[5:]
    assert float(off.max()) > 0.01


def test_default_product_dtype() -> None:
    x, d = torch.randn(8, 5, 1, 40), torch.randn(8, 5, 1, 30)
    use = matrix_factors(x, d)
    for kernel, same, other in (
        ("chunked", torch.float32, torch.float64),  # the gradients were formed in float32
        ("ghost", torch.float64, torch.float32),
    ):
        found, *_ = kernels.gram([use], kernel=kernel)
        assert torch.equal(found, kernels.gram([use], kernel=kernel, products=same)[0])
        assert not torch.equal(found, kernels.gram([use], kernel=kernel, products=other)[0])
    wide = matrix_factors(x.double(), d.double())
    assert kernels.product_dtype([wide]) is torch.float64
    assert kernels.product_dtype([use]) is torch.float32
    meta = d.to("meta")
    assert kernels.product_dtype([matrix_factors(meta, meta)]) is torch.float64


def test_buffers_of_one_measurement_do_not_reach_next() -> None:
    uses = [factors(3, 1, 30, 40), factors(2, 1, 50, 20), factors(3, 1, 30, 40)]
    found = [kernels.gram([use], kernel=kernel)[0] for use, _ in uses for kernel in ("ghost", "chunked")]
    for K, (_, A) in zip(found, [pair for pair in uses for _ in range(2)], strict=True):
        torch.testing.assert_close(K, A @ A.T, rtol=1e-12, atol=1e-12)


def test_combinations_share_one_pass() -> None:
    use, A = factors(3, 2, 4, 10)
    weights = torch.randn(7, N, dtype=torch.float64)
    for scratch in (1, kernels.SCRATCH_BYTES):
        found = kernels.combine([use], weights, scratch=scratch)
        torch.testing.assert_close(found.flatten(1), weights @ A, rtol=1e-12, atol=1e-12)


def test_factors_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in samples, rows or columns"):
        kernels.gram([factors(2, 1, 4, 9)[0], factors(2, 1, 9, 4)[0]])


def test_cost_rule_takes_cheaper_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ghost_cost_ratio", lambda device, dtype, products, formed: 1.0)

    def counts(t: int, i: int, o: int) -> tuple[int, int]:
        return N * N * t * t * (i + o), N * t * i * o + N * N * i * o

    for t, i, o in [(1, 30, 30), (1, 1, 50), (2, 30, 30), (8, 30, 30), (30, 6, 6), (3, 64, 4), (5, 64, 64)]:
        ghost, chunked = counts(t, i, o)
        assert kernels.choose([factors(t, 1, i, o)[0]])[0] == ("ghost" if ghost < chunked else "chunked")
    assert kernels.choose([lookup(2, 500, 4)[0], factors(1, 1, 4, 500)[0]])[0] == "chunked"
    monkeypatch.setattr(kernels, "ghost_cost_ratio", lambda device, dtype, products, formed: 1e9)
    assert kernels.choose([factors(1, 1, 30, 30)[0]])[0] == "chunked"


def test_products_without_gradients_are_in_float64_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ratios = {torch.float64: 1.0, torch.float32: 0.25}
    monkeypatch.setattr(kernels, "ghost_cost_ratio", lambda device, dtype, products, formed: ratios[products])
    single, double = torch.float32, torch.float64
    for t, expected in ((1, ("ghost", double)), (6, ("ghost", single)), (64, ("chunked", single))):
        use, A = factors(t, 1, 24, 24, single)
        assert kernels.choose([use]) == expected
        K, *used = kernels.gram([use])
        assert tuple(used) == expected
        torch.testing.assert_close(K, A @ A.T, rtol=1e-5, atol=1e-5 * float(K.abs().max()))
        assert kernels.choose([use], double)[1] == kernels.choose([factors(t, 1, 24, 24)[0]])[1] == double


@pytest.mark.slow
def test_cost_ratio_is_measured_once() -> None:
    kernels.ghost_cost_ratio.cache_clear()
    device = torch.device("cpu")
    before = torch.get_rng_state()
    kinds = torch.float32, torch.float64, torch.float32
    found = kernels.ghost_cost_ratio(device, *kinds)
    assert 0.125 <= found <= 8
    assert kernels.ghost_cost_ratio(device, *kinds) == found
    assert kernels.ghost_cost_ratio.cache_info().hits == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_memory_stays_within_scratch() -> None:
    use, _ = factors(3, 1, 32, 256)
    biggest = max(G.numel() for _, _, G in kernels.chunks([use], kernels.SCRATCH_BYTES))
    assert biggest * 8 <= kernels.SCRATCH_BYTES
    small = [G.numel() * 8 for _, _, G in kernels.chunks([use], 3000)]
    assert max(small) <= 3000
    assert len(small) == math.ceil(256 / (3000 // (8 * N * 32)))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    "module",
    [
        nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2),
        nn.Conv2d(4, 4, (3, 2), padding="same", dilation=(1, 3), groups=4),
        nn.Conv2d(4, 2, 3, padding=(2, 1), padding_mode="circular"),
        nn.Conv3d(4, 2, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1)),
    ],
)
def test_unfolding_is_convolution(module: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> None:
    module = module.double()
    x = torch.randn(N, 4, *(7,) * (module.weight.dim() - 2), dtype=torch.float64)
    patches = unfold(module, x).unflatten(1, (module.groups, -1)).flatten(2, 3)
    weight = module.weight.reshape(module.groups, -1, patches.shape[2])
    out = torch.einsum("ngip,goi->ngop", patches, weight).flatten(1, 2)
    expected = module(x) - module.bias.view(-1, *(1,) * (x.dim() - 2))
    torch.testing.assert_close(out.reshape(expected.shape), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("module", "shape", "kind"),
    [
        (nn.Linear(4, 6), (N, 3, 4), "factors"),
        (nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate", groups=2), (N, 4, 5, 5), "factors"),
        (nn.LayerNorm((3, 4)), (N, 2, 3, 4), "vectors"),
        (nn.GroupNorm(2, 4), (N, 4, 6), "vectors"),
    ],
)
def test_sizes_are_root_sum_squares_of_samples(module: nn.Module, shape: tuple[int, ...], kind: str) -> None:
    module = module.double()
    x = torch.randn(*shape, dtype=torch.float64)
    out = module(x)
    delta = torch.randn_like(out)
    use: Factors = kernel_of(module)(module, x, delta, N)["weight"]
    if isinstance(use, VectorFactors):
        assert kind == "vectors"
        normal = F.layer_norm(x, (3, 4), None, None) if x.dim() == 4 else F.group_norm(x, 2)
        torch.testing.assert_close(use.sizes(), (normal * delta).flatten(1).norm(dim=1))
    else:
        assert isinstance(use, MatrixFactors)
        x_NTgi, d = use.all_inputs(), use.delta
        summands = x_NTgi.square().sum(-1) * d.square().sum(-1)
        torch.testing.assert_close(use.sizes(), summands.flatten(1).sum(1).sqrt())


def test_subclass_with_its_own_forward_has_no_kernel() -> None:
    class Same(nn.Linear):
        pass

    class Other(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    assert kernel_of(Same(2, 3)) is kernel_of(nn.Linear(2, 3))
    assert kernel_of(Other(2, 3)) is None
    assert kernel_of(nn.ConvTranspose2d(2, 2, 2)) is None
    assert kernel_of(nn.Conv2d(2, 2, 2)) is convolution


def test_wide_matrices_are_chunked_transposed() -> None:
    x, d = torch.randn(N, 3, 1, 40, dtype=torch.float64), torch.randn(N, 3, 1, 6, dtype=torch.float64)
    use = matrix_factors(x, d, held=True)
    transposed = use.transposed()
    assert (transposed.rows, transposed.columns) == (40, 6)
    A = torch.einsum("ntgo,ntgi->noi", d, x).flatten(1)
    for uses, factor in (([use], 1), ([use, use], 2)):
        K, *_ = kernels.gram(uses, kernel="chunked")
        torch.testing.assert_close(K, factor**2 * A @ A.T, rtol=1e-12, atol=1e-12)
    other = MatrixFactors(d, lambda a, b: x[a:b], lambda: x.norm(dim=-1), 40)  # inputs are computed on demand
    assert other.transposed() is None
    K, *_ = kernels.gram([use, other], kernel="chunked")
    torch.testing.assert_close(K, 4 * A @ A.T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sums", [1 << 16, 70])
def test_float32_products_are_summed_in_float64(sums: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SUMS", sums)
    n, m = 3, 64 * kernels.RUN + 5
    A = 1 + 1e-3 * torch.randn(n, m)  # partial sums grow far beyond the summands
    d, x = torch.ones(n, 1, 1, 1), A.view(n, 1, 1, m)
    K, used, _ = kernels.gram(
        [MatrixFactors(d, lambda a, b: x[a:b], lambda: x[..., 0], m)],
        kernel="chunked",
        products=torch.float32,
    )
    assert used == "chunked"
    exact = A.double() @ A.double().T
    assert float(((K - exact).abs() / exact).max()) < 2e-8


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2),
        nn.Conv2d(4, 8, 3, padding=1),
        nn.Conv3d(2, 4, 2, padding=(0, 1, 1)),
    ],
)
@pytest.mark.parametrize("block", [1, 1 << 17])
def test_direct_gradients_of_convolution_are_those_of_unfolding(
    module: nn.Module, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backlight.measure.gram.factors.DIRECT_SCALARS", block)
    dimensions = module.weight.dim() - 2
    x = torch.randn(N, module.in_channels, *((31,) if dimensions == 1 else (7,) * dimensions))
    delta = torch.randn_like(module(x))
    use = convolution(module, x, delta, N)["weight"]
    assert isinstance(use, MatrixFactors)
    unfolded = torch.full((N, use.rows, use.columns), torch.nan)  # like uninitialised memory
    replace(use, direct=None).take(0, use.rows, unfolded, add=False)
    assert use.direct is not None
    for uses, factor in (([use], 1), ([use, use], 2)):
        ((_, rows, G),) = kernels.chunks(uses)
        assert rows == use.rows
        torch.testing.assert_close(G / factor, unfolded, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size", "kernel", "is_direct"), [(8, 3, True), (7, 3, False), (9, 1, False)])
def test_convolutions_are_unfolded_where_positions_are_few(size: int, kernel: int, is_direct: bool) -> None:
    module = nn.Conv2d(4, 32, kernel, padding=kernel // 2)  # 64 positions are twice the rows
    x = torch.randn(N, 4, size, size)
    use = convolution(module, x, torch.randn_like(module(x)), N)["weight"]
    assert isinstance(use, MatrixFactors)
    assert (use.direct is not None) == is_direct


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("g", [1, 4])
def test_uninitialised_memory_does_not_matter(t: int, g: int) -> None:
    use, A = factors(t, g, 2, 5)
    out = torch.full((N, use.rows, use.columns), torch.nan, dtype=torch.float64)
    use.take(0, use.rows, out, add=False)
    torch.testing.assert_close(out.flatten(1), A)
