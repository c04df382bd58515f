"""A supervised task in two phases: train the dense net, then prune, rewind and train what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backlight.experiments.data.split import generator
from backlight.experiments.tasks.supervised import SupervisedTask

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
class TicketTask(SupervisedTask):
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
