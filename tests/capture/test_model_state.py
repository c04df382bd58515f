"""Passes of backlight: they leave the model unchanged and no listener observes them."""

from __future__ import annotations

import torch
from torch import nn

from backlight.capture.forward import Forwards
from backlight.capture.hub import HUB, Listener
from backlight.capture.model_state import preserve_state


class Counting(Listener):
    """Listener that counts forwards and gradient computations."""

    def __init__(self) -> None:
        self.forwards = self.grads = 0

    def forward_begin(self, *_call: object) -> None:
        self.forwards += 1

    def grad_begin(self, roots: object) -> None:
        self.grads += 1


def test_internal_passes_are_not_reported() -> None:
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    counting, forwards = Counting(), Forwards()
    HUB.add(counting)
    forwards.follow([model])
    try:
        with preserve_state(model):
            torch.autograd.grad(model(x).sum(), model.weight)
        assert (counting.forwards, counting.grads) == (0, 0)
        torch.autograd.grad(model(x).sum(), model.weight)
        assert (counting.forwards, counting.grads) == (1, 1)
    finally:
        forwards.leave()
        HUB.remove(counting)


def test_buffers_modes_and_random_state_are_restored() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    mean, state = model[0].running_mean.clone(), torch.get_rng_state()
    with preserve_state(model) as before:
        model(torch.randn(8, 3))
        model.eval()
        assert before.drew
    assert torch.equal(model[0].running_mean, mean)
    assert model.training
    assert model[1].training
    assert torch.equal(torch.get_rng_state(), state)
