"""Power et al. 2022: the first report of grokking, on tables of binary operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.experiments.data.algorithmic import modular_table, permutation_table
from backlight.experiments.data.split import apply_control, draw_split, seeded
from backlight.experiments.experiment import Paper, Setup, experiment
from backlight.experiments.models import Decoder
from backlight.experiments.progress import softmax_collapse, weight_norm
from backlight.experiments.task import AdamWTraining, Task


@dataclass(frozen=True)
class Data:
    """The table a∘b; source: section 2 and appendix A.1.1 of the paper.

    ``operation`` is one of ``add``, ``subtract``, ``multiply``, ``divide``, ``squares`` mod ``p``, or
    ``s5``, the composition of permutations of five (120 elements, 14,400 pairs).
    """

    operation: str = "divide"
    p: int = 97
    train_share: float = 0.5


@dataclass(frozen=True)
class Model:
    """Two layers, width 128, four heads (appendix A.1.2): 455,424 parameters.

    ``vocabulary`` is that of the authors' code: 97 residues, 120 permutations, 20 operations, the equal
    sign and the end of a text.
    """

    layers: int = 2
    width: int = 128
    heads: int = 4
    vocabulary: int = 239


@dataclass(frozen=True)
class Training(AdamWTraining):
    """AdamW, ten updates of warm-up, 10⁵ updates (appendix A.1.2); a batch is at most half of training."""

    batch_size: int = 512
    warmup: int = 10


def table(data: Data, vocabulary: int) -> tuple[Tensor, Tensor, int]:
    """Return tokens [n, 5] of ``end a operation b =``, result tokens [n], and the number of elements."""
    if data.operation == "s5":
        # In the authors' vocabulary permutations come after the 97 residues.
        offset = 97 if vocabulary >= 97 + 120 + 3 else 0
        pairs, results, count = *permutation_table(5), 120
    else:
        offset = 0
        pairs, results = modular_table(data.p, data.operation)
        count = data.p
    if vocabulary < offset + count + 3:
        raise ValueError(
            f"model.vocabulary is {vocabulary}, expected at least {offset + count + 3}: {count} elements and "
            "the signs of operation, equality and end"
        )
    signs = torch.tensor([vocabulary - 1, vocabulary - 3, vocabulary - 2]).expand(len(pairs), 3)
    a, b = (pairs + offset).T
    return torch.stack([signs[:, 0], a, signs[:, 1], b, signs[:, 2]], 1), results + offset, count


@experiment(
    "power",
    "Power: small algorithmic tables",
    Paper(
        arxiv="2201.02177",
        title="Grokking: Generalization Beyond Overfitting on Small Algorithmic Datasets",
        authors="Power, Burda, Edwards, Babuschkin, Misra",
        claim="A small transformer generalises on a∘b long after it has memorised the training half.",
        unclear="The weight decay differs from figure to figure; 1 is the value that the paper finds "
        "best. The authors' code also asks for the sign of the end after the answer; here the loss is "
        "that of the answer alone. Positions are sinusoidal and blocks post-norm as in that code.",
    ),
    settings=Setup(Data(), Model(), Training()),
    ci=Setup(
        data=Data(p=47, train_share=0.85),
        model=Model(layers=1, width=128, heads=4, vocabulary=50),
        # Batches of one size: the rest of an epoch would be a small and noisy one. Without clipping, as in
        # the paper, the loss jumps to that of guessing every few hundred or thousand updates once the decay
        # has made the weights small, and training is lost at more logs than the verdict allows.
        training=Training(
            steps=14_000,
            batch_size=613,
            lr=6e-4,
            weight_decay=0.5,
            betas=(0.9, 0.999),
            clip=3.0,
            log_every=50,
            thorough_every=500,
        ),
    ),
)
def build(settings: Setup[Data, Model, Training], seed: int, device: torch.device, control: str) -> Task:
    """Return the task."""
    shape, training = settings.model, settings.training
    tokens, results, count = table(settings.data, shape.vocabulary)
    train_size = round(settings.data.train_share * len(tokens))
    split = apply_control(draw_split(tokens, results, train_size, seed), control, seed).to(device)
    with seeded(seed, "model"):
        model = Decoder(shape.vocabulary, 5, layers=shape.layers, width=shape.width, heads=shape.heads).to(
            device
        )
    return Task.with_adamw(
        model,
        split,
        seed,
        training,
        chance=1 / count,
        batch_size=min(training.batch_size, -(-train_size // 2)),
        cheap={"last_layer_norm": lambda: weight_norm([model.head.weight])},
        thorough={"softmax_collapse": lambda: softmax_collapse(model(split.train_inputs[:512]))},
    )
