"""The exception that ends training on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backlight.records import Finding


class StopTraining(SystemExit):
    """Ends a training run cleanly: after the requested number of steps, or on ``finding``.

    Like every :class:`SystemExit` it ends the process with ``code`` unless it is caught.
    """

    def __init__(self, code: int = 0, finding: Finding | None = None) -> None:
        super().__init__(code)
        self.finding = finding

    def __str__(self) -> str:
        """Return the finding, else the exit code."""
        return str(self.code) if self.finding is None else f"{self.finding.rule}: {self.finding.title}"
