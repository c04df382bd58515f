"""Limits of rules: declared as fields of a frozen dataclass next to the rule, overridden by monitor and name.

A rule declares its own class and names it in :func:`backlight.registry.rule`::

    @dataclass(frozen=True)
    class MemoryLimits(Limits, monitor="steptime"):
        logits_share: float = limit(0.2, "share of the peak memory that logits take", high=1.0)

    @rule("memory", monitor="steptime", limits=MemoryLimits)
    def memory(run: Run, limits: MemoryLimits) -> Iterator[Finding]: ...

Limits that several rules or a model share are declared once, in a base class of theirs. The user sees one
table of thresholds per monitor: ``[thresholds.steptime]``.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar

from backlight.registry import RULES
from backlight.text import did_you_mean

CHOSEN = "chosen: injected faults are found, controls stay silent"


class ThresholdError(ValueError):
    """A threshold that does not exist, or a value that it cannot take."""


def limit(
    default: Any, reason: str, *, source: str = CHOSEN, low: float = 0.0, high: float = math.inf
) -> Any:
    """Declare one limit; ``low`` and ``high`` bound what an override may set, both included."""
    return field(default=default, metadata={"reason": reason, "source": source, "low": low, "high": high})


@dataclass(frozen=True)
class Limits:
    """Base of the limits of a rule: a frozen dataclass whose fields are made by :func:`limit`."""

    monitor: ClassVar[str] = ""

    def __init_subclass__(cls, monitor: str = "") -> None:
        """Register the class with its monitor, by default that of its base."""
        super().__init_subclass__()
        cls.monitor = monitor or cls.monitor
        _CLASSES[cls.__module__, cls.__qualname__] = cls

    def override(self, changes: Mapping[str, Any]) -> Self:
        """Return these limits with some values replaced; ThresholdError for an unknown name or bad value."""
        fields = {f.name: f for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **_checked(self.monitor, fields, changes))

    def changed(self) -> dict[str, float]:
        """Return the values that differ from the defaults, by name."""
        return {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        }


L = TypeVar("L", bound=Limits)

_CLASSES: dict[tuple[str, str], type[Limits]] = {}


def declared(monitor: str) -> dict[str, dataclasses.Field[Any]]:
    """Return the limits of a monitor by name, in the order of their declaration; empty for none."""
    RULES.of([monitor])  # imports its rules, and with them their classes of limits
    fields: dict[str, dataclasses.Field[Any]] = {}
    for cls in _CLASSES.values():
        if cls.monitor == monitor and dataclasses.is_dataclass(cls):
            fields |= {f.name: f for f in dataclasses.fields(cls)}
    return fields


def merge_overrides(
    monitor: str, recorded: Mapping[str, Any] | None = None, overrides: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """Return the overridden limits of a monitor by name: what the run recorded, then what the caller gives.

    A recorded name that this release does not have (another wrote the run) is left out with a warning.

    Raises
    ------
    ThresholdError
        If ``overrides`` holds an unknown name, or a value of the wrong type or out of bounds.
    """
    if not recorded and not overrides:
        return {}
    kept, problems = known_overrides(monitor, recorded or {})
    for problem in problems:
        warnings.warn(f"backlight: a threshold that the run recorded is ignored: {problem}", stacklevel=3)
    return _checked(monitor, declared(monitor), {**kept, **(overrides or {})})


def known_overrides(monitor: str, recorded: Mapping[str, Any]) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return those recorded overrides that this release can use, and what is wrong with the others."""
    if not recorded:
        return {}, ()
    limits_of = declared(monitor)
    problems = {name: _problem(monitor, limits_of, name, value) for name, value in recorded.items()}
    kept = {name: value for name, value in recorded.items() if not problems[name]}
    return _checked(monitor, limits_of, kept), tuple(filter(None, problems.values()))


def with_overrides(cls: type[L], overrides: Mapping[str, float]) -> L:
    """Return the limits of one class; names that it does not have belong to other rules."""
    return cls(**{f.name: overrides[f.name] for f in dataclasses.fields(cls) if f.name in overrides})


def _checked(
    monitor: str, fields: Mapping[str, dataclasses.Field[Any]], changes: Mapping[str, Any]
) -> dict[str, Any]:
    taken: dict[str, Any] = {}
    for name, value in changes.items():
        problem = _problem(monitor, fields, name, value)
        if problem:
            raise ThresholdError(problem)
        taken[name] = int(value) if isinstance(fields[name].default, int) else float(value)
    return taken


def _problem(monitor: str, fields: Mapping[str, dataclasses.Field[Any]], name: str, value: Any) -> str:
    """Return what is wrong with ``value`` for the limit ``name``; empty if nothing is."""
    if name not in fields:
        hint = did_you_mean(str(name), sorted(fields))
        return f"the {monitor} monitor has no threshold {name!r}{hint}"
    whole = isinstance(fields[name].default, int)
    kind = "a whole number" if whole else "a number"
    where = f"threshold {name!r} of the {monitor} monitor"
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return f"{where} must be {kind}, got {value!r}"
    if whole and value != int(value):
        return f"{where} counts steps and must be {kind}, got {value!r}"
    low, high = fields[name].metadata["low"], fields[name].metadata["high"]
    if not low <= value <= high:
        bounds = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
        return f"{where} must be {bounds}, got {value!r}"
    return ""
