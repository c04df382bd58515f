"""Liu et al. 2023 (Omnigrok): grokking of images, induced by a large initialisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backlight.experiments.data.split import apply_control, image_split, seeded
from backlight.experiments.experiment import Paper, Setup, experiment
from backlight.experiments.models import Mlp
from backlight.experiments.progress import weight_norm
from backlight.experiments.task import AdamWTraining, Task, one_hot_squared_error


@dataclass(frozen=True)
class Data:
    """1,000 training images of MNIST (section 3 and public code).

    ``path`` is an .npz file of MNIST that the user supplies; where it is empty, scikit-learn's digits
    stand for it, 1,797 images of 8 by 8 pixels, and the test images are those not trained on. A
    ``test_size`` of 0 takes all.
    """

    path: str = ""
    train_size: int = 1000
    test_size: int = 0


@dataclass(frozen=True)
class Model:
    """Depth 3, width 200, ReLU, weights and biases of PyTorch's initialisation times ``scale``."""

    hidden: tuple[int, ...] = (200, 200)
    scale: float = 8.0


@dataclass(frozen=True)
class Training(AdamWTraining):
    """Squared error on one-hot labels, AdamW, batches of 200, 10⁵ updates (public code)."""

    batch_size: int = 200
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    log_every: int = 500
    thorough_every: int = 5000


@experiment(
    "omnigrok",
    "Omnigrok: images with a large initialisation",
    Paper(
        arxiv="2210.01117",
        title="Omnigrok: Grokking Beyond Algorithmic Data",
        authors="Liu, Michaud, Tegmark",
        claim="Weights begun eight times too large memorise first and generalise when weight decay has "
        "brought their norm down; begun at the usual size they do not grok.",
        unclear="The paper trains in fp64 and does not state the weight decay of each figure; 0.01 is "
        "that of the public code. Training here is in fp32.",
    ),
    settings=Setup(Data(), Model(), Training()),
    ci=Setup(
        data=Data(train_size=200),
        model=Model(hidden=(100, 100), scale=8.0),
        training=Training(
            # A slower decay leaves the fit, near step 1,000, where it is and moves generalisation to 6,000.
            steps=10_000,
            batch_size=0,
            lr=5e-3,
            weight_decay=0.03,
            log_every=25,
            thorough_every=500,
        ),
    ),
)
def build(settings: Setup[Data, Model, Training], seed: int, device: torch.device, control: str) -> Task:
    """Return the task."""
    data, training = settings.data, settings.training
    split = image_split(data.path, data.train_size, data.test_size, seed)
    split = apply_control(split, control, seed).to(device)
    with seeded(seed, "model"):
        model = Mlp((split.train_inputs.shape[1], *settings.model.hidden, 10), scale=settings.model.scale).to(
            device
        )
    cheap = {"last_layer_norm": lambda: weight_norm(model.layers[-1].parameters())}
    losses = one_hot_squared_error
    return Task.with_adamw(model, split, seed, training, chance=0.1, sample_losses=losses, cheap=cheap)
