"""The Gram of the last W step gradients, kept up step by step.

Only the row of the newest gradient changes, so that a step costs W M products and not W^2 M. W gradients
are kept in the type that they came in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 18
"""Elements of the kept gradients that are widened to float64 at once."""


class Window:
    """The last ``size`` gradients of a training and their inner products.

    Parameters
    ----------
    size:
        W, at least 1.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"window: it must hold at least 1 step, got {size}")
        self.size = size
        self.steps: list[int] = []
        self._kept: list[Tensor] = []
        self._gram: Tensor | None = None
        self._next = 0

    def __len__(self) -> int:
        return len(self.steps)

    def push(self, step: int, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of ``step``, dropping the oldest ones if the window is full.

        Parameters
        ----------
        step
            Number of the step, for :attr:`steps`.
        gradients
            Those of all parameters, always the same shapes in the same order.

        Raises
        ------
        ValueError
            If shapes differ from those of earlier steps.
        """
        flat = [gradient.detach().reshape(-1) for gradient in gradients]
        if not self._kept:
            self._kept = [part.new_zeros(self.size, part.numel()) for part in flat]
            self._gram = torch.zeros(self.size, self.size, dtype=torch.float64, device=flat[0].device)
        sizes = [kept.shape[1] for kept in self._kept]
        if [part.numel() for part in flat] != sizes:
            raise ValueError(
                f"window: gradients of step {step} have sizes {[part.numel() for part in flat]}, earlier "
                f"ones {sizes}; start a new window when the parameters change"
            )
        assert self._gram is not None
        slot = self._next
        row = torch.zeros(self.size, dtype=torch.float64, device=self._gram.device)
        for kept, part in zip(self._kept, flat, strict=True):
            kept[slot] = part
            row += _inner(kept, kept[slot]).to(row.device)
        self._gram[slot] = row
        self._gram[:, slot] = row
        self._next = (slot + 1) % self.size
        self.steps = [*self.steps, step][-self.size :]

    @property
    def matrix(self) -> Tensor:
        """Inner products, float64 ``[w, w]``, oldest step first; w is W once the window is full.

        Raises
        ------
        ValueError
            If no step was pushed.
        """
        if self._gram is None:
            raise ValueError("window: it is empty; push the gradients of a step first")
        order = [(self._next - len(self.steps) + i) % self.size for i in range(len(self.steps))]
        return self._gram[order][:, order]


def _inner(kept_WM: Tensor, newest_M: Tensor) -> Tensor:
    """Return the inner products of every kept gradient with the newest one, summed in float64."""
    w, m = kept_WM.shape
    total = torch.zeros(w, dtype=torch.float64, device=kept_WM.device)
    width = max(1, _BLOCK // w)
    for a in range(0, m, width):
        total += kept_WM[:, a : a + width].double() @ newest_M[a : a + width].double()
    return total
