"""Tables of the traced steps of a profile, per step: operators by phase, kinds, copies, device use.

The numbers of :mod:`backlight.trace.analysis` per step; time in no operator (Python, waiting) gets a row of
its own, so that the rows of a phase add up to the phase.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from backlight.trace.analysis import (
    RankAnalysis,
    analyse_rank,
    exposed_communication,
    idle_causes,
    idle_share,
)
from backlight.trace.classification import OPERATOR
from backlight.trace.events import ITEM_BYTES, Events, Trace, TraceError
from backlight.trace.module_times import MIN_STEPS
from backlight.trace.operators import NO_OPERATOR, Row
from backlight.trace.step_limits import Limit, limit_of
from backlight.trace.timeline import Timeline, device_work

SUM_TOLERANCE = 0.02
"""Share by which parts may miss their whole."""

_OPTIMIZER_STEP = re.compile(r"^Optimizer\.step#(.+)\.step$")
"""Range of torch around the step of an optimizer; it names the type."""


@dataclass(frozen=True)
class OperatorTime:
    """One operator of a phase, one kind of operation or one kernel, per step.

    ``host_ms`` is without the operators called inside; ``share`` is that of its phase, or of all operators.
    """

    name: str
    calls: float
    host_ms: float
    device_ms: float
    share: float
    phase: str = ""
    kind: str = ""

    @classmethod
    def of(cls, row: Row, steps: int, share: float, phase: str = "", kind: str = "") -> OperatorTime:
        """Return a row of the analysis per step."""
        scale = 1e-6 / steps
        return cls(row.name, row.calls / steps, row.host * scale, row.device * scale, share, phase, kind)


@dataclass(frozen=True)
class CopyTime:
    """Copies of one kind from one line, per step; ``share`` is of the step they were traced in."""

    source: str
    target: str
    contiguous: bool | None
    line: str
    calls: float
    elements: float | None
    host_ms: float
    device_ms: float
    share: float


@dataclass(frozen=True)
class JoinedTime:
    """An operator and the node of backward that differentiates it, per step, what they call included."""

    forward: str
    backward: str
    calls: float
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True)
class TracedOptimizer:
    """The steps of one type of optimizer: median, 95th percentile and largest milliseconds of a traced step.

    They are of the device where there is one, else of the host.
    """

    type: str
    steps: int
    median_ms: float
    p95_ms: float
    max_ms: float


@dataclass(frozen=True)
class DeviceTime:
    """Use of the device: median share of a step that is ``idle``, its ``causes`` (they add up to 1)."""

    name: str
    idle: float
    idle_by_step: tuple[float, ...]
    causes: dict[str, float]
    busy_ms: float
    launch_bound: bool
    statement: str


@dataclass(frozen=True)
class Operations:
    """The tables of the traced steps, per step; times are milliseconds.

    ``operators`` are by phase, their shares of a phase add up to 1. ``traced_optimizers`` are those in at
    least ten traced steps: fewer show no variation. None are: ``device`` without device events,
    ``exposed_communication`` (median share of a step) without communication, ``logits`` without a cross
    entropy. ``trace_sum_error`` is the share by which the phases miss the steps.
    """

    traced_steps: int
    traced_step_ms: float
    traced_phases: dict[str, float]
    operators: tuple[OperatorTime, ...]
    kinds: tuple[OperatorTime, ...]
    kernels: tuple[OperatorTime, ...]
    traced_optimizers: tuple[TracedOptimizer, ...]
    copies: tuple[CopyTime, ...]
    joined: tuple[JoinedTime, ...]
    device: DeviceTime | None
    exposed_communication: float | None
    exposed_by_step: tuple[float, ...]
    logits: Logits | None
    trace_sum_error: float
    trace_notes: tuple[str, ...] = ()


def read_operations(main: Trace, lines: Trace | None) -> Operations:
    """Return the tables of the traced steps; the copies are those of ``lines``, where that is given."""
    timeline = Timeline(main)
    analysis = analyse_rank(timeline, usual=True)
    lengths = {row.number: row.duration for row in analysis.steps}
    if None in lengths:
        raise TraceError(f"{main.path}: has no ProfilerStep: no step was traced to its end")
    count = len(lengths)
    sum_error = abs(sum(row.host for row in analysis.phases) / sum(lengths.values()) - 1)
    if sum_error > SUM_TOLERANCE:
        raise TraceError(
            f"{main.path}: host times miss the steps by {sum_error:.1%}; expected at most {SUM_TOLERANCE:.0%}"
        )
    scale = 1e-6 / count
    on_device = bool(analysis.device_total)
    copying = analyse_rank(Timeline(lines), usual=True) if lines is not None else analysis
    return Operations(
        traced_steps=len(timeline.steps),
        traced_step_ms=float(np.median(list(lengths.values()))) * 1e-6,
        traced_phases={row.phase: row.host * scale for row in analysis.phases},
        operators=_operators(analysis, count),
        kinds=tuple(OperatorTime.of(row, count, row.share) for row in analysis.kinds),
        kernels=tuple(OperatorTime.of(row, count, row.share) for row in analysis.kernels),
        traced_optimizers=tuple(_optimizers(analysis)),
        copies=_copies(copying),
        joined=tuple(
            JoinedTime(
                pair.forward, pair.backward, pair.calls / count,
                (pair.forward_device if on_device else pair.forward_host) * scale,
                (pair.backward_device if on_device else pair.backward_host) * scale,
            )
            for pair in analysis.pairs
        ),
        device=_device(analysis, scale),
        exposed_communication=exposed_communication(analysis),
        exposed_by_step=tuple(row.overlap.exposed / row.duration for row in analysis.steps if row.duration),
        logits=logits(main),
        trace_sum_error=sum_error,
        trace_notes=(*analysis.notes, *_few_steps(len(timeline.steps))),
    )  # fmt: skip


def split(trace: Trace, steps: int) -> tuple[Trace, Trace | None]:
    """Cut a trace after its first ``steps`` steps: those, and the rest; None where there is no rest.

    Device events stay in both: they belong to the call that launched them.
    """
    timeline = Timeline(trace)
    marked = [step for step in timeline.steps if step.number is not None]
    if not marked:
        return trace, None
    events = timeline.events
    if len(marked) <= steps:
        return dataclasses.replace(trace, events=events), None
    later = events["start"] >= marked[steps].start
    device = device_work(events)
    before, after = _kept(events, ~later | device), _kept(events, later | device)
    return dataclasses.replace(trace, events=before), dataclasses.replace(trace, events=after)


def _kept(events: Events, mask: np.ndarray) -> Events:
    rows = np.flatnonzero(mask)
    return Events({name: column[rows] for name, column in events.columns.items()}, events.words)


def _operators(analysis: RankAnalysis, steps: int) -> tuple[OperatorTime, ...]:
    on_device, scale = bool(analysis.device_total), 1e-6 / steps
    whole = {row.phase: (row.device if on_device else row.host) for row in analysis.phases}
    inside: dict[str, int] = defaultdict(int)
    times = []
    for row in analysis.operators:
        if not row.phase:
            continue  # its launch is not in the trace
        spent = row.device if on_device else row.host
        inside[row.phase] += row.host
        share = spent / whole[row.phase] if whole.get(row.phase) else 0.0
        times.append(OperatorTime.of(row, steps, share, row.phase, row.kind))
    for phase in analysis.phases:
        rest = phase.host - inside[phase.phase]
        share = rest / whole[phase.phase] if not on_device and whole[phase.phase] else 0.0
        times.append(OperatorTime(NO_OPERATOR, 0.0, rest * scale, 0.0, share, phase.phase))
    order = {row.phase: place for place, row in enumerate(analysis.phases)}
    return tuple(sorted(times, key=lambda row: (order[row.phase], -row.share, -row.host_ms)))


def _optimizers(analysis: RankAnalysis) -> Iterator[TracedOptimizer]:
    for row in analysis.annotations:
        match = _OPTIMIZER_STEP.match(row.name)
        spread = row.device_per_step or row.host_per_step
        if match and spread is not None:
            times = (1e-6 * time for time in (spread.median, spread.p95, spread.max))
            yield TracedOptimizer(match[1], row.steps, *times)


def _few_steps(steps: int) -> list[str]:
    few = f"optimizers in the trace: {steps} traced steps, {MIN_STEPS} are needed"
    return [few] if steps < MIN_STEPS else []


def _copies(analysis: RankAnalysis) -> tuple[CopyTime, ...]:
    lengths = {row.number: row.duration for row in analysis.steps}
    count, length = max(1, len(lengths)), sum(lengths.values())
    device = bool(analysis.device_total)
    return tuple(
        CopyTime(
            row.source, row.target, row.contiguous, row.line, row.calls / count,
            None if row.elements is None else row.elements / count,
            row.host * 1e-6 / count, row.device * 1e-6 / count,
            (row.device if device else row.host) / length if length else 0.0,
        )
        for row in analysis.copies
    )  # fmt: skip


def _device(analysis: RankAnalysis, scale: float) -> DeviceTime | None:
    idle = idle_share(analysis)
    if idle is None:
        return None
    names = ", ".join(name or f"device {number}" for number, name in analysis.devices.items())
    causes = idle_causes(analysis)
    limit = limit_of(idle, causes)
    launch_bound = limit is Limit.LAUNCHES
    main = max(causes, key=lambda cause: causes[cause], default="")
    statement = f"device idle {idle:.0%}"
    if launch_bound:
        statement = f"launch-bound: {statement}"
    elif main and limit is Limit.IDLE:
        statement += f", mostly {main.replace('_', ' ')}"
    by_step = tuple(
        row.idle.total / row.duration for row in analysis.steps if row.device is not None and row.duration
    )
    return DeviceTime(names, idle, by_step, causes, analysis.device_total * scale, launch_bound, statement)


_LOSSES = ("aten::cross_entropy_loss", "aten::_log_softmax", "aten::log_softmax")


@dataclass(frozen=True)
class Logits:
    """The largest input of a cross entropy; ``itemsize`` in bytes, 4 where the type is not known."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int


def logits(trace: Trace) -> Logits | None:
    """Return the largest logits of a trace; None where it has no cross entropy with shapes."""
    events = trace.events
    wanted = events.where("name", lambda word: word in _LOSSES)
    shapes_of: dict[tuple[int, ...], str] = {}
    for row in (wanted & events.among(OPERATOR)).nonzero()[0].tolist():
        shapes, types = events.listed("shapes", row), events.listed("types", row)
        if shapes and isinstance(shapes[0], list) and all(isinstance(n, int) for n in shapes[0]):
            shapes_of.setdefault(tuple(shapes[0]), str(types[0]) if types else "")
    if not shapes_of:
        return None
    largest = max(shapes_of, key=math.prod)
    kind = shapes_of[largest]
    name = kind.removeprefix("c10::").lower()
    return Logits(largest, name, ITEM_BYTES.get(name, 4))
