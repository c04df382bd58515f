"""Liu et al. 2022: an effective theory of grokking as the forming of a representation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.experiments.data.split import apply_control, draw_split, generator, seeded
from backlight.experiments.experiment import Duration, Paper, Setup, experiment
from backlight.experiments.models import AdditionToy
from backlight.experiments.progress import representation_quality
from backlight.experiments.task import Task


@dataclass(frozen=True)
class Data:
    """Sums of two numbers below p = 10, a + b and b + a being one sample: 45 of 55 train (section 2).

    A sum's target is a fixed random vector of ``outputs`` normal numbers; an answer is right where the
    nearest target is the sum's.
    """

    p: int = 10
    train_size: int = 45
    outputs: int = 30


@dataclass(frozen=True)
class Model:
    """One-dimensional embeddings, a 1-200-200-30 tanh decoder (section 3, appendix and public code)."""

    dimensions: int = 1
    hidden: int = 200


@dataclass(frozen=True)
class Training(Duration):
    """Full batches; AdamW with rates of its own for embeddings and decoder (public code)."""

    steps: int = 5000
    embedding_lr: float = 1e-3
    decoder_lr: float = 1e-4
    embedding_decay: float = 0.0
    decoder_decay: float = 0.0
    log_every: int = 10
    thorough_every: int = 10


@experiment(
    "liu",
    "Liu: effective theory of representation learning",
    Paper(
        arxiv="2205.10343",
        title="Towards Understanding Grokking: An Effective Theory of Representation Learning",
        authors="Liu, Kitouni, Nolte, Michaud, Tegmark, Williams",
        claim="Generalisation comes when embeddings form parallelograms; how fast that is against the "
        "decoder decides between comprehension, grokking, memorisation and confusion.",
        unclear="The tolerance of a parallelogram and whether it is on the distance or its square; "
        "the public code has the square below 0.01, which is used here.",
    ),
    settings=Setup(Data(), Model(), Training()),
    ci=Setup(
        # A slow and wide decoder leaves the embedding the time to come into order before all is fitted.
        data=Data(train_size=36),
        model=Model(hidden=400),
        training=Training(
            steps=7000, embedding_lr=1e-2, decoder_lr=3e-5, decoder_decay=0.3, log_every=20, thorough_every=20
        ),
    ),
    effect="structure with generalisation",
    expects="",
    ci_expects="no-delay",
)
def build(settings: Setup[Data, Model, Training], seed: int, device: torch.device, control: str) -> Task:
    """Return the task."""
    p, training = settings.data.p, settings.training
    pairs = torch.combinations(torch.arange(p), with_replacement=True)
    split = draw_split(pairs, pairs.sum(1), settings.data.train_size, seed)
    split = apply_control(split, control, seed).to(device)
    targets = torch.randn(2 * p - 1, settings.data.outputs, generator=generator(seed, "targets")).to(device)
    with seeded(seed, "model"):
        model = AdditionToy(p, settings.model.dimensions, settings.model.hidden, settings.data.outputs)
        model = model.to(device)
    groups = (
        ([model.embed.weight], training.embedding_lr, training.embedding_decay),
        (list(model.decoder.parameters()), training.decoder_lr, training.decoder_decay),
    )
    optimizer = torch.optim.AdamW(
        [{"params": params, "lr": lr, "weight_decay": decay} for params, lr, decay in groups]
    )

    def losses(outputs: Tensor, labels: Tensor) -> Tensor:
        return (outputs - targets[labels]).square().mean(1)

    def right(outputs: Tensor, labels: Tensor) -> Tensor:
        return torch.cdist(outputs, targets).argmin(1) == labels

    return Task(
        model,
        optimizer,
        split,
        seed,
        chance=1 / (2 * p - 1),
        sample_losses=losses,
        right=right,
        accuracy="share of samples whose nearest target is that of the sum",
        cheap={"representation_quality": lambda: representation_quality(model.embed.weight)},
    )
