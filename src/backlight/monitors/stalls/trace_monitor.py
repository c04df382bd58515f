"""``stalls.trace``: lines on the terminal and events in the run, flushed at the moment they happen."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any, Self

from backlight.monitor import Monitor, RunHandle
from backlight.monitors.stalls.settings import StallsSettings
from backlight.terminal import write

if TYPE_CHECKING:
    from backlight.session.settings import Settings


class TraceMonitor(Monitor):
    """Traces every backward line by line, to standard error and as events of the run, on disk at once."""

    name = "trace"
    requested_by = None
    records = "the trace of backward passes"

    def __init__(self, kinds: tuple[str, ...]) -> None:
        self._kinds = kinds

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor where ``trace`` names what to trace."""
        kinds = StallsSettings.of(settings).trace
        return cls(kinds) if kinds else None

    def attach(self, run: RunHandle) -> None:
        """Attach a tracer of backward passes."""
        from backlight.monitors.stalls.instrument.backward_trace import Tracer  # noqa: PLC0415 - only on request

        if "modules" in self._kinds:
            # Compiled wrappers warn of a global hook at every call; inside compiled code the hook does
            # nothing.
            warnings.filterwarnings("ignore", message=r".*when there are global hooks on modules")

        def emit(text: str, payload: dict[str, Any]) -> None:
            number = run.clock.index
            # One write with its end of line: ranks share a terminal.
            write(f"[rank {run.rank}] step {number} {text}", file=sys.stderr)
            run.writer.event(number, "trace", payload)
            run.writer.flush()

        self._tracer = Tracer(self._kinds, emit)
        self._tracer.start()

    def detach(self, error: BaseException | None) -> None:
        """Remove the tracer's hooks."""
        self._tracer.stop()
