"""``--trace``: lines on the terminal and events in the run, flushed at the moment they happen."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from backlight.monitor import Monitor, RunContext
from backlight.setting_error import SettingError
from backlight.terminal import write

if TYPE_CHECKING:
    from backlight.session.settings import Settings

KINDS = ("gradients", "modules", "buckets")
"""What can be traced."""

VARIABLE = "BACKLIGHT_TRACE"
"""Environment variable with the value of ``--trace``, for clusters where no option can be passed."""


def traced_kinds(
    given: str | tuple[str, ...] | None, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Return what to trace, as given, else by the environment variable; SettingError for an unknown kind."""
    source = "trace"
    if given is None:
        given, source = environment.get(VARIABLE, ""), VARIABLE
    kinds = (
        tuple(k.strip() for k in given.split(",") if k.strip()) if isinstance(given, str) else tuple(given)
    )
    for kind in kinds:
        if kind not in KINDS:
            raise SettingError(source, f"cannot trace {kind!r}; expected some of {','.join(KINDS)}")
    return kinds


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
        return cls(settings.trace) if settings.trace else None

    def attach(self, run: RunContext) -> None:
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
