"""The gradients of past logged steps: the Gram of the last ones, and a sketch of all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backlight.measure.gram.frequent_directions import FrequentDirections

if TYPE_CHECKING:
    from backlight.monitors.grokking.instrument.tracker import Sink


class Window:
    """The gradients of the last ``length`` logged steps, on the host, as they were.

    Their W x W Gram has the non-zero spectrum of the M x M product ``sum_t g_t g_t^T``, which nobody has
    to build. Products are accumulated in float64.
    """

    def __init__(self, length: int) -> None:
        self._held: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=length)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Take the gradients of one step; the oldest step leaves a full window."""
        self._held.append((step, dict(gradients)))

    def gram(self) -> tuple[npt.NDArray[np.float64], list[int]]:
        """Return ``K[a, b] = g_a . g_b``, ``[W, W]``, over all parameters, and the steps of its rows.

        A parameter without a gradient at some step counts as zero there.
        """
        steps = [step for step, _ in self._held]
        K = torch.zeros(len(steps), len(steps), dtype=torch.float64)
        names = dict.fromkeys(name for _, held in self._held for name in held)
        for name in names:
            rows = [held.get(name) for _, held in self._held]
            like = next(row for row in rows if row is not None)
            wide = torch.complex128 if like.is_complex() else torch.float64
            A = torch.stack(
                [torch.zeros(like.numel(), dtype=wide) if r is None else r.reshape(-1).to(wide) for r in rows]
            )
            if A.is_complex():
                A = torch.view_as_real(A).flatten(1)
            K.addmm_(A, A.T)
        return K.numpy(), steps

    def state(self) -> dict[str, Any]:
        """Return the window as plain lists and tensors."""
        return {"steps": [step for step, _ in self._held], "gradients": [held for _, held in self._held]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` gave."""
        self._held.clear()
        for step, held in zip(state["steps"], state["gradients"], strict=True):
            self._held.append((int(step), dict(held)))


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
