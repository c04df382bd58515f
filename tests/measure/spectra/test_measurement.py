"""The spectral echo of injected gradients: oracle B, the null, and invariances."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import backlight
from backlight.measure.spectra import measurement
from backlight.measure.spectra.measurement import spectral_echo
from backlight.measure.spectra.replicates import ReplicateError
from backlight.measure.spectra.shrinkage import predict, threshold

METHODS = ["svd", "gram", "randomized"]


def injected(p, q, R, ratios, sigma=1.0, dtype=torch.float32, vectors=False):
    """Return replicates of a gradient with strengths in units of the threshold."""
    s = torch.tensor(ratios, dtype=torch.float64) * threshold(sigma, p, q)
    U = torch.linalg.qr(torch.randn(p, len(ratios), dtype=torch.float64))[0]
    V = torch.linalg.qr(torch.randn(q, len(ratios), dtype=torch.float64))[0]
    G = ((U * s) @ V.T + sigma * torch.randn(R, p, q, dtype=torch.float64)).to(dtype)
    return (G, U, s, V) if vectors else G


def arrays(result):
    return {name: value for name, value in vars(result).items() if isinstance(value, np.ndarray)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "ratio", "tolerance"),
    [
        *((method, 3, 0.01) for method in METHODS),
        ("randomized", 5, 0.01),
        ("randomized", 2, 0.02),
        *(
            pytest.param(m, r, t, marks=pytest.mark.full)
            for m in ("svd", "gram")
            for r, t in ((5, 0.01), (2, 0.02))
        ),
    ],
)
def test_oracle_b(method, ratio, tolerance):
    """One injected direction at (300, 1200), sigma .01, R = 8, both estimators."""
    p, q, sigma = 300, 1200, 0.01
    G, _, s, _ = injected(p, q, 8, [ratio], sigma, vectors=True)
    expected = predict(s.numpy(), sigma, p, q)
    found = spectral_echo(G, method=method, null_draws=2)
    assert found.method == method
    assert found.identifiable == 1
    assert found.noise.sigma == pytest.approx(sigma, rel=1e-3)
    assert found.echo[0] == pytest.approx(float(expected.echo[0]), abs=tolerance)
    assert found.pooled[0] == pytest.approx(float(expected.echo[0]), abs=tolerance)
    assert found.expected[0] == pytest.approx(float(expected.echo[0]), abs=tolerance)
    assert found.singular_value[0] == pytest.approx(float(expected.value[0]), rel=0.02)
    assert found.strength[0] == pytest.approx(float(s[0]), rel=0.02)
    assert found.shrunk[0] == pytest.approx(float(s[0] * expected.echo[0]), rel=0.03)
    # The unbiased diagonal is the echo times the strength, without any model.
    assert found.diagonal[0] == pytest.approx(float(s[0] * expected.echo[0]), rel=0.03)
    low, high = found.interval[0]
    assert low < found.echo[0] < high
    assert found.echo[0] > 3 * found.null[0]


@pytest.mark.slow
def test_every_direction_of_decaying_spectrum():
    G, U, _, V = injected(96, 160, 12, [12, 8, 5, 3.5, 2.5, 1.8, 0.5, 0.3], vectors=True)
    found = spectral_echo(G)
    assert found.identifiable == 6
    assert found.measured == 96
    left, _, right = torch.linalg.svd(G.double(), full_matrices=False)
    for i in range(6):
        # The true echo of each replicate.
        true = [
            float((U[:, i] @ left[a, :, j]) * (V[:, i] @ right[a, j]))
            for a, j in enumerate(found.permutation[:, i])
        ]
        assert found.echo[i] == pytest.approx(np.mean(true), abs=0.025)
        np.testing.assert_allclose(found.by_replicate[:, i], true, atol=0.08)
    assert (np.diff(found.echo[:6]) < 0).all()
    assert np.abs(found.echo[8:]).max() < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(("p", "q", "R"), [(60, 60, 8), (40, 120, 16), (300, 400, 6)])
def test_pure_noise_has_no_echo(p, q, R):
    found = spectral_echo(torch.randn(R, p, q))
    assert found.identifiable == 0
    assert found.blocks == ()
    assert np.abs(np.mean(found.echo)) < 0.05
    assert np.abs(found.pooled).max() < 4 / (p * q) ** 0.25 / math.sqrt(R / 2)
    # About one direction in twenty exceeds the 95 % quantile of the null.
    assert 0.0 <= (found.echo > found.null).mean() <= 0.15
    assert found.null[0] > 0
    assert abs(found.noise.signal_share) < 0.01


@pytest.mark.slow
def test_null_does_not_depend_on_signal():
    signal = spectral_echo(injected(60, 80, 8, [10, 6, 4]))
    noise = spectral_echo(torch.randn(8, 60, 80))
    assert signal.null[0] == pytest.approx(noise.null[0], rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_transposing_exchanges_left_and_right(method):
    G = injected(70, 130, 6, [8, 5, 3])
    one, other = spectral_echo(G, method=method), spectral_echo(G.mT, method=method)
    assert (one.shape, other.shape) == ((70, 130), (130, 70))
    assert other.noise.shape == (130, 70)
    np.testing.assert_array_equal(one.left_alignment, other.right_alignment)
    np.testing.assert_array_equal(one.right_alignment, other.left_alignment)
    assert one.left_alignment[2] > one.right_alignment[2]
    for name in ("echo", "interval", "null", "diagonal", "singular_values", "shrunk"):
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("factor", [3e-7, *(pytest.param(2.0**e, marks=pytest.mark.full) for e in (-40, 40))])
def test_scaling_changes_units_only(method, factor):
    G = injected(60, 100, 6, [8, 5, 3], dtype=torch.float64)
    one, other = spectral_echo(G, method=method), spectral_echo(G * factor, method=method)
    assert other.noise.sigma == pytest.approx(factor * one.noise.sigma, rel=1e-9)
    assert other.noise.signal_share == pytest.approx(one.noise.signal_share, rel=1e-9)
    assert (other.identifiable, other.blocks) == (one.identifiable, one.blocks)
    k = one.identifiable
    for name in ("echo", "interval", "null", "residual", "expected"):
        np.testing.assert_allclose(getattr(other, name)[:k], getattr(one, name)[:k], atol=1e-6)
    for name in ("score", "ambiguity"):
        np.testing.assert_allclose(getattr(other, name)[..., :k], getattr(one, name)[..., :k], atol=1e-6)
    for name in ("singular_value", "strength", "shrunk", "diagonal"):
        np.testing.assert_allclose(getattr(other, name)[:k], factor * getattr(one, name)[:k], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_order_of_replicates_does_not_matter(method):
    G = injected(60, 100, 7, [8, 5, 3])
    order = np.random.default_rng(0).permutation(7)
    one, other = spectral_echo(G, method=method), spectral_echo(G[order], method=method)
    for name, array in arrays(one).items():
        expected = array[order] if len(array) == 7 and array.ndim == 2 else array
        np.testing.assert_allclose(getattr(other, name), expected, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_chunks_do_not_matter(method, monkeypatch):
    G = injected(60, 100, 7, [8, 5, 3])
    one = spectral_echo(G, method=method, budget=1)
    other = spectral_echo(list(G), method=method)
    np.testing.assert_allclose(other.echo, one.echo, atol=1e-4)
    np.testing.assert_allclose(other.diagonal, one.diagonal, rtol=1e-3, atol=1e-3)
    real, failures = measurement.decompose, []

    def short_of_memory(A_Cpq, *arguments, **options):
        if len(A_Cpq) > 2:
            failures.append(len(A_Cpq))
            raise torch.OutOfMemoryError("none left")
        return real(A_Cpq, *arguments, **options)

    monkeypatch.setattr(measurement, "decompose", short_of_memory)
    np.testing.assert_allclose(spectral_echo(G, method=method).echo, one.echo, atol=1e-4)
    assert failures


@pytest.mark.slow
def test_methods_agree():
    G = injected(330, 360, 6, [20, 12, 8, 5, 3.5, 2.5, 1.8, 1.4])
    found = {method: spectral_echo(G, method=method, null_draws=0) for method in ["auto", *METHODS]}
    assert found["auto"].method == "randomized"
    k = found["svd"].identifiable
    assert k == 8
    for method in ("gram", "randomized", "auto"):
        one = found[method]
        assert one.identifiable == k
        np.testing.assert_allclose(one.echo[:k], found["svd"].echo[:k], atol=2e-3)
        np.testing.assert_allclose(one.singular_value[:k], found["svd"].singular_value[:k], rtol=1e-3)
        np.testing.assert_allclose(one.diagonal[:k], found["svd"].diagonal[:k], rtol=1e-2)
        # Directions that were not measured are NaN, not 0.
        assert np.isnan(one.echo[k:]).all()
        assert (one.permutation[:, k:] == -1).all()
        assert all(array.shape[1 if array.shape[0] == 6 else 0] == 330 for array in arrays(one).values())
        assert (one.solver_residual[:, :k] < 0.02).all()
    sorted_values = torch.linalg.svdvals(G.double()).numpy()
    np.testing.assert_allclose(found["svd"].singular_values, sorted_values, rtol=1e-4)
    kept = ~np.isnan(found["randomized"].singular_values)
    assert kept[:, :7].all()
    np.testing.assert_allclose(found["randomized"].singular_values[kept], sorted_values[kept], rtol=1e-2)


@pytest.mark.slow
def test_many_directions_are_taken_by_gram_matrix():
    G = injected(360, 400, 5, list(np.linspace(30, 10, 60)))
    found = spectral_echo(G, null_draws=0)
    assert (found.method, found.identifiable) == ("gram", 60)
    assert (found.block_echo[:60] > 0.9).all()


def test_large_layer_of_noise_is_measured_as_noise():
    found = spectral_echo(torch.randn(4, 330, 340))
    assert (found.identifiable, found.measured, found.blocks) == (0, 0, ())
    assert np.isnan(found.echo).all()
    assert found.echo.shape == (330,)
    assert found.noise.sigma == pytest.approx(1, rel=0.01)


@pytest.mark.slow
def test_number_of_directions_is_limited():
    G = injected(60, 100, 6, [8, 5, 3])
    whole, two = spectral_echo(G), spectral_echo(G, max_directions=2)
    np.testing.assert_allclose(two.echo[:2], whole.echo[:2], atol=1e-3)
    assert (two.measured, two.identifiable, two.candidates, whole.identifiable) == (2, 2, 3, 3)
    assert np.isnan(two.echo[2:]).all()


@pytest.mark.slow
def test_close_modes_lose_their_echo_but_not_their_block_echo():
    """Two directions of equal strength mix, but their plane is recovered."""
    found = spectral_echo(injected(80, 120, 10, [6, 6, 2.5]))
    assert found.blocks == ((0, 2), (2, 3))
    apart = predict(6 * threshold(1, 80, 120), 1, 80, 120).echo
    np.testing.assert_allclose(found.block_echo[:2], apart, atol=0.03)
    assert found.echo[:2].max() < apart - 0.05
    assert found.residual[:2].min() > 0.2
    assert found.residual[2] < 0.2
    assert found.block_echo[2] == found.echo[2]


@pytest.mark.slow
def test_half_precision_is_promoted_first():
    G = injected(60, 100, 6, [8, 5, 3])
    exact = spectral_echo(G)
    for dtype in (torch.bfloat16, torch.float16):
        found = spectral_echo(G.to(dtype))
        np.testing.assert_allclose(found.echo[:3], exact.echo[:3], atol=5e-3)
        as_single = spectral_echo(G.to(dtype).float())
        np.testing.assert_array_equal(found.echo, as_single.echo)


@pytest.mark.slow
@pytest.mark.parametrize("matching", ["hungarian", "greedy"])
def test_aligned_values_follow_the_directions(matching):
    """Two strong directions that change places between replicates."""
    torch.manual_seed(0)
    U, V = torch.linalg.qr(torch.randn(40, 2))[0], torch.linalg.qr(torch.randn(30, 2))[0]
    sizes = torch.tensor([[10.0, 8], [8.0, 10], [10.5, 8], [8.0, 9.5]])
    G = (U * sizes[:, None]) @ V.T + 1e-3 * torch.randn(4, 40, 30)
    echo = backlight.spectral_echo(G, matching=matching)
    assert echo.aligned_values.shape == echo.singular_values.shape == (4, 30)
    np.testing.assert_array_equal(echo.singular_values, -np.sort(-echo.singular_values, axis=1))
    pairs = echo.aligned_values[:, :2]
    order = [0, 1] if sizes[:, 0].mean() > sizes[:, 1].mean() else [1, 0]
    np.testing.assert_allclose(pairs[:, order], sizes, atol=0.02)


def test_input_is_unchanged():
    G = injected(60, 100, 6, [8, 5, 3])
    before = G.clone()
    for method in METHODS:
        spectral_echo(G, method=method)
        spectral_echo(list(G.double()), method=method)
    assert torch.equal(G, before)


@pytest.mark.parametrize(
    ("G", "message"),
    [
        (
            lambda: torch.randn(2, 5, 6),
            "layer 'w': 2 replicate.*at least 3 are needed. Use more microbatches",
        ),
        (
            lambda: torch.ones(4, 5, 6).cumsum(2) * torch.arange(3.0, -1, -1)[:, None, None],
            "layer 'w': replicate 3 is zero and has no directions",
        ),
        (lambda: torch.randn(4, 5), "layer 'w': expected replicates .*no singular directions"),
        (lambda: torch.randn(5, 9, 9)[[0, 1, 2, 1, 4]], "layer 'w': replicates 1 and 3 are the same"),
        (lambda: torch.randn(1, 9, 9).expand(4, 9, 9), "layer 'w': replicates 0 and 1 are the same"),
    ],
)
def test_bad_input_is_refused(G, message):
    with pytest.raises(ReplicateError, match=message):
        spectral_echo(G(), layer="w")


def test_invalid_options_are_refused():
    with pytest.raises(ValueError, match="method must be 'auto', 'svd', 'gram' or 'randomized', got 'qr'"):
        spectral_echo(torch.randn(3, 5, 6), method="qr")
    with pytest.raises(ValueError, match="max_directions must be at least 1"):
        spectral_echo(torch.randn(3, 5, 6), max_directions=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", METHODS)
def test_accelerator_equals_host(method):
    """Replicates on the host are copied in chunks; those on the device are not."""
    G = injected(400, 700, 9, [12, 8, 5, 3])
    on_host = spectral_echo(G, method=method)
    k = on_host.identifiable
    for on_device in (
        spectral_echo(G, method=method, device="cuda", budget=2**23),
        spectral_echo(G.cuda(), method=method),
        spectral_echo(G.half(), method=method, device="cuda", budget=2**23),
    ):
        assert on_device.identifiable == k
        np.testing.assert_allclose(on_device.echo[:k], on_host.echo[:k], atol=5e-3)
        np.testing.assert_allclose(on_device.singular_value[:k], on_host.singular_value[:k], rtol=1e-3)
        np.testing.assert_allclose(on_device.noise.variance, on_host.noise.variance, rtol=1e-4)


@pytest.mark.slow
def test_directions_are_numbered_by_mean(monkeypatch):
    """Swapped directions in the references of some replicates change nothing."""
    G = injected(60, 100, 6, [8, 5, 3])
    expected = spectral_echo(G, method="gram")
    real = measurement.decompose

    def swapped(*arguments, **options):
        found = real(*arguments, **options)
        if any(str(name).endswith(("0", "3")) and "others" in str(name) for name in options["names"]):
            left, right = found.left.flip(-1), found.right.flip(-1)
            found = dataclasses.replace(found, left=left, right=right)
        return found

    monkeypatch.setattr(measurement, "decompose", swapped)
    found = spectral_echo(G, method="gram", budget=1)
    np.testing.assert_allclose(found.echo[:3], expected.echo[:3], atol=1e-6)
    np.testing.assert_array_equal(found.permutation, expected.permutation)


@pytest.mark.slow
def test_candidates_above_the_edge_are_kept_where_the_gram_takes_over():
    """Noise of few samples has large singular values of its own, which come before a weak direction."""
    p, q, R, samples = 400, 700, 4, 60
    torch.manual_seed(0)
    signal = torch.zeros(p, q)
    signal[0, 0] = 50.0
    noise = [torch.randn(p, samples) @ torch.randn(samples, q) / math.sqrt(samples) for _ in range(R)]
    G = torch.stack([signal + E for E in noise])
    left, _, right = torch.linalg.svd(G, full_matrices=False)
    true = (left[:, 0] * right[:, :, 0]).abs().amax(1)
    found = spectral_echo(G, null_draws=0)
    assert found.method == "gram"
    assert found.echo[0] == pytest.approx(float(true.mean()), abs=0.03)
