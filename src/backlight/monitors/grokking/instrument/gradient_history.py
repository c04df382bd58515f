"""Gradients of logged steps: their storage as arrays, the Gram of the last ones, a sketch of all of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backlight.measure.gram.frequent_directions import FrequentDirections

if TYPE_CHECKING:
    from backlight.monitor import Recorder

_TYPES = {"float32": torch.float32, "float64": torch.float64}


def record_array(
    recorder: Recorder, name: str, step: int, values: Tensor | npt.NDArray[Any], dims: tuple[str, ...] = ()
) -> None:
    """Record a host tensor or array; bfloat16, which numpy lacks, is stored by its bits."""
    if isinstance(values, np.ndarray):
        recorder.array(name, step, values, dims=dims)
    elif values.dtype is torch.bfloat16:
        bits = values.contiguous().view(torch.uint16).numpy()
        recorder.array(name, step, bits, dims=dims, encoding="bf16")
    else:
        recorder.array(name, step, values.numpy(), dims=dims)


def stored(gradient: Tensor, precision: str) -> Tensor:
    """Return a gradient in its own type, or in ``precision`` if that is narrower."""
    wanted = _TYPES[precision]
    if gradient.is_complex() or gradient.dtype.itemsize <= wanted.itemsize:
        return gradient
    return gradient.to(wanted)


class GradientWindow:
    """The gradients of the last ``length`` logged steps, on the host, in their own types.

    Their W x W Gram has the non-zero spectrum of the M x M product ``sum_t g_t g_t^T``, which is never
    formed. Products are accumulated in float64.
    """

    def __init__(self, length: int) -> None:
        self._steps: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=length)

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of one step; a full window drops the oldest step."""
        self._steps.append((step, dict(gradients)))

    def gram(self) -> tuple[npt.NDArray[np.float64], list[int]]:
        """Return ``K[a, b] = g_a . g_b``, ``[W, W]``, over all parameters, and the steps of its rows.

        A parameter without a gradient at some step counts as zero there.
        """
        K = torch.zeros(len(self._steps), len(self._steps), dtype=torch.float64)
        for name in dict.fromkeys(name for _, gradients in self._steps for name in gradients):
            rows = [gradients.get(name) for _, gradients in self._steps]
            like = next(row for row in rows if row is not None)
            wide = torch.complex128 if like.is_complex() else torch.float64
            A = torch.stack(
                [torch.zeros(like.numel(), dtype=wide) if r is None else r.reshape(-1).to(wide) for r in rows]
            )
            if A.is_complex():
                A = torch.view_as_real(A).flatten(1)
            K.addmm_(A, A.T)
        return K.numpy(), [step for step, _ in self._steps]

    def state(self) -> dict[str, Any]:
        """Return the window as plain lists and tensors."""
        return {
            "steps": [step for step, _ in self._steps],
            "gradients": [gradients for _, gradients in self._steps],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self._steps.clear()
        for step, gradients in zip(state["steps"], state["gradients"], strict=True):
            self._steps.append((int(step), dict(gradients)))


class GradientSketch:
    """A Frequent Directions sketch of ``rows`` rows over the parameters of the first gradients it gets.

    A parameter without a gradient at a later step counts as zero there; one that appears later is refused.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._sizes: dict[str, int] = {}
        self._sketch: FrequentDirections | None = None

    def add(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradient of one step as one row.

        Raises
        ------
        ValueError
            If a parameter was absent at the first step, or a value is not finite.
        """
        if self._sketch is None:
            self._sizes = {name: gradient.numel() for name, gradient in gradients.items()}
            self._sketch = FrequentDirections(self._rows, sum(self._sizes.values()), dtype=torch.float64)
        late = [name for name in gradients if name not in self._sizes]
        if late:
            raise ValueError(f"parameter {late[0]!r} had no gradient when the sketch began; it is not in it")
        parts = [
            gradients[name].reshape(-1).double()
            if name in gradients
            else torch.zeros(size, dtype=torch.float64)
            for name, size in self._sizes.items()
        ]
        self._sketch.add(torch.cat(parts))

    def record(self, step: int, recorder: Recorder) -> None:
        """Record the rows ``[r, M]`` and the certificate."""
        if self._sketch is None:
            return
        # A copy is reduced to its rows, so that recording does not change the stream.
        copy = FrequentDirections(self._rows, self._sketch.columns, dtype=torch.float64)
        copy.merge(self._sketch)
        rows = copy.rows()
        recorder.scalars(
            step, {"sketch/model/shrinkage": copy.shrinkage, "sketch/model/seen": float(copy.seen)}
        )
        record_array(recorder, "sketch/model/rows", step, rows, ("rank", "parameter"))

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {} if self._sketch is None else {"sizes": dict(self._sizes), **self._sketch.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        if state:
            self._sizes = {str(name): int(size) for name, size in state["sizes"].items()}
            self._sketch = FrequentDirections.from_state(state)
