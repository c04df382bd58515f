"""Minegishi et al. 2023: a subnetwork of the grokked net generalises without the delay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backlight.experiments.data.algorithmic import modular_table, unordered
from backlight.experiments.data.split import apply_control, draw_split, generator, seeded
from backlight.experiments.experiment import Paper, Setup, experiment
from backlight.experiments.models import PairMlp
from backlight.experiments.progress import inverse_participation_ratio
from backlight.experiments.task import AdamWTraining, Task


@dataclass(frozen=True)
class Data:
    """Addition mod 67, 40 % of the pairs with a ≤ b for training (section 3 and public code)."""

    p: int = 67
    train_share: float = 0.4


@dataclass(frozen=True)
class Model:
    """Embeddings of 500, added, one hidden ReLU layer of 48, back to 500, then scores (public code)."""

    embedding: int = 500
    hidden: int = 48


@dataclass(frozen=True)
class Training(AdamWTraining):
    """Full batches, AdamW with weight decay 1 (public code).

    The dense net is trained for ``dense_steps``; then a share ``sparsity`` of all weights is pruned, the
    others go back to their initial values, and training begins anew. ``mask`` is ``ticket`` (the
    smallest weights of the dense net go), ``random`` (as many in each matrix, drawn at random) or
    ``none`` (nothing goes). ``scope`` says whether the smallest of ``all`` weights together go, as in
    the public code, or of each ``matrix``.
    """

    steps: int = 60_000
    dense_steps: int = 30_000
    mask: str = "ticket"
    sparsity: float = 0.6
    scope: str = "all"
    log_every: int = 50
    thorough_every: int = 500


MASKS = ("ticket", "random", "none")
SCOPES = ("all", "matrix")


def magnitude_masks(weights: Mapping[str, Tensor], sparsity: float, scope: str = "all") -> dict[str, Tensor]:
    """Return masks [shape of the weight] bool, False for the ``sparsity`` smallest weights.

    They are the smallest of ``all`` weights together, or of each ``matrix`` by itself. Exactly
    round(sparsity·count) are pruned; of equal ones, the first.
    """
    if scope == "matrix":
        return {
            name: mask
            for name, w in weights.items()
            for mask in magnitude_masks({name: w}, sparsity).values()
        }
    sizes = torch.cat([w.detach().abs().flatten() for w in weights.values()])
    kept = torch.ones(len(sizes), dtype=torch.bool, device=sizes.device)
    kept[torch.argsort(sizes, stable=True)[: round(sparsity * len(sizes))]] = False
    parts = kept.split([w.numel() for w in weights.values()])  # type: ignore[no-untyped-call]  # torch's split
    return {name: part.view_as(w) for (name, w), part in zip(weights.items(), parts, strict=True)}


def shuffled_masks(masks: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return random masks that keep as many weights of each tensor as ``masks`` do."""
    draw = generator(seed, "random mask")
    shuffled = {}
    for name, mask in masks.items():
        order = torch.randperm(mask.numel(), generator=draw).to(mask.device)
        shuffled[name] = mask.flatten()[order].view_as(mask)
    return shuffled


