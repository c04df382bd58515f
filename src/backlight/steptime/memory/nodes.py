"""Which module a node of autograd belongs to, by the numbers that nodes get in the order of the forward."""

from __future__ import annotations

import bisect
from typing import Any

import torch


class Modules:
    """The modules whose forward is under way, and the nodes that each has made."""

    def __init__(self) -> None:
        self._entered: list[tuple[str, int]] = []
        self._numbers: list[int] = []
        self._ranges: list[tuple[int, int, str]] = []

    @property
    def inside(self) -> bool:
        """Whether a module's forward is under way."""
        return bool(self._entered)

    def enter(self, name: str) -> None:
        """A module's forward begins."""
        self._entered.append((name, _sequence()))

    def leave(self) -> None:
        """The innermost module's forward is over: the nodes made since it began are its."""
        if self._entered:
            name, begin = self._entered.pop()
            self._note(begin, _sequence(), name)

    def current(self, *, backward: bool) -> str:
        """Return the module whose forward, or whose node of backward, is under way."""
        if self._entered:
            return self._entered[-1][0]
        node: Any = torch._C._current_autograd_node() if backward else None
        if node is None:
            return ""
        number = node._sequence_nr()
        place = bisect.bisect_right(self._numbers, number) - 1
        if place < 0 or number >= self._ranges[place][1]:
            return ""
        return self._ranges[place][2]

    def _note(self, begin: int, end: int, name: str) -> None:
        # Modules close inside out: what an inner one has taken stays its own.
        taken = bisect.bisect_left(self._numbers, begin)
        covered = begin
        pieces = []
        for start, stop, _ in self._ranges[taken:]:
            if covered < start:
                pieces.append((covered, start, name))
            covered = stop
        if covered < end:
            pieces.append((covered, end, name))
        for piece in pieces:
            place = bisect.bisect_left(self._numbers, piece[0])
            self._numbers.insert(place, piece[0])
            self._ranges.insert(place, piece)


def _sequence() -> int:
    """Return the number that the next node of autograd will have in this thread."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]  # not in the stubs
    return number
