"""Where the time of a step went, phase by phase."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backlight.monitors.steptime.model.evidence import SteadyLimits, measured_phases
from backlight.monitors.steptime.model.step_line import step_line
from backlight.monitors.steptime.model.step_times import find_steady, join_scalars
from backlight.report.charts import TONES, Axis, Line, chart, clipped_top
from backlight.report.panel import Drawn, FactLine, Figures, MonitorSummary, NotMeasured, PanelFact, panel
from backlight.report.source import Source, cut
from backlight.store.format.schema import SAMPLED_LINES
from backlight.text import count, duration, number, percent, visible

RANGES = 1500
"""Ranges of steps in the stacked chart; a stack of means adds up, a stack of maxima would not."""


def summary(source: Source) -> MonitorSummary | None:
    """Return the summary of a run that measured times alone: health was not requested, and is not missing."""
    if source.run.monitors != ("steptime",) or not len(source.step_times):
        return None
    detail = f"The times of {count(len(source.step_times), 'step')} were measured."
    detail = f"{detail} {_skipped(source.step_times)}".rstrip()
    usual = duration(float(np.median(source.step_times)))
    return MonitorSummary(detail, _figures, headline=f"A step takes {usual} (median)")


def line_of(source: Source) -> FactLine | None:
    """Return where the time of a step goes; a profile looks further where most of it computes nothing."""
    line = step_line(source.run)
    return None if line is None else FactLine(line.text, "profile" if line.computing < 0.5 else "")


def checked(source: Source) -> str:
    """Return what the rules on time and memory look at; of too few steady steps they look at no times."""
    if not len(source.step_times) or _skipped(source.step_times):
        limits = SteadyLimits()
        data = "" if measured_phases(source.run, limits) is None else "waits for data, "
        others = "times need" if not data else "other times need"
        return f"{data}memory and compilation; {others} {count(limits.steady_steps, 'steady step')}"
    return "time and memory: waits for data and device, saving, kept tensors, compilation, slow steps"


def _skipped(seconds: NDArray[np.float64]) -> str:
    """Return that rules on times were not evaluated, where there are too few steady steps; else nothing."""
    steady, needed = len(find_steady(seconds).values), SteadyLimits().steady_steps
    if steady >= needed:
        return ""
    return f"Rules on phase times were not evaluated: {count(steady, 'steady step')}, {needed} are needed."


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
    order=50,
    series=("scalars/phase", "scalars/time"),
    note="Time of each phase of a step, stacked.",
    monitor="steptime",
    events=(SAMPLED_LINES,),
    summary=summary,
    line=line_of,
    checked=checked,
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
    labels = [visible(name.removeprefix("phase/")).replace("_", " ") for name in recorded]
    lines = [
        Line(
            labels[row],
            buckets.first,
            1e3 * np.add.reduceat(seconds[row], starts) / buckets.recorded,
            style="area",
            tone=TONES[place % len(TONES)],
            recorded=steps,
        )
        for place, row in enumerate(order)
    ]
    slowest = np.maximum.reduceat(total, starts)
    if not buckets.exact:
        lines.append(Line("slowest step", buckets.first, 1e3 * slowest, tone="limit", recorded=steps))
    top = clipped_top(buckets.first, 1e3 * slowest, source.cold_steps)
    drawn = chart(lines, Axis("time (ms)", low=0.0, top=top), numbers=RANGES * (len(lines) + 1))
    rows = [
        (
            labels[row],
            percent(float(shares[row])) if shares.sum() else "not measured",
            duration(float(np.median(seconds[row]))),
            duration(float(np.quantile(seconds[row], 0.95))),
        )
        for row in order
    ]
    heads = ("Phase", "Share", "Median", "95th percentile")
    note = "Shares are medians over steps, normalised to one: a slow step has no more weight than another."
    tones = [line.tone for line in lines]
    table = {
        **{"name": "Time by phase", "heads": heads, "figures": (1, 2, 3), "rows": rows},
        **{"tones": tones, "note": note},
    }
    facts = (
        PanelFact("median step", duration(float(np.median(total)))),
        PanelFact("95th percentile", duration(float(np.quantile(total, 0.95)))),
        PanelFact("first step", duration(float(total[0]))),
    )
    remarks = [skipped] if (skipped := _skipped(total)) else []
    if not buckets.exact:
        remarks.append("The stack shows means over ranges of steps; the line the slowest step in each.")
    return Drawn("lines", {"charts": [drawn], "table": table}, facts, tuple(remarks))


def _shares(seconds: NDArray[np.float64], total: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the median share of each phase of its step, made to add up to 1; ``seconds`` is [P, S]."""
    is_positive = total > 0
    if not is_positive.any():
        return np.zeros(len(seconds))
    shares: NDArray[np.float64] = np.median(seconds[:, is_positive] / total[is_positive], axis=1)
    return shares / shares.sum() if shares.sum() else shares
