"""Noise, signal share and noise scale against their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.measure.spectra.replicates import (
    Noise,
    ReplicateError,
    Replicates,
    check_distinct,
    noise_about,
    sum_squares,
)

SETTINGS = settings(deadline=None, max_examples=40)


def noise(G, layer=""):
    replicates = Replicates.of(G, layer=layer)
    return noise_about(replicates, replicates.mean())


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


def test_small_noise_with_large_signal_is_measured():
    """A difference of two sums of squares would cancel completely here."""
    G = 1e3 + 1e-6 * torch.randn(5, 30, 40, dtype=torch.float64)
    assert noise(G).variance == pytest.approx(by_definition(G)[0], rel=1e-6)
    assert noise(G).signal_share == pytest.approx(1.0)
    assert noise(torch.ones(3, 2, 2)).variance == 0


@pytest.mark.slow
def test_noise_scale_of_quadratic():
    """Per-sample gradients g + e: the noise scale is tr(cov)/|g|^2 by definition, whatever the batch."""
    p, q, R = 40, 60, 200
    g = torch.randn(p, q, dtype=torch.float64)
    true = p * q * 3.0**2 / float((g**2).sum())
    for batch in (1, 16):
        found = noise(g + 3.0 / math.sqrt(batch) * torch.randn(R, p, q, dtype=torch.float64))
        assert found.noise_scale(batch) == pytest.approx(true, rel=0.05)
    assert found.signal_share == pytest.approx(1 / (1 + true / 16), rel=0.05)
    assert found.share_at(16) == pytest.approx(1 / (1 + true / 256), rel=0.05)


def test_no_signal_has_no_finite_noise_scale():
    level = Noise(4, (3, 3), 1.0, 9.0, -0.01)
    assert level.noise_scale(32) == math.inf
    with pytest.raises(ValueError, match="batch size of a replicate must be positive"):
        level.noise_scale(0)
    assert level.share_at(4) == 0


@pytest.mark.parametrize(
    ("G", "message"),
    [
        (torch.ones(1, 2, 3), "layer 'w': 1 replicate.*at least 2"),
        (torch.ones(4, 3), r"layer 'w': expected replicates \[R, p, q\], got shape \(4, 3\)"),
        ([torch.ones(3), torch.ones(3)], r"replicate 0 has shape \(3,\); expected a matrix"),
        ([torch.ones(2, 3), torch.ones(3, 2)], "replicate 1 is .* they must have one type and shape"),
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
def test_non_finite_replicate_is_reported(bad):
    G = torch.randn(5, 40, 30)
    G[3, 17, 2] = bad
    with pytest.raises(ReplicateError, match="layer 'w': replicate 3 holds NaN or infinite values"):
        noise(G, layer="w")


@pytest.mark.parametrize("change", [0.0, 1e-7])
def test_same_data_twice_is_detected(change):
    G = 0.1 + torch.randn(6, 40, 30)
    G[4] = G[1] * (1 + change)
    replicates = Replicates.of(G, layer="w")
    with pytest.raises(ReplicateError, match="layer 'w': replicates 1 and 4 are the same"):
        check_distinct(replicates, noise(G).variance)
    distinct = Replicates.of(G[:4])
    check_distinct(distinct, noise(G[:4]).variance)
    mirrored = Replicates.of(torch.stack([G[0], -G[0], G[2]]))  # equal norms, but not the same
    check_distinct(mirrored, noise(torch.stack([G[0], -G[0], G[2]])).variance)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_chunks_hold_every_replicate_once_and_fit(size):
    G = torch.randn(7, 4, 6)
    chunks = []
    Replicates.of(G, budget=size * 10).chunks(lambda i, x: chunks.append((i, x.clone())), bytes_each=10)
    assert max(len(i) for i, _ in chunks) == min(size, 7)
    for indices, x in chunks:
        torch.testing.assert_close(x, G[list(indices)])
    assert sorted(a for indices, _ in chunks for a in indices) == list(range(7))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("none left"), MemoryError(),
              RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes")],
)  # fmt: skip
def test_out_of_memory_halves_chunk(error):
    chunks = []

    def work(indices, x):
        if len(indices) > 2:
            raise error
        chunks.append(indices)

    assert Replicates.of(torch.randn(9, 3, 3)).chunks(work, bytes_each=1) == 2
    assert sorted(sum(chunks, ())) == list(range(9))
    assert {len(indices) for indices in chunks} == {1, 2}


def test_out_of_memory_with_one_replicate_is_error():
    def work(indices, x):
        raise torch.OutOfMemoryError("none left")

    message = "layer 'w': out of memory on cpu with a single replicate of 3 x 5"
    with pytest.raises(ReplicateError, match=message):
        Replicates.of(torch.randn(4, 3, 5), layer="w").chunks(work, bytes_each=1)


def test_other_errors_do_not_halve_chunk():
    def work(indices, x):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        Replicates.of(torch.randn(4, 3, 5)).chunks(work, bytes_each=1)


def test_sum_of_squares_exceeds_range_of_float32():
    for x in (torch.full((300, 400), 1e20), torch.full((300, 400), 1e-30), torch.randn(500, 300).T):
        expected = float((x.double() ** 2).sum())
        assert sum_squares(x) == pytest.approx(expected, rel=1e-12)
