"""Injected faults as data: each training knows how to plant its fault and how to do without it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

Train = Callable[[bool], None]


@dataclass(frozen=True)
class Fault:
    """A training with a fault that its argument injects.

    ``expected`` is what a command must say of it; the line is the one marked ``# HERE`` in the source.
    """

    name: str
    train: Train
    expected: dict[str, object]

    @property
    def line(self) -> int | None:
        """Number of the marked line in its file, None where no line is marked."""
        lines, first = inspect.getsourcelines(self.train)
        marked = [first + n for n, text in enumerate(lines) if "# HERE" in text]
        return marked[0] if marked else None


def registrar(table: dict[str, Fault]) -> Callable[..., Callable[[Train], Train]]:
    """Return a decorator that enters trainings into ``table``."""

    def fault(**expected: object) -> Callable[[Train], Train]:
        def decorate(train: Train) -> Train:
            table[train.__name__] = Fault(train.__name__, train, expected)
            return train

        return decorate

    return fault
