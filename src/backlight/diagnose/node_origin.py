"""Origins of autograd nodes: the line of the forward pass, by the sequence number of the node.

Every node gets the next number of its thread at creation, so the numbers of one operation belong to the line
that called it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from backlight.user_code import SourceLine

next_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]  # not exported
"""Return the number of the next node of this thread."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a node: the operation, its line, the running module, and the line of a library inside."""

    operation: str
    line: SourceLine | None
    module: int = 0
    library_line: SourceLine | None = None


class Origins:
    """Origins by ranges of sequence numbers, added in rising order."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._origins: list[Origin] = []

    def add(self, begin: int, end: int, origin: Origin) -> None:
        """Record ``origin`` for the nodes ``begin`` to ``end - 1``."""
        if end > begin:
            at = bisect_right(self._begins, begin)
            self._begins.insert(at, begin)
            self._ends.insert(at, end)
            self._origins.insert(at, origin)

    def of(self, number: int) -> Origin | None:
        """Return the origin of the node with that sequence number, None if it was not recorded."""
        at = bisect_right(self._begins, number) - 1
        return self._origins[at] if at >= 0 and number < self._ends[at] else None

    def trim(self, limit: int) -> None:
        """Forget the oldest half if there are more than ``limit``."""
        if len(self._begins) > limit:
            kept = slice(-limit // 2, None)
            self._begins, self._ends = self._begins[kept], self._ends[kept]
            self._origins = self._origins[kept]

    def clear(self) -> None:
        """Forget everything."""
        self._begins.clear()
        self._ends.clear()
        self._origins.clear()
