"""Evidence of findings about step time: profile, runtime info and phase times of a stored run. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight import codec
from backlight.findings.limits import Limits, limit
from backlight.monitors.steptime.model.step_times import PREFIX, Floats, PhaseTimes, read_phases
from backlight.records import Evidence
from backlight.store.format.schema import SAMPLED_LINES
from backlight.store.read.run import Event, Run

RUNTIME_INFO = "runtime_info"
"""Kind of the event that records, at the end of a run, optimizers, threads, memory and compilation."""

DEVICE_PREFIX = "gpu/"
"""Prefix of the scalars that the driver of a GPU reports."""

HOST_MEMORY = "host/memory"
"""Scalar of the bytes of memory that the process has resident."""

GARBAGE_COLLECTION = "garbage_collection"
"""Kind of the event of a pause by Python's garbage collector."""

KEPT_GRAPHS = "kept_graphs"
"""Kind of the event that records graphs of earlier steps that are alive, and what holds them."""

MEASURED_STEPS = 8
"""Steps without the first from which on the share of a phase has an interval that says something."""

FORMULAS = "docs/formulas.md, section 6"
"""Source of limits that the formulas state."""

KEPT_DATA = "kept_data"
"""Kind of the event that records a container of tensors without a graph that grows from step to step."""

GROWING_HOOKS = "growing_hooks"
"""Kind of the event that records a module or parameter that gets a further hook in each step."""

_PROFILE = re.compile(r"(^|/)profile(-\d+)?\.json$")


@dataclass(frozen=True)
class SteadyLimits(Limits, monitor="steptime"):
    """Limit of every rule on phase times."""

    steady_steps: int = limit(
        20, "steady steps that a rule on phase times needs: fewer are an accident", low=4
    )


@dataclass(frozen=True)
class BusyLimits(SteadyLimits, monitor="steptime"):
    """Limits of rules that take a time for what the run itself does."""

    busy_share: float = limit(
        0.05,
        "share of the run that the training thread waited for a core; above it, times are the machine's",
        high=1.0,
    )


@dataclass(frozen=True)
class StoredProfile:
    """The profile of a run; ``content`` is what ``backlight profile --json`` prints."""

    content: Mapping[str, Any]

    @property
    def step_ms(self) -> float | None:
        """Median of a steady step; None where none was found."""
        step = self.content.get("step")
        return float(step["median_ms"]) if step else None

    def rows(self, table: str) -> list[Mapping[str, Any]]:
        """Return the rows of a table; empty where it was not measured."""
        listed = self.content.get(table)
        return [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []

    def evidence(self, part: str, value: float | str, unit: str = "1") -> Evidence:
        """Cite a part of the profile by the path that the report's panels use: ``profile/copies/...``."""
        return Evidence(f"profile/{part}", value=value, unit=unit)

    def state(self, name: str) -> str:
        """Return the state of an optimization: ``on``, ``off`` or ``not measured``."""
        rows = self.rows("optimizations")
        return next((str(row.get("state")) for row in rows if row.get("name") == name), "not measured")


def read_profile(run: Run) -> StoredProfile | None:
    """Return the newest readable profile of a run; None where it has none."""
    for path in sorted((path for path in run.evidence() if _PROFILE.search(path)), reverse=True):
        try:
            content = codec.decode(run.read_evidence(path).decode("utf-8"))
        except (ValueError, OSError):
            continue
        if isinstance(content, dict):
            return StoredProfile(content)
    return None


def newest_events(run: Run, kind: str) -> list[Event]:
    """Return the events of a kind of the newest attempt, of all ranks."""
    return [event for event in run.events(kind) if event.attempt == run.attempts[-1].index]


def read_runtime_info(run: Run) -> Event | None:
    """Return the runtime info of the newest attempt, of its lowest rank; None where none was recorded."""
    return min(newest_events(run, RUNTIME_INFO), key=lambda event: event.rank, default=None)


def peak_memory(run: Run, profile: StoredProfile) -> tuple[float, float]:
    """Return peak and capacity of the memory in bytes, from the profile or the runtime info; 0 if unknown."""
    info = read_runtime_info(run)
    memory = profile.content.get("memory") or (info.payload.get("memory") if info is not None else None) or {}
    return float(memory.get("peak") or 0.0), float(memory.get("capacity") or 0.0)


def measured_phases(run: Run, limits: SteadyLimits, at_least: int = MEASURED_STEPS) -> PhaseTimes | None:
    """Return the phase times of the steady steps, or of all but the first where few are steady.

    They show which part of a step a phase takes, not how long a steady step is; None where they are too few.
    """
    table = steady_phases(run, limits)
    if table is None and (table := read_phases(run)) is not None:
        table = table.after(1)
    return table if table is not None and len(table.steps) >= at_least else None


def core_wait(run: Run) -> float | None:
    """Return the share of the run that the training thread waited for a core; None where not recorded."""
    info = read_runtime_info(run)
    waited = info.payload.get("core_wait") if info is not None else None
    return None if waited is None else float(waited)


def steady_phases(run: Run, limits: SteadyLimits, rank: int | None = None) -> PhaseTimes | None:
    """Return the phase times of the steady steps; None where they are too few."""
    table = read_phases(run, rank=rank)
    if table is None:
        return None
    rest = table.steady()[1]
    return rest if len(rest.steps) >= limits.steady_steps else None


def is_busy(run: Run, limits: BusyLimits) -> bool:
    """Return whether other programs took the cores of the training thread, so that its times mean little.

    A run that goes on, or was killed, has not recorded it: nothing is claimed from its times.
    """
    waited = core_wait(run)
    return read_runtime_info(run) is None or (waited is not None and waited > limits.busy_share)


def phase_evidence(table: PhaseTimes, name: str) -> Evidence:
    """Cite the step whose time in a phase is nearest to the median."""
    return scalar_evidence(f"{PREFIX}{name}", table.steps, table.phase(name))


def scalar_evidence(name: str, steps: npt.NDArray[np.int64], values: Floats) -> Evidence:
    """Cite the step whose seconds of a scalar are nearest to the median."""
    row = int(np.argmin(np.abs(values - np.median(values))))
    return Evidence(f"scalars/{name}", int(steps[row]), float(values[row]), "s")


def samples_evidence(run: Run, share: float) -> Evidence:
    """Cite the samples of the training thread, of which a share is in question."""
    step = next((event.step for event in reversed(newest_events(run, SAMPLED_LINES))), None)
    return Evidence(f"events/{SAMPLED_LINES}", step, share, "of the samples")


def info_evidence(info: Event, value: float | str, unit: str = "1") -> Evidence:
    """Cite the runtime info."""
    return Evidence(f"events/{RUNTIME_INFO}", info.step, value, unit)


def percent(share: float) -> str:
    """Return a share as ``12 %``, small ones as ``0.4 %``."""
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 else f"{100 * share:.2g} %"
