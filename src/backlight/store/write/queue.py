"""What monitors have measured, on its way to the thread that writes.

The training never waits for the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backlight.store.write.writer import RunWriter


class Queue:
    """A sink that keeps what it is given until somebody writes it."""

    def __init__(self) -> None:
        self.held: deque[tuple[str, tuple[Any, ...], dict[str, Any]]] = deque()

    def scalars(self, step: int, values: Mapping[str, float], source: str = "backlight") -> None:
        """Keep scalars."""
        self.held.append(("scalars", (step, dict(values), source), {}))

    def array(
        self,
        name: str,
        step: int,
        values: Any,
        *,
        dims: tuple[str, ...] = (),
        unit: str = "1",
        encoding: str = "plain",
    ) -> None:
        """Keep an array."""
        self.held.append(("array", (name, step, values), {"dims": dims, "unit": unit, "encoding": encoding}))

    def event(self, step: int | None, kind: str, payload: Mapping[str, Any]) -> None:
        """Keep an event."""
        self.held.append(("event", (step, kind, payload), {}))

    def write(self, writer: RunWriter) -> None:
        """Hand everything over to ``writer``, in order."""
        while self.held:
            method, arguments, named = self.held.popleft()
            getattr(writer, method)(*arguments, **named)
