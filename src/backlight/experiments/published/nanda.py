"""Nanda et al. 2023: modular addition reverse-engineered, and progress measures that foretell it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.experiments import progress as fourier
from backlight.experiments.data.algorithmic import modular_table
from backlight.experiments.data.split import apply_control, draw_split, generator, seeded
from backlight.experiments.experiment import Paper, Setup, experiment
from backlight.experiments.models import PlainTransformer
from backlight.experiments.task import AdamWTraining, Task


@dataclass(frozen=True)
class Data:
    """Addition mod 113, 30 % of the pairs for training (section 3)."""

    p: int = 113
    train_share: float = 0.3


@dataclass(frozen=True)
class Model:
    """One layer, width 128, four heads, 512 ReLU units, no LayerNorm (section 3): 226,816 parameters."""

    layers: int = 1
    width: int = 128
    heads: int = 4
    hidden: int = 512


@dataclass(frozen=True)
class Training(AdamWTraining):
    """Full batches, AdamW with weight decay 1, 40,000 epochs (section 3); β and warm-up from the code.

    ``key_frequencies`` is how many the restricted and the excluded loss keep and remove.
    """

    steps: int = 40_000
    warmup: int = 10
    key_frequencies: int = 5
    thorough_every: int = 500


def precise_cross_entropy(outputs_NC: Tensor, labels_N: Tensor) -> Tensor:
    """Return the cross-entropy of each sample in fp64, as the authors take it against softmax collapse."""
    return torch.nn.functional.cross_entropy(outputs_NC.to(torch.float64), labels_N, reduction="none")


@experiment(
    "nanda",
    "Nanda: modular addition with progress measures",
    Paper(
        arxiv="2301.05217",
        title="Progress measures for grokking via mechanistic interpretability",
        authors="Nanda, Chan, Lieberum, Smith, Steinhardt",
        claim="A one-layer transformer learns addition by Fourier waves; restricted loss falls and "
        "excluded loss rises before the test loss falls.",
        unclear="Key frequencies are those of the trained net in the paper; here they are the strongest "
        "of the embedding at the step that is measured, so that no later step is looked at.",
    ),
    settings=Setup(Data(), Model(), Training()),
    ci=Setup(
        data=Data(p=29, train_share=0.5),
        model=Model(width=64, heads=4, hidden=256),
        training=Training(steps=2000, lr=3e-3, weight_decay=2.0, log_every=20, thorough_every=100),
    ),
    effect="late generalisation, restricted loss first",
)
def build(settings: Setup[Data, Model, Training], seed: int, device: torch.device, control: str) -> Task:
    """Return the task."""
    p, shape, training = settings.data.p, settings.model, settings.training
    pairs, results = modular_table(p, "add")
    tokens = torch.cat([pairs, torch.full((len(pairs), 1), p)], 1)
    train_size = round(settings.data.train_share * len(tokens))
    split = apply_control(draw_split(tokens, results, train_size, seed), control, seed).to(device)
    trained = torch.randperm(len(tokens), generator=generator(seed, "split"))[:train_size].to(device)
    # What the net is trained on, with the labels of the control where it is one.
    labels = results.to(device).clone()
    labels[trained] = split.train_labels
    table = tokens.to(device)
    with seeded(seed, "model"):
        model = PlainTransformer(
            p + 1, 3, layers=shape.layers, width=shape.width, heads=shape.heads, hidden=shape.hidden
        ).to(device)

    def logits() -> tuple[Tensor, list[int]]:
        keys = fourier.key_frequencies(model.embed.weight[:p], training.key_frequencies)
        return model(table)[:, :p], keys

    def restricted() -> float:
        outputs, keys = logits()
        return fourier.restricted_loss(outputs, labels, p, keys, precise_cross_entropy)

    def excluded() -> float:
        outputs, keys = logits()
        return fourier.excluded_loss(outputs, labels, p, keys, trained, precise_cross_entropy)

    def participation() -> float:
        return fourier.inverse_participation_ratio(model.embed.weight[:p].T)

    measures = {
        "cheap": {"fourier_ipr": participation},
        "thorough": {"restricted_loss": restricted, "excluded_loss": excluded},
    }
    losses = precise_cross_entropy
    return Task.with_adamw(model, split, seed, training, chance=1 / p, sample_losses=losses, **measures)
