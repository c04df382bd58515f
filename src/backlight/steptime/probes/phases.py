"""Host time per phase of a step, from the hooks that are there anyway.

What no hook separates (forward, loss, anything between steps) is one remainder, named as such: it
still counts in the sum.
"""

from __future__ import annotations

from typing import Any

from backlight.registry import Needs, probe

REMAINDER = "between"
"""Name of the time that no hook separates."""


@probe("phases", room="steptime", needs=Needs.STEPS)
class PhaseProbe:
    """Seconds per phase, which add up to the step."""

    def measure(self, summary: Any) -> dict[str, float]:
        """Return one scalar per phase of the step in ``summary``."""
        scalars = {f"phase/{phase}": seconds for phase, seconds in summary.phases.items()}
        rest = summary.seconds - sum(summary.phases.values())
        scalars[f"phase/{REMAINDER}"] = max(rest, 0.0)
        return scalars
