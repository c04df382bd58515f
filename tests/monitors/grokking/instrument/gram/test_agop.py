"""The input AGOP against Jacobians of single samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backlight.monitors.grokking.instrument.gram.checks import GramError
from backlight.monitors.grokking.instrument.gram.ntk import input_agop


def test_agop_is_mean_of_squared_jacobians() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    J = torch.stack([torch.autograd.functional.jacobian(net, row) for row in x])
    torch.testing.assert_close(input_agop(net, x), torch.einsum("nci,ncj->ij", J, J) / 6)
    assert all(p.grad is None for p in net.parameters())


class FunctionModule(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_agop_refuses_inputs_without_jacobian() -> None:
    net, x = nn.Linear(5, 3), torch.randn(6, 5)
    with pytest.raises(GramError, match=r"expected outputs \[6, ...\] that depend on the inputs, got \[\]"):
        input_agop(FunctionModule(lambda b: net(b).sum()), x)
    with pytest.raises(GramError, match="the outputs do not depend on the inputs"):
        input_agop(FunctionModule(lambda b: net(torch.ones_like(b))), x)
    with pytest.raises(GramError, match=r"expected real inputs.*int64; of token ids take the embedded"):
        input_agop(net, torch.randint(0, 7, (6, 2)))


class Checkpointed(nn.Module):
    """A layer with re-entrant checkpointing and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self._inside, x, use_reentrant=True))

    def _inside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Plain(Checkpointed):
    """The control without checkpointing."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._inside(x))


def controls() -> tuple[Checkpointed, Plain, Tensor]:
    one, other = Checkpointed(), Plain()
    other.load_state_dict(one.state_dict())
    return one, other, torch.randn(5, 3)


def test_agop_of_reentrantly_checkpointed_model() -> None:
    model, plain, x = controls()
    for p in model.parameters():
        p.grad = torch.full_like(p, 7.0)
    assert input_agop(model, x) == pytest.approx(input_agop(plain, x), rel=1e-6)
    assert all((p.grad == 7.0).all() for p in model.parameters())  # type: ignore[union-attr]


@pytest.mark.slow
def test_agop_of_compiled_model_compiles_nothing() -> None:
    torch._dynamo.reset()
    _, plain, x = controls()
    compiled = torch.compile(plain, backend="aot_eager")
    compiled(x[:2]).sum().backward()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert input_agop(compiled, x) == pytest.approx(input_agop(plain, x), rel=1e-6)
