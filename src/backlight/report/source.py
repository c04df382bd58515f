"""What a panel may read: the stored run, what the caller handed over, and its series, reduced once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from backlight.findings.evaluate import separate_hints
from backlight.records import Finding, ParameterRecord
from backlight.store.read.run import Run, Scalar
from backlight.text import count, listed, visible

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Window = tuple[int, int]
"""First and last step, both included."""


@dataclass(frozen=True)
class StepBuckets:
    """Consecutive ranges of recorded steps; each of ``first``, ``last`` and ``recorded`` is ``[B]``.

    Bucket b covers the steps ``first[b] .. last[b]``, both included, of which ``recorded[b]`` were
    recorded.
    """

    first: Ints
    last: Ints
    recorded: Ints

    def __len__(self) -> int:
        return len(self.first)

    @property
    def exact(self) -> bool:
        """Whether every bucket is one step, so that nothing was reduced."""
        return bool((self.recorded <= 1).all())

    def offsets(self, steps: Ints) -> tuple[Ints, Ints]:
        """Return the buckets that ``steps`` (sorted) fall into and the index at which each begins."""
        index = np.searchsorted(self.first, steps, side="right") - 1
        starts = np.flatnonzero(np.diff(index, prepend=-1)) if len(index) else np.empty(0, np.int64)
        return index[starts].astype(np.int64), starts.astype(np.int64)


def cut(steps: Ints, most: int) -> StepBuckets:
    """Cut sorted ``steps`` [S] into at most ``most`` buckets with equally many recorded steps each."""
    size = min(len(steps), max(1, most))
    edges = np.linspace(0, len(steps), size + 1).round().astype(np.int64)
    return StepBuckets(steps[edges[:-1]], steps[edges[1:] - 1], np.diff(edges))


@dataclass(frozen=True)
class Extremes:
    """What is left of a frame: each array is ``[B, P]``.

    ``low`` and ``high`` are over the measured, finite values, NaN where a bucket has none.
    ``measured`` counts steps with a measurement, ``broken`` those whose value was not finite, although it is
    defined.
    """

    low: Floats
    high: Floats
    measured: Ints
    broken: Ints


def extremes(
    values: NDArray[np.generic],
    measured: Bools,
    steps: Ints,
    buckets: StepBuckets,
    undefined: Bools | np.bool_ = np.False_,
) -> Extremes:
    """Reduce a frame ``values`` [S, P] with its mask to the extremes of each bucket.

    Where a value is ``undefined`` it has no number, and is not broken.
    """
    shape = (len(buckets), values.shape[1])
    low, high = np.full(shape, np.nan), np.full(shape, np.nan)
    counted, broken = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    into, starts = buckets.offsets(steps)
    if len(starts) and shape[1]:
        floats = values.astype(np.float64)
        bad = measured & ~np.isfinite(floats) & ~undefined
        floats[~measured | ~np.isfinite(floats)] = np.nan
        low[into] = np.fmin.reduceat(floats, starts, axis=0)
        high[into] = np.fmax.reduceat(floats, starts, axis=0)
        counted[into] = np.add.reduceat(measured, starts, axis=0, dtype=np.int64)
        broken[into] = np.add.reduceat(bad, starts, axis=0, dtype=np.int64)
    return Extremes(low, high, counted, broken)


def reduced_to(most: int, series: int) -> int:
    """Return into how many buckets :func:`keep` cuts the points of so many series."""
    return max(1, most // (2 * series))


def keep(columns: Sequence[Floats], present: Sequence[Bools], most: int, always: Sequence[int] = ()) -> Ints:
    """Return the sorted indices of the points that a chart needs, all of them where S is at most ``most``.

    ``present`` tells where each of the K series has a value at all; ``always`` are indices to keep. The S
    points are cut into ``most // (2 K)`` buckets. Of each bucket stay the smallest and the largest finite
    value of every series and the first value that is not finite; so do the first and last point of all. What
    stays is a real point with its own step, never an average.
    """
    length = len(columns[0]) if columns else 0
    if length <= most:
        return np.arange(length)
    size = reduced_to(most, len(columns))
    bucket = np.arange(length) * size // length
    chosen = [np.array([0, length - 1, *always])]
    for column, there in zip(columns, present, strict=True):
        finite = np.isfinite(column) & there
        for sign in (1.0, -1.0):
            ranked = np.where(finite, sign * column, np.inf)
            order = np.lexsort((ranked, bucket))
            first = order[np.flatnonzero(np.diff(bucket[order], prepend=-1))]
            chosen.append(first[finite[first]])
        non_finite = np.flatnonzero(there & ~finite)
        chosen.append(non_finite[np.flatnonzero(np.diff(bucket[non_finite], prepend=-1))])
    return np.unique(np.concatenate(chosen))


def quantiles(values: Floats, shares: Sequence[float]) -> Floats:
    """Return ``[len(shares), S]``: nearest-rank quantiles of each row of ``values`` [S, P], NaN left out.

    Nearest rank, so that every number was a measurement. A row without a number gives NaN.
    """
    ordered = np.sort(values, axis=1)
    amount = np.isfinite(values).sum(axis=1)
    result = np.full((len(shares), len(values)), np.nan)
    rows = np.flatnonzero(amount)
    for place, share in enumerate(shares):
        rank = np.rint(share * (amount[rows] - 1)).astype(np.int64)
        result[place, rows] = ordered[rows, rank]
    return result


CELLS = 450_000
"""Cells (parameters x buckets) of a heat map: five columns of them stay below 10 MB of page."""

FEWEST_BUCKETS, MOST_BUCKETS = 48, 4000
"""Not worth looking at below, finer than any screen above."""

SPREAD = (0.0, 0.1, 0.5, 0.9, 1.0)
"""Quantiles shown of a distribution: smallest, lower tenth, median, upper tenth, largest."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A column of the format as the heat map shows it; ``scale`` is ``log``, ``share`` or ``count``."""

    name: str
    series: str
    column: str
    label: str
    scale: str
    meaning: str


