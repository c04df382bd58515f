"""Levi et al. 2024: grokking in a linear net, where the whole training has a closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from backlight.experiments.data.split import apply_control, generator, linear_teacher
from backlight.experiments.experiment import Duration, Paper, Setup, experiment
from backlight.experiments.progress import weight_norm
from backlight.experiments.task import Task


@dataclass(frozen=True)
class Data:
    """Gaussian inputs of ``inputs`` dimensions, a random linear teacher (section 3).

    λ = inputs / train_size; training generalises late where it is near 1, and never above 1.
    """

    inputs: int = 1000
    outputs: int = 1
    train_size: int = 1111
    test_size: int = 10_000


@dataclass(frozen=True)
class Training(Duration):
    """Full-batch gradient descent of the mean squared error in fp64.

    A sample counts as right where its squared error, the mean over outputs, is at most ``tolerance``
    (the paper's ε).
    """

    lr: float = 0.01
    tolerance: float = 1e-3


@dataclass(frozen=True)
class Model:
    """A linear student without bias, with entries N(0, 1/(2·inputs·outputs)) times ``scale`` at first."""

    scale: float = 1.0


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the squared error of each sample, the mean over outputs, [N]."""
    return (outputs - targets).square().mean(1)


@experiment(
    "levi",
    "Levi: linear teacher and student",
    Paper(
        arxiv="2310.16441",
        title="Grokking in Linear Estimators -- A Solvable Model that Groks without Understanding",
        authors="Levi, Beck, Bar-Sinai",
        claim="A linear student fits long before it generalises where λ = d/N is near 1, as its closed "
        "form D_t = D_0 (I - 2ηΣ/d_out)^t says; the delay is one of the accuracy's threshold.",
        unclear="Sizes, rate and ε differ between figures; those here have λ = .9 and ε = 1e-3 and "
        "could not be checked against each of them.",
    ),
    settings=Setup(Data(), Model(), Training()),
    ci=Setup(
        model=Model(),
        data=Data(inputs=100, train_size=105, test_size=1000),
        training=Training(steps=12_000, lr=0.1, tolerance=1e-3, log_every=20, thorough_every=500),
    ),
)
def build(settings: Setup[Data, Model, Training], seed: int, device: torch.device, control: str) -> Task:
    """Return the task."""
    data, training = settings.data, settings.training
    split, teacher = linear_teacher(data.inputs, data.outputs, data.train_size, data.test_size, seed)
    split = apply_control(split, control, seed).to(device)
    student = nn.Linear(data.inputs, data.outputs, bias=False, dtype=torch.float64)
    with torch.no_grad():
        drawn = torch.randn(teacher.shape, generator=generator(seed, "student"), dtype=torch.float64)
        student.weight.copy_(drawn * settings.model.scale * (2 * data.inputs * data.outputs) ** -0.5)
    student = student.to(device)
    teacher = teacher.to(device)
    # The student that always answers 0 is right where a target is that small; errors are normal.
    chance = math.erf(math.sqrt(training.tolerance / 2) / float(teacher.norm())) if data.outputs == 1 else 0.0
    return Task(
        student,
        torch.optim.SGD(student.parameters(), lr=training.lr),
        split,
        seed,
        chance=chance,
        sample_losses=squared_error,
        right=lambda outputs, targets: squared_error(outputs, targets) <= training.tolerance,
        accuracy="share of samples whose squared error is at most training.tolerance",
        cheap={"distance_to_teacher": lambda: weight_norm([student.weight - teacher])},
    )
