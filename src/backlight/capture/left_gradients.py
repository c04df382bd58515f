"""Gradients that the last step of a run has left in ``.grad``: measured at the end, where that is possible.

The last step is known when no further one comes, and it is rarely one of those that are recorded. A loop that
clears gradients before the next backward leaves them; one that clears them after the step does not.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from backlight.capture.hub import HUB
from backlight.capture.parameters import settled
from backlight.interrupts import call_from_callback

if TYPE_CHECKING:
    from torch import nn

    from backlight.capture.parameters import Scope


# The moment at which a model is freed: the last one at which the gradients of its last step can be read.
#
# The callback of a weak reference is called before the attributes of its object go. A model that only the
# garbage collector frees has lost its parameters by then.

STEPS_EACH = 16
"""Training steps for each freed model that is measured: some loops wrap their model anew in every step."""


class FreedModels:
    """Delivers ``model_freed`` when a model of ``scope`` is freed in the thread that trains."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._models: list[weakref.ref[nn.Module]] = []
        self._measured = 0
        scope.on_change.append(self._follow)

    def forget(self) -> None:
        """Follow no model any more."""
        self._models = []

    def is_due(self, step: int) -> bool:
        """Return whether enough steps have passed for one more model; count it."""
        is_due = step >= STEPS_EACH * self._measured
        self._measured += is_due
        return is_due

    def _follow(self) -> None:
        models = self._scope.roots(set(self._scope.table.rows))
        self._models = [weakref.ref(model, self._freed) for model in models]

    def _freed(self, _: weakref.ref[nn.Module]) -> None:
        if threading.get_ident() != HUB.training.ident or HUB.is_emitting:
            return
        call_from_callback(self._deliver)

    @staticmethod
    def _deliver() -> None:
        HUB.resume()
        HUB.timed_steps = 1
        HUB.emit("model_freed")


_TOLERANCE = 1e-4
"""Relative difference up to which a norm is that of clipped gradients."""


class LeftGradients:
    """Whether ``.grad`` holds what the backward of the last step gave, or a known multiple of it.

    ``clips`` are the clippings of the last step that was recorded.
    """

    def __init__(self) -> None:
        self.clips: Sequence[tuple[int, str, float]] = ()
        self._at_step: list[tuple[torch.Tensor, int]] = []
        self._optimizer_changes_them = False

    def optimizer_begins(self, parameters: Sequence[torch.Tensor]) -> None:
        """Remember the gradients with which a step of the optimizer begins."""
        self._at_step = [(p.grad, p.grad._version) for p in parameters if p.grad is not None]

    def optimizer_ends(self) -> None:
        """Note whether the optimizer changes them in place, as some do: Nesterov momentum for instance."""
        changed, self._at_step = [g for g, version in self._at_step if g._version != version], []
        self._optimizer_changes_them = self._optimizer_changes_them or bool(changed)

    def factor(
        self, gradients: Sequence[torch.Tensor], norms: Sequence[torch.Tensor | None], *, is_whole: bool
    ) -> float | None:
        """Return by what they were multiplied since the backward pass, None where that is not known.

        ``norms`` are those that the clippings of the step used; ``is_whole`` is whether nothing but clipping
        and the optimizer can have changed the gradients. Cleared gradients have no factor.
        """
        total = _norm(gradients)
        if not (total and is_whole and math.isfinite(total)) or self._optimizer_changes_them:
            return None
        if not norms:
            return 1.0
        norm = None if norms[0] is None else settled(norms[0])
        if len(norms) > 1 or norm is None or len(self.clips) != 1:
            return None
        before, limit = float(norm), self.clips[0][2]
        # Another kind of norm, or one of some parameters only, gives another total.
        if abs(total - min(before, limit)) > _TOLERANCE * total:
            return None
        return 1.0 if before <= limit else total / before


def _norm(gradients: Sequence[torch.Tensor]) -> float:
    """Return the L2 norm over all gradients."""
    norms = [
        torch.linalg.vector_norm(g.detach(), dtype=torch.promote_types(g.dtype, torch.float32))
        for g in gradients
    ]
    return math.hypot(*map(float, norms))
