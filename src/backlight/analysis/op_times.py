"""Two profiled runs by kind of operation: milliseconds per step, with intervals from the stored traces."""

from __future__ import annotations

import numpy as np

from backlight.monitors.steptime.model.evidence import StoredProfile, read_profile
from backlight.monitors.steptime.model.run_variation import ASSUMED
from backlight.monitors.steptime.model.step_comparison import (
    TimeComparison,
    TimeRow,
    compare_series,
    core_wait,
    levels_of,
    widen,
)
from backlight.monitors.steptime.model.step_times import CONFIDENCE, MIN_STEPS, Floats, difference
from backlight.store.read.run import Run

NEGLIGIBLE = 0.005
"""Share of all operations below which a kind is not tested."""


def compare_kinds(first: Run, second: Run, confidence: float = CONFIDENCE) -> TimeComparison | None:
    """Compare two profiles by kind of operation; None where one of the runs has no traced profile."""
    profiles = read_profile(first), read_profile(second)
    if profiles[0] is None or profiles[1] is None:
        return None
    averages = _averages(profiles[0]), _averages(profiles[1])
    if not averages[0] or not averages[1]:
        return None
    first_steps, second_steps = (int(p.content.get("traced_steps") or 0) for p in profiles if p)
    counts = (first_steps, second_steps)
    names = dict.fromkeys([*averages[0], *averages[1]])
    rows = [TimeRow(name, averages[0].get(name, 0.0), averages[1].get(name, 0.0)) for name in names]
    if min(counts) < MIN_STEPS:
        needed = f"{MIN_STEPS} or more are needed (backlight profile --traced)"
        why = f"no intervals: {min(counts)} traced steps, {needed}"
        return TimeComparison(counts, tuple(rows), confidence, (why,))
    one, other = _by_step(first, counts[0]), _by_step(second, counts[1])
    if one is None or other is None:
        why = "no intervals: a trace is not there, or cannot be read (pip install 'backlight[trace]')"
        return TimeComparison(counts, tuple(rows), confidence, (why,))
    least = [NEGLIGIBLE * sum(float(np.median(series)) for series in side.values()) for side in (one, other)]
    levels = levels_of((one, other), least)
    waits = core_wait(first), core_wait(second)
    shown = (
        widen(
            compare_series(row.name, one, other, difference, levels[row.name], ASSUMED),
            *waits,
            is_drifting=False,
        )
        if row.name in levels
        else row
        for row in rows
    )
    return TimeComparison(counts, tuple(shown), confidence, variation=ASSUMED)


def _averages(profiled: StoredProfile) -> dict[str, float]:
    """Return milliseconds per step by kind: of the device where there is one, else of the host."""
    rows = profiled.rows("kinds")
    column = "device_ms" if any(row.get("device_ms") for row in rows) else "host_ms"
    return {str(row["name"]): float(row.get(column) or 0.0) for row in rows}


def _by_step(run: Run, steps: int) -> dict[str, Floats] | None:
    """Return seconds by kind, each [steps], from the trace that a run keeps; None where that fails."""
    paths = [path for path in run.evidence() if path.endswith("trace.json.gz")]
    if not paths:
        return None
    try:
        # Reading traces takes packages that reading runs does not.
        from backlight.trace.analysis import analyse_rank  # noqa: PLC0415
        from backlight.trace.reader import read_trace  # noqa: PLC0415
        from backlight.trace.step_operators import split  # noqa: PLC0415
        from backlight.trace.timeline import Timeline  # noqa: PLC0415

        main, _ = split(read_trace(run.path / paths[-1]), steps)
        timeline = Timeline(main)
        numbers = list(dict.fromkeys(step.number for step in timeline.steps if step.number is not None))
        each = [analyse_rank(timeline, number) for number in numbers]
    except (ModuleNotFoundError, ValueError, OSError):
        return None
    on_device = any(one.device_total for one in each)
    names = dict.fromkeys(row.name for one in each for row in one.kinds)
    by_name = [
        {row.name: (row.device if on_device else row.host) * 1e-9 for row in one.kinds} for one in each
    ]
    return {name: np.array([row.get(name, 0.0) for row in by_name]) for name in names}
