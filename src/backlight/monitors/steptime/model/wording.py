"""How findings about time name their evidence and put numbers into sentences. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from backlight.monitors.steptime.model.phase_times import PREFIX, Recorded, read_phases
from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.records import Evidence
from backlight.store.read.run import Event, Run

CIRCUMSTANCES = "circumstances"
"""Kind of the event that says, at the end of a run, how its steps were run; see the session."""

_PROFILE = re.compile(r"(^|/)profile(-\d+)?\.json$")


@dataclass(frozen=True)
class Profiled:
    """The profile of a run and its place in it; ``content`` is what ``backlight profile --json`` prints."""

    path: str
    content: Mapping[str, Any]

    @property
    def step_ms(self) -> float | None:
        """Return the median of a steady step; None where none was found."""
        step = self.content.get("step")
        return float(step["median_ms"]) if step else None

    def rows(self, table: str) -> list[Mapping[str, Any]]:
        """Return a table; empty where it was not measured."""
        return list(self.content.get(table) or [])

    def evidence(self, part: str, value: float | str, unit: str = "1") -> Evidence:
        """Point to a part of the profile, in the words of the report's panels: ``profile/copies/...``."""
        return Evidence(f"profile/{part}", value=value, unit=unit)

    def state(self, name: str) -> str:
        """Return the state of an optimisation: ``on``, ``off`` or ``not measured``."""
        for row in self.rows("optimizations"):
            if row.get("name") == name:
                return str(row.get("state"))
        return "not measured"


def read_profile(run: Run) -> Profiled | None:
    """Return the newest profile that a run holds; None where it has none that can be read."""
    found = [path for path in run.evidence() if _PROFILE.search(path)]
    for path in sorted(found, reverse=True):
        try:
            content = json.loads(run.read_evidence(path))
        except (ValueError, OSError):
            continue
        if isinstance(content, dict):
            return Profiled(path, content)
    return None


def circumstances(run: Run) -> Event | None:
    """Return how the newest attempt was run, as its lowest rank recorded it; None where nothing was."""
    found = [e for e in run.events(CIRCUMSTANCES) if e.attempt == run.attempts[-1].index]
    return min(found, key=lambda event: event.rank, default=None)


def steady_phases(run: Run, limits: Thresholds, rank: int | None = None) -> Recorded | None:
    """Return the phase times of the steady steps; None where they are too few to judge."""
    table = read_phases(run, rank=rank)
    if table is None:
        return None
    rest = table.steady()[1]
    return rest if len(rest.steps) >= limits.steady_steps else None


def phase(table: Recorded, name: str) -> Evidence:
    """Point to the step whose time in a phase is nearest to the median."""
    values = table.phase(name)
    row = int(np.argmin(np.abs(values - np.median(values))))
    return Evidence(f"scalars/{PREFIX}{name}", int(table.steps[row]), float(values[row]), "s")


def percent(share: float) -> str:
    """Write a share as ``12 %``, small ones as ``0.4 %``."""
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 else f"{100 * share:.2g} %"


def ms(milliseconds: float) -> str:
    """Write a time in milliseconds, or seconds where it is long."""
    return f"{milliseconds / 1e3:.3g} s" if milliseconds >= 1e3 else f"{milliseconds:.3g} ms"


def size(nbytes: float) -> str:
    """Write bytes in MiB or GiB."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def plural(count: int, noun: str) -> str:
    """Write ``1 step`` or ``3 steps``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
