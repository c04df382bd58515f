"""The noise scale and its interval, against closed forms and by coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import backlight
from backlight.measure.noise_scale import noise_scale


def of(G: np.ndarray, samples: float = 1):
    return noise_scale((G**2).sum(1), G @ G.sum(0), samples)


def test_value_and_jackknife_equal_those_of_the_gradients_themselves() -> None:
    G = np.random.default_rng(0).normal(0.4, 1, (7, 11))

    def share(rows: np.ndarray) -> float:
        K, R = rows @ rows.T, len(rows)
        return (K.sum() - np.trace(K)) / (R - 1) / np.trace(K)

    found = of(G, 5)
    assert found.share == pytest.approx(share(G), rel=1e-12)
    assert found.value == pytest.approx(5 * (1 - share(G)) / share(G), rel=1e-12)
    without = np.array([share(np.delete(G, a, 0)) for a in range(7)])
    error = 2.446911851 * math.sqrt(6 / 7 * np.square(without - without.mean()).sum())  # Student, 6 degrees
    assert found.share_interval == pytest.approx((share(G) - error, share(G) + error), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("R", [5, 8, 32])
@pytest.mark.parametrize(("dim", "share"), [(20, 0.5), (20, 0.1), (500, 0.3), (500, 0.05)])
def test_interval_covers_truth(R: int, dim: int, share: float) -> None:
    draw = np.random.default_rng(R * dim)
    mean = draw.normal(size=dim)
    mean *= math.sqrt(share / (1 - share)) * math.sqrt(dim) / np.linalg.norm(mean)
    truth = dim / float(mean @ mean)
    inside = 0
    for _ in range(300):
        found = of(mean + draw.normal(size=(R, dim)))
        inside += found.interval.low <= truth <= found.interval.high
    assert inside >= 0.9 * 300


def test_without_signal_the_interval_is_open() -> None:
    draw, open_ended = np.random.default_rng(0), 0
    for _ in range(100):
        open_ended += math.isinf(of(draw.normal(size=(12, 200))).interval.high)
    assert open_ended >= 90
    assert math.isnan(of(draw.normal(1, 1, (2, 5))).interval.low)


@pytest.mark.slow
def test_gram_of_linear_regression_has_the_noise_scale_of_its_closed_form() -> None:
    # f(x) = w x + b, squared error: g_n = 2 r_n (x_n, 1), and B_simple = tr Cov g / |E g|^2.
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 1).double())
    x, y = torch.randn(400, 6, dtype=torch.float64) + 0.5, torch.randn(400, 1, dtype=torch.float64)
    gram = backlight.gram(model, lambda m, batch: (m(batch[0]) - batch[1]).square().sum(), (x, y))
    with torch.no_grad():
        residual = 2 * (model(x) - y)
        g = torch.cat([residual * x, residual], 1).numpy()
    signal = (g.sum(0) @ g.sum(0) - (g**2).sum()) / (400 * 399)
    expected = ((g**2).sum(1).mean() - signal) / signal
    scales = gram.noise_scales()
    assert scales["model"].value == pytest.approx(expected, rel=1e-9)
    assert scales["0"].value == pytest.approx(expected, rel=1e-9)
    assert scales["model"].interval.low < expected < scales["model"].interval.high
    # The population: its mean gradient in closed form for x ~ N(1/2, I) and y ~ N(0, 1) independent of x.
    weight, bias = model[0].weight.detach().numpy()[0], float(model[0].bias.detach())
    offset = weight.sum() / 2 + bias
    mean = 2 * np.append(weight + offset / 2, offset)
    centred = np.random.default_rng(0).normal(size=(200_000, 6)) + 0.5
    r = 2 * (centred @ weight + bias - np.random.default_rng(1).normal(size=200_000))
    total = float((r**2 * ((centred**2).sum(1) + 1)).mean())
    truth = (total - mean @ mean) / (mean @ mean)
    assert scales["model"].interval.low < truth < scales["model"].interval.high


@pytest.mark.parametrize(
    ("squares", "products", "samples", "text"),
    [
        ([1.0], [1.0], 1, "R >= 2 gradients"),
        ([1.0, 2.0], [1.0], 1, "got shapes"),
        ([1.0, 2.0], [1.0, 1.0], 0, "must be positive, got 0"),
    ],
)
def test_invalid_gradients_are_refused(
    squares: list[float], products: list[float], samples: float, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        noise_scale(squares, products, samples)
