"""Tensors that modules keep as attributes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from faults.silent.loop import batches, control, fault

STEPS = 6


class Gated(nn.Module):
    """Scales its input by a learned gate, which ``make`` gives it."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.gate = make()
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(x * self.gate)
        self.last = out if self.last is None or self.training else self.last
        return out


def train(model: nn.Module, *more: Tensor) -> None:
    optimizer = torch.optim.SGD([*model.parameters(), *more], lr=0.1)
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, dtype=torch.float16))


@fault(rule="trained_tensors", kind="computed_once", severity="error", step=1, names="`gate` of Gated")
def parameter_that_is_cast_at_once(injected: bool) -> None:
    train(Gated(lambda: parameter().float() if injected else nn.Parameter(torch.ones(4))))


@control
def output_that_is_kept_until_the_next_forward() -> None:
    train(Gated(lambda: torch.ones(4)))


@control
def cast_of_a_parameter_that_the_optimizer_holds() -> None:
    """It is updated, although the module does not see that: an embedding may be read once per run."""
    leaf = nn.Parameter(torch.ones(4, dtype=torch.float16))
    train(Gated(leaf.float), leaf)


@control
def weight_that_is_normed_in_every_forward() -> None:
    """`weight_norm` puts the result of an operation in place of the weight."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    train(nn.Sequential(layer))


@control
def fixed_tensor_as_attribute() -> None:
    train(Gated(lambda: torch.rand(4).float() + 1))


@control
def parameter_of_another_module_that_is_frozen() -> None:
    """Nothing gives it a gradient."""
    frozen = nn.Parameter(torch.ones(4, dtype=torch.float16), requires_grad=False)
    train(Gated(frozen.float))
