"""The Frequent Directions sketch of all logged gradients of a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from backlight.measure.gram.frequent_directions import FrequentDirections

if TYPE_CHECKING:
    from backlight.monitors.grokking.instrument.tracker import Sink


class Sketch:
    """A sketch of ``rows`` rows over the parameters of the first gradients that it is given.

    A parameter without a gradient at a later step counts as zero there; one that appears later is refused.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._sizes: dict[str, int] = {}
        self._made: FrequentDirections | None = None

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradient of one step, as one row.

        Raises
        ------
        ValueError
            If a parameter was not there at the first step, or a value is not finite.
        """
        if self._made is None:
            self._sizes = {name: gradient.numel() for name, gradient in gradients.items()}
            self._made = FrequentDirections(self._rows, sum(self._sizes.values()), dtype=torch.float64)
        late = [name for name in gradients if name not in self._sizes]
        if late:
            raise ValueError(f"parameter {late[0]!r} had no gradient when the sketch began; it is not in it")
        parts = [
            gradients[name].reshape(-1).double()
            if name in gradients
            else torch.zeros(size, dtype=torch.float64)
            for name, size in self._sizes.items()
        ]
        self._made.add(torch.cat(parts))

    def put(self, step: int, sink: Sink, put: Callable[[str, int, Any, tuple[str, ...]], None]) -> None:
        """Hand over the rows ``[r, M]`` and the certificate."""
        if self._made is not None:
            # A copy is brought down to its rows: the stream itself goes on as if nobody had looked.
            copy = FrequentDirections(self._rows, self._made.columns, dtype=torch.float64)
            copy.merge(self._made)
            rows = copy.rows()
            sink.scalars(
                step, {"sketch/model/shrinkage": copy.shrinkage, "sketch/model/seen": float(copy.seen)}
            )
            put("sketch/model/rows", step, rows, ("rank", "parameter"))

    def state(self) -> dict[str, Any]:
        """Return what a resumed training needs."""
        if self._made is None:
            return {}
        return {"sizes": dict(self._sizes), **self._made.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` gave."""
        if not state:
            return
        self._sizes = {str(name): int(size) for name, size in state["sizes"].items()}
        # Checkpoints of earlier versions did not say how many rows.
        self._made = FrequentDirections.from_state({"size": self._rows, **state})
