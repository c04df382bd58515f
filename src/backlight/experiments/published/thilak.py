"""Thilak et al. 2022: the slingshot, grokking without weight decay in cycles of the last layer's norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from backlight.experiments.data.algorithmic import modular_table, unordered
from backlight.experiments.data.split import apply_control, draw_split, seeded
from backlight.experiments.experiment import Duration, Paper, Setup, experiment
from backlight.experiments.models import Decoder, PairMlp
from backlight.experiments.progress import smallest_margin, softmax_collapse, weight_norm
from backlight.experiments.task import Task, linear_warmup


@dataclass(frozen=True)
class Data:
    """A table mod 97, half of it for training, in the setting of Power et al. (section 2)."""

    operation: str = "divide"
    p: int = 97
    train_share: float = 0.5


@dataclass(frozen=True)
class Model:
    """``decoder`` of two layers, width 128 and four heads (section 2), or ``pairs``, a ReLU net.

    The paper sees slingshots in fully connected nets as well. ``pairs`` has one hidden layer of
    ``width`` on the sum of two embeddings of that width, and takes pairs with a ≤ b only.
    """

    kind: str = "decoder"
    layers: int = 2
    width: int = 128
    heads: int = 4


@dataclass(frozen=True)
class Training(Duration):
    """Adam without weight decay, rate 1e-3, β (.9, .98), batches of 512, ten updates of warm-up."""

    batch_size: int = 512
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    warmup: int = 10


@experiment(
    "thilak",
    "Thilak: the slingshot mechanism",
    Paper(
        arxiv="2206.04817",
        title="The Slingshot Mechanism: An Empirical Study of Adaptive Optimizers and the Grokking "
        "Phenomenon",
        authors="Thilak, Littwin, Zhai, Saremi, Paiss, Susskind",
        claim="Adam without weight decay goes through cycles: the last layer's norm grows, the training "
        "loss spikes, the norm rests; generalisation comes with such cycles.",
        unclear="Batch size and β of each figure; those of Power et al. are taken.",
    ),
    settings=Setup(Data(), Model(), Training()),
    ci=Setup(
        # With fewer residues or a smaller share there are slingshots without generalisation.
        data=Data(operation="add", p=59, train_share=0.9),
        model=Model(kind="pairs", width=128),
        training=Training(steps=9000, batch_size=0, lr=5e-3, log_every=20, thorough_every=200),
    ),
    effect="slingshots, and generalisation with them",
)
def build(settings: Setup[Data, Model, Training], seed: int, device: torch.device, control: str) -> Task:
    """Return the task."""
    data, shape, training = settings.data, settings.model, settings.training
    pairs, results = modular_table(data.p, data.operation)
    model: nn.Module
    with seeded(seed, "model"):
        if shape.kind == "decoder":
            signs = torch.full((len(pairs), 1), data.p)
            inputs = torch.cat([pairs[:, :1], signs, pairs[:, 1:], signs + 1], 1)
            model = Decoder(data.p + 2, 4, layers=shape.layers, width=shape.width, heads=shape.heads)
            last = model.head
        elif shape.kind == "pairs":
            inputs, results = unordered(pairs, results)
            model = PairMlp(data.p, shape.width, shape.width)
            last = model.unembed
        else:
            raise ValueError(f"model.kind is {shape.kind!r}, expected 'decoder' or 'pairs'")
    model = model.to(device)
    train_size = round(data.train_share * len(inputs))
    split = apply_control(draw_split(inputs, results, train_size, seed), control, seed).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=training.lr, betas=training.betas, eps=training.eps)
    return Task(
        model,
        optimizer,
        split,
        seed,
        chance=1 / data.p,
        scheduler=linear_warmup(optimizer, training.warmup),
        batch_size=training.batch_size,
        cheap={"last_layer_norm": lambda: weight_norm([last.weight])},
        thorough={
            "softmax_collapse": lambda: softmax_collapse(model(split.train_inputs)),
            "smallest_margin": lambda: smallest_margin(model(split.train_inputs), split.train_labels),
        },
    )