COLUMNS = (
    Shown("rms", "gradient", "rms", "rms", "log", "root mean square of the gradient"),
    Shown("max_abs", "gradient", "max_abs", "largest |g|", "log", "largest absolute value of the gradient"),
    Shown("zero_share", "gradient", "zero_share", "zeros", "share", "share of values that are exactly zero"),
    Shown("non_finite", "gradient", "non_finite", "NaN and Inf", "count", "values that are NaN or infinite"),
    Shown(
        "ratio", "update", "ratio", "update / weight", "log", "norm of the step taken over the weight's norm"
    ),
)


@dataclass
class ParameterFrames:
    """What was read: extremes per bucket, and exact figures over all recorded steps.

    ``steps`` and ``extremes`` are keyed by series and by :class:`Shown` name; ``stats`` are ``[P]``
    each; ``over_steps`` holds, per parameter, the ``SPREAD`` of its finite rms ``[5, P]``;
    ``ratio_spread`` holds, per step of the update series, the ``SPREAD`` over parameters ``[5, S]``.
    """

    buckets: StepBuckets
    steps: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    extremes: dict[str, Extremes] = field(default_factory=dict)
    stats: dict[str, Floats] = field(default_factory=dict)
    over_steps: Floats | None = None
    ratio_spread: Floats | None = None

    def has(self, series: str) -> bool:
        """Return whether at least one value of ``series`` was measured."""
        return any(
            shown.series == series and bool(self.extremes[shown.name].measured.any())
            for shown in COLUMNS
            if shown.name in self.extremes
        )


