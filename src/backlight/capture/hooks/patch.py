"""Reversible replacement of attributes of other people's classes and modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Patches:
    """Attributes that were replaced, and how to put them back.

    A replacement that somebody else has wrapped since cannot be taken out without losing theirs:
    it stays, and its wrapper must then pass every call straight through.
    """

    _replaced: list[tuple[Any, str, Any, Any]] = field(default_factory=list)

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> bool:
        """Replace ``owner.name`` by ``wrap(original)``; False where there is no such attribute."""
        original = vars(owner).get(name)
        if original is None:
            return False
        replacement = wrap(original)
        setattr(owner, name, replacement)
        self._replaced.append((owner, name, original, replacement))
        return True

    def undo(self) -> list[str]:
        """Put the originals back, last first; return the names of those that had to stay."""
        stayed = []
        while self._replaced:
            owner, name, original, replacement = self._replaced.pop()
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
            else:
                stayed.append(f"{getattr(owner, '__name__', owner)}.{name}")
        return stayed
