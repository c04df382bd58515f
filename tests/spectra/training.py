"""A small transformer and training loops, for tests of the spectra monitor in a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import backlight

WIDTH, VOCABULARY, LENGTH = 16, 12, 6


class Block(nn.Module):
    """Attention over a fused weight, and a feed-forward layer, optionally checkpointed."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def _inside(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.drop(self.down(torch.relu(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None or not torch.is_grad_enabled():
            return self._inside(x)
        out: Tensor = checkpoint(self._inside, x, use_reentrant=self.reentrant)
        return out


class Transformer(nn.Module):
    """From tokens to logits; ``tied`` shares the embedding with the head."""

    def __init__(self, *, tied: bool = False, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block(reentrant)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.embed(x)))
        return logits


def build(**options: Any) -> Transformer:
    """Return the same model each time."""
    torch.manual_seed(0)
    return Transformer(**options)


def batch(number: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Return the tokens and next tokens of a numbered batch."""
    draw = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy."""
    return nn.functional.cross_entropy(model(pair[0]).flatten(0, 1), pair[1].flatten())


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 3,
    micro: int = 4,
    scaler: Any = None,
    autocast: bool = False,
    before: Callable[[int, int], None] = lambda _step, _micro: None,
    number: Callable[[int, int], int] = lambda step, micro: 100 * step + micro,
    size: Callable[[int, int], int] = lambda _step, _micro: 8,
) -> None:
    """Train with accumulation; the data follow from step and microbatch."""
    torch.manual_seed(7)
    for step in range(steps):
        optimizer.zero_grad()
        for m in range(micro):
            before(step, m)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model, batch(number(step, m), size(step, m))) / micro
            (scaler.scale(loss) if scaler is not None else loss).backward()
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the weights and buffers."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether two states are bit-identical."""
    return all(torch.equal(one[name], other[name]) for name in one)


def watch(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, *, every: int = 1, **settings: Any
) -> Any:
    """Watch a training run with the spectra monitor only."""
    return backlight.watch(model, optimizer, run=path, monitors=("spectra",), every=every, **settings)


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


def train_once(
    model: nn.Module, loop: dict[str, Any], path: Path | None = None, **settings: Any
) -> dict[str, Tensor]:
    """Train, watched if there is a path, and return the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loop = {**loop, "scaler": scaler()} if loop.get("scaler") is True else loop
    if path is None:
        train(model, optimizer, **loop)
    else:
        with watch(model, optimizer, path, every=2, **settings):
            train(model, optimizer, **loop)
    return weights(model)


def unmeasured(path: Path) -> dict[str, list[int | None]]:
    """Return the steps by the reason why nothing was measured there."""
    found: dict[str, list[int | None]] = {}
    for event in backlight.open_run(path).events("unmeasured"):
        found.setdefault(str(event.payload["reason"]), []).append(event.step)
    return found
