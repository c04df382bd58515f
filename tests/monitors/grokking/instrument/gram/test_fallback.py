"""Parameters without a kernel, and outputs that samples share: measured, and with eigenvectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backlight

N = 6


def entropies(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def penalised(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    out = model(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, batch[1], reduction="none") + (g.flatten(1).norm(dim=1) - 1).square()


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.W


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W, self.b = nn.Parameter(torch.randn(2, 5, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ni,hio->nho", x, self.W).tanh().sum(1) + self.b


class Adapted(nn.Linear):
    """A low-rank adapter whose own weight is frozen."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.A, self.B = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))
        self.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.A.T @ self.B.T


class AdaptedByHook(nn.Linear):
    """An adapter in a hook: the forward is that of a linear layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.A, self.B = nn.Parameter(torch.randn(2, inputs)), nn.Parameter(torch.randn(outputs, 2))
        self.register_forward_hook(lambda m, args, out: out + args[0] @ m.A.T @ m.B.T)


class Hypernetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.z, self.h, self.out = nn.Parameter(torch.randn(1, 4)), nn.Linear(4, 15), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x @ self.h(self.z).view(5, 3)))


class Perceiver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.latents, self.ln = nn.Parameter(torch.randn(1, 3, 5)), nn.LayerNorm(5)
        self.q, self.out = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(self.ln(self.latents)).repeat(len(x), 1, 1)
        return self.out(((q @ x.transpose(1, 2)).softmax(-1) @ x).mean(1))


def two(layer: Callable[[int, int], nn.Module]) -> nn.Module:
    return nn.Sequential(layer(5, 6), nn.Tanh(), layer(6, 3))


def first(change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(change(nn.Linear(5, 6)), nn.Tanh(), nn.Linear(6, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], Tensor]]] = {
    "product": (Product, entropies),
    "einsum": (Einsum, entropies),
    "adapter": (lambda: two(Adapted), entropies),
    "adapter_by_hook": (lambda: two(AdaptedByHook), entropies),
    "old_weight_norm": (lambda: first(nn.utils.weight_norm), entropies),
    "hypernetwork": (Hypernetwork, entropies),
    "perceiver": (Perceiver, entropies),
    "gradient_penalty": (lambda: two(nn.Linear), penalised),
    "gradient_penalty_of_einsum": (Einsum, penalised),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("at_once", [None, 2])
@pytest.mark.parametrize("name", CASES)
def test_gram_and_eigenvectors(name: str, at_once: int | None) -> None:
    build, losses = CASES[name]
    model = build().double()
    shape = (N, 4, 5) if name == "perceiver" else (N, 5)
    batch = torch.randn(*shape, dtype=torch.float64), torch.randint(0, 3, (N,))
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained, retain_graph=True)])
        for loss in losses(model, batch)
    ]
    A = torch.stack(rows)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return losses(model, batch).sum()

    for _ in range(3):  # the third is not checked
        found = backlight.gram(model, loss, batch, at_once=at_once)
        torch.testing.assert_close(found.matrix, A @ A.T, rtol=1e-9, atol=1e-12)
        values, vectors = found.eigenvectors(2)
        torch.testing.assert_close(values, torch.linalg.svdvals(A)[:2] ** 2 / N)
        V = torch.cat([part.flatten(1) for part in vectors.values()], 1)
        assert float(((V @ A.T) @ A / N - values[:, None] * V).norm()) < 1e-8 * float(values[0])
        mean = torch.cat([g.flatten() for g in found.mean_gradient.values() if g is not None])
        torch.testing.assert_close(mean, A.mean(0))


def test_spectral_norm_is_measured_as_the_model_is() -> None:
    """Its forward pass changes a buffer: every pass begins with the same one."""
    model = first(nn.utils.spectral_norm).double()
    batch = torch.randn(N, 5, dtype=torch.float64), torch.randint(0, 3, (N,))
    before = model[0].weight_u.clone()
    found = backlight.gram(model, lambda m, b: entropies(m, b).sum(), batch, at_once=2)
    assert torch.equal(model[0].weight_u, before)
    values, _ = found.eigenvectors(2)
    assert len(values) == 2
