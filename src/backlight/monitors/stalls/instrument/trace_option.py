"""``--trace``: lines on the terminal and events in the run, flushed at the moment they happen."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backlight.monitors.stalls.instrument.backward_trace import Tracer
    from backlight.store.write.writer import RunWriter

VARIABLE = "BACKLIGHT_TRACE"
"""Environment variable that stands in for ``--trace``, where a cluster lets one set nothing else."""


def traced_kinds(
    given: str | tuple[str, ...] | None, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """Return what is to be traced: as given, else by the environment variable, else nothing.

    Raises
    ------
    ValueError
        If a kind does not exist.
    """
    source = "--trace"
    if given is None:
        given, source = environment.get(VARIABLE, ""), VARIABLE
    kinds = (
        tuple(k.strip() for k in given.split(",") if k.strip()) if isinstance(given, str) else tuple(given)
    )
    known = ("gradients", "modules", "buckets")
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"{source}: cannot trace {kind!r}; expected some of {','.join(known)}")
    return kinds


def start_tracing(kinds: tuple[str, ...], writer: RunWriter, step: Callable[[], int]) -> Tracer:
    """Attach a tracer that writes to standard error and to the run.

    Parameters
    ----------
    kinds:
        What to trace.
    writer:
        The run, which gets each line as an event ``trace`` and is flushed with it, so that nothing
        is missing of what happened before a hang.
    step:
        Gives the number of the step.
    """
    from backlight.monitors.stalls.instrument.backward_trace import Tracer  # noqa: PLC0415 - the monitor costs its import only where asked

    rank = os.environ.get("RANK", "0")
    if "modules" in kinds:
        # Compiled wrappers warn of a global hook at every call; inside compiled code ours does nothing.
        warnings.filterwarnings("ignore", message=r".*when there are global hooks on modules")

    def emit(text: str, payload: dict[str, Any]) -> None:
        number = step()
        # In one write with its end of line: ranks share a terminal.
        sys.stderr.write(f"[rank {rank}] step {number} {text}\n")
        sys.stderr.flush()
        writer.event(number, "trace", payload)
        writer.flush()

    tracer = Tracer(kinds, emit)
    tracer.start()
    return tracer
