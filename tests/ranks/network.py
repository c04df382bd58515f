"""Model and data of the multi-rank tests, and the reference run of one process on the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

TOKENS, WIDTH, HIDDEN, LENGTH, SAMPLES, STEPS = 11, 6, 10, 4, 8, 4


class Block(nn.Module):
    """Sizes that four ranks cannot split evenly, and a parameter with fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, a block, a gate with three elements, an unused branch and a tied head."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.block = Block()
        self.gate = nn.Parameter(torch.ones(3))
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.block(self.embed(tokens))
        return self.head(x * self.gate.repeat(2))


def build(*, tied: bool = True, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(7)
    return Net(tied=tied).to(dtype)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of a step; two tokens never occur, so some gradients are zero."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, TOKENS - 2, (SAMPLES, LENGTH), generator=generator)
    return tokens, torch.randint(0, TOKENS, (SAMPLES, LENGTH), generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)


class Whole:
    """Statistics of one process on the whole batch: ``at[step][series, column, name]``."""

    def __init__(self, *, tied: bool = True, dtype: torch.dtype = torch.float64) -> None:
        self.model = build(tied=tied, dtype=dtype)
        self.optimizer = adam(self.model)
        self.at: list[dict[tuple[str, str, str], float]] = []
        self.total: list[float] = []
        self.loss: list[float] = []

    def run(self, steps: int = STEPS) -> Whole:
        """Train."""
        for step in range(steps):
            tokens, target = batch(step)
            self.optimizer.zero_grad()
            loss = loss_of(self.model(tokens), target)
            loss.backward()
            self.loss.append(float(loss.detach()))
            self.at.append({})
            self._gradients()
            before = {n: p.detach().clone() for n, p in self.model.named_parameters()}
            self.optimizer.step()
            for name, p in self.model.named_parameters():
                if p.grad is not None:
                    self.at[-1]["update", "update_norm", name] = float((p.detach() - before[name]).norm())
                    self.at[-1]["update", "weight_norm", name] = float(before[name].norm())
                    ratio = (p.detach() - before[name]).norm() / before[name].norm()
                    self.at[-1]["update", "ratio", name] = float(ratio)
        return self

    def _gradients(self) -> None:
        squares = 0.0
        for name, p in self.model.named_parameters():
            if p.grad is None:
                continue
            g = p.grad.double()
            values = {
                "norm": g.norm(),
                "max_abs": g.abs().max(),
                "sum": g.sum(),
                "mean": g.mean(),
                "numel": g.numel(),
                "zeros": (g == 0).sum(),
                "nan": g.isnan().sum(),
                "inf": g.isinf().sum(),
            }
            for column, value in values.items():
                self.at[-1]["gradient", column, name] = float(value)
            squares += float(g.square().sum())
        self.total.append(squares**0.5)
