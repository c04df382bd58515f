"""Hardware counters of kernels that CUPTI's range profiler recorded, by the operator that launched them."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from backlight.trace.classification import PROFILER_RANGE, RUNTIME
from backlight.trace.operators import NO_OPERATOR
from backlight.trace.timeline import Timeline


@dataclass(frozen=True)
class OperatorCounters:
    """Counters summed over the kernels of one operator; ``kernels`` is their number."""

    operator: str
    kernels: int
    counters: dict[str, float]


def hardware_counters(timeline: Timeline) -> tuple[list[OperatorCounters], str]:
    """Return the counters by operator, the most kernels first, and a note where launches do not match.

    Ranges carry no correlation. The profiler serialises kernels, so the n-th range is of the n-th launch;
    where their numbers differ, all counters stand under no operator.
    """
    events, tree = timeline.events, timeline.tree
    rows = np.flatnonzero(events.among(PROFILER_RANGE) & (events["counters"] >= 0))
    if not len(rows):
        return [], ""
    rows = rows[np.argsort(events["start"][rows], kind="stable")]
    launching = events.among(RUNTIME) & events.where("name", lambda word: "LaunchKernel" in word)
    calls = np.flatnonzero(launching[tree.rows])
    calls = calls[np.argsort(tree.start[calls], kind="stable")]
    note = ""
    if len(calls) != len(rows):
        note = (
            f"{len(rows):,} ranges of counters and {len(calls):,} launches do not match: their operators are "
            "not known"
        )
        calls = np.full(len(rows), -1)
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    counts: dict[str, int] = defaultdict(int)
    for row, call in zip(rows.tolist(), calls.tolist(), strict=True):
        operator = int(timeline.operators[call]) if call >= 0 else -1
        name = timeline.name(int(tree.rows[operator])) if operator >= 0 else NO_OPERATOR
        counts[name] += 1
        for counter, value in json.loads(events.word("counters", row)).items():
            if isinstance(value, (int, float)):
                sums[name][counter] += value
    found = [OperatorCounters(name, counts[name], dict(sums[name])) for name in counts]
    return sorted(found, key=lambda one: -one.kernels), note
