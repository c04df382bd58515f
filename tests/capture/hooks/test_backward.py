"""Patched ``torch.autograd.backward`` and ``grad`` accept the same arguments and return the same results."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from backlight.capture.hub import HUB, Listener


class Events(Listener):
    """Listener that records the names of the reported events."""

    def __init__(self) -> None:
        self.reported: list[str] = []

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        self.reported.append(f"backward of {len(roots)}")

    def backward_end(self) -> None:
        self.reported.append("end")

    def backward_raised(self, error: BaseException) -> None:
        self.reported.append(type(error).__name__)

    def nested_begin(self) -> None:
        self.reported.append("nested")

    def grad_begin(self, roots: Sequence[Tensor]) -> None:
        self.reported.append(f"grad of {len(roots)}")

    def grad_end(self) -> None:
        self.reported.append("grad end")


@pytest.fixture
def events() -> object:
    listener = Events()
    HUB.add(listener)
    yield listener
    HUB.remove(listener)


def leaf() -> Tensor:
    return torch.arange(3.0, requires_grad=True)


def test_gradients_are_reported_unchanged(events: Events) -> None:
    x = leaf()
    (grad,) = torch.autograd.grad((x * x).sum(), x)
    assert torch.equal(grad, 2 * x)
    assert events.reported == ["grad of 1", "grad end"]


@pytest.mark.slow
def test_every_argument_form_is_accepted(events: Events) -> None:
    x = leaf()
    twice = torch.autograd.grad(outputs=(y for y in [x.sum(), (2 * x).sum()]), inputs=[x])
    assert torch.equal(twice[0], torch.full((3,), 3.0))
    (batched,) = torch.autograd.grad(x * 2, x, torch.eye(3), is_grads_batched=True)
    assert torch.equal(batched, 2 * torch.eye(3))
    y = x * 3
    (by_edge,) = torch.autograd.grad(get_gradient_edge(y.sum()), get_gradient_edge(x))
    assert torch.equal(by_edge, torch.full((3,), 3.0))
    torch.autograd.backward(get_gradient_edge((x * 5).sum()))
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 5.0))
    torch.autograd.backward(tensors=[(x * 1).sum()])
    assert torch.equal(x.grad, torch.full((3,), 6.0))
    begins = [event for event in events.reported if " of " in event]
    assert begins == ["grad of 2", "grad of 1", "grad of 0", "backward of 0", "backward of 1"]


@pytest.mark.slow
def test_function_transforms_pass_through(events: Events) -> None:
    x = torch.arange(3.0)
    assert torch.equal(torch.func.grad(lambda v: (v * v).sum())(x), 2 * x)
    hessian = torch.func.jacrev(torch.func.grad(lambda v: (v**3).sum()))(x)
    assert torch.allclose(hessian, torch.diag(6 * x))
    assert events.reported == []


def test_nested_backward_is_reported_as_nested(events: Events) -> None:
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                y = leaf()
                torch.autograd.grad(y.sum(), y)
                y.sum().backward()
            return grad

    Inner.apply(leaf()).sum().backward()
    assert events.reported == ["backward of 1", "nested", "nested", "end"]


def test_backward_error_is_reported_before_the_end(events: Events) -> None:
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(torch.ones(()), leaf())
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()
    assert events.reported == [
        "grad of 1",
        "RuntimeError",
        "grad end",
        "backward of 1",
        "RuntimeError",
        "end",
    ]
    assert (HUB.backward_depth, HUB.grad_depth) == (0, 0)


def test_patches_are_removed_with_the_last_listener() -> None:
    before = torch.autograd.grad, torch.autograd.backward
    listener = Events()
    HUB.add(listener)
    assert torch.autograd.grad is not before[0]
    HUB.remove(listener)
    assert (torch.autograd.grad, torch.autograd.backward) == before
