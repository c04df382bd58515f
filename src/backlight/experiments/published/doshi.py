"""Doshi et al. 2024: modular polynomials in nets with a power activation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.experiments.data.split import apply_control, draw_split, seeded
from backlight.experiments.experiment import Paper, Setup, experiment
from backlight.experiments.models import PowerNet
from backlight.experiments.progress import (
    circulant_deviation,
    inverse_participation_ratio,
)
from backlight.experiments.task import AdamWTraining, Task, one_hot_squared_error
from backlight.monitors.grokking.instrument.gram.ntk import input_agop


@dataclass(frozen=True)
class Data:
    """Σ cᵢ nᵢ^aᵢ mod ``p`` over as many terms as there are ``coefficients`` (section 2).

    Every tuple (n₁, …, n_S) is a sample: p^S of them.
    """

    p: int = 97
    coefficients: tuple[int, ...] = (1, 1)
    exponents: tuple[int, ...] = (1, 1)
    train_share: float = 0.5


@dataclass(frozen=True)
class Model:
    """Two layers, one-hot inputs; the activation is the power S, the number of terms (section 2)."""

    width: int = 500


@dataclass(frozen=True)
class Training(AdamWTraining):
    """Full batches, squared error on one-hot, AdamW.

    The decay is decoupled: as a part of the gradient it collapses such a net to zero.
    """

    steps: int = 20_000
    lr: float = 5e-3
    weight_decay: float = 5.0
    log_every: int = 20
    thorough_every: int = 200


def polynomial_table(data: Data) -> tuple[Tensor, Tensor]:
    """Return tuples [p^S, S] and values of the polynomial [p^S], int64."""
    terms = len(data.coefficients)
    if terms != len(data.exponents) or terms < 2:
        raise ValueError(
            f"data.coefficients has {terms} terms and data.exponents {len(data.exponents)}; expected as "
            "many of both, at least two"
        )
    tuples = torch.cartesian_prod(*[torch.arange(data.p)] * terms)
    value = torch.zeros(len(tuples), dtype=torch.int64)
    for column, (coefficient, exponent) in enumerate(zip(data.coefficients, data.exponents, strict=True)):
        powers = torch.tensor([coefficient * pow(n, exponent, data.p) for n in range(data.p)])
        value += powers[tuples[:, column]]
    return tuples, value % data.p


@experiment(
    "doshi",
    "Doshi: modular polynomials",
    Paper(
        arxiv="2406.03495",
        title="Grokking Modular Polynomials",
        authors="Doshi, He, Das, Gromov",
        claim="Two-layer nets with a power activation grok modular addition of many terms; each neuron "
        "ends on one wave, so that the inverse participation ratio rises.",
        unclear="Width, learning rate, weight decay and β of each figure could not be checked against "
        "the paper; those here are the values known from the authors' work on modular arithmetic.",
    ),
    settings=Setup(Data(), Model(), Training()),
    ci=Setup(
        data=Data(p=11, coefficients=(1, 1, 1), exponents=(1, 1, 1), train_share=0.45),
        model=Model(width=256),
        training=Training(steps=1500, lr=5e-3, weight_decay=1.0, log_every=5, thorough_every=100),
    ),
    effect="late generalisation, neurons on one wave",
)
def build(settings: Setup[Data, Model, Training], seed: int, device: torch.device, control: str) -> Task:
    """Return the task."""
    p, width, training = settings.data.p, settings.model.width, settings.training
    tuples, values = polynomial_table(settings.data)
    terms = tuples.shape[1]
    inputs = torch.nn.functional.one_hot(tuples, p).flatten(1).to(torch.float32)
    split = draw_split(inputs, values, round(settings.data.train_share * len(inputs)), seed)
    split = apply_control(split, control, seed).to(device)
    with seeded(seed, "model"):
        model = PowerNet(terms * p, width, p, power=terms).to(device)

    def participation() -> float:
        # Each neuron has one wave for each term.
        return inverse_participation_ratio(model.embed.weight.reshape(width * terms, p))

    def deviation() -> float:
        return circulant_deviation(input_agop(model, split.train_inputs[:256]), p)

    measures = {"cheap": {"fourier_ipr": participation}, "thorough": {"agop_circulant_deviation": deviation}}
    losses = one_hot_squared_error
    return Task.with_adamw(model, split, seed, training, chance=1 / p, sample_losses=losses, **measures)
