"""Where the time of a step went, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.monitors.steptime.model.step_times import join_scalars
from backlight.report.frames import cut
from backlight.report.panel import Drawn, Fact, Figures, NotMeasured, Summary, panel
from backlight.report.source import Source
from backlight.text import count, duration, number, percent, visible

FEW = 10
"""Steps below which none is called an outlier."""

NAMED = 5
"""Outliers that are named, the slowest first."""

RANGES = 1500
"""Ranges of steps in the stacked chart; a stack of means adds up, a stack of maxima would not."""


def summary(source: Source) -> Summary | None:
    """Return the summary of a run that measured times alone: health was not requested, and is not missing."""
    if source.run.monitors != ("steptime",) or not len(source.step_times):
        return None
    return Summary(f"The times of {count(len(source.step_times), 'step')} were measured.", _figures)


def _figures(source: Source) -> Figures:
    seconds = source.step_times
    return (
        ("steps", number(len(seconds)), "the cold first one included"),
        ("median step", duration(float(np.median(seconds))), ""),
        ("95th percentile", duration(float(np.quantile(seconds, 0.95))), ""),
        ("first step", duration(float(seconds[0])), ""),
    )


@panel(
    "phases",
    title="Time per step",
    order=100,
    series=("scalars/phase", "scalars/time"),
    note="Time of each phase of a step, stacked.",
    monitor="steptime",
    summary=summary,
)
def phases(source: Source) -> Drawn | NotMeasured:
    """Draw the phases as a stack of means per range of steps, and the slowest step of each range."""
    recorded = {name: source.scalar(name) for name in source.scalar_names("phase")}
    recorded = {name: scalar for name, scalar in recorded.items() if len(scalar.steps)}
    if not recorded:
        return NotMeasured(source.reason("phase", "steptime", otherwise="The monitor steptime was not on."))
    steps, table_SP = join_scalars(list(recorded.values()))
    seconds = np.nan_to_num(table_SP.T, posinf=0, neginf=0)
    total = seconds.sum(axis=0)
    shares = _shares(seconds, total)
    order = np.argsort(-shares, kind="stable")
    buckets = cut(steps, RANGES)
    starts = buckets.offsets(steps)[1]
    names = list(recorded)
    table: list[dict[str, Any]] = [
        {
            "label": visible(names[row].removeprefix("phase/")).replace("_", " "),
            "seconds": np.add.reduceat(seconds[row], starts) / buckets.recorded,
            "median": duration(float(np.median(seconds[row]))),
            "p95": duration(float(np.quantile(seconds[row], 0.95))),
            "share": percent(float(shares[row])) if shares.sum() else "not measured",
        }
        for row in order
    ]
    facts = (
        Fact("median step", duration(float(np.median(total)))),
        Fact("95th percentile", duration(float(np.quantile(total, 0.95)))),
        Fact("first step", duration(float(total[0]))),
    )
    data = {
        "steps": buckets.first,
        "exact": buckets.exact,
        "phases": table,
        "usual": float(np.quantile(total, 0.95)),
        "slowest": np.maximum.reduceat(total, starts),
    }
    remarks = [
        "Shares are medians over steps, normalised to one: a slow step has no more weight than another."
    ]
    if not buckets.exact:
        remarks.append("The stack shows means over ranges of steps; the line the slowest step in each.")
    labels = [str(table[at]["label"]) for at in np.argsort(order)]
    return Drawn("stack", data, facts, (*remarks, *_outliers(steps, seconds, labels)))


def _shares(seconds: NDArray[np.float64], total: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median share of each phase of its step, made to add up to 1; ``seconds`` is [P, S]."""
    known = total > 0
    if not known.any():
        return np.zeros(len(seconds))
    shares: NDArray[np.float64] = np.median(seconds[:, known] / total[known], axis=1)
    return shares / shares.sum() if shares.sum() else shares


def _outliers(
    steps: NDArray[np.int64], seconds: NDArray[np.float64], labels: Sequence[str]
) -> tuple[str, ...]:
    """Return the slowest outliers, without the first step, each with the phase that grew most."""
    later = seconds[:, 1:]
    if later.shape[1] < FEW:
        return ()
    usual = np.median(later, axis=1)
    total = later.sum(axis=0)
    median = float(np.median(total))
    # Normal noise has a deviation of 1.48 MAD; very even steps are still allowed a quarter more.
    limit = median + max(5 * 1.4826 * float(np.median(np.abs(total - median))), 0.25 * median)
    out = np.flatnonzero(total > limit)
    if not len(out):
        return ()
    worst = out[np.argsort(-total[out])][:NAMED]
    named = []
    for at in worst:
        grown = later[:, at] - usual
        phase = int(np.argmax(grown))
        named.append(
            f"step {steps[at + 1]} ({duration(float(total[at]))}: {labels[phase]} "
            f"+{duration(float(grown[phase]))})"
        )
    more = f" and {len(out) - NAMED} more" if len(out) > NAMED else ""
    many = "step is an outlier" if len(out) == 1 else "steps are outliers"
    return (f"{len(out)} {many} against a median of {duration(median)}: {', '.join(named)}{more}.",)
