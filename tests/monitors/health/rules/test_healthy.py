"""Healthy runs of many kinds have no finding above ``info``; expected ``info`` findings are listed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from backlight.records import Severity

Make = Callable[..., Any]
SETUPS: dict[str, tuple[Callable[[Make], Any], frozenset[str]]] = {}


def setup(*infos: str) -> Callable[[Callable[[Make], Any]], Callable[[Make], Any]]:
    """Register a healthy training setup and the rules that may report ``info``."""

    def decorate(train: Callable[[Make], Any]) -> Callable[[Make], Any]:
        SETUPS[train.__name__] = (train, frozenset(infos))
        return train

    return decorate


def blobs(count: int = 512, width: int = 20, classes: int = 5) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, width)
    return x, (x @ torch.randn(width, classes) + 0.5 * torch.randn(count, classes)).argmax(1)


def mlp(depth: int = 2, width: int = 48, inputs: int = 20, outputs: int = 5) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(inputs, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def fit(
    rec: Any, model: nn.Module, optimizer: Any, steps: int, *, batch: int = 32, x: Any = None, **more: Any
) -> Any:
    inputs, targets = blobs() if x is None else x
    schedule = more.pop("schedule", None)

    def loss_of(step: int) -> Tensor:
        chosen = torch.randint(0, len(inputs), (batch,)) if batch else slice(None)
        if schedule is not None:
            for group in optimizer.param_groups:
                group["lr"] = schedule(step)
        return functional.cross_entropy(model(inputs[chosen]), targets[chosen])

    return rec.fit(optimizer, steps, loss_of, **more)


@setup()
def perceptron_sgd(make: Make) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return fit(make(model, optimizer), model, optimizer, 120)


@setup()
def perceptron_tiny_batches(make: Make) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    return fit(make(model, optimizer), model, optimizer, 200, batch=2)


@setup()
def adam_with_warm_up_and_decay_to_zero(make: Make) -> Any:
    model = mlp(depth=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rate = lambda step: 3e-3 * min(step / 30, max(0.0, 1 - (step - 30) / 119))  # noqa: E731 - a schedule
    return fit(make(model, optimizer), model, optimizer, 150, schedule=rate)


@setup()
def full_batch_to_convergence(make: Make) -> Any:
    model = mlp(width=128)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return fit(make(model, optimizer), model, optimizer, 250, batch=0, x=blobs(64))


@setup()
def recorded_at_every_tenth_step(make: Make) -> Any:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return fit(make(model, optimizer, every=10), model, optimizer, 400)


@setup("vanishing")
def convolutions_with_batch_norm(make: Make) -> Any:
    """The bias of a convolution before a batch norm has no effect; its gradient is rounding error."""
    layers: list[nn.Module] = []
    for channels in (1, 8, 8, 8):
        layers += [nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(128, 1, 8, 8)
    return fit(
        make(model, optimizer), model, optimizer, 80, x=(x, (x.mean((1, 2, 3)) * 20).long().clamp(0, 3))
    )


class Block(nn.Module):
    def __init__(self, width: int, causal: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        y = self.first(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.second(x))


class LanguageModel(nn.Module):
    """Small pre-norm transformer over characters; its head is tied or zero-initialised."""

    def __init__(self, depth: int = 2, width: int = 32, tied: bool = True, vocabulary: int = 64) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        else:
            nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text() -> Tensor:
    source = (math.__doc__ or "") + "".join(str(f.__doc__) for f in vars(math).values()) + str(torch.__doc__)
    return torch.tensor([ord(c) % 64 for c in source])


def language(make: Make, model: nn.Module, steps: int, rate: float, warm: int, batch: int = 8) -> Any:
    tokens = text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)

    def loss_of(step: int) -> Tensor:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / max(warm, 1))
        at = torch.randint(0, len(tokens) - 17, (batch,))
        rows = torch.stack([tokens[i : i + 17] for i in at])
        return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    return make(model, optimizer).fit(optimizer, steps, loss_of, clip=1.0)


@setup("always_clipped")
def transformer_tied(make: Make) -> Any:
    return language(make, LanguageModel(), 150, 3e-3, 20)


@setup("always_clipped")
def transformer_zero_head_long_warm_up(make: Make) -> Any:
    return language(make, LanguageModel(tied=False), 150, 1e-3, 300)


@setup("always_clipped")
def transformer_of_eight_blocks(make: Make) -> Any:
    return language(make, LanguageModel(depth=8, tied=False), 80, 2e-3, 20)


@setup("no_gradient")
def frozen_backbone(make: Make) -> Any:
    model = mlp(depth=3)
    for p in model[:-1].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    return fit(make(model, optimizer), model, optimizer, 100)


class Adapted(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


@setup("no_gradient")
def low_rank_adapters_from_zero(make: Make) -> Any:
    model = nn.Sequential(*(Adapted(m) if isinstance(m, nn.Linear) else m for m in mlp(depth=3)))
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
    rate = lambda step: 1e-3 * min(1.0, (step + 1) / 50)  # noqa: E731 - a schedule
    return fit(make(model, optimizer), model, optimizer, 200, schedule=rate)


@setup()
def embedding_with_rare_tokens(make: Make) -> Any:
    model = nn.Sequential(nn.Embedding(2000, 16), nn.Flatten(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = (torch.rand(512, 4) ** 6 * 2000).long()
    return fit(make(model, optimizer), model, optimizer, 100, batch=8, x=(tokens, tokens[:, 0] % 4))


@setup()
def recurrent(make: Make) -> Any:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTM(8, 32, batch_first=True, num_layers=2), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.cell(x)[0][:, -1])

    model = Reader()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    x = torch.randn(256, 20, 8)
    return fit(make(model, optimizer), model, optimizer, 120, x=(x, x.sum((1, 2)).gt(0).long()), clip=5.0)


@setup()
def two_optimizers_against_each_other(make: Make) -> Any:
    model = nn.ModuleDict({"generator": mlp(inputs=4, outputs=2), "critic": mlp(inputs=2, outputs=1)})
    first = torch.optim.Adam(model["generator"].parameters(), lr=1e-3, betas=(0.5, 0.9))
    second = torch.optim.Adam(model["critic"].parameters(), lr=1e-3, betas=(0.5, 0.9))
    rec = make(model, first, second)
    for step in range(160):
        real = torch.randn(32, 2) * 0.3 + 1
        fake = model["generator"](torch.randn(32, 4))
        model.zero_grad()
        if step % 2:
            loss = functional.softplus(-model["critic"](fake)).mean()
            loss.backward()
            model["critic"].zero_grad()
            rec.advance(loss.detach(), first)
        else:
            rejected = model["critic"](fake.detach())
            loss = functional.softplus(-model["critic"](real)).mean() + functional.softplus(rejected).mean()
            loss.backward()
            rec.advance(loss.detach(), second)
    return rec.close()


@setup("no_gradient")
def critic_with_clipped_weights(make: Make) -> Any:
    """Train a Wasserstein critic: the bias of its output cancels in the loss, its gradient is zero."""
    critic = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.RMSprop(critic.parameters(), lr=5e-5)
    rec = make(critic, optimizer)
    for _ in range(80):
        optimizer.zero_grad()
        loss = critic(torch.randn(16, 8)).mean() - critic(torch.randn(16, 8) + 1).mean()
        loss.backward()
        rec.advance(loss.detach(), optimizer)
        for p in critic.parameters():
            p.data.clamp_(-0.01, 0.01)
    return rec.close()


@setup()
def policy_gradient_with_sparse_rewards(make: Make) -> Any:
    model = mlp(inputs=4, outputs=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def loss_of(_step: int) -> Tensor:
        states = torch.randn(16, 4)
        policy = torch.distributions.Categorical(logits=model(states))
        actions = policy.sample()
        correct = (actions == states.argmax(1).clamp(max=2)).float()
        reward = correct * (torch.rand(16) < 0.3) + 0.1 * torch.randn(16)
        return -(policy.log_prob(actions) * reward).mean()

    return make(model, optimizer).fit(optimizer, 200, loss_of)


@setup()
def half_precision_with_a_scaler(make: Make) -> Any:
    """fp32 weights with an fp16 forward and a scaler; the calibration of the scale skips steps."""
    model = mlp(depth=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=50)
    inputs, targets = blobs()

    def loss_of(_step: int) -> Tensor:
        chosen = torch.randint(0, len(inputs), (32,))
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(inputs[chosen])
        return functional.cross_entropy(out.float(), targets[chosen])

    return make(model, optimizer).fit(optimizer, 150, loss_of, scaler=scaler)


SLOW = {
    "full_batch_to_convergence",
    "perceptron_tiny_batches",
    "policy_gradient_with_sparse_rewards",
    "recorded_at_every_tenth_step",
    "transformer_of_eight_blocks",
    "transformer_zero_head_long_warm_up",
}
"""Variants of setups that the default run covers."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] if n in SLOW else []) for n in sorted(SETUPS)]
)
def test_healthy_run_has_no_finding(name: str, recorder: Make, evaluated: Make) -> None:
    train, infos = SETUPS[name]
    findings = evaluated(train(recorder))
    assert not [f"{f.rule}: {f.title}" for f in findings if f.severity is not Severity.INFO]
    assert {f.rule for f in findings} <= infos
