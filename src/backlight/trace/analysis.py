"""Analysis of the traces of a run: the tables of each rank, and single numbers for rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np

from backlight.text import percent
from backlight.trace.annotations import Annotation, by_annotation
from backlight.trace.copies import Copy, Transfer, copies, transfers
from backlight.trace.critical_path import CriticalPath, Paths
from backlight.trace.delayed_steps import delayed_steps
from backlight.trace.device_queues import Launches, Stream, launches, streams
from backlight.trace.events import Trace, TraceError
from backlight.trace.hardware_counters import OperatorCounters, hardware_counters
from backlight.trace.operators import (
    Costs,
    Pair,
    Row,
    by_kernel,
    by_kind,
    by_operator,
    by_phase,
    device_time,
    pairs,
)
from backlight.trace.ranks import Ranks, check_ranks, ranks
from backlight.trace.rates import (
    CollectiveRate,
    CopyRate,
    OperatorRate,
    collective_rates,
    copy_rates,
    operator_rates,
)
from backlight.trace.sequences import Sequence, sequences
from backlight.trace.timeline import Step, Timeline
from backlight.trace.utilization import Idle, Overlap, Utilization


@dataclass(frozen=True)
class StepRow:
    """One step on one device; nanoseconds. ``device`` is None, with no device time, where there is none.

    ``busy + idle.total == duration`` where there is a device: ``busy`` is the union of its events.
    """

    number: int | None
    duration: int
    device: int | None
    busy: int
    idle: Idle
    overlap: Overlap
    critical_path: CriticalPath


@dataclass(frozen=True)
class RankAnalysis:
    """The tables of one trace; times are nanoseconds.

    ``delayed`` are the numbers of steps, such as a preempted one, that count in no share of a table: one of
    four would decide them all. ``device_total`` is the union of the device events of the steps,
    ``host_total`` the length of the steps.
    """

    path: str
    rank: int | None
    events: int
    devices: dict[int, str]
    steps: tuple[StepRow, ...]
    delayed: tuple[int | None, ...]
    host_total: int
    device_total: int
    outside_steps: int
    phases: tuple[Row, ...]
    kinds: tuple[Row, ...]
    operators: tuple[Row, ...]
    kernels: tuple[Row, ...]
    transfers: tuple[Transfer, ...]
    copies: tuple[Copy, ...]
    pairs: tuple[Pair, ...]
    annotations: tuple[Annotation, ...]
    launches: tuple[Launches, ...]
    streams: tuple[Stream, ...]
    sequences: tuple[Sequence, ...]
    operator_rates: tuple[OperatorRate, ...]
    copy_rates: tuple[CopyRate, ...]
    collective_rates: tuple[CollectiveRate, ...]
    hardware_counters: tuple[OperatorCounters, ...]
    notes: tuple[str, ...]

    @property
    def usual_steps(self) -> tuple[StepRow, ...]:
        """The steps that are not delayed."""
        return tuple(row for row in self.steps if row.number not in self.delayed)


@dataclass(frozen=True)
class Analysis:
    """One or several ranks; ``ranks`` is None for a single trace."""

    traces: tuple[RankAnalysis, ...]
    ranks: Ranks | None


def analyse(traces: list[Trace], *, step: int | None = None) -> Analysis:
    """Analyse one trace, or one for each of several ranks; ``step`` is the number of the only step, if any.

    A :class:`TraceError` is raised where the traces do not belong together, or have no such step.
    """
    timelines = [Timeline(trace) for trace in traces]
    together = None
    if len(timelines) > 1:
        by_rank = check_ranks(timelines)
        timelines = list(by_rank.values())
        together = ranks(by_rank)
    return Analysis(tuple(analyse_rank(timeline, step) for timeline in timelines), together)


def analyse_rank(timeline: Timeline, number: int | None = None, *, usual: bool = False) -> RankAnalysis:
    """Analyse one trace; with ``usual``, delayed steps are left out, except for the annotations.

    A :class:`TraceError` is raised where the trace has no step of that number.
    """
    chosen = chosen_steps(timeline, number)
    delayed = delayed_steps(timeline) if number is None else []
    steps = [step for step in chosen if step not in [one.step for one in delayed]]
    whole = Costs(timeline, chosen)
    shared = Costs(timeline, steps) if delayed else whole
    costs = shared if usual else whole
    launched = device_time(costs)
    counters, note = hardware_counters(timeline)
    devices = timeline.trace.device_names
    used = np.unique(timeline.device.device).tolist()
    rows = tuple(_step_rows(timeline, steps if usual else chosen, used))
    late = [one.note for one in delayed]

    def table(of: Callable[[Costs], list[Row]]) -> tuple[Row, ...]:
        return tuple(of(costs) if costs is shared else _with_shares(of(costs), of(shared)))

    return RankAnalysis(
        path=timeline.trace.path,
        rank=timeline.trace.rank,
        events=timeline.trace.count,
        devices={device: devices.get(device, "") for device in used},
        steps=rows,
        delayed=tuple(one.step.number for one in delayed),
        host_total=costs.host_total,
        device_total=costs.device_total,
        outside_steps=len(timeline.device.rows) - len(whole.device_rows) if number is None else 0,
        phases=table(by_phase),
        kinds=table(by_kind),
        operators=table(by_operator),
        kernels=table(by_kernel),
        transfers=tuple(transfers(costs)),
        copies=tuple(copies(costs, launched)),
        pairs=tuple(pairs(costs, launched)),
        annotations=tuple(by_annotation(whole, launched if costs is whole else device_time(whole))),
        launches=tuple(launches(costs)),
        streams=tuple(streams(costs)),
        sequences=tuple(sequences(costs)),
        operator_rates=tuple(operator_rates(costs)),
        copy_rates=tuple(copy_rates(costs)),
        collective_rates=tuple(collective_rates(costs)),
        hardware_counters=tuple(counters),
        notes=tuple(filter(None, (*timeline.trace.notes, *late, *_notes(timeline, costs, rows), note))),
    )


def _with_shares(rows: list[Row], shared: list[Row]) -> list[Row]:
    """Return the rows with the shares of other steps, the largest first."""
    shares = {(row.name, row.phase, row.kind): row.share for row in shared}
    found = (replace(row, share=shares.get((row.name, row.phase, row.kind), 0.0)) for row in rows)
    return sorted(found, key=lambda row: (row.share, row.host), reverse=True)


def chosen_steps(timeline: Timeline, number: int | None) -> list[Step]:
    """Return all steps, or the one of a number; a :class:`TraceError` is raised where there is none."""
    if number is None:
        return timeline.steps
    chosen = [step for step in timeline.steps if step.number == number]
    if not chosen:
        there = [step.number for step in timeline.steps if step.number is not None]
        found = f"steps {there[0]} to {there[-1]}" if there else "no steps (no ProfilerStep annotations)"
        raise TraceError(f"{timeline.trace.path}: has no step {number}; it has {found}")
    return chosen


def _step_rows(timeline: Timeline, steps: list[Step], devices: list[int]) -> list[StepRow]:
    paths = Paths(timeline)
    uses = {device: Utilization(timeline, device) for device in devices}
    rows = []
    for step in steps:
        path = paths.of(step)
        length = step.end - step.start
        if not devices:
            rows.append(StepRow(step.number, length, None, 0, Idle(), Overlap(0, 0, 0), path))
        for device, use in uses.items():
            busy = use.busy.within(step.start, step.end).length
            rows.append(StepRow(step.number, length, device, busy, use.idle(step), use.overlap(step), path))
    return rows


def _notes(timeline: Timeline, costs: Costs, rows: tuple[StepRow, ...]) -> list[str]:
    notes = []
    if costs.device_total and not any(row.critical_path.device for row in rows):
        notes.append(
            "the host never waits for the device in these steps: the critical path is on the host alone, and "
            "ends with it, not with the device"
        )
    if timeline.steps[0].number is None:
        notes.append(
            "no ProfilerStep annotations: the whole trace counts as one window. "
            "Give the profiler a schedule and call its step() in the loop to see steps"
        )
    if not len(timeline.device.rows):
        notes.append(
            "no device events: device time, idle time and overlap are not measured; shares are of the host"
        )
    elif not len(costs.device_rows):
        notes.append("no device event was launched in these steps")
    else:
        lost = int((timeline.device.launch[costs.device_rows] < 0).sum())
        if lost:
            share = percent(lost / len(costs.device_rows))
            notes.append(
                f"{lost:,} device events ({share}) have no launch in the trace: their phase is unknown"
            )
    return notes


def idle_share(analysis: RankAnalysis) -> float | None:
    """Return the median over steps of the idle part of the device; None without a device."""
    shares = [
        row.idle.total / row.duration for row in analysis.steps if row.device is not None and row.duration
    ]
    return float(np.median(shares)) if shares else None


def idle_causes(analysis: RankAnalysis) -> dict[str, float]:
    """Return the parts of the idle time by cause, which add up to 1; empty where nothing was idle."""
    steps = analysis.usual_steps
    total = sum(row.idle.total for row in steps)
    if not total:
        return {}
    return {f.name: sum(getattr(row.idle, f.name) for row in steps) / total for f in fields(Idle)}


def exposed_communication(analysis: RankAnalysis) -> float | None:
    """Return the median over steps of the part with communication alone; None where no step communicates."""
    if not any(row.overlap.communication for row in analysis.steps):
        return None
    return float(np.median([row.overlap.exposed / row.duration for row in analysis.steps if row.duration]))
