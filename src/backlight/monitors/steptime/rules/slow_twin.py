"""Rule ``slow_twin``: one layer of many alike takes longer than the others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from backlight.monitors.steptime.model.thresholds import Thresholds
from backlight.monitors.steptime.model.wording import Profiled, ms, percent, plural, read_profile
from backlight.records import Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run


@rule("slow_twin", monitor="steptime", thresholds=("twin_count", "twin_factor", "twin_share"))
def slow_twin(run: Run, limits: Thresholds) -> Iterator[Finding]:
    """Find modules that take longer than others of the same place in numbered blocks.

    Controls are modules whose names differ in one number and that have the same type and as many calls.
    What is inside a slow one is not told again.
    """
    profiled = read_profile(run)
    step = profiled.step_ms if profiled is not None else None
    if profiled is None or not step:
        return
    told: list[str] = []
    printed = run.fingerprint()
    types = dict(printed.modules) if printed is not None else {}
    for members in _twins(profiled.rows("modules"), types):
        if len(members) < limits.twin_count:
            continue
        times = np.array([_time(row) for row in members])
        median = float(np.median(times))
        for row, spent in zip(members, times.tolist(), strict=True):
            name, lost = str(row["name"]), (spent - median) / step
            slow = median > 0 and spent > limits.twin_factor * median and lost > limits.twin_share
            if not slow or any(name.startswith(f"{other}.") for other in told):
                continue
            told.append(name)
            yield _finding(profiled, row, spent, median, len(members), lost)


def _twins(modules: list[Mapping[str, Any]], types: Mapping[str, str]) -> list[list[Mapping[str, Any]]]:
    """Return the groups of controls, those with the shortest names first: the blocks before their parts."""
    groups: dict[tuple[str, str, float], list[Mapping[str, Any]]] = defaultdict(list)
    for row in modules:
        name = str(row["name"])
        if re.search(r"(^|\.)\d+(\.|$)", name):
            place = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name, count=1)
            groups[place, types.get(name, ""), float(row.get("calls") or 0.0)].append(row)
    return [groups[key] for key in sorted(groups, key=lambda key: (key[0].count("."), key[0]))]


def _time(row: Mapping[str, Any]) -> float:
    return float(row.get("forward_ms") or 0.0) + float(row.get("backward_ms") or 0.0)


def _finding(
    profiled: Profiled, row: Mapping[str, Any], spent: float, median: float, count: int, lost: float
) -> Finding:
    name = str(row["name"])
    return Finding(
        rule="slow_twin",
        severity=Severity.WARNING,
        claim=(
            f"{name} takes {ms(spent)} of a step, {spent / median:.1f} times the median of {ms(median)} of "
            "its "
            f"{plural(count - 1, 'control')}. Expected gain: at most {percent(lost)} of a step."
        ),
        subject=Subject(module=name),
        evidence=(
            profiled.evidence(f"modules/{name}/forward_ms", float(row.get("forward_ms") or 0.0), "ms"),
            profiled.evidence(f"modules/{name}/backward_ms", float(row.get("backward_ms") or 0.0), "ms"),
        ),
        next_check=(
            f"Look at what {name} does that its controls do not: another type or device, a hook, a fallback "
            "kernel, "
            "a copy. The operators of the profile by phase show it."
        ),
        refuted_if="traced again, another one of them is the slow one: then it was an accident.",
    )
