"""Host time per phase of a step, from the hooks that are there anyway.

What no hook separates is one remainder that still counts in the sum: ``other`` where the forward was
seen, and ``between`` where forward and loss are a part of it.
"""

from __future__ import annotations

from typing import Any

from backlight.records import Phase
from backlight.registry import Needs, probe

REMAINDER = "between"
"""Name of the time between the phases where forward and loss are not separated from it."""


@probe("phases", monitor="steptime", needs=Needs.STEPS)
class PhaseProbe:
    """Seconds per phase, which add up to the step."""

    def measure(self, summary: Any) -> dict[str, float]:
        """Return one scalar per phase of the step in ``summary``."""
        scalars = {f"phase/{phase}": seconds for phase, seconds in summary.phases.items()}
        rest = summary.seconds - sum(summary.phases.values())
        scalars[f"phase/{Phase.OTHER if summary.separated else REMAINDER}"] = max(rest, 0.0)
        return scalars
