"""What the thresholds of every monitor share: a field with its reason and bounds, and how it is changed."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self


class ThresholdError(ValueError):
    """A threshold that does not exist, or a value that it cannot take."""


def limit(
    default: Any, reason: str, *, source: str = "chosen", low: float = 0.0, high: float = math.inf
) -> Any:
    """Declare one threshold; ``low`` and ``high`` bound what an override may set, both included."""
    return field(default=default, metadata={"reason": reason, "source": source, "low": low, "high": high})


@dataclass(frozen=True)
class Limits:
    """Base of the thresholds of a monitor: a frozen dataclass whose fields are made by :func:`limit`."""

    monitor: ClassVar[str] = ""

    def override(self, changes: Mapping[str, Any]) -> Self:
        """Return these thresholds with some values replaced.

        Parameters
        ----------
        changes:
            New values by field name. A field that counts steps takes whole numbers only.

        Raises
        ------
        ThresholdError
            If a name is unknown or a value has the wrong type or lies out of bounds; the message
            names the key and what would be valid.
        """
        known = {f.name: f for f in dataclasses.fields(self)}
        taken: dict[str, Any] = {}
        for name, value in changes.items():
            problem = self._problem(name, value)
            if problem:
                raise ThresholdError(problem)
            taken[name] = int(value) if isinstance(known[name].default, int) else float(value)
        return dataclasses.replace(self, **taken)

    @classmethod
    def recorded(cls, changes: Mapping[str, Any]) -> tuple[Self, tuple[str, ...]]:
        """Return the thresholds that a run recorded, with what is wrong with those that are left out.

        Another release may have written the run, and that must not keep it from being read.
        """
        problems = {name: cls._problem(name, value) for name, value in changes.items()}
        known = {name: value for name, value in changes.items() if not problems[name]}
        return cls().override(known), tuple(problem for problem in problems.values() if problem)

    def changed(self) -> dict[str, float]:
        """Return the values that differ from the defaults, by field name."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }

    @classmethod
    def _problem(cls, name: str, value: Any) -> str:
        """Say what is wrong with ``value`` for the field ``name``; empty if nothing is."""
        known = {f.name: f for f in dataclasses.fields(cls)}
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
            hint = f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(sorted(known))}"
            return f"the {cls.monitor} monitor has no threshold {name!r}; {hint}"
        whole = isinstance(known[name].default, int)
        kind = "a whole number" if whole else "a number"
        where = f"threshold {name!r} of the {cls.monitor} monitor"
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return f"{where} must be {kind}, got {value!r}"
        if whole and value != int(value):
            return f"{where} counts steps and must be {kind}, got {value!r}"
        low, high = known[name].metadata["low"], known[name].metadata["high"]
        if not low <= value <= high:
            bounds = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
            return f"{where} must be {bounds}, got {value!r}"
        return ""
