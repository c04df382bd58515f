"""What a step tracker collects: the summary of a step that is recorded, and the scalars of every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from backlight.records import ParameterRecord


@dataclass
class StepSummary:
    """Summary of a step at its end; tensors may still be on a device.

    ``backwards_seen`` are those since watching began. ``phases`` are host seconds by phase, ``seconds``
    those of the whole step; ``separated`` says whether forward and loss are among the phases or in the rest.
    ``clips`` are number within the step, kind and limit of each clipping, ``optimizers`` the numbers of those
    that stepped, ``optimizer_seconds`` those of that phase by number of the (outer) optimizer. ``forwards``
    are those under grad, ``addends`` the values that the losses add up, each None where unknown;
    of the losses after the first, ``undivided`` are not the result of a division. ``without_gradient`` are
    the parameters of which an optimizer, or clipping, found none.
    """

    index: int
    backwards: int = 0
    backwards_seen: int = 0
    forwards: int | None = 0
    addends: int | None = 0
    undivided: int = 0
    clips: list[tuple[int, str, float]] = field(default_factory=list)
    changed_by_hand: int = 0
    scale: torch.Tensor | None = None
    skipped: bool | torch.Tensor | None = None
    batch: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    optimizers: list[int] = field(default_factory=list)
    optimizer_seconds: dict[int, float] = field(default_factory=dict)
    without_gradient: list[ParameterRecord] = field(default_factory=list)
    seconds: float = 0.0
    separated: bool = False


class ScalarSink:
    """Receives the scalars of every step, recorded or not; each method does nothing here.

    Called in steps that are only counted as well, where nothing guards the training: no method raises.
    """

    def add_losses(self, roots: Sequence[torch.Tensor]) -> None:
        """Add the numbers among ``roots``, from which a backward is about to start."""

    def after_backward(self, parameters: Sequence[torch.Tensor] = ()) -> None:
        """Note that the backward is over, and has given gradients to ``parameters``, or some of them."""

    def reached(self, optimizers: Mapping[int, bool]) -> None:
        """Note which of several optimizers that backward gave gradients to, by their numbers.

        True where theirs add to those of the backward passes before.
        """

    def drop_losses(self) -> None:
        """Forget the numbers that were added last: their backward failed."""

    def add_norm(self, norm: torch.Tensor | None) -> None:
        """Add the total norm that a clipping uses; None for a clipping by value."""

    def add_rates(self, number: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Add the learning rates of the optimizer ``number``, which is about to step."""

    def close(self, step: int) -> None:
        """End a step that is not recorded."""
