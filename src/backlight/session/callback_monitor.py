"""Calls the user's ``on_finding`` with each new finding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from backlight.interrupts import is_interrupt
from backlight.monitor import Monitor, RunContext
from backlight.records import Finding

if TYPE_CHECKING:
    from backlight.session.settings import Settings


class CallbackMonitor(Monitor):
    """Calls ``on_finding``; on rank 0 only. What it raises is reported once, and it is called again."""

    name = "on_finding"
    requested_by = None
    records = "calls of on_finding"

    def __init__(self, on_finding: Callable[[Finding], Any]) -> None:
        self._on_finding = on_finding

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor where the user gave a callback."""
        return None if settings.on_finding is None else cls(settings.on_finding)

    def attach(self, run: RunContext) -> None:
        """Remember where errors are reported."""
        self._notifier = run.notifier

    def on_new_findings(self, findings: Sequence[Finding]) -> None:
        """Call it with each of them."""
        for finding in findings:
            try:
                self._on_finding(finding)
            except (Exception, SystemExit) as error:
                if is_interrupt(error):
                    raise
                reason = f"{type(error).__name__}: {error}"
                self._notifier.warn(
                    "on_finding", f"on_finding raised {reason}; it is called again with the next finding"
                )
