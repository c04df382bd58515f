from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from backlight.capture import loss_graph
from backlight.capture.loss_graph import addends

LOGITS = torch.randn(6, 4, requires_grad=True)
TARGETS = torch.tensor([0, 1, 2, 3, 0, 1])


def a_loop(rounds: int) -> Tensor:
    total = torch.zeros(())
    for row in range(rounds):
        total = total + functional.cross_entropy(LOGITS[row : row + 1], TARGETS[row : row + 1])
    return total


def two_sums() -> Tensor:
    parts = [functional.mse_loss(LOGITS[row], torch.zeros(4)) for row in range(5)]
    return torch.stack(parts).sum() + torch.stack(parts[:3]).sum()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (LOGITS.mean, 1),
        (lambda: functional.cross_entropy(LOGITS, TARGETS), 1),
        (lambda: functional.mse_loss(LOGITS, torch.zeros(6, 4)) + functional.l1_loss(LOGITS, LOGITS * 2), 2),
        (LOGITS.sum, 24),
        (lambda: -LOGITS[:3].sum() / 2, 12),
        (lambda: functional.mse_loss(LOGITS, torch.zeros(6, 4), reduction="sum"), 24),
        (lambda: functional.binary_cross_entropy_with_logits(LOGITS, torch.zeros(6, 4), reduction="sum"), 24),
        (lambda: a_loop(1), 1),
        (lambda: a_loop(6), 6),
        (two_sums, 8),
        (lambda: LOGITS.pow(2).sum().sqrt(), 1),
    ],
)
def test_addends_of_a_loss(loss: Callable[[], Tensor], expected: int) -> None:
    assert addends(loss().grad_fn) == expected


def test_sum_of_class_losses_grows_with_its_samples() -> None:
    sums = [functional.cross_entropy(LOGITS[:n], TARGETS[:n], reduction="sum").grad_fn for n in (2, 6)]
    few, many = (addends(one) for one in sums)
    assert few
    assert many == 3 * few


def test_no_saved_tensor_is_unpacked() -> None:
    def unpack(_: Tensor) -> Tensor:
        raise AssertionError("unpacked")

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        loss = functional.mse_loss(LOGITS, torch.zeros(6, 4), reduction="sum") * LOGITS.sum()
    assert addends(loss.grad_fn) == 1


def test_endless_sum_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_graph, "MAX_ADDENDS", 8)
    assert addends(a_loop(6).grad_fn) is None
