"""The thresholds of the stalls room: one frozen class, each field with its reason. No torch."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self


class ThresholdError(ValueError):
    """A threshold that does not exist, or a value that it cannot take."""


def _limit(default: float, reason: str, *, low: float = 0.0, high: float = math.inf) -> Any:
    return field(default=default, metadata={"reason": reason, "low": low, "high": high})


@dataclass(frozen=True)
class Thresholds:
    """Every number that a verdict on a stall compares with; times are in seconds.

    ``metadata`` of each field holds its ``reason`` and the bounds of an override.
    """

    times_typical: float = _limit(
        10.0, "a phase that takes ten times its moving time is no longer its usual self", low=1.0
    )
    floor: float = _limit(
        30.0, "backward, clipping or optimizer: shorter than this nobody would look", low=0.1
    )
    floor_collective: float = _limit(
        60.0, "inside a collective: the others may be compiling or writing a checkpoint", low=0.1
    )
    floor_forward: float = _limit(
        60.0, "forward or loss: recompilation of a new shape takes this long", low=0.1
    )
    floor_data: float = _limit(60.0, "waiting for data: a new epoch starts its workers", low=0.1)
    floor_other: float = _limit(300.0, "between steps: the script may do anything there", low=0.1)
    idle: float = _limit(0.05, "share of one core below which a process waits rather than works", high=1.0)
    busy: float = _limit(0.6, "share of one core above which a thread computes without a pause", high=1.0)
    looks: float = _limit(3.0, "looks at the stacks without which no claim about a line is made", low=2.0)
    window: float = _limit(0.6, "seconds that the looks must span", low=0.1)

    def override(self, changes: Mapping[str, Any]) -> Self:
        """Return these thresholds with some values replaced.

        Raises
        ------
        ThresholdError
            If a name is unknown, or a value is no number or out of bounds.
        """
        known = {f.name: f for f in dataclasses.fields(self)}
        for name, value in changes.items():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
                raise ThresholdError(f"thresholds.stalls: unknown key {name!r}; {hint}")
            low, high = known[name].metadata["low"], known[name].metadata["high"]
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                raise ThresholdError(
                    f"thresholds.stalls.{name}: got {value!r}, expected a number from {low:g} to {high:g}"
                )
        return dataclasses.replace(self, **{name: float(value) for name, value in changes.items()})
