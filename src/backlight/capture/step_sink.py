"""What a step hands to the session: its gradients while it goes on, and a summary at its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class StepSummary:
    """Summary of a step at its end; tensors may still be on a device.

    ``backwards_seen`` are those since watching began. ``phases`` are host seconds by phase, ``seconds``
    those of the whole step; ``separated`` says whether forward and loss are among the phases or in the rest.
    ``optimizer_seconds`` are those of that phase by number of the (outer) optimizer. ``forwards`` are those
    under grad, ``addends`` the values that the losses add up, each None where unknown.
    """

    index: int
    backwards: int = 0
    backwards_seen: int = 0
    forwards: int | None = 0
    addends: int | None = 0
    loss: torch.Tensor | None = None
    clips: list[tuple[str, float, torch.Tensor | None]] = field(default_factory=list)
    changed_by_hand: int = 0
    scale: torch.Tensor | None = None
    skipped: bool | torch.Tensor | None = None
    batch: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    rates: list[tuple[str, Any]] = field(default_factory=list)
    optimizer_seconds: dict[int, float] = field(default_factory=dict)
    without_gradient: list[torch.Tensor] = field(default_factory=list)
    seconds: float = 0.0
    separated: bool = False


class StepSink:
    """Receives what a tracker finds; each method does nothing here."""

    def step_opens(self, index: int) -> bool:
        """Return whether this step is to be recorded."""
        return False

    def next_step(self, index: int) -> int:
        """Return the first step after ``index``, which is not recorded, that has to be observed."""
        return index + 1

    def collect(
        self, parameters: Sequence[torch.Tensor], scale: torch.Tensor | float | None, summary: StepSummary
    ) -> None:
        """Measure the gradients of ``parameters`` now; they are unchanged since backward.

        ``summary`` is that of the step so far.
        """

    def update_begins(self, parameters: Sequence[torch.Tensor]) -> None:
        """Parameters are about to be updated."""

    def update_ends(self) -> None:
        """Parameters have been updated."""

    def backward_ended(self, parameters: Sequence[torch.Tensor], index: int) -> None:
        """Backward number ``index`` of the step is over; only with ``per_backward``."""

    def step_closes(self, summary: StepSummary) -> None:
        """Receive the summary of a recorded step."""

    def parameters_changed(self) -> None:
        """The parameter table of the scope is a new one."""
