"""Results that may still be on their way from a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Rows of one device: ``bits`` is an int64 host tensor ``[k, F + I]`` that a copy may still be filling.

    The first F columns are the bit patterns of float64 numbers. ``done`` was recorded behind the copy;
    it is None where the values were on the host from the beginning. ``source`` is kept until then, so
    that the allocator does not hand its memory to somebody else while the copy still reads it.
    """

    rows: np.ndarray
    bits: Tensor
    done: torch.Event | None = None
    source: Tensor | None = None


class Pending:
    """Numbers per tensor, possibly in flight; nothing waits until :meth:`arrays` is called.

    Rows of tensors that were not measured hold zeros, ``measured`` included.
    """

    def __init__(self, rows: int, floats: int, integers: int, parts: Sequence[Part]) -> None:
        self._shape = (rows, floats, integers)
        self._parts = tuple(parts)
        self._arrays: tuple[np.ndarray, np.ndarray] | None = None

    def ready(self) -> bool:
        """Tell, without waiting, whether :meth:`arrays` would return at once."""
        return self._arrays is not None or all(part.done is None or part.done.query() for part in self._parts)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return float64 ``[P, F]`` and int64 ``[P, I]``, after waiting for this result's own copies only."""
        if self._arrays is None:
            rows, floats, integers = self._shape
            values = np.zeros((rows, floats), dtype=np.float64)
            counts = np.zeros((rows, integers), dtype=np.int64)
            for part in self._parts:
                if part.done is not None:
                    part.done.synchronize()
                bits = part.bits.numpy()
                values[part.rows] = bits[:, :floats].copy().view(np.float64)
                counts[part.rows] = bits[:, floats:]
            self._arrays = (values, counts)
            self._parts = ()
        return self._arrays
