"""Tables of the traced steps of a profile, per step: operators by phase, kinds, copies, device use.

The numbers of :mod:`backlight.trace.analysis` per step; time in no operator (Python, waiting) gets a row of
its own, so that the rows of a phase add up to the phase.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backlight.trace.analysis import (
    RankAnalysis,
    StepRow,
    analyse,
    exposed_communication,
    idle_causes,
    idle_share,
)
from backlight.trace.classification import DEVICE, HOST, OPERATOR
from backlight.trace.events import Events, Trace, TraceError
from backlight.trace.operators import NO_OPERATOR
from backlight.trace.timeline import Timeline

SUM_TOLERANCE = 0.02
"""Share by which parts may miss their whole."""

LAUNCH_BOUND_IDLE = 0.2
"""Share of idle time above which a device that waits for the host is launch-bound."""

_HOST_CAUSES = ("host_bound", "launch_gap", "synchronisation")


@dataclass(frozen=True)
class OperatorTime:
    """One operator of a phase, one kind of operation or one kernel, per step.

    ``host_ms`` is without the operators called inside. ``share`` is that of its phase (of the device time
    launched in it, or without a device of its host time); over all phases that of all operators.
    """

    name: str
    calls: float
    host_ms: float
    device_ms: float
    share: float
    phase: str = ""
    kind: str = ""


@dataclass(frozen=True)
class CopyTime:
    """Copies of one kind from one line, per step; ``share`` is of the step they were traced in.

    ``contiguous`` is whether source and target have the same layout.
    """

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
class DeviceTime:
    """Use of the device: median shares of a step, and the causes of idle time, which add up to 1.

    ``launch_bound`` is whether the device mostly waits for the host to launch; ``statement`` says it in
    words.
    """

    name: str
    idle: float
    causes: dict[str, float]
    busy_ms: float
    launch_bound: bool
    statement: str


@dataclass(frozen=True)
class Operations:
    """The tables of the traced steps.

    Attributes
    ----------
    traced_steps:
        Steps that the operators and kinds are averaged over.
    traced_step_ms:
        Median length of a traced step.
    traced_phases:
        Host milliseconds by phase in the trace.
    operators:
        By phase; within a phase the most expensive first. Their shares of a phase add up to 1.
    kernels:
        Device events by name, compiled and Triton kernels by theirs.
    joined:
        Operators with the node of backward that differentiates them.
    device:
        None where no device event was recorded.
    exposed_communication:
        Median share of a step with communication and no computation; None without communication.
    logits:
        The input of the loss; None without a cross entropy.
    trace_sum_error:
        Share by which the phases of the traced steps miss the steps, on the thread that runs them.
    """

    traced_steps: int
    traced_step_ms: float
    traced_phases: dict[str, float]
    operators: tuple[OperatorTime, ...]
    kinds: tuple[OperatorTime, ...]
    kernels: tuple[OperatorTime, ...]
    copies: tuple[CopyTime, ...]
    joined: tuple[JoinedTime, ...]
    device: DeviceTime | None
    exposed_communication: float | None
    logits: Logits | None
    trace_sum_error: float
    trace_notes: tuple[str, ...] = ()


def read_operations(main: Trace, lines: Trace | None) -> Operations:
    """Return the tables of a profile.

    Parameters
    ----------
    main:
        The traced steps.
    lines:
        The step that was traced with lines, for the copies; None to take them from ``main``.

    Raises
    ------
    TraceError
        If there is no step in the trace, or parts miss their whole by more than 2 %.
    """
    one = analyse([main]).traces[0]
    steps = {id(row.number): row for row in one.steps}
    if any(row.number is None for row in steps.values()):
        raise TraceError(f"{main.path}: has no ProfilerStep: no step was traced to its end")
    count = len({row.number for row in one.steps})
    scale = 1e-6 / count
    on_device = bool(one.device_total)
    copying = analyse([lines]).traces[0] if lines is not None else one
    return Operations(
        traced_steps=count,
        traced_step_ms=_step_ms(one.steps),
        traced_phases={row.phase: row.host * scale for row in one.phases},
        operators=_operators(one, scale, on_device),
        kinds=tuple(
            OperatorTime(r.name, r.calls / count, r.host * scale, r.device * scale, r.share) for r in
            one.kinds
        ),
        kernels=tuple(
            OperatorTime(r.name, r.calls / count, 0.0, r.device * scale, r.share) for r in one.kernels
        ),
        copies=_copies(copying),
        joined=tuple(
            JoinedTime(
                pair.forward, pair.backward, pair.calls / count,
                (pair.forward_device if on_device else pair.forward_host) * scale,
                (pair.backward_device if on_device else pair.backward_host) * scale,
            )
            for pair in one.pairs
        ),
        device=_device(one, scale),
        exposed_communication=exposed_communication(one),
        logits=logits(main),
        trace_sum_error=_sum_error(main),
        trace_notes=one.notes,
    )  # fmt: skip


def split(trace: Trace, steps: int) -> tuple[Trace, Trace | None]:
    """Cut a trace after its first ``steps`` steps: those, and the rest; None where there is no rest.

    Device events stay in both: they belong to the call that launched them. A call that is open at the end of
    its step, as that of the optimizer whose hook ends the step, is cut off there: the rest is the profiler's
    own time between two steps.
    """
    timeline = Timeline(trace)
    marked = [step for step in timeline.steps if step.number is not None]
    if not marked:
        return trace, None
    events = trace.events
    ends = np.array([step.end for step in timeline.steps], dtype=np.int64)
    host = np.flatnonzero(events.complete(HOST) & (events["duration"] > 0))
    inside = timeline.step_of(events["start"][host])
    host, inside = host[inside >= 0], inside[inside >= 0]
    duration = events["duration"].copy()
    duration[host] = np.minimum(duration[host], ends[inside] - events["start"][host])
    events = Events({**events.columns, "duration": duration}, events.words)
    if len(marked) <= steps:
        return dataclasses.replace(trace, events=events), None
    later = events["start"] >= marked[steps].start
    device = events.complete(DEVICE)
    before, after = _kept(events, ~later | device), _kept(events, later | device)
    return dataclasses.replace(trace, events=before), dataclasses.replace(trace, events=after)


def _kept(events: Events, mask: np.ndarray) -> Events:
    rows = np.flatnonzero(mask)
    return Events({name: column[rows] for name, column in events.columns.items()}, events.words)


def _operators(one: RankAnalysis, scale: float, on_device: bool) -> tuple[OperatorTime, ...]:
    steps = round(1e-6 / scale)
    whole = {row.phase: (row.device if on_device else row.host) for row in one.phases}
    inside: dict[str, int] = defaultdict(int)
    found = []
    for row in one.operators:
        if not row.phase:
            continue  # its launch is not in the trace
        spent = row.device if on_device else row.host
        inside[row.phase] += row.host
        share = spent / whole[row.phase] if whole.get(row.phase) else 0.0
        found.append(
            OperatorTime(
                row.name, row.calls / steps, row.host * scale, row.device * scale, share, row.phase, row.kind
            )
        )
    for phase in one.phases:
        rest = phase.host - inside[phase.phase]
        share = rest / whole[phase.phase] if not on_device and whole[phase.phase] else 0.0
        found.append(OperatorTime(NO_OPERATOR, 0.0, rest * scale, 0.0, share, phase.phase))
    order = {row.phase: place for place, row in enumerate(one.phases)}
    return tuple(sorted(found, key=lambda row: (order[row.phase], -row.share, -row.host_ms)))


def _copies(one: RankAnalysis) -> tuple[CopyTime, ...]:
    count = max(1, len({row.number for row in one.steps}))
    length = sum({row.number: row.duration for row in one.steps}.values())
    device = bool(one.device_total)
    return tuple(
        CopyTime(
            row.source, row.target, row.contiguous, row.line, row.calls / count,
            None if row.elements is None else row.elements / count,
            row.host * 1e-6 / count, row.device * 1e-6 / count,
            (row.device if device else row.host) / length if length else 0.0,
        )
        for row in one.copies
    )  # fmt: skip


def _device(one: RankAnalysis, scale: float) -> DeviceTime | None:
    idle = idle_share(one)
    if idle is None:
        return None
    names = ", ".join(name or f"device {number}" for number, name in one.devices.items())
    causes = idle_causes(one)
    launch_bound = idle > LAUNCH_BOUND_IDLE and sum(causes.get(cause, 0.0) for cause in _HOST_CAUSES) > 0.5
    main = max(causes, key=lambda cause: causes[cause], default="")
    statement = f"device idle {idle:.0%}"
    if launch_bound:
        statement = f"launch-bound: {statement}"
    elif main and idle > LAUNCH_BOUND_IDLE:
        statement += f", mostly {main.replace('_', ' ')}"
    return DeviceTime(names, idle, causes, one.device_total * scale, launch_bound, statement)


def _step_ms(rows: Sequence[StepRow]) -> float:
    return float(np.median(list({row.number: row.duration for row in rows}.values()))) * 1e-6


def _sum_error(trace: Trace) -> float:
    """Return the largest share by which the phases on the threads that run the steps miss the steps."""
    timeline = Timeline(trace)
    tree = timeline.tree
    here = timeline.step_of(tree.start)
    worst = 0.0
    for number, step in enumerate(timeline.steps):
        inside = here == number
        opening = np.flatnonzero(inside & (tree.start == step.start) & (tree.end == step.end))
        if not len(opening):
            continue
        thread = tree.thread[opening[0]]
        total = int(tree.inner[inside & (tree.thread == thread)].sum())
        worst = max(worst, abs(total / (step.end - step.start) - 1))
    if worst > SUM_TOLERANCE:
        raise TraceError(
            f"{trace.path}: host times miss the step by {worst:.1%}; expected at most {SUM_TOLERANCE:.0%}"
        )
    return worst


_LOSSES = ("aten::cross_entropy_loss", "aten::_log_softmax", "aten::log_softmax")

_SIZES = {"double": 8, "float": 4, "c10::BFloat16": 2, "c10::Half": 2}


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
    found: dict[tuple[int, ...], str] = {}
    for row in (wanted & events.complete(OPERATOR)).nonzero()[0].tolist():
        shapes, types = (json.loads(events.word(key, row) or "[]") for key in ("shapes", "types"))
        if shapes and isinstance(shapes[0], list) and all(isinstance(n, int) for n in shapes[0]):
            found.setdefault(tuple(shapes[0]), str(types[0]) if types else "")
    if not found:
        return None
    largest = max(found, key=math.prod)
    kind = found[largest]
    return Logits(largest, kind.removeprefix("c10::").lower(), _SIZES.get(kind, 4))
