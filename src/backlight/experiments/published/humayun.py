"""Humayun et al. 2024: robustness to attacks comes long after accuracy, as regions migrate."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backlight.experiments.data.split import apply_control, generator, image_split, seeded
from backlight.experiments.experiment import Paper, Setup, experiment
from backlight.experiments.models import Mlp
from backlight.experiments.progress import (
    adversarial_accuracy,
    local_complexity,
    neighbourhood,
)
from backlight.experiments.task import (
    AdamWTraining,
    Task,
    cross_entropy,
    one_hot_squared_error,
)

LOSSES = {"cross-entropy": cross_entropy, "squared-error": one_hot_squared_error}


@dataclass(frozen=True)
class Data:
    """1,000 training images of MNIST (public code); ``path`` and the digits as in ``omnigrok``."""

    path: str = ""
    train_size: int = 1000
    test_size: int = 0


@dataclass(frozen=True)
class Model:
    """Depth 4, width 200 (public code, which names depths 2 to 6)."""

    hidden: tuple[int, ...] = (200, 200, 200)
    activation: str = "relu"
    scale: float = 1.0


@dataclass(frozen=True)
class Training(AdamWTraining):
    """AdamW, batches of 200, squared error on one-hot (public code).

    Attacks have ``attack_radius`` in l∞ of pixels in [0, 1], with ``attack_steps`` projected gradient
    steps; local complexity is counted on ``frame`` orthonormal directions at ``frame_radius``. Both are
    measured on ``measured`` test images and training images.
    """

    steps: int = 1_000_000
    batch_size: int = 200
    loss: str = "squared-error"
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    attack_radius: float = 0.1
    attack_steps: int = 10
    frame: int = 25
    frame_radius: float = 0.05
    measured: int = 500
    log_every: int = 1000


@experiment(
    "humayun",
    "Humayun: delayed robustness",
    Paper(
        arxiv="2402.15555",
        title="Deep Networks Always Grok and Here is Why",
        authors="Humayun, Balestriero, Baraniuk",
        claim="Accuracy on attacked samples comes long after accuracy on clean ones, while local "
        "complexity around the data falls; clean accuracy itself need not be delayed.",
        unclear="Attack and radius of each figure; the public code for MNIST measures complexity at "
        "radii .05 to 5 and 50 vertices, depths 2 to 6, with GELU as the last default of its file.",
    ),
    settings=Setup(Data(), Model(), Training()),
    ci=Setup(
        data=Data(train_size=200),
        model=Model(hidden=(100, 100), scale=8.0),
        training=Training(
            steps=10_000,
            batch_size=0,
            lr=5e-3,
            weight_decay=0.03,
            attack_radius=0.04,
            measured=200,
            log_every=100,
            thorough_every=100,
        ),
    ),
    effect="late robustness",
    expects="",
)
def build(settings: Setup[Data, Model, Training], seed: int, device: torch.device, control: str) -> Task:
    """Return the task."""
    data, training = settings.data, settings.training
    if training.loss not in LOSSES:
        raise ValueError(f"training.loss is {training.loss!r}, expected one of {', '.join(LOSSES)}")
    split = image_split(data.path, data.train_size, data.test_size, seed)
    split = apply_control(split, control, seed).to(device)
    with seeded(seed, "model"):
        model = Mlp(
            (split.train_inputs.shape[1], *settings.model.hidden, 10),
            activation=settings.model.activation,
            scale=settings.model.scale,
        ).to(device)
    frame = neighbourhood(split.train_inputs.shape[1], training.frame, seed)
    some_train = split.train_inputs[: training.measured]
    some_test = split.test_inputs[: training.measured]
    low, high = float(split.train_inputs.min()), float(split.train_inputs.max())
    random = torch.rand(some_train.shape, generator=generator(seed, "random inputs"))
    some_random = (low + (high - low) * random).to(device)

    def hidden(inputs: torch.Tensor) -> list[torch.Tensor]:
        return model.before_activations(inputs)[:-1]

    def robust() -> float:
        labels = split.test_labels[: training.measured]
        return adversarial_accuracy(
            model, some_test, labels, radius=training.attack_radius, steps=training.attack_steps
        )

    def complexity(points: torch.Tensor) -> float:
        return local_complexity(hidden, points, frame, training.frame_radius)

    thorough = {
        "adversarial_accuracy": robust,
        "local_complexity_train": lambda: complexity(some_train),
        "local_complexity_test": lambda: complexity(some_test),
        "local_complexity_random": lambda: complexity(some_random),
    }
    losses = LOSSES[training.loss]
    return Task.with_adamw(model, split, seed, training, chance=0.1, sample_losses=losses, thorough=thorough)
