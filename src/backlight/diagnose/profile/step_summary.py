"""Steady step of the clocked steps: its phases, which add up to it, and the tree of its modules."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from backlight.monitors.steptime.model.step_times import MIN_STEPS, SeriesError, find_steady, summarize
from backlight.records import Phase
from backlight.trace.classification import PHASES
from backlight.trace.events import Events, Trace
from backlight.trace.module_times import ModuleTime
from backlight.trace.timeline import Timeline

SUM_TOLERANCE = 0.02
"""Share by which the phases of a step may miss the step."""

_ORDER = (
    "data", "host_to_device", "forward", "loss", "backward", "clip", "optimizer",
    "evaluation", "checkpoint", "other", "between",
)  # fmt: skip


@dataclass(frozen=True)
class PhaseTime:
    """One phase over the steady steps, in milliseconds.

    ``share`` is the median over steps of the phase's share of its step, normalised to a sum of one over
    the phases: a sum over steps would give the phase of one outlier the share of the outlier.
    """

    median_ms: float
    p95_ms: float
    mad_ms: float
    share: float


@dataclass(frozen=True)
class StepTime:
    """One step: host seconds, those of its phases, which add up, and of its optimizers, by their number."""

    seconds: float
    phases: dict[str, float]
    separated: bool
    backwards: int = 1
    optimizers: tuple[str, ...] = ()
    optimizer_seconds: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, clocked: Mapping[str, float], seconds: float, *others: Any) -> Self:
        """Return the step whose clocked phases are given; the rest of it is ``other``."""
        phases = {str(name): spent for name, spent in clocked.items()}
        phases[Phase.OTHER] = max(0.0, seconds - sum(phases.values()))
        return cls(seconds, phases, *others)


@dataclass(frozen=True)
class OptimizerTime:
    """One of several optimizers: median milliseconds, and median share of a step, over the steady steps."""

    number: int
    type: str
    median_ms: float
    share: float


@dataclass(frozen=True)
class StepMilliseconds:
    """The steady step: median with its interval, 95th percentile, median absolute deviation."""

    median_ms: float
    low_ms: float
    high_ms: float
    p95_ms: float
    mad_ms: float
    steps: int


@dataclass(frozen=True)
class StepProfile:
    """The steady part of the clocked steps.

    ``warmup`` steps come before it, the cold first one included, and ``trouble`` is why it is not one level;
    ``step`` is None where no steady part was found; ``phases`` are in the order of a step; ``sum_error`` is
    the largest share by which the phases of a steady step miss it.
    """

    first_ms: float
    warmup: int
    trouble: str
    step: StepMilliseconds | None
    phases: dict[str, PhaseTime]
    sum_error: float


def summarize_steps(steps: Sequence[StepTime]) -> StepProfile:
    """Summarize clocked steps and their phases."""
    steady = find_steady([step.seconds for step in steps])
    if len(steady.values) < MIN_STEPS:
        return StepProfile(steady.first * 1e3, steady.warmup, steady.trouble, None, {}, 0.0)
    kept = steps[steady.warmup :]
    names = sorted({name for step in kept for name in step.phases}, key=_order)
    table = np.array([[step.phases.get(name, 0.0) for name in names] for step in kept])
    errors = np.abs(table.sum(axis=1) - steady.values) / steady.values
    worst = int(errors.argmax())
    if errors[worst] > SUM_TOLERANCE:
        raise SeriesError(
            f"the phases of step {steady.warmup + worst} add up to {table[worst].sum() * 1e3:.3f} ms, "
            f"the step took {steady.values[worst] * 1e3:.3f} ms: expected agreement within "
            f"{SUM_TOLERANCE:.0%}"
        )
    shares = np.median(table / table.sum(axis=1, keepdims=True), axis=0)
    shares /= shares.sum()
    is_separated = all(step.separated for step in kept)
    phases = {}
    for name, values, share in zip(names, table.T, shares.tolist(), strict=True):
        median = float(np.median(values))
        shown = name if is_separated or name != "other" else "between"
        phases[shown] = PhaseTime(
            median * 1e3,
            float(np.quantile(values, 0.95)) * 1e3,
            float(np.median(np.abs(values - median))) * 1e3,
            share,
        )
    whole = summarize(steady.values)
    step = StepMilliseconds(
        median_ms=1e3 * whole.median,
        low_ms=1e3 * whole.low,
        high_ms=1e3 * whole.high,
        p95_ms=1e3 * whole.p95,
        mad_ms=1e3 * whole.mad,
        steps=whole.count,
    )
    return StepProfile(steady.first * 1e3, steady.warmup, steady.trouble, step, phases, float(errors[worst]))


def optimizer_times(
    steps: Sequence[StepTime], profile: StepProfile, types: Mapping[int, str]
) -> tuple[OptimizerTime, ...]:
    """Return the time of each optimizer; nothing for one alone, whose time is that of its phase."""
    if profile.step is None or len(types) < 2:
        return ()
    kept = steps[profile.warmup :]
    whole = np.array([step.seconds for step in kept])
    times = []
    for number, kind in sorted(types.items()):
        spent = np.array([step.optimizer_seconds.get(number, 0.0) for step in kept])
        times.append(
            OptimizerTime(number, kind, 1e3 * float(np.median(spent)), float(np.median(spent / whole)))
        )
    return tuple(times)


def _order(name: str) -> tuple[int, str]:
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER), name)


_CALL = "aten::scaled_dot_product_attention"
_KERNELS = "aten::_scaled_dot_product_"


@dataclass(frozen=True)
class Throughput:
    """Tokens per second over all ranks, and MFU; None where unknown.

    ``mfu_basis`` states what the MFU rests on, or why there is none.
    """

    tokens_per_second: float | None
    mfu: float | None
    mfu_basis: str


@dataclass(frozen=True)
class Attention:
    """Calls of attention per step, their operations forward and backward, and the shape of a query."""

    calls: float
    operations: float
    shape: str


def throughput(
    step_seconds: float,
    *,
    tokens: int | None,
    parameters: int,
    attention: float | None,
    peak: float | None,
    world: int = 1,
    device: str = "",
    recomputed: float = 0.0,
) -> Throughput:
    """Return tokens per second and MFU of a step of ``tokens`` on ``world`` devices of ``peak`` FLOP/s.

    ``attention`` is 12 L d T, the operations of attention per token, left out where None; ``device`` is the
    name whose tabled peak it is; ``recomputed`` are seconds of forwards inside backward, for the basis.
    """
    if tokens is None:
        return Throughput(None, None, "tokens per step were not given (--tokens-per-step)")
    rate = tokens / step_seconds
    if peak is None:
        return Throughput(rate, None, "the peak of this device is not known (--peak-flops)")
    per_token = 6 * parameters + (attention or 0.0)
    counted = (
        f", and {attention:,.4g} of attention (12 L d T) a token"
        if attention
        else ", attention not counted (no call of scaled_dot_product_attention with shapes in the trace)"
    )
    source = f" ({device}, dense 16 bit)" if device else ""
    work = f", which takes {recomputed * 1e3:,.1f} ms of a step here" if recomputed else "; there is none"
    basis = (
        f"6 N with N = {parameters:,} (all parameters){counted}; "
        f"peak {peak / 1e12:,.4g} TFLOP/s a device{source} on {world} device(s); "
        f"recomputation is not counted as work{work}"
    )
    return Throughput(rate, rate * per_token / (world * peak), basis)


def find_attention(trace: Trace, steps: int) -> Attention | None:
    """Return the operations of attention per step; None where no call with shapes is in the trace.

    With batch B, heads H, lengths T and S, and head dimension D, one call has ``12 B H T S D`` operations; a
    causal mask is not subtracted. Calls inside backward are recomputed ones, which MFU does not count.
    """
    timeline = Timeline(trace)
    events, tree = timeline.events, timeline.tree
    codes = [
        code
        for code, name in enumerate(events.words["name"])
        if name == _CALL or (name.startswith(_KERNELS) and "backward" not in name)
    ]
    if not codes:
        return None
    is_call = np.isin(events["name"][tree.rows], codes)
    # A kernel lies inside the call that chose it, and is counted with it.
    above = tree.inherited(np.where(is_call, np.arange(len(is_call)), -1))
    is_outermost = is_call & ~np.where(tree.parent >= 0, above[tree.parent] >= 0, False)
    is_forward = timeline.phases != PHASES.index(Phase.BACKWARD)
    in_step = timeline.step_of(tree.start) >= 0
    rows = tree.rows[is_outermost & is_forward & in_step].tolist()
    calls = [call for row in rows if (call := _operations(events, row)) is not None]
    if not calls:
        return None
    return Attention(len(calls) / steps, sum(operations for operations, _ in calls) / steps, calls[0][1])


def _operations(events: Events, row: int) -> tuple[float, str] | None:
    text = events.word("shapes", row)
    shapes = json.loads(text) if text else []
    if len(shapes) < 2 or any(not isinstance(s, list) or len(s) < 2 for s in shapes[:2]):
        return None
    query, key = shapes[0], shapes[1]
    length, size = query[-2:]
    batch = int(np.prod(query[:-2], dtype=np.int64))
    return 12.0 * batch * length * key[-2] * size, "x".join(map(str, query))


# Modules of a profile as a tree, with traced times brought to the scale of the clocked steps.


@dataclass(frozen=True)
class ModuleRow:
    """One module: its depth below the model, and milliseconds of a clocked step, forward and backward.

    ``total_ms`` includes the modules inside, ``self_ms`` does not; ``share`` is that of the total in a step.
    """

    name: str
    depth: int
    total_ms: float
    self_ms: float
    share: float


def module_tree(
    modules: Sequence[ModuleTime], profile: StepProfile, traced_phases: Mapping[str, float]
) -> tuple[ModuleRow, ...] | None:
    """Return the modules depth first, siblings with the most time first.

    Forward and backward are scaled by what the phase takes in a clocked step over what it takes in a traced
    one. None where the clock does not separate one of them, or no steady step was found.
    """
    scale = {}
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        traced = traced_phases.get(phase)
        if profile.step is None or phase not in profile.phases or not traced:
            return None
        scale[phase] = profile.phases[phase].share * profile.step.median_ms / traced
    step = profile.step.median_ms if profile.step is not None else 0.0
    ahead, behind = scale[Phase.FORWARD], scale[Phase.BACKWARD]
    by_name = {module.name: module for module in modules}
    children: defaultdict[str | None, list[ModuleTime]] = defaultdict(list)
    for module in modules:
        children[_parent(module.name, by_name)].append(module)

    def total(module: ModuleTime) -> float:
        return module.forward_ms * ahead + module.backward_ms * behind

    def rows(parent: str | None, depth: int) -> Iterator[ModuleRow]:
        for module in sorted(children[parent], key=total, reverse=True):
            exclusive = module.forward_exclusive_ms * ahead + module.backward_exclusive_ms * behind
            yield ModuleRow(module.name, depth, total(module), exclusive, total(module) / step)
            yield from rows(module.name, depth + 1)

    return tuple(rows(None, 0))


def _parent(name: str, called: Mapping[str, ModuleTime]) -> str | None:
    """Return the nearest module outside of one that was called, None for the model."""
    while name:
        name = name.rpartition(".")[0]
        if name in called:
            return name
    return None
