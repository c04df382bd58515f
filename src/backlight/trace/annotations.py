"""Time by the user's own annotations: ``record_function`` and what frameworks mark."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from backlight.trace.classification import ANNOTATION
from backlight.trace.events import Integers
from backlight.trace.operators import Costs


@dataclass(frozen=True)
class Annotation:
    """One name; nanoseconds of the host, and of the device for what was launched inside.

    Annotations inside one of the same name count once; others are included in those around them.
    """

    name: str
    calls: int
    host: int
    device: int
    share: float


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
    host = (tree.end - tree.start)[rows]
    found = []
    for code in np.unique(names[rows]):
        here = names[rows] == code
        once = here & outermost
        spent, on_device = int(host[once].sum()), int(launched[rows[once]].sum())
        share = costs.share(spent, on_device)
        found.append(Annotation(events.words["name"][int(code)], int(here.sum()), spent, on_device, share))
    return sorted(found, key=lambda one: (one.share, one.host), reverse=True)
