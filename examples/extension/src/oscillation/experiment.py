"""An experiment for ``backlight grok``: a linear student of a linear teacher, at a rate of one's choice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from backlight.experiments.data.split import apply_control, linear_teacher
from backlight.experiments.experiment import Duration, Paper, Setup, experiment
from backlight.experiments.task import Task


@dataclass(frozen=True)
class Data:
    """Gaussian inputs and their teacher."""

    inputs: int = 200
    train_size: int = 400
    test_size: int = 1000


@dataclass(frozen=True)
class Model:
    """A linear student without bias."""


@dataclass(frozen=True)
class Training(Duration):
    """Full-batch gradient descent: ``backlight grok run teacher --set training.lr=0.1``."""

    steps: int = 2000
    lr: float = 0.01
    tolerance: float = 1e-2
    log_every: int = 20
    thorough_every: int = 500


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the squared error of each sample, [N]."""
    return (outputs - targets).square().mean(1)


@experiment(
    "teacher",
    "A linear student of a linear teacher",
    Paper(
        arxiv="",
        title="An example of an extension",
        authors="",
        claim="With twice as many samples as inputs the student generalises as it fits: no delay.",
    ),
    settings=Setup(Data(), Model(), Training()),
    ci=Setup(Data(40, 80, 200), Model(), Training(steps=300, lr=0.1)),
    effect="no delay",
    expects="",
    ci_expects="",
)
def build(settings: Setup[Data, Model, Training], seed: int, device: torch.device, control: str) -> Task:
    """Return the task; ``control`` shuffles the labels where it is ``"random-labels"``."""
    data, training = settings.data, settings.training
    split, _ = linear_teacher(data.inputs, 1, data.train_size, data.test_size, seed)
    split = apply_control(split, control, seed).to(device)
    torch.manual_seed(seed)
    student = nn.Linear(data.inputs, 1, bias=False, dtype=torch.float64).to(device)
    return Task(
        student,
        torch.optim.SGD(student.parameters(), lr=training.lr),
        split,
        seed,
        chance=0.0,
        sample_losses=squared_error,
        right=lambda outputs, targets: squared_error(outputs, targets) <= training.tolerance,
        accuracy="share of samples whose squared error is at most training.tolerance",
    )
