"""Wang et al. 2024: implicit two-hop reasoning over a synthetic knowledge graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from backlight.experiments.data.algorithmic import knowledge_graph
from backlight.experiments.data.split import apply_control, seeded
from backlight.experiments.experiment import Paper, Setup, experiment
from backlight.experiments.models import Gpt
from backlight.experiments.task import AdamWTraining, Task


@dataclass(frozen=True)
class Data:
    """2,000 entities, 200 relations, 20 facts each, 5 % of them set aside (section 3.1).

    ``inferred_ratio`` is the paper's φ, inferred facts for each atomic one; it studies 3.6 to 18.
    """

    entities: int = 2000
    relations: int = 200
    degree: int = 20
    foreign_share: float = 0.05
    inferred_ratio: float = 18.0


@dataclass(frozen=True)
class Model:
    """Eight layers, width 768, 12 heads, like GPT-2 (section 2)."""

    layers: int = 8
    width: int = 768
    heads: int = 12


@dataclass(frozen=True)
class Training(AdamWTraining):
    """AdamW, rate 1e-4, batches of 512, weight decay .1, 2,000 updates of warm-up (section 2).

    What the paper leaves out is as in its code (github.com/OSU-NLP-Group/GrokkedTransformer): β, clipping,
    and no weight decay of biases and the gains of LayerNorm.
    """

    steps: int = 1_500_000
    batch_size: int = 512
    lr: float = 1e-4
    weight_decay: float = 0.1
    decay_vectors: bool = False
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: int = 2000
    log_every: int = 2000
    thorough_every: int = 10_000


@experiment(
    "wang",
    "Wang: two-hop questions on a knowledge graph",
    Paper(
        arxiv="2405.15071",
        title="Grokked Transformers are Implicit Reasoners: A Mechanistic Journey to the Edge of "
        "Generalization",
        authors="Wang, Yue, Su, Sun",
        claim="Two-hop questions in distribution are answered long after training is fitted; those out "
        "of distribution never are.",
        unclear="φ differs between figures, here it is the largest. β of AdamW, clipping and what does "
        "not decay are those of the released code; its command leaves GPT-2's dropout on, here is none. "
        "Each entity, relation and tail is one token here as there, but no end of text is predicted.",
    ),
    settings=Setup(Data(), Model(), Training()),
    ci=Setup(
        # Nearly all inferred facts: the more of them in training, the sooner the others come.
        data=Data(entities=100, relations=10, degree=10, inferred_ratio=9.0),
        model=Model(layers=2, width=64, heads=4),
        # A ten times faster rate and three times the decay save steps, and so does β₂: in seed 0 the test is
        # at .30 after 3,000 steps, at .20 with .999.
        training=Training(
            steps=16_000,
            lr=1e-3,
            weight_decay=0.3,
            betas=(0.9, 0.98),
            warmup=50,
            log_every=200,
            thorough_every=600,
        ),
    ),
    effect="late in distribution, never out of it",
)
def build(settings: Setup[Data, Model, Training], seed: int, device: torch.device, control: str) -> Task:
    """Return the task: training on atomic and inferred facts, tested on inferred ones in distribution."""
    data, shape, training = settings.data, settings.model, settings.training
    graph = knowledge_graph(
        data.entities, data.relations, data.degree, data.foreign_share, data.inferred_ratio, seed
    )
    split = apply_control(graph.split, control, seed).to(device)
    foreign = graph.foreign_questions.to(device), graph.foreign_answers.to(device)
    with seeded(seed, "model"):
        model = Gpt(
            data.entities + data.relations, 3, layers=shape.layers, width=shape.width, heads=shape.heads
        ).to(device)
    task = Task.with_adamw(model, split, seed, training, chance=1 / data.entities)
    atomic = slice(0, graph.atomic)
    task.cheap = {
        "out_of_distribution_accuracy": lambda: task.score(*foreign)[1],
        "atomic_accuracy": lambda: task.score(split.train_inputs[atomic], split.train_labels[atomic])[1],
    }
    return task
