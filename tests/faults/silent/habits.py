"""Habits of training loops that have nothing to do with an error in one: clipping, autocast, accumulation, …

Every loop of :class:`faults.silent.loop.Loop` has the habits in force. What is found in a loop with an error
must not depend on them, and neither must the silence of its control.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Habits:
    """What a loop does besides; the defaults are those of the plainest one.

    ``clips`` is by what gradients are clipped, ``clears`` where in a step they are cleared. Other code may
    rely on ``sets_to_none``.
    """

    clips: str = ""
    autocast: bool = False
    microbatches: int = 1
    has_schedule: bool = False
    has_scaler: bool = False
    averages: bool = False
    is_compiled: bool = False
    evaluates: bool = False
    clears: str = "start"
    sets_to_none: bool = True

    def __str__(self) -> str:
        """Return what differs from the plainest loop."""
        own, plain = dataclasses.asdict(self), dataclasses.asdict(Habits())
        return ", ".join(f"{name}={value}" for name, value in own.items() if value != plain[name]) or "plain"


PLAIN = Habits()

VALUES: dict[str, tuple[object, ...]] = {
    "clips": ("", "norm", "value"),
    "autocast": (False, True),
    "microbatches": (1, 2),
    "has_schedule": (False, True),
    "has_scaler": (False, True),
    "averages": (False, True),
    "is_compiled": (False, True),
    "evaluates": (False, True),
    "clears": ("start", "end"),
    "sets_to_none": (True, False),
}
"""The values of each habit, whose product are 1,536 loops."""

_in_force = [PLAIN]


def current() -> Habits:
    """Return the habits in force."""
    return _in_force[-1]


@contextlib.contextmanager
def practised(habits: Habits) -> Iterator[None]:
    """Give every loop inside these habits."""
    _in_force.append(habits)
    try:
        yield
    finally:
        _in_force.pop()


def product() -> list[Habits]:
    """Return every combination."""
    return [
        Habits(**dict(zip(VALUES, values, strict=True))) for values in itertools.product(*VALUES.values())
    ]


def covering(strength: int, seed: int = 0) -> list[Habits]:
    """Return loops among which every combination of values of ``strength`` habits occurs, the plainest first.

    Each is the best of some random ones by how many new combinations it holds; all of them if ``strength`` is
    the number of habits.
    """
    if strength >= len(VALUES):
        return product()
    groups = list(itertools.combinations(VALUES, strength))
    left = {(names, values) for names in groups for values in itertools.product(*(VALUES[n] for n in names))}
    draw, rows = random.Random(seed), [PLAIN]

    def held(row: Habits) -> set[tuple[tuple[str, ...], tuple[object, ...]]]:
        return {(names, tuple(getattr(row, n) for n in names)) for names in groups} & left

    left -= held(PLAIN)
    while left:
        needed = dict(zip(*min(left, key=repr), strict=True))
        drawn = [{name: draw.choice(values) for name, values in VALUES.items()} for _ in range(64)]
        rows.append(max((Habits(**{**one, **needed}) for one in drawn), key=lambda row: len(held(row))))
        left -= held(rows[-1])
    return rows