def read_frames(
    run: Run,
    parameters: tuple[ParameterRecord, ...],
    cells: int | None = None,
    window: Window | None = None,
) -> ParameterFrames:
    """Read every column of :data:`COLUMNS` once and reduce it; one frame is in memory at a time.

    A column is reduced to ``cells`` (parameters x buckets) at most, by default :data:`CELLS`. Only
    steps of the ``window`` are read, by default all.
    """
    present = [series for series in ("gradient", "update") if run.has(series)]
    every = [run.series_steps(series) for series in present]
    steps = np.unique(np.concatenate(every)) if every else np.empty(0, np.int64)
    steps = steps[_within(steps, window)]
    amount = len(parameters)
    most = min(MOST_BUCKETS, max(FEWEST_BUCKETS, (CELLS if cells is None else cells) // max(1, amount)))
    frames = ParameterFrames(cut(steps, most))
    for shown, at, values, measured in _columns(run, parameters, present, window):
        undefined = np.False_ if shown.name != "ratio" else _from_zero(run, parameters, window)
        frames.steps.setdefault(shown.series, at)
        frames.extremes[shown.name] = extremes(values, measured, at, frames.buckets, undefined)
        values[~measured | undefined] = np.nan
        _figures(frames, shown.name, values, measured)
    return frames


def _columns(
    run: Run, parameters: tuple[ParameterRecord, ...], present: list[str], window: Window | None
) -> Iterator[tuple[Shown, Ints, Floats, Bools]]:
    """Yield each column that was recorded, its rows in the order of ``parameters``."""
    for shown in COLUMNS:
        if shown.series in present:
            steps, values, measured = _ordered(run, shown.series, shown.column, parameters, window)
            if len(steps):
                yield shown, steps, values, measured


def _ordered(
    run: Run, series: str, column: str, parameters: tuple[ParameterRecord, ...], window: Window | None
) -> tuple[Ints, Floats, Bools]:
    """Return the steps of a column, its values [S, P] in the order of ``parameters``, and its mask."""
    row = {record.name: index for index, record in enumerate(parameters)}
    frame = run.frame(series, column)
    part = _within(frame.steps, window)
    steps, values, measured = frame.steps[part], frame.values[part].astype(np.float64), frame.measured[part]
    if frame.names == tuple(row):
        return steps, values, measured
    source = [index for index, name in enumerate(frame.names) if name in row]
    target = [row[frame.names[index]] for index in source]
    whole = np.full((len(steps), len(row)), np.nan)
    mask = np.zeros(whole.shape, np.bool_)
    whole[:, target], mask[:, target] = values[:, source], measured[:, source]
    return steps, whole, mask


def _within(steps: Ints, window: Window | None) -> slice:
    """Return which of the sorted ``steps`` are in the window."""
    if window is None:
        return slice(None)
    low, high = np.searchsorted(steps, (window[0], window[1] + 1))
    return slice(int(low), int(high))


def _from_zero(run: Run, parameters: tuple[ParameterRecord, ...], window: Window | None) -> Bools:
    """Return where an update has no ratio to the weights before it, since those were zero."""
    _, moved, _ = _ordered(run, "update", "update_norm", parameters, window)
    _, weights, _ = _ordered(run, "update", "weight_norm", parameters, window)
    return np.asarray((weights == 0) & np.isfinite(moved))


def _figures(frames: ParameterFrames, name: str, values: Floats, measured: NDArray[np.bool_]) -> None:
    """Add the exact figures of one column; ``values`` [S, P] are NaN where not measured."""
    by_parameter = np.ascontiguousarray(values.T)
    if name in {"rms", "ratio"}:
        spread = quantiles(by_parameter, SPREAD)
        frames.stats[f"{name}_median"], frames.stats[f"{name}_max"] = spread[2], spread[4]
        frames.stats[f"{name}_last"] = _last(by_parameter, measured)
    if name == "rms":
        frames.over_steps = spread
        frames.stats["measured"] = measured.sum(axis=0).astype(np.float64)
    elif name == "ratio":
        frames.ratio_spread = quantiles(values, SPREAD)
    elif name == "max_abs":
        frames.stats["max_abs_max"] = quantiles(by_parameter, (1.0,))[0]
    elif name == "zero_share":
        frames.stats["zero_share_last"] = _last(by_parameter, measured)
    elif name == "non_finite":
        total = np.nansum(values, axis=0)
        frames.stats["non_finite_sum"] = np.where(measured.any(axis=0), total, np.nan)


def _last(by_parameter: Floats, measured: NDArray[np.bool_]) -> Floats:
    """Return the value [P] at the last step at which each parameter was measured, NaN if never."""
    last = measured.shape[0] - 1 - np.argmax(measured[::-1], axis=0)
    value = by_parameter[np.arange(len(by_parameter)), last]
    return np.where(measured.any(axis=0), value, np.nan)


NO_GRADIENT = "no gradient when the optimizer stepped, at any recorded step"
NOT_IN_MODEL = "in an optimizer, but not a parameter of the model"
"""Why a parameter without a recorded reason was not measured."""

Series = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Steps [S] and values [S]; NaN where a step was not measured."""

T = TypeVar("T")

APART = "ranks measured gradients that do not make up a whole"
"""Why a gradient that ranks measured is not known."""


@dataclass(frozen=True)
class GradientCoverage:
    """Recorded steps [S] of the gradient, and for each of the parameters [P] whether it ever was measured.

    ``unjoined`` is at how many of the steps ranks measured it without making up a whole, ``fewest`` at how
    many the parameter was measured that was measured least.
    """

    steps: NDArray[np.int64]
    measured: NDArray[np.bool_]
    unjoined: NDArray[np.int64]
    fewest: int = 0


@dataclass
class Source:
    """A run as the report sees it, all attempts joined; ``findings`` are without ``hints``, both in order.

    ``health`` is the score over steps and ``untrained`` names the trainable parameters that never train; the
    caller computes both by the rules of their monitor. ``cells`` are those that a heat map may have, None for
    as many as a written report has; ``window`` are the steps that it shows, None for all. ``kept`` is what
    panels read through :meth:`once`.
    """

    run: Run
    findings: Sequence[Finding] = ()
    health: Series | None = None
    untrained: Sequence[str] = ()
    cells: int | None = None
    window: Window | None = None
    kept: dict[Callable[[Any], Any], Any] = field(default_factory=dict, init=False, repr=False)
    hints: Sequence[Finding] = field(default=(), init=False)

    def __post_init__(self) -> None:
        """Separate hints from findings."""
        self.findings, self.hints = separate_hints(self.findings)

    def once(self, read: Callable[[Source], T]) -> T:
        """Return what ``read`` returns of this source; it is called once, for all panels of a monitor."""
        if read not in self.kept:
            self.kept[read] = read(self)
        value: T = self.kept[read]
        return value

    @property
    def untrained_text(self) -> str:
        """What the health does not cover: the parameters that never trained."""
        amount = count(len(self.untrained), "parameter")
        has = "has" if len(self.untrained) == 1 else "have"
        return f"{amount} never trained and {has} no health: {listed([visible(n) for n in self.untrained])}"

    def watched(self, monitor: str) -> bool:
        """Return whether ``monitor`` watched; a run that names no monitors is taken to have had all."""
        return not monitor or not self.run.monitors or monitor in self.run.monitors

    @property
    def step_range(self) -> tuple[int, int]:
        """First and last step of the run, recorded or not: every axis of steps shows them all."""
        first = min((attempt.step_offset for attempt in self.run.attempts), default=0)
        return first, max(first, self.run.last_step())

    @property
    def cold_steps(self) -> frozenset[int]:
        """First step of each attempt, which compiles and loads."""
        return frozenset(attempt.step_offset for attempt in self.run.attempts)

    @cached_property
    def step_times(self) -> NDArray[np.float64]:
        """Seconds of every step whose phases were recorded, in order."""
        phases = [self.scalar(name) for name in self.scalar_names("phase")]
        if not phases:
            return np.empty(0)
        steps = np.unique(np.concatenate([scalar.steps for scalar in phases]))
        seconds = np.zeros(len(steps))
        for scalar in phases:
            seconds[np.searchsorted(steps, scalar.steps)] += np.nan_to_num(scalar.values, posinf=0, neginf=0)
        return seconds

    @cached_property
    def parameters(self) -> tuple[ParameterRecord, ...]:
        """The parameters of the run in model order."""
        return self.run.parameters()

    @cached_property
    def frames(self) -> ParameterFrames:
        """Everything that the page shows per parameter, read once and reduced."""
        return read_frames(self.run, self.parameters, self.cells, self.window)

    @cached_property
    def coverage(self) -> GradientCoverage:
        """What was measured of the gradient at all; cheap next to :attr:`frames`."""
        none = np.zeros(len(self.parameters), np.bool_)
        nothing = GradientCoverage(np.empty(0, np.int64), none, none.astype(np.int64))
        if not self.run.has("gradient"):
            return nothing
        frame = self.run.frame("gradient", "measured")
        seen = {name for i, name in enumerate(frame.names) if frame.measured[:, i].any()}
        ever = np.array([record.name in seen for record in self.parameters], np.bool_)
        unjoined = dict(zip(frame.names, frame.incomplete().sum(axis=0).tolist(), strict=True))
        split = np.array([unjoined.get(record.name, 0) for record in self.parameters], np.int64)
        amounts = frame.measured.sum(axis=0)
        return GradientCoverage(frame.steps, ever, split, int(min(amounts[amounts > 0], default=0)))

    def scalar(self, name: str, source: str = "backlight") -> Scalar:
        """Return a scalar; empty where it was never logged."""
        try:
            return self.run.scalar(name, source=source)
        except KeyError:
            return Scalar(np.zeros(0, np.int64), np.zeros(0), "1")

    def array(
        self, name: str, attempt: int | None = None
    ) -> tuple[NDArray[np.int64], Sequence[NDArray[Any]]]:
        """Return the steps and values of a stored array; empty where it was never stored."""
        is_stored = name in self.run.array_names()
        return self.run.array(name, attempt=attempt) if is_stored else (np.zeros(0, np.int64), [])

    def scalar_names(self, beginning: str) -> list[str]:
        """Return the names of backlight's own scalars below ``beginning/``, sorted."""
        names = self.run.scalar_names(source="backlight")
        return sorted(name for name in names if name.startswith(f"{beginning}/"))

    def reason(self, *subjects: str, otherwise: str) -> str:
        """Return why ``subjects`` were not measured, in the words of the session that watched.

        ``otherwise`` is said where the run holds no word about it.
        """
        for event in self.run.events("unmeasured"):
            if event.payload.get("parameters"):
                continue  # the reason of those parameters, not of the whole
            what = str(event.payload.get("what", ""))
            if what in subjects or what.removeprefix("series/").removeprefix("scalars/") in subjects:
                reason = str(event.payload.get("reason", "")).strip()
                if reason:
                    return reason[0].upper() + reason[1:] + ("" if reason[-1] in ".!?" else ".")
        return otherwise

    def evidence(self, ending: str) -> list[str]:
        """Return the paths of the evidence files with that ending."""
        return [path for path in self.run.evidence() if path.endswith(ending)]

    @cached_property
    def unmeasured_parameters(self) -> dict[str, list[str]]:
        """Names of the parameters that never had a measured gradient, by the reason why."""
        recorded: dict[str, str] = {}
        for event in self.run.events("unmeasured"):
            for name in event.payload.get("parameters") or ():
                recorded.setdefault(str(name), str(event.payload.get("reason", "")))
        coverage = self.coverage
        reasons: dict[str, list[str]] = {}
        for record, measured, unjoined in zip(
            self.parameters, coverage.measured, coverage.unjoined, strict=True
        ):
            if not measured:
                otherwise = APART if unjoined else NO_GRADIENT if record.in_model else NOT_IN_MODEL
                reason = record.unmeasured or recorded.get(record.name) or otherwise
                reasons.setdefault(reason, []).append(record.name)
        return reasons


def rate_labels(run: Run, rates: Sequence[str]) -> dict[str, str]:
    """Return ``AdamW, group 1`` for ``lr/0/1``: by the optimizers' names, as short as the rates differ."""
    stored = run.fingerprint()
    kinds = [kind.partition("(")[0] for kind in stored.optimizers] if stored else []
    groups = [name.removeprefix("lr/").partition("/") for name in rates]
    labels = {}
    for name, (optimizer, _, group) in zip(rates, groups, strict=True):
        index = int(optimizer) if optimizer.isdecimal() else len(kinds)
        label = visible(kinds[index]) if index < len(kinds) else f"optimizer {optimizer}"
        if index < len(kinds) and kinds.count(kinds[index]) > 1:
            label += f" {optimizer}"
        alone = sum(other == optimizer for other, _, _ in groups) == 1
        labels[name] = label if alone or not group else f"{label}, group {group}"
    return labels
