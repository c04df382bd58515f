"""The fast oracle: modular addition mod 23 in a quadratic net, which groks in about a second."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from backlight.experiments.data.algorithmic import modular_table, one_hot_pairs
from backlight.experiments.data.split import apply_control, seeded, share_out
from backlight.experiments.experiment import Experiment, Paper
from backlight.experiments.models.mlp import PowerNet
from backlight.experiments.tasks.supervised import SupervisedTask, one_hot_squared_error


@dataclass(frozen=True)
class Data:
    """Pairs (a, b) mod ``p``, and the share of them that is trained on."""

    p: int = 23
    operation: str = "add"
    train_share: float = 0.5


@dataclass(frozen=True)
class Model:
    """U, V ~ N(0, 1/(2p)) and W ~ N(0, 1/width)."""

    width: int = 128


@dataclass(frozen=True)
class Training:
    """AdamW on full batches; ``log_every`` steps between two evaluations."""

    steps: int = 2000
    lr: float = 5e-3
    weight_decay: float = 1.0
    betas: tuple[float, float] = (0.9, 0.98)
    log_every: int = 10
    thorough_every: int = 100


@dataclass(frozen=True)
class Settings:
    """The oracle, as section 4 of the formulas states it."""

    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)


def build(
    settings: Settings | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
    control: str = "",
) -> SupervisedTask:
    """Return the oracle, ready to train."""
    settings = settings or Settings()
    p, width, device = settings.data.p, settings.model.width, torch.device(device)
    pairs, results = modular_table(p, settings.data.operation)
    split = share_out(one_hot_pairs(pairs, p), results, round(settings.data.train_share * len(pairs)), seed)
    split = apply_control(split, control, seed).to(device)
    with seeded(seed, "model"):
        model = PowerNet(2 * p, width, p, power=2, embed_std=(2 * p) ** -0.5, unembed_std=width**-0.5).to(
            device
        )
    training = settings.training
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=training.lr, weight_decay=training.weight_decay, betas=training.betas
    )
    return SupervisedTask(model, optimizer, split, seed, chance=1 / p, sample_losses=one_hot_squared_error)


ORACLE = Experiment(
    name="oracle",
    title="Fast oracle: modular addition in a quadratic net",
    paper=Paper(
        arxiv="2301.02679",
        title="Grokking modular arithmetic",
        authors="Gromov",
        claim="A two-layer quadratic net groks modular addition, and its solution has a closed form.",
        unclear="Sizes and training are chosen for speed, not published.",
    ),
    settings=Settings,
    ci=Settings(),
    build=build,
    effect="late generalisation",
)
