"""Flame graph of a stored profile: stacks as bars, each on top of its caller and as wide as its time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from backlight.text import number, visible

SMALLEST = 0.002
"""Share of the whole from which a bar is drawn."""

LEVELS = 40
"""Frames of a stack that are drawn, outermost first."""


@dataclass
class _Bar:
    """Milliseconds of a label, and the bars on it."""

    ms: float = 0.0
    on_it: defaultdict[str, _Bar] = field(default_factory=lambda: defaultdict(_Bar))


def bars(stacks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the bars of stacks: level, begin and width (shares of the whole), label, number of the phase.

    Phases are at the bottom. What a bar has beyond those on it is its own time.
    """
    base = _Bar()
    for stack in stacks:
        names = [f"{name} ({PurePath(file).name}:{line})" for file, line, name in stack["frames"]]
        bar = base
        for label in [str(stack["phase"]).replace("_", " "), *names][:LEVELS]:
            bar = bar.on_it[label]
            bar.ms += float(stack["ms"])
    whole = sum(bar.ms for bar in base.on_it.values())
    drawn: list[dict[str, Any]] = []
    left = [(0, 0.0, base, -1)]
    while left:
        level, begin, below, phase = left.pop()
        ordered = sorted(below.on_it.items(), key=lambda item: -item[1].ms)
        for place, (label, bar) in enumerate(ordered):
            width = bar.ms / whole
            if width < SMALLEST:
                break  # the others are smaller
            of = phase if level else place
            text = f"{visible(label)} {number(bar.ms, 3)} ms"
            drawn.append({"level": level, "begin": begin, "width": width, "phase": of, "label": text})
            left.append((level + 1, begin, bar, of))
            begin += width
    return drawn
