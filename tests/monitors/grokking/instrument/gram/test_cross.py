"""Training against test samples, retraining as the truth; the neural tangent kernel of a linear net."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import backlight
from backlight.experiments import config
from backlight.monitors.grokking.instrument.gram.checks import GramError
from tiny_classifier import Batch, batch, net, summed


def per_sample(model: nn.Module, given: Batch) -> Tensor:
    rows = []
    for n in range(len(given[0])):
        loss = summed(model, (given[0][n : n + 1], given[1][n : n + 1]))
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    return torch.stack(rows)


@pytest.mark.parametrize("at_once", [None, 4])
def test_cross_gram_is_that_of_single_gradients(at_once: int | None) -> None:
    model, train, test = net(), batch(6), batch(9)
    found = backlight.gram(model, summed, train, against=test, at_once=at_once)
    A, B = per_sample(model, train), per_sample(model, test)
    torch.testing.assert_close(found.cross(), A @ B.T, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.influence(), A @ B.sum(0), rtol=1e-10, atol=1e-12)
    parts = sum(found.cross(f"layer/{name}") for name in found.per_layer)
    torch.testing.assert_close(parts, found.cross())


def test_batches_that_do_not_fit_are_refused() -> None:
    model, (x, y) = net(), batch(4)
    with pytest.raises(GramError, match=r"`against` must hold the same tensors .* batch\[0\] \[5\] .* \[4\]"):
        backlight.gram(model, summed, (x, y), against=(x[:, :4], y))
    with pytest.raises(GramError, match="there is no second batch; measure with gram"):
        backlight.gram(model, summed, (x, y)).cross()


@pytest.mark.slow
def test_influence_over_training_is_leave_one_out_retraining() -> None:
    task = config.build()
    split = task.split
    x, y, tx, ty = split.train_inputs, split.train_labels, split.test_inputs, split.test_labels
    start, steps, rate = task.model, 30, 0.02  # far enough for later steps: .93 at 0.1

    def loss(model: nn.Module, given: Batch) -> Tensor:
        return functional.mse_loss(model(given[0]), functional.one_hot(given[1], 23).float(), reduction="sum")

    def trained(left_out: int | None) -> tuple[float, Tensor]:
        model = copy.deepcopy(start)
        weights = torch.ones(len(x))
        total = torch.zeros(len(x), dtype=torch.float64)
        if left_out is not None:
            weights[left_out] = 0
        for _ in range(steps):
            if left_out is None:
                total += rate / len(x) * backlight.gram(model, loss, (x, y), against=(tx, ty)).influence()
            model.zero_grad()
            errors = (model(x) - functional.one_hot(y, 23)).square().sum(1)
            ((weights * errors).sum() / len(x)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=rate)
        return float(loss(model, (tx, ty)).detach()), total

    whole, influence = trained(None)
    some = torch.cat([influence.argsort()[:8], influence.argsort()[-8:]]).tolist()
    lost = [trained(n)[0] - whole for n in some]  # what the test loss is higher by without a sample
    assert np.corrcoef(influence[some].numpy(), lost)[0, 1] > 0.99


# The neural tangent kernel


def test_kernel_of_a_linear_net_in_closed_form() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False)).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    first, second = (p.detach() for p in model.parameters())
    found = backlight.ntk(model, x)
    hidden = x @ first.T
    through_first = torch.einsum("nm,cd->ncmd", x @ x.T, second @ second.T)
    through_second = torch.einsum("nm,cd->ncmd", hidden @ hidden.T, torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(found.kernel, through_first + through_second, rtol=1e-10, atol=1e-12)
    assert (found.samples, found.outputs) == (6, 3)


def test_alignment_and_distance() -> None:
    model, x = net(), batch(6)[0]
    start = backlight.ntk(model, x)
    assert start.distance(start) == pytest.approx(0, abs=1e-12)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.5)
    assert 0.01 < backlight.ntk(model, x).distance(start) < 1
    y = torch.randn(6, 3, dtype=torch.float64)
    y -= y.mean(0)
    alone = type(start)(torch.outer(y.flatten(), y.flatten()).reshape(6, 3, 6, 3))
    assert alone.alignment(y) == pytest.approx(1)
    values, vectors = torch.linalg.eigh(start.matrix)
    v = vectors[:, -1].reshape(6, 3)
    v = v - v.mean(0)
    expected = v.flatten() @ start.matrix @ v.flatten() / (values.norm() * v.square().sum())
    assert start.alignment(v) == pytest.approx(float(expected))
    with pytest.raises(GramError, match=r"targets must have shape \[6, 3\], got \[6\]"):
        start.alignment(y[:, 0])
    with pytest.raises(GramError, match=r"kernels of .* have no distance"):
        start.distance(backlight.ntk(model, x[:4]))
    with pytest.raises(GramError, match="must return a tensor with 6 samples first, got \\[\\]"):
        backlight.ntk(model, x, outputs=lambda model, batch: model(batch).sum())
