"""Time by the user's own annotations: ``record_function`` and what frameworks mark."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backlight.trace.classification import ANNOTATION
from backlight.trace.device_queues import Spread
from backlight.trace.events import Integers
from backlight.trace.operators import Costs

MIN_STEPS = 10
"""Fewer steps show no variation."""


@dataclass(frozen=True)
class Annotation:
    """One name; nanoseconds of the host, and of the device for what was launched inside.

    Annotations inside one of the same name count once; others are included in those around them. What it
    takes in a step, over the ``steps`` that it is in, is None for fewer than :data:`MIN_STEPS`, and on the
    device where there is none.
    """

    name: str
    calls: int
    host: int
    device: int
    share: float
    steps: int
    host_per_step: Spread | None
    device_per_step: Spread | None


def by_annotation(costs: Costs, launched: Integers) -> list[Annotation]:
    """Return the annotations of the chosen steps; ``launched`` is from ``device_time``."""
    timeline = costs.timeline
    tree, events = timeline.tree, timeline.events
    is_step = events.where("name", lambda word: word.startswith("ProfilerStep"))
    marked = events.among(ANNOTATION) & ~is_step
    rows = costs.host_rows[marked[tree.rows[costs.host_rows]]]
    names = events["name"][tree.rows]
    inner = [
        any(names[outer] == names[row] for outer in tree.upwards(int(tree.parent[row])))
        for row in rows.tolist()
    ]
    outermost = ~np.array(inner, dtype=bool)
    host, device = (tree.end - tree.start)[rows], launched[rows]
    steps = timeline.step_of(tree.start[rows])
    found = []
    for code in np.unique(names[rows]):
        here = names[rows] == code
        once = here & outermost
        spent, on_device = int(host[once].sum()), int(device[once].sum())
        numbers, at = np.unique(steps[once], return_inverse=True)
        per_step = [
            Spread.of(np.bincount(at, time[once])) if len(numbers) >= MIN_STEPS else None
            for time in (host, device)
        ]
        found.append(
            Annotation(
                events.words["name"][int(code)], int(here.sum()), spent, on_device,
                costs.share(spent, on_device), len(numbers), per_step[0],
                per_step[1] if costs.on_device else None,
            )
        )  # fmt: skip
    return sorted(found, key=lambda one: (one.share, one.host), reverse=True)
