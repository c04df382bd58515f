"""Rule ``group_ratio``: one group of parameters gets gradients out of proportion to another's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.health.model.parameters import GroupError, GroupRms, group_rms, ratio
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count


@dataclass(frozen=True)
class GroupLimits(Limits, monitor="health"):
    """Limits of the rule ``group_ratio``."""

    group_ratio_low: float = limit(
        1e-2, "rms of one group over rms of the other; parts of a sound model stay within about 30"
    )
    group_ratio_high: float = limit(1e2, "the same limit from the other side")
    group_window: int = limit(20, "last recorded steps at which the ratio is evaluated", low=1)
    group_share: float = limit(0.9, "share of those steps at which the ratio must lie outside", high=1.0)


@rule("group_ratio", monitor="health", limits=GroupLimits, needs=("gradient",))
def group_ratio(run: Run, limits: GroupLimits) -> Iterator[Finding]:
    """Compare each pair of named groups; a group that matches no parameter is a finding as well."""
    known: dict[str, GroupRms] = {}
    for title, pattern in run.groups.items():
        try:
            known[title] = group_rms(run, pattern)
        except GroupError as error:
            yield _empty(title, pattern, str(error))
    for (a, one), (b, other) in itertools.combinations(known.items(), 2):
        with np.errstate(invalid="ignore"):
            ratios = ratio(one.values, other.values)
        rows = np.flatnonzero(~np.isnan(ratios))[-limits.group_window :]
        if len(rows) < limits.group_window:
            continue
        low, high = ratios[rows] < limits.group_ratio_low, ratios[rows] > limits.group_ratio_high
        if max(low.mean(), high.mean()) < limits.group_share:
            continue
        yield _finding(run, a, b, one, other, ratios, rows, limits)


def _finding(
    run: Run,
    a: str,
    b: str,
    one: GroupRms,
    other: GroupRms,
    ratios: np.ndarray,
    rows: np.ndarray,
    limits: GroupLimits,
) -> Finding:
    median = float(np.median(ratios[rows]))
    last = int(rows[-1])
    step = int(one.steps[last])
    small = (a, one) if median < 1 else (b, other)
    outside = int(np.sum((ratios[rows] < limits.group_ratio_low) | (ratios[rows] > limits.group_ratio_high)))
    member = small[1].names[0]
    norm = run.frame("gradient", "norm")
    column = norm.names.index(member)
    return Finding(
        severity=Severity.WARNING,
        title=f"Group {small[0]!r} hardly learns next to group {(b if small[0] == a else a)!r}",
        detail=(
            f"The gradient rms of group {a!r} ({count(len(one.names), 'parameter')}) is "
            f"{phrases.number(median)} times that of {b!r} "
            f"({count(len(other.names), 'parameter')}), the median over the last {len(rows)} "
            f"recorded steps. At {outside} of them the ratio is outside {limits.group_ratio_low:g} to "
            f"{limits.group_ratio_high:g}."
        ),
        subject=Subject(module=f"{a}/{b}", step=step),
        evidence=(
            Evidence(f"groups/{a}", step, phrases.plain(float(one.values[last])), "gradient, rms"),
            Evidence(f"groups/{b}", step, phrases.plain(float(other.values[last])), "gradient, rms"),
            phrases.series("gradient/norm", member, step, float(norm.values[norm.steps == step, column][0])),
        ),
        fix=(
            f"Compare the update-to-weight ratios of the two groups. If {small[0]!r} also moves less, give "
            "it its own learning rate, or find what attenuates the path to it."
        ),
        refuted_if=(
            "the update-to-weight ratios are equal (Adam rescales gradients), or one group learns slowly by "
            "design."
        ),
    )


def _empty(title: str, pattern: str, reason: str) -> Finding:
    return Finding(
        severity=Severity.WARNING,
        title=f"Group {title!r} has no parameters",
        detail=f"The ratio of group {title!r} cannot be computed: {reason}.",
        subject=Subject(module=title),
        evidence=(Evidence(f"groups/{title}", None, pattern, "pattern"),),
        fix="Correct the pattern: `--group NAME=PATTERN` takes parameter or module names.",
        refuted_if="the parameters of the group were added after the last recorded step.",
    )
