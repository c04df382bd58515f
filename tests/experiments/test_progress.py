"""Progress measures against other algorithms and known cases."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from backlight.experiments import progress as fourier
from backlight.experiments.models import Mlp
from backlight.experiments.progress import (
    adversarial_accuracy,
    attacked,
    circulant_deviation,
    local_complexity,
    neighbourhood,
    parallelograms,
    representation_quality,
    smallest_margin,
    softmax_collapse,
    weight_norm,
)


def draw(seed=0):
    return torch.Generator().manual_seed(seed)


def losses(outputs, labels):
    return nn.functional.cross_entropy(outputs, labels, reduction="none")


def test_weight_norm_equals_that_of_concatenation():
    net = Mlp((4, 7, 3))
    whole = nn.utils.parameters_to_vector(net.parameters()).detach().double()
    assert weight_norm(net.parameters()) == pytest.approx(float(whole.norm()), rel=1e-12)


@pytest.mark.parametrize("p", [11, 12])
def test_power_spectrum_satisfies_parseval(p):
    rows = torch.randn(5, p, generator=draw(), dtype=torch.float64)
    power = fourier.power_spectrum(rows)
    assert torch.allclose(power.sum(1), rows.square().sum(1))
    waves = torch.arange(p) * (2 * math.pi / p)
    cosine, sine = torch.cos(2 * waves).double(), torch.sin(2 * waves).double()
    by_projection = ((rows @ cosine) ** 2 + (rows @ sine) ** 2) * 2 / p
    assert torch.allclose(power[:, 2], by_projection, atol=1e-6)


def test_participation_is_one_for_waves_and_small_for_noise():
    angle = torch.arange(23) * (2 * math.pi * 3 / 23)
    waves = torch.stack([torch.cos(angle + phase) for phase in (0.0, 0.4, 2.0)])
    assert fourier.inverse_participation_ratio(waves) == pytest.approx(1.0, abs=1e-5)
    both = torch.cos(angle) + torch.cos(angle * 2)
    assert fourier.inverse_participation_ratio(both[None]) == pytest.approx(0.5, abs=1e-5)
    noise = torch.randn(2000, 23, generator=draw())
    assert 0.13 < fourier.inverse_participation_ratio(noise) < 0.2
    assert math.isnan(fourier.inverse_participation_ratio(torch.zeros(2, 23)))


def test_key_frequencies_are_recovered():
    position = torch.arange(31)[:, None] * (2 * math.pi / 31)
    frequencies = torch.tensor([4.0, 4.0, 9.0, 13.0])
    embedding = torch.cos(position * frequencies) + 0.01 * torch.randn(31, 4, generator=draw())
    assert fourier.key_frequencies(embedding, 3) == [4, 9, 13]


@pytest.mark.parametrize("p", [7, 8])
def test_sum_waves_are_orthonormal(p):
    waves = fourier.sum_waves(p, list(range(1, p // 2 + 1)))
    assert torch.allclose(waves @ waves.T, torch.eye(len(waves), dtype=torch.float64), atol=1e-10)
    assert len(waves) == p - 1


def test_key_part_keeps_functions_of_sum_and_drops_rest():
    p = 7
    a, b = torch.cartesian_prod(torch.arange(p), torch.arange(p)).T
    general = torch.stack([torch.cos(2 * math.pi * 2 / p * (a + b - c)) for c in range(p)], 1).double()
    other = torch.stack([torch.cos(2 * math.pi * 2 / p * (a - b + c)) for c in range(p)], 1).double()
    assert torch.allclose(fourier.key_part(general, p, [2]), general, atol=1e-5)
    assert fourier.key_part(other, p, [2]).abs().max() < 1e-5
    assert fourier.key_part(general, p, [1, 3]).abs().max() < 1e-5
    # The same by a two-dimensional transform, one output at a time.
    logits = torch.randn(p * p, 3, generator=draw(), dtype=torch.float64)
    spectrum = torch.fft.fft2(logits.T.reshape(3, p, p))
    kept = torch.zeros_like(spectrum)
    for k in (2, 3):
        for q in (k, p - k):
            kept[:, q, q] = spectrum[:, q, q]
    by_transform = torch.fft.ifft2(kept).real.reshape(3, p * p).T
    assert torch.allclose(fourier.key_part(logits, p, [2, 3]), by_transform, atol=1e-9)


def test_restricted_and_excluded_loss_separate_general_from_memorised():
    p = 11
    pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))
    labels = pairs.sum(1) % p
    waves = sum(
        torch.stack([torch.cos(2 * math.pi * k / p * (pairs.sum(1) - c)) for c in range(p)], 1)
        for k in (1, 2, 3)
    ).double()
    trained = torch.arange(0, p * p, 2)
    memorised = torch.zeros(p * p, p, dtype=torch.float64)
    memorised[trained, labels[trained]] = 20.0
    keys = [1, 2, 3]
    general = fourier.restricted_loss(10 * waves, labels, p, keys, losses)
    assert general == pytest.approx(float(losses(10 * waves, labels).mean()), rel=1e-3)
    assert fourier.restricted_loss(memorised, labels, p, keys, losses) > 1.0
    excluded = fourier.excluded_loss(10 * waves, labels, p, keys, trained, losses)
    assert excluded == pytest.approx(math.log(p), rel=1e-3)
    assert fourier.excluded_loss(memorised, labels, p, keys, trained, losses) < 0.1


def test_parallelograms_by_brute_force():
    found = set(map(tuple, parallelograms(7).tolist()))
    expected = {
        (i, n, j, m)
        for i, j, m, n in itertools.product(range(7), repeat=4)
        if i < j <= m < n and i + n == j + m
    }
    assert found == expected
    assert len(parallelograms(10)) == len(found | set(map(tuple, parallelograms(10).tolist())))


def test_representation_quality_of_line_and_of_noise():
    line = torch.arange(10.0)[:, None] * -3 + 5
    assert representation_quality(line) == 1.0
    assert representation_quality(torch.cat([line, 2 * line], 1)) == 1.0
    assert representation_quality(torch.randn(10, 1, generator=draw())) < 0.4
    assert math.isnan(representation_quality(torch.ones(10, 1)))


def test_attack_on_linear_net_is_optimal():
    net = nn.Linear(6, 2).requires_grad_(False)
    inputs = torch.rand(40, 6, generator=draw()) * 0.5 + 0.25
    labels = (net(inputs).argmax(1)).clone()
    labels[:5] = 1 - labels[:5]
    moved = attacked(net, inputs, labels, radius=0.1, steps=8)
    assert (moved - inputs).abs().max() <= 0.1 + 1e-6
    # With two classes the best attack moves every input by the radius against the difference.
    direction = (net.weight[0] - net.weight[1]).sign() * (2 * labels - 1)[:, None]
    assert torch.allclose(moved, inputs + 0.1 * direction, atol=1e-5)
    lead = net(inputs).gather(1, labels[:, None])[:, 0] - net(inputs).gather(1, 1 - labels[:, None])[:, 0]
    worst = lead - 0.1 * (net.weight[0] - net.weight[1]).abs().sum()
    share = float((worst > 0).double().mean())
    assert adversarial_accuracy(net, inputs, labels, radius=0.1, steps=8) == pytest.approx(share)
    assert attacked(net, inputs, labels, radius=2.0, steps=8).min() >= 0


def test_attack_writes_no_gradient():
    net = Mlp((6, 5, 2))
    attacked(net, torch.rand(4, 6), torch.zeros(4, dtype=torch.int64), radius=0.1, steps=2)
    assert all(p.grad is None for p in net.parameters())


def test_local_complexity_counts_hyperplanes_through_ball():
    frame = torch.eye(2, dtype=torch.float64)
    lines = nn.Linear(2, 3)
    with torch.no_grad():
        lines.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
        lines.bias.copy_(torch.tensor([0.0, -5.0, -0.05]))
    points = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
    # The first and the third line pass within .1 of the origin; none passes near the other point.
    assert local_complexity(lambda x: [lines(x)], points, frame, 0.1) == 1.0
    assert local_complexity(lambda x: [lines(x)], points[:1], frame, 0.1) == 2.0
    assert local_complexity(lambda x: [lines(x)], points[:1], frame, 0.01) == 1.0
    directions = neighbourhood(9, 25, seed=0)
    assert torch.allclose(directions @ directions.T, torch.eye(9, dtype=torch.float64), atol=1e-12)


def test_circulant_deviation():
    row = torch.randn(5, generator=draw())
    position = torch.arange(5)
    circulant = row[(position[None] - position[:, None]) % 5]
    anticirculant = row[(position[None] + position[:, None]) % 5]
    blocks = torch.cat([torch.cat([circulant, anticirculant], 1), torch.cat([anticirculant, circulant], 1)])
    assert circulant_deviation(blocks, 5) == pytest.approx(0.0, abs=1e-12)
    noise = torch.randn(46, 46, generator=draw())
    assert 0.8 < circulant_deviation(noise, 23) < 1.0
    assert math.isnan(circulant_deviation(torch.zeros(4, 4), 2))


def test_softmax_collapse_is_loss_of_exactly_zero():
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 50.0, 0.0], [200.0, 0.0, 0.0]])
    labels = torch.tensor([2, 1, 0])
    assert softmax_collapse(logits) == pytest.approx(2 / 3)
    assert (losses(logits, labels) == 0).float().mean() == pytest.approx(2 / 3)
    assert softmax_collapse(logits.double()) == pytest.approx(2 / 3)
    assert softmax_collapse(torch.tensor([[20.0, 0.0]])) == 1.0
    assert softmax_collapse(torch.tensor([[20.0, 0.0]], dtype=torch.float64)) == 0.0
    assert smallest_margin(logits, labels) == 1.0
