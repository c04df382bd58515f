"""The fast oracle: modular addition mod 23 in a quadratic net, which groks in about a second.

Half of the 529 pairs train a net f = ((U[a] + V[b])²)W of width 128 (8,832 parameters) with full batches,
mean squared error on one-hot labels and AdamW. It memorises at step 30 to 40 and generalises near step 1000
(architecture and closed-form solution: Gromov, 2301.02679; see docs/formulas.md, section 4). With a weight
decay of .1, with random labels, or with a training share of .8 it does not grok. It is not a published
experiment, so it is not registered.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backlight.experiments.data.algorithmic import modular_table, one_hot_pairs
from backlight.experiments.data.split import apply_control, draw_split, seeded
from backlight.experiments.experiment import Experiment, Paper, Settings
from backlight.experiments.models import PowerNet
from backlight.experiments.task import AdamWTraining, Task, one_hot_squared_error


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
class Training(AdamWTraining):
    """AdamW on full batches; ``log_every`` steps between two evaluations."""

    steps: int = 2000
    lr: float = 5e-3
    log_every: int = 10
    thorough_every: int = 100


SETTINGS = Settings(Data(), Model(), Training())


def build(
    settings: Settings[Data, Model, Training] = SETTINGS,
    seed: int = 0,
    device: torch.device | str = "cpu",
    control: str = "",
) -> Task:
    """Return the oracle, ready to train."""
    p, width, device = settings.data.p, settings.model.width, torch.device(device)
    pairs, results = modular_table(p, settings.data.operation)
    split = draw_split(one_hot_pairs(pairs, p), results, round(settings.data.train_share * len(pairs)), seed)
    split = apply_control(split, control, seed).to(device)
    with seeded(seed, "model"):
        model = PowerNet(2 * p, width, p, power=2).to(device)
    return Task.with_adamw(
        model, split, seed, settings.training, chance=1 / p, sample_losses=one_hot_squared_error
    )


ORACLE = Experiment(
    "oracle",
    "Fast oracle: modular addition in a quadratic net",
    Paper(
        arxiv="2301.02679",
        title="Grokking modular arithmetic",
        authors="Gromov",
        claim="A two-layer quadratic net groks modular addition, and its solution has a closed form.",
        unclear="Sizes and training are chosen for speed, not published.",
    ),
    SETTINGS,
    SETTINGS,
    build,
)
