"""How findings name their evidence and put numbers into sentences."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from backlight import text
from backlight.records import Evidence
from backlight.store.read.run import Run

T = TypeVar("T")

TITLE_CHARACTERS = 80
_NAMES = re.compile("`([^`]+)`")

NAME_LEAST = 12
"""Characters below which no name in a title is shortened."""

NAME_CHARACTERS = 40
"""Length of two parameter names above which a title names one of them only."""

EVIDENCE_ROWS = 5
"""Parameters that the evidence of one finding lists; the detail gives the number."""


def number(value: float) -> str:
    """Write a number with three significant digits, as sentences need it."""
    return text.number(value, 3)


def share(part: int, whole: int, nouns: str) -> str:
    """Write ``3 of 12 parameters (25 %)``."""
    return f"{part} of {whole} {nouns} ({text.percent(part / max(whole, 1))})"


def parameters(names: Sequence[str], count: int) -> str:
    """Write ``count`` parameters as a title does: one, two, or two "and 3 more"."""
    shown = names[:2] if sum(map(len, names[:2])) <= NAME_CHARACTERS else names[:1]
    quoted = [f"`{name}`" for name in shown]
    if count > len(shown):
        return f"{', '.join(quoted)} and {count - len(shown)} more"
    return " and ".join(quoted)


def at_line(line: str) -> str:
    """Write `` at `train.py:12` ``, to follow a noun; nothing where the line is not known."""
    return f" at `{line}`" if line else ""


def gradient_of(names: Sequence[str], count: int) -> str:
    """Write ``The gradient of `a``` or ``The gradients of `a` and `b```; the verb follows ``count``."""
    return f"The gradient{'s' if count > 1 else ''} of {parameters(names, count)}"


def series(column: str, parameter: str, step: int | None, value: float, unit: str = "gradient") -> Evidence:
    """Point to one value of a per-parameter series; ``column`` is ``gradient/rms`` or the like."""
    return Evidence(f"series/{column}/{parameter}", step, plain(value), unit)


def scalar(name: str, step: int | None, value: float, unit: str = "1") -> Evidence:
    """Point to one value of a scalar of backlight."""
    return Evidence(f"scalars/{name}", step, plain(value), unit)


def total_norm(run: Run, step: int, value: float) -> Evidence:
    """Point to a total norm: the recorded scalar, else the series that it was joined from."""
    recorded = step in run.scalar("total_norm").steps
    path = "scalars/total_norm" if recorded else "series/gradient/norm"
    return Evidence(path, step, plain(value), "gradient" if recorded else "gradient, over all parameters")


def plain(value: float) -> float | str:
    """Return a float that JSON can carry; what is not finite becomes its name."""
    return float(value) if math.isfinite(value) else str(float(value))


def loudest(items: Iterable[T], size: Callable[[T], float], count: int = EVIDENCE_ROWS) -> list[T]:
    """Return the items that the evidence lists, the largest first; ties keep their order."""
    return sorted(items, key=lambda item: -size(item))[:count]


def shorten(title: str) -> str:
    """Return a title in which the longest names are shortened until it fits; a sentence is never cut."""
    longest = max((len(name) for name in _NAMES.findall(title)), default=0)
    for most in range(longest - 1, NAME_LEAST - 1, -1):
        if len(title) <= TITLE_CHARACTERS:
            break
        title = _NAMES.sub(lambda name: f"`{text.shortened(name[1], most)}`", title)  # noqa: B023 - used at once
    return title


def modules_of(run: Run) -> dict[str, str]:
    """Return the module of each parameter, by name."""
    return {p.name: p.module for p in run.parameters()}


SCALE_FREE = frozenset(
    {
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "Adam8bit",
        "AdamW",
        "AdamW8bit",
        "Adamax",
        "Lion",
        "Muon",
        "NAdam",
        "PagedAdamW8bit",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SparseAdam",
    }
)
"""Optimizers whose step hardly changes if all gradients shrink by one factor."""


def optimizer_kinds(run: Run) -> tuple[str, ...]:
    """Return the classes of the optimizers of a run by number; empty where none was recorded."""
    stored = run.fingerprint()
    return () if stored is None else tuple(kind.partition("(")[0] for kind in stored.optimizers)


def scale_free_kinds(run: Run) -> tuple[str, ...]:
    """Return the classes of the optimizers where each of them is in ``SCALE_FREE``; else nothing."""
    kinds = optimizer_kinds(run)
    return tuple(dict.fromkeys(kinds)) if SCALE_FREE.issuperset(kinds) else ()


def optimizer_name(run: Run, number: int) -> str:
    """Return the class of an optimizer; where several have it, with the parameters that it holds."""
    kinds = optimizer_kinds(run)
    members = [p for p in run.parameters() if p.group.partition("/")[0] == str(number)]
    kind = kinds[number] if number < len(kinds) else "the optimizer"
    if kinds.count(kind) < 2 or not members:
        return kind
    return f"{kind} of {parameters([p.name for p in members], len(members))}"
