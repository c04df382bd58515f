"""Flame graph of a stored profile: stacks as bars, each on top of its caller and as wide as its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from backlight.text import number, visible

SMALLEST = 0.002
"""Share of the whole from which a bar is drawn."""

LEVELS = 40
"""Frames of a stack that are drawn, outermost first."""

Tree = dict[str, tuple[list[float], "Tree"]]


def bars(stacks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the bars of stacks: level, begin and width (shares of the whole), label, number of the phase.

    Phases are at the bottom. What a bar has beyond those on it is its own time.
    """
    tree: Tree = {}
    for stack in stacks:
        names = [f"{name} ({PurePath(file).name}:{line})" for file, line, name in stack["frames"]]
        within = tree
        for label in [str(stack["phase"]).replace("_", " "), *names][:LEVELS]:
            spent, within = within.setdefault(label, ([0.0], {}))
            spent[0] += float(stack["ms"])
    whole = sum(spent[0] for spent, _ in tree.values())
    drawn: list[dict[str, Any]] = []
    open_bars = [(0, 0.0, tree, -1)]
    while open_bars:
        level, begin, children, phase = open_bars.pop()
        ordered = sorted(children.items(), key=lambda item: -item[1][0][0])
        for place, (label, ((spent,), on_it)) in enumerate(ordered):
            width = spent / whole
            if width < SMALLEST:
                break  # the others are smaller
            of = phase if level else place
            drawn.append(
                {
                    "level": level, "begin": begin, "width": width, "phase": of,
                    "label": f"{visible(label)} {number(spent, 3)} ms",
                }
            )  # fmt: skip
            open_bars.append((level + 1, begin, on_it, of))
            begin += width
    return drawn
