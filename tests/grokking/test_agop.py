"""The input AGOP against Jacobians of samples one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from backlight.grokking.gram.agop import input_agop
from backlight.grokking.gram.gates import GramError


def test_agop_is_the_mean_of_squared_jacobians() -> None:
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(6, 5, dtype=torch.float64)
    J = torch.stack([torch.autograd.functional.jacobian(net, row) for row in x])
    torch.testing.assert_close(input_agop(net, x), torch.einsum("nci,ncj->ij", J, J) / 6)
    assert all(p.grad is None for p in net.parameters())
    found = input_agop(net, x.float(), function=lambda m, batch: m.double()(batch.double())[:, :1])
    torch.testing.assert_close(found, torch.einsum("ni,nj->ij", J[:, 0], J[:, 0]) / 6, rtol=1e-5, atol=1e-7)


def test_agop_of_embedded_tokens_and_images() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head = nn.Embedding(7, 4), nn.Linear(8, 3)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.emb(ids).flatten(1).tanh())

    net = Tokens().double()
    ids = torch.randint(0, 7, (6, 2))
    embedded = net.emb(ids).detach()
    found = input_agop(net, embedded, function=lambda m, h: m.head(h.flatten(1).tanh()))
    J = torch.stack(
        [torch.autograd.functional.jacobian(lambda h: net.head(h.flatten().tanh()), row) for row in embedded]
    ).flatten(2)
    torch.testing.assert_close(found, torch.einsum("nci,ncj->ij", J, J) / 6)
    with pytest.raises(GramError, match=r"expected real inputs.*int64; of token ids take the embedded"):
        input_agop(net, ids)


def test_agop_refuses_what_has_no_jacobian() -> None:
    net = nn.Linear(5, 3)
    x = torch.randn(6, 5)
    with pytest.raises(GramError, match=r"expected outputs \[6, ...\] that depend on the inputs, got \[\]"):
        input_agop(net, x, function=lambda m, b: m(b).sum())
    with pytest.raises(GramError, match="the outputs do not depend on the inputs"):
        input_agop(net, x, function=lambda m, b: m(torch.ones_like(b)))
