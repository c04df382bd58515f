"""Weight decay of vectors, and gradient clipping."""

import math

import pytest
import torch
from torch import nn

from backlight.experiments.tasks.supervised import AdamWTraining, adamw, clip_gradients


@pytest.mark.parametrize("decay_vectors", [True, False])
def test_vectors_decay_unless_excluded(decay_vectors):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    nn.init.normal_(model[0].bias)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw(model, AdamWTraining(lr=0.1, weight_decay=0.5, decay_vectors=decay_vectors))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        decays = decay_vectors or parameter.ndim > 1
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if decays else 1.0))


@pytest.mark.parametrize(("limit", "expected"), [(0.0, 5.0), (2.0, 2.0), (7.0, 5.0)])
def test_gradients_are_clipped_to_the_norm(limit, expected):
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))]
    optimizer = torch.optim.SGD([{"params": weights[:1]}, {"params": weights[1:]}], lr=1.0)
    clip_gradients(optimizer, weights, limit)
    weights[0].grad, weights[1].grad = torch.tensor([3.0]), torch.tensor([0.0, 4.0])
    optimizer.step()
    taken = torch.cat([w.detach() for w in weights])
    assert float(taken.norm()) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(taken / taken.norm(), torch.tensor([-0.6, 0.0, -0.8]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("norm", [-1.0, math.inf, math.nan])
def test_an_impossible_norm_is_refused(norm):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(
        ValueError, match=r"training.clip is .*, expected a norm above 0, or 0 for no clipping"
    ):
        clip_gradients(optimizer, [], norm)
