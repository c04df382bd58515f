"""What is known of each parameter while a training is observed, and the answer at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import weakref

    from backlight.diagnose.missing_gradients.inplace_error import Overwritten
    from backlight.diagnose.missing_gradients.reasons import Reason


@dataclass
class Row:
    """What is known of one parameter; ``when`` says at which moment its reason was found."""

    name: str
    shape: tuple[int, ...]
    reference: weakref.ref[Any] | None
    root: int = 0
    aliases: tuple[str, ...] = ()
    arrived: bool = False
    reached: bool = False
    held: bool = False
    reason: Reason | None = None
    when: str = ""

    def keep(self, reason: Reason, when: str) -> None:
        """Take ``reason`` unless one that knows more is there."""
        if self.reason is None or reason.weight > self.reason.weight:
            self.reason, self.when = reason, when


@dataclass
class MissingGradients:
    """The answer: rows without a gradient or without an optimizer, and what else was met."""

    rows: list[Row] = field(default_factory=list)
    watched: int = 0
    steps: int = 0
    backwards: int = 0
    nodes: int = 0
    failure: Overwritten | None = None
    notes: list[str] = field(default_factory=list)
