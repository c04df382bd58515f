"""Analysis of the traces of a run: the tables of each rank, and single numbers for rules."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np

from backlight.text import duration, percent
from backlight.trace.classification import PHASES, PROFILER_RANGE, RUNTIME
from backlight.trace.copies import Copy, DeviceCopies, copies, transfers
from backlight.trace.critical_path import CriticalPath, Paths
from backlight.trace.device_queues import Launches, Stream, by_stream, launches, streams
from backlight.trace.events import Integers, Trace, TraceError
from backlight.trace.host_moments import OUTSIDE
from backlight.trace.module_times import Annotation, by_annotation, by_module
from backlight.trace.operators import (
    NO_OPERATOR,
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
    Gemm,
    OperatorRate,
    collective_rates,
    copy_rates,
    gemms,
    operator_rates,
)
from backlight.trace.timeline import Step, Timeline
from backlight.trace.utilization import Idle, Overlap, Utilization

DELAYED = 1.5
"""Length of a delayed step, in medians of the steps with as many calls."""

SAME_CALLS = 0.1
"""Share by which the calls of two steps of one kind differ at most; alternating steps are of two kinds."""

MIN_STEPS = 3
"""Steps of one kind whose median means something."""


@dataclass(frozen=True)
class DelayedStep:
    """A step ``times`` as long as the median of its kind, ``longer`` nanoseconds of it more in ``phase``."""

    step: Step
    times: float
    phase: str
    longer: int

    @property
    def note(self) -> str:
        """What it is, in words."""
        length = duration((self.step.end - self.step.start) / 1e9)
        return (
            f"step {self.step.number} took {length}, {self.times:.1f} times the median, "
            f"{duration(self.longer / 1e9)} of it more in {self.phase}: it is in no share"
        )


def delayed_steps(timeline: Timeline) -> list[DelayedStep]:
    """Return the delayed steps; none where they are so many that they are the rule."""
    steps, moments = timeline.steps, timeline.moments
    if len(steps) < MIN_STEPS:
        return []
    begun = timeline.step_of(timeline.tree.start)
    calls = np.bincount(begun[begun >= 0], minlength=len(steps))
    length = np.array([step.end - step.start for step in steps], dtype=np.int64)
    phase = np.append(timeline.phases, len(PHASES))[moments.call]
    spent = np.zeros((len(steps), len(PHASES) + 1), np.int64)
    np.add.at(spent, (moments.step, phase), moments.end - moments.start)
    delayed = []
    for index, step in enumerate(steps):
        same = np.abs(calls - calls[index]) <= SAME_CALLS * calls[index]
        times = float(length[index] / np.median(length[same]))
        if same.sum() >= MIN_STEPS and times > DELAYED:
            longer = spent[index] - np.median(spent[same], axis=0)
            most = int(longer.argmax())
            name = OUTSIDE if most == len(PHASES) else PHASES[most].value.replace("_", " ")
            delayed.append(DelayedStep(step, times, name, int(longer[most])))
    # What comes back every few steps is a property of the loop.
    few = max(1, min(len(steps) // 4, 3), len(steps) // 10)
    return delayed if len(delayed) <= few else []


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
    by_operator = [OperatorCounters(name, counts[name], dict(sums[name])) for name in counts]
    return sorted(by_operator, key=lambda operator: -operator.kernels), note


# Sequences of kernels that repeat on a stream, such as the layers of a model.
#
# The most frequent pair of neighbours is replaced by one symbol, again and again (Re-Pair: Larsson and
# Moffat, Offline dictionary-based compression, 2000). A symbol that is left stands for a sequence that
# repeats.

MIN_COUNT = 4
"""Repetitions of a sequence."""

MAX_SYMBOLS = 64
"""Pairs that are replaced at most."""


@dataclass(frozen=True)
class Sequence:
    """A sequence of kernels on one stream: its occurrences, and the device time of all of them in ns."""

    kernels: tuple[str, ...]
    stream: int
    count: int
    device: int


def sequences(costs: Costs) -> list[Sequence]:
    """Return sequences of two or more kernels that repeat in the chosen steps, the most expensive first."""
    timeline = costs.timeline
    device, words = timeline.device, timeline.events.words["name"]
    repeated = []
    for _, stream, rows in by_stream(timeline, costs.device_rows):
        codes, names = np.unique(timeline.events["name"][device.rows[rows]], return_inverse=True)
        symbols, spent, pairs = _paired(names, (device.end - device.start)[rows], len(codes))
        for symbol in np.unique(symbols[symbols >= len(codes)]).tolist():
            here = symbols == symbol
            kernels = tuple(words[codes[code]] for code in _spelled(symbol, pairs, len(codes)))
            repeated.append(Sequence(kernels, stream, int(here.sum()), int(spent[here].sum())))
    return sorted((s for s in repeated if s.count >= MIN_COUNT), key=lambda sequence: -sequence.device)


def _paired(
    symbols: Integers, spent: Integers, base: int
) -> tuple[Integers, Integers, list[tuple[int, int]]]:
    """Replace pairs; return the symbols, the time of each, and what symbol ``base + i`` stands for."""
    pairs: list[tuple[int, int]] = []
    size = base + MAX_SYMBOLS
    while len(symbols) > 1 and len(pairs) < MAX_SYMBOLS:
        first, second = divmod(int(np.argmax(np.bincount(symbols[:-1] * size + symbols[1:]))), size)
        at = np.flatnonzero((symbols[:-1] == first) & (symbols[1:] == second))
        if first == second:  # of a run of equal symbols every other pair
            run = np.cumsum(np.concatenate(([0], np.diff(at) > 1)))
            begin = at[np.searchsorted(run, run)]
            at = at[(at - begin) % 2 == 0]
        if len(at) < MIN_COUNT:
            break
        symbols, spent = symbols.copy(), spent.copy()
        symbols[at] = base + len(pairs)
        spent[at] += spent[at + 1]
        symbols, spent = np.delete(symbols, at + 1), np.delete(spent, at + 1)
        pairs.append((first, second))
    return symbols, spent, pairs


def _spelled(symbol: int, pairs: list[tuple[int, int]], base: int) -> list[int]:
    if symbol < base:
        return [symbol]
    first, second = pairs[symbol - base]
    return [*_spelled(first, pairs, base), *_spelled(second, pairs, base)]


@dataclass(frozen=True)
class TracedStep:
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
    steps: tuple[TracedStep, ...]
    delayed: tuple[int | None, ...]
    host_total: int
    device_total: int
    outside_steps: int
    phases: tuple[Row, ...]
    kinds: tuple[Row, ...]
    operators: tuple[Row, ...]
    modules: tuple[Row, ...]
    kernels: tuple[Row, ...]
    transfers: tuple[DeviceCopies, ...]
    copies: tuple[Copy, ...]
    pairs: tuple[Pair, ...]
    annotations: tuple[Annotation, ...]
    launches: tuple[Launches, ...]
    streams: tuple[Stream, ...]
    sequences: tuple[Sequence, ...]
    operator_rates: tuple[OperatorRate, ...]
    gemms: tuple[Gemm, ...]
    copy_rates: tuple[CopyRate, ...]
    collective_rates: tuple[CollectiveRate, ...]
    hardware_counters: tuple[OperatorCounters, ...]
    notes: tuple[str, ...]

    @property
    def usual_steps(self) -> tuple[TracedStep, ...]:
        """The steps that are not delayed."""
        return tuple(row for row in self.steps if row.number not in self.delayed)


@dataclass(frozen=True)
class Analysis:
    """One or several ranks; ``ranks`` is None for a single trace."""

    traces: tuple[RankAnalysis, ...]
    ranks: Ranks | None
    unit: str = "ns"


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
    steps = [step for step in chosen if step not in [late_step.step for late_step in delayed]]
    whole = Costs(timeline, chosen)
    shared = Costs(timeline, steps) if delayed else whole
    costs = shared if usual else whole
    launched = device_time(costs)
    counters, note = hardware_counters(timeline)
    used = np.unique(timeline.device.device).tolist()
    rows = tuple(_step_rows(timeline, steps if usual else chosen, used))
    late = [late_step.note for late_step in delayed]

    rates = tuple(operator_rates(costs))

    def table(of: Callable[[Costs], list[Row]]) -> tuple[Row, ...]:
        return tuple(of(costs) if costs is shared else _with_shares(of(costs), of(shared)))

    return RankAnalysis(
        path=timeline.trace.path,
        rank=timeline.trace.rank,
        events=timeline.trace.count,
        devices={device: timeline.trace.device_name(device) for device in used},
        steps=rows,
        delayed=tuple(late_step.step.number for late_step in delayed),
        host_total=costs.host_total,
        device_total=costs.device_total,
        outside_steps=len(timeline.device.rows) - len(whole.device_rows) if number is None else 0,
        phases=table(by_phase),
        kinds=table(by_kind),
        operators=table(by_operator),
        modules=table(by_module),
        kernels=table(by_kernel),
        transfers=tuple(transfers(costs)),
        copies=tuple(copies(costs, launched)),
        pairs=tuple(pairs(costs, launched)),
        annotations=tuple(by_annotation(whole, launched if costs is whole else device_time(whole))),
        launches=tuple(launches(costs)),
        streams=tuple(streams(costs)),
        sequences=tuple(sequences(costs)),
        operator_rates=rates,
        gemms=tuple(gemms(rates)),
        copy_rates=tuple(copy_rates(costs)),
        collective_rates=tuple(collective_rates(costs)),
        hardware_counters=tuple(counters),
        notes=tuple(filter(None, (*timeline.trace.notes, *late, *_notes(timeline, costs, rows), note))),
    )


def _with_shares(rows: list[Row], shared: list[Row]) -> list[Row]:
    """Return the rows with the shares of other steps, the largest first."""
    shares = {(row.name, row.phase, row.kind): row.share for row in shared}
    ordered = (replace(row, share=shares.get((row.name, row.phase, row.kind), 0.0)) for row in rows)
    return sorted(ordered, key=lambda row: (row.share, row.host), reverse=True)


def chosen_steps(timeline: Timeline, number: int | None) -> list[Step]:
    """Return all steps, or the one of a number; a :class:`TraceError` is raised where there is none."""
    if number is None:
        return timeline.steps
    chosen = [step for step in timeline.steps if step.number == number]
    if not chosen:
        there = [step.number for step in timeline.steps if step.number is not None]
        available = f"steps {there[0]} to {there[-1]}" if there else "no steps (no ProfilerStep annotations)"
        raise TraceError(f"{timeline.trace.path}: has no step {number}; it has {available}")
    return chosen


def _step_rows(timeline: Timeline, steps: list[Step], devices: list[int]) -> list[TracedStep]:
    paths = Paths(timeline)
    uses = {device: Utilization(timeline, device) for device in devices}
    rows = []
    for step in steps:
        path = paths.of(step)
        length = step.end - step.start
        if not devices:
            rows.append(TracedStep(step.number, length, None, 0, Idle(), Overlap(0, 0, 0), path))
        for device, use in uses.items():
            busy = use.busy.within(step.start, step.end).length
            rows.append(
                TracedStep(step.number, length, device, busy, use.idle(step), use.overlap(step), path)
            )
    return rows


def _notes(timeline: Timeline, costs: Costs, rows: tuple[TracedStep, ...]) -> list[str]:
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