@dataclass
class TicketTask(Task):
    """Dense training up to ``dense_steps``, then training of the pruned and rewound net.

    Before step ``dense_steps`` every weight matrix is masked by :func:`magnitude_masks` (``ticket``), by
    :func:`shuffled_masks` of them (``random``) or not at all (``none``), all parameters are reset to their
    initial values, and the optimizer state is cleared. Pruned weights stay 0: they are reset after each
    optimizer step, so that gradients are those of the loss alone.
    """

    dense_steps: int = 0
    sparsity: float = 0.0
    scope: str = "all"
    mask: str = "ticket"

    def __post_init__(self) -> None:
        super().__post_init__()
        # Rebuilding from the seed gives the same weights, so they are not part of the state.
        self._initial = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._masks: dict[str, Tensor] = {}
        self._rewound = False
        self.optimizer.register_step_post_hook(self._reset_pruned)

    def before_step(self, step: int) -> None:
        """Prune and rewind once, before step ``dense_steps``."""
        if step == self.dense_steps and not self._rewound:
            self._rewind()

    def _rewind(self) -> None:
        parameters = dict(self.model.named_parameters())
        matrices = {name: p for name, p in parameters.items() if p.ndim > 1}
        if self.mask != "none":
            self._masks = magnitude_masks(matrices, self.sparsity, self.scope)
        if self.mask == "random":
            self._masks = shuffled_masks(self._masks, self.seed)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(self._initial[name])
        self.optimizer.state.clear()
        self._reset_pruned()
        self._rewound = True

    def _reset_pruned(self, *_: object) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in self._masks:
                    parameter.mul_(self._masks[name])

    def evaluate(self, *, thorough: bool) -> dict[str, float]:
        """Return the values of a supervised task, the phase (0 dense, 1 rewound) and the pruned share."""
        values = super().evaluate(thorough=thorough)
        count = sum(p.numel() for p in self.model.parameters())
        pruned = sum(int((~mask).sum()) for mask in self._masks.values())
        return {**values, "progress/phase": float(self._rewound), "progress/sparsity": pruned / count}

    def extra_state(self) -> dict[str, Any]:
        """Return the masks and whether the net was rewound."""
        return {"rewound": self._rewound, "masks": {name: m.cpu() for name, m in self._masks.items()}}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`extra_state` returned."""
        device = self.split.train_inputs.device
        self._rewound = bool(state["rewound"])
        self._masks = {name: mask.to(device) for name, mask in state["masks"].items()}


@experiment(
    "minegishi",
    "Minegishi: grokking tickets",
    Paper(
        arxiv="2310.19470",
        title="Bridging Lottery Ticket and Grokking: Understanding Grokking from Inner Structure of Networks",
        authors="Minegishi, Iwasawa, Matsuo",
        claim="The subnetwork of the largest weights after grokking, rewound to its initial values, "
        "generalises much earlier than the dense net; a random subnetwork of that size does not.",
        unclear="The sparsity of .4 in the public file is the share that stays, so .6 are pruned; the "
        "paper varies it. The weight decay of the dense net, 1, is read off the names of its runs. The "
        "public code leaves b + a out of the table, and so is it here, with a + a kept.",
    ),
    settings=Setup(Data(), Model(), Training()),
    ci=Setup(
        # The dense net begins with no test sample right at all. With 246 of them that is still likely enough
        # for the verdict not to take the zeros for a log that was filled in.
        data=Data(p=37, train_share=0.65),
        model=Model(embedding=128, hidden=48),
        training=Training(steps=14_000, dense_steps=9000, sparsity=0.4, thorough_every=500),
    ),
    effect="an early ticket",
)
def build(
    settings: Setup[Data, Model, Training], seed: int, device: torch.device, control: str
) -> TicketTask:
    """Return the task."""
    p, training = settings.data.p, settings.training
    if training.mask not in MASKS:
        raise ValueError(f"training.mask is {training.mask!r}, expected one of {', '.join(MASKS)}")
    if training.scope not in SCOPES:
        raise ValueError(f"training.scope is {training.scope!r}, expected one of {', '.join(SCOPES)}")
    pairs, results = unordered(*modular_table(p, "add"))
    split = draw_split(pairs, results, round(settings.data.train_share * len(pairs)), seed)
    split = apply_control(split, control, seed).to(device)
    with seeded(seed, "model"):
        model = PairMlp(p, settings.model.embedding, settings.model.hidden, factored=True).to(device)
    return TicketTask.with_adamw(
        model,
        split,
        seed,
        training,
        chance=1 / p,
        cheap={"fourier_ipr": lambda: inverse_participation_ratio(model.up.weight @ model.embed.weight.T)},
        dense_steps=training.dense_steps,
        sparsity=training.sparsity,
        mask=training.mask,
        scope=training.scope,
    )
