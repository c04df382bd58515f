"""Schedule and triggers of the independence check."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import backlight
from backlight.monitors.grokking.instrument.gram import checks
from backlight.monitors.grokking.instrument.gram.checks import GramError
from gram_setups import images, labels


def was_checked(found: Any) -> bool:
    return next(iter(found.coverage.values())).independence is not None


def new_loss() -> Callable[[nn.Module, Any], Tensor]:
    """Return a new loss function."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return labels(model, batch)

    return loss


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 3), nn.Identity()).double()


class Task:
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return labels(model, batch)


def test_check_interval_doubles() -> None:
    net, batch = linear(), images(7)
    checked_at = [was_checked(backlight.gram(net, labels, batch)) for _ in range(9)]
    assert [number for number, checked in enumerate(checked_at, 1) if checked] == [1, 2, 4, 8]


@pytest.mark.slow
def test_new_combination_is_checked_again() -> None:
    net, batch, task = linear(), images(7), Task()
    assert [was_checked(backlight.gram(net, task.loss, batch)) for _ in range(3)] == [True, True, False]
    assert was_checked(backlight.gram(net, Task().loss, batch))
    for _ in range(3):
        backlight.gram(net, labels, batch)
    assert was_checked(backlight.gram(net, labels, tuple(part[:4] for part in batch)))
    assert was_checked(backlight.gram(net, new_loss(), batch))
    assert was_checked(backlight.gram(linear(), labels, batch))
    net[1].eval()
    assert was_checked(backlight.gram(net, labels, batch))


class LateMixing(nn.Module):
    """Mixes samples by a share that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.share = nn.Linear(7, 3), 0.0

    def forward(self, x: Tensor) -> Tensor:
        out = self.lin(x)
        return out + self.share * out.mean(0)


@pytest.mark.slow
def test_late_sample_mixing_is_detected_every_time() -> None:
    net, batch = LateMixing().double(), images(7)
    for _ in range(3):
        backlight.gram(net, labels, batch)
    net.share = 1.0
    for _ in range(3):
        with pytest.raises(GramError, match="independent along the first dimension"):
            backlight.gram(net, labels, batch)


def test_models_and_functions_are_not_kept_alive() -> None:
    gc.collect()
    before = len(checks._PASSED)
    net = nn.Sequential(nn.Linear(7, 3)).double()
    backlight.gram(net, new_loss(), images(7))
    assert len(checks._PASSED) == before + 1
    assert not len(checks._PASSED[net])  # the function was collected
    del net
    gc.collect()
    assert len(checks._PASSED) == before


def test_loss_without_weak_references_is_checked_each_time() -> None:
    class Slotted:
        __slots__ = ()

        def __call__(self, model: nn.Module, batch: Any) -> Tensor:
            return labels(model, batch)

    net, batch, loss = nn.Sequential(nn.Linear(7, 3)).double(), images(7), Slotted()
    assert all(was_checked(backlight.gram(net, loss, batch)) for _ in range(4))
    assert torch.is_grad_enabled()
