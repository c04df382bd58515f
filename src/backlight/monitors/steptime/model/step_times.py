"""Phase times of a stored run, their steady part, and intervals of medians and differences. No torch.

Sources: ``docs/formulas.md``, section 6; batch means for correlated series as in Law, *Simulation Modeling
and Analysis*, here with medians, because a garbage collection must not move the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backlight.store.read.run import Run, Scalar
from backlight.student_t import student_quantile

# Variation of step times between equal runs: measured from repeats where there are any, else assumed.
#
# The steps of one run do not show it: clocks, memory layout and neighbours on the machine differ from run to
# run. Source: ``docs/formulas.md``, section 6.

ASSUMED_DEVIATION = 0.0125
"""Deviation that is assumed without repeats; ``python bench/comparison.py`` gives the false alarms."""

MIN_FREEDOM = 2
"""Degrees of freedom of a measured deviation: three repeats of one run, or two of either."""


@dataclass(frozen=True)
class Variation:
    """Standard deviation of the logarithm of a run's median; ``freedom`` is infinite where it is assumed."""

    deviation: float
    freedom: float

    @property
    def is_measured(self) -> bool:
        """Return whether it comes from repeats."""
        return math.isfinite(self.freedom)


ASSUMED = Variation(ASSUMED_DEVIATION, math.inf)
NONE = Variation(0.0, math.inf)


def measure_variation(groups: Sequence[Sequence[float]]) -> Variation:
    """Return the deviation within groups of medians of equal runs; the assumed one where they are too few."""
    logs = [np.log(group) for group in groups if len(group) > 1 and min(group) > 0]
    freedom = sum(len(group) - 1 for group in logs)
    if not freedom:
        return ASSUMED
    deviation = math.sqrt(sum(float(np.square(group - group.mean()).sum()) for group in logs) / freedom)
    if freedom < MIN_FREEDOM:
        return Variation(max(deviation, ASSUMED_DEVIATION), math.inf)
    return Variation(deviation, float(freedom))


Floats = npt.NDArray[np.float64]

PREFIX = "phase/"
OPTIMIZER_PREFIX = "optimizer_time/"
"""Prefix of the scalars of phase times."""

WINDOW_STEPS = 5
"""Steps whose median is compared with that of the same number of steps after them."""

TOLERANCE = 0.05
"""Share by which that median may move once the warm-up is over."""

BATCHES = 8
"""Batches that a series is cut into for its interval: long enough to be nearly independent."""

MIN_STEPS = 4
"""Steps that an interval needs."""

CONFIDENCE = 0.99
"""Of the interval of a difference: with correlated steps, false alarms then stay well below 5 %."""


class SeriesError(ValueError):
    """A series of times is too short, or contains an invalid time."""


@dataclass(frozen=True)
class SteadyPart:
    """Seconds after ``warmup`` steps, the cold ``first`` one included; ``trouble``: why not one level."""

    first: float
    warmup: int
    values: Floats
    trouble: str = ""


@dataclass(frozen=True)
class Summary:
    """Median, 95th percentile and median absolute deviation in seconds, with an interval of the median."""

    count: int
    median: float
    p95: float
    mad: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """The ratio of a later median to an earlier one, with its interval; 1.03 is 3 % slower."""

    ratio: float
    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.low <= 1.0 <= self.high


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds [S, phases] by step [S] and phase, 0 for a phase that is missing; a row adds up to its step."""

    steps: npt.NDArray[np.int64]
    names: tuple[str, ...]
    seconds: Floats

    @property
    def total(self) -> Floats:
        """Time of each step, [S]."""
        return np.asarray(self.seconds.sum(axis=1))

    def phase(self, name: str) -> Floats:
        """Return the seconds of one phase, [S]; zeros for one that no step had."""
        if name not in self.names:
            return np.zeros(len(self.steps))
        return self.seconds[:, self.names.index(name)]

    def steady(self) -> tuple[SteadyPart, PhaseTimes]:
        """Return the steady part of the step times, and the table without the warm-up."""
        part = find_steady(self.total)
        return part, self.after(part.warmup)

    def after(self, first: int) -> PhaseTimes:
        """Return the table without its first steps."""
        return PhaseTimes(self.steps[first:], self.names, self.seconds[first:])


def read_phases(run: Run, *, attempt: int | None = None, rank: int | None = None) -> PhaseTimes | None:
    """Return the phase times of an attempt of a run, the newest by default; None where none were recorded.

    Attempts are not joined: each is a process with its own warm-up. Without ``rank``, the lowest is read.
    """
    if not run.attempts:
        return None
    chosen = run.attempts[-1].index if attempt is None else attempt
    names = [name for name in run.scalar_names("backlight") if name.startswith(PREFIX)]
    scalars = {
        name.removeprefix(PREFIX): scalar
        for name in names
        if len((scalar := run.scalar(name, attempt=chosen, rank=rank)).steps)
    }
    if not scalars:
        return None
    steps, seconds = join_scalars(list(scalars.values()))
    valid = np.isfinite(seconds).all(axis=1) & (seconds >= 0).all(axis=1) & (seconds.sum(axis=1) > 0)
    return PhaseTimes(steps[valid], tuple(scalars), seconds[valid]) if valid.any() else None


def optimizer_seconds(run: Run, table: PhaseTimes, number: int) -> Floats | None:
    """Return the seconds of one optimizer by step of ``table`` [S]; None where not recorded apart."""
    name = f"{OPTIMIZER_PREFIX}{number}"
    if name not in run.scalar_names("backlight"):
        return None
    scalar = run.scalar(name, attempt=run.attempts[-1].index)
    spent = dict(zip(scalar.steps.tolist(), scalar.values.tolist(), strict=True))
    return np.array([spent.get(step, 0.0) for step in table.steps.tolist()])


def join_scalars(scalars: Sequence[Scalar]) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return all steps [S], and a column for each scalar, [S, scalars], 0 where it has no value."""
    # The indices are not needed; without them numpy imports numpy.ma, at the end of every watched run.
    steps, _ = np.unique(np.concatenate([scalar.steps for scalar in scalars]), return_index=True)
    table = np.zeros((len(steps), len(scalars)))
    for column, scalar in enumerate(scalars):
        table[np.searchsorted(steps, scalar.steps), column] = scalar.values
    return steps, table


def find_steady(seconds: Sequence[float] | Floats) -> SteadyPart:
    """Cut the warm-up off a series of step times.

    The warm-up ends where the median of five steps and that of the five steps after them differ by less than
    5 %; the first step never counts as steady. ``trouble`` reports a steady part whose halves differ by more.
    """
    values, window = _checked(seconds), WINDOW_STEPS
    for start in range(1, len(values) - 2 * window + 1):
        now = float(np.median(values[start : start + window]))
        later = float(np.median(values[start + window : start + 2 * window]))
        if abs(later - now) < TOLERANCE * now:
            return SteadyPart(float(values[0]), start, values[start:], _drift(values[start:]))
    needed = 1 + 2 * window
    trouble = (
        f"{len(values)} steps are too few to find a steady part, which takes {needed} or more"
        if len(values) < needed
        else f"no steady part: the median of {window} steps kept moving by {TOLERANCE:.0%} or more"
    )
    return SteadyPart(float(values[0]), len(values), np.empty(0), trouble)


def summarize(values: Sequence[float] | Floats, confidence: float = 0.95) -> Summary:
    """Summarize steady step times; the interval of the median comes from medians of consecutive batches.

    Neighbouring steps are correlated: an interval for independent steps would be too narrow.
    """
    checked = _checked(values)
    medians = _batch_medians(checked)
    median = float(np.median(checked))
    half = student_quantile(len(medians) - 1, 0.5 + confidence / 2) * float(np.sqrt(_squared_error(checked)))
    return Summary(
        count=len(checked),
        median=median,
        p95=float(np.quantile(checked, 0.95)),
        mad=float(np.median(np.abs(checked - median))),
        low=median - half,
        high=median + half,
    )


def difference(
    before: Sequence[float] | Floats,
    after: Sequence[float] | Floats,
    confidence: float = CONFIDENCE,
    variation: Variation = NONE,
) -> Difference:
    """Compare the medians of two series of steady step times, each from its own run.

    Welch's t interval of the logarithms, with the errors of batch medians widened by the correlation of
    neighbouring steps, and with the variation between equal runs added to either side.
    """
    sides = [np.log(_checked(side, positive=True)) for side in (before, after)]
    errors = [(_squared_error(side), len(_batch_medians(side)) - 1.0) for side in sides]
    errors.append((2 * variation.deviation**2, variation.freedom))
    squared = sum(error for error, _ in errors)
    # Welch-Satterthwaite on the widened errors; scipy's tests take the errors from the samples alone.
    parts = sum(error**2 / freedom for error, freedom in errors)
    # A deviation of few repeats that is small by chance must not narrow the interval.
    freedom = min(squared**2 / parts if parts else 1.0, variation.freedom)
    middle = float(np.log(np.median(after) / np.median(before)))
    return _interval(middle, freedom, float(np.sqrt(squared)), confidence)


def paired_difference(
    before: Sequence[float] | Floats, after: Sequence[float] | Floats, confidence: float = CONFIDENCE
) -> Difference:
    """Compare medians of interleaved runs, where ``before[i]`` and ``after[i]`` are a pair.

    What disturbs both of a pair cancels; the interval is Student's over the logarithms of the ratios.

    Raises
    ------
    SeriesError
        If the series differ in length, or have fewer than three pairs.
    """
    first, second = _checked(before, positive=True), _checked(after, positive=True)
    if len(first) != len(second):
        raise SeriesError(f"{len(first)} medians against {len(second)}: pairs need as many of each")
    if len(first) < 3:
        raise SeriesError(f"{len(first)} pairs: an interval takes 3 or more")
    logs = np.log(second / first)
    error = float(logs.std(ddof=1) / np.sqrt(len(logs)))
    return _interval(float(logs.mean()), len(logs) - 1, error, confidence)


def _interval(middle: float, freedom: float, error: float, confidence: float) -> Difference:
    """Return the exponentials of Student's interval around a mean of logarithms."""
    half = student_quantile(freedom, 0.5 + confidence / 2) * error
    return Difference(*(float(np.exp(value)) for value in (middle, middle - half, middle + half)))


def _batch_medians(values: Floats) -> Floats:
    if len(values) < MIN_STEPS:
        raise SeriesError(f"{len(values)} steps: an interval takes {MIN_STEPS} or more")
    batches = np.array_split(values, min(BATCHES, len(values) // 2))
    return np.array([np.median(batch) for batch in batches])


def _squared_error(values: Floats) -> float:
    """Return the squared standard error of the mean of batch medians, widened by their correlation.

    With the lag-one correlation r of the steps, an AR(1) series has the variance V(n) of its mean over n
    steps in closed form, and the usual estimate expects (V(batch) - V(all)) / (batches - 1) where V(all) is
    true.
    """
    medians = _batch_medians(values)
    usual = float(medians.var(ddof=1)) / len(medians)
    r = _correlation(values)
    everything = _variance_of_mean(len(values), r)
    expected = (_variance_of_mean(len(values) // len(medians), r) - everything) / (len(medians) - 1)
    return usual * max(1.0, everything / expected)


def _variance_of_mean(count: int, r: float) -> float:
    lags = np.arange(1, count)
    return float(1 + 2 * np.sum((1 - lags / count) * r**lags)) / count


def _correlation(values: Floats) -> float:
    """Return the lag-one correlation with clipped outliers, plus its standard error."""
    # Too small a correlation gives false alarms, too large a one only widens the interval.
    middle = float(np.median(values))
    reach = 4 * float(np.median(np.abs(values - middle)))
    clipped = np.clip(values, middle - reach, middle + reach)
    clipped = clipped - clipped.mean()
    spread = float(clipped @ clipped)
    if spread == 0:
        return 0.0
    r = float(clipped[1:] @ clipped[:-1]) / spread
    return min(max(r, 0.0) + float(np.sqrt((1 - r * r) / len(values))), 0.95)


def _drift(values: Floats) -> str:
    first, second = (float(np.median(half)) for half in np.array_split(values, 2))
    if abs(second - first) <= TOLERANCE * first:
        return ""
    return f"the second half is {second / first - 1:+.0%} against the first: the steps drift"


def _checked(seconds: Sequence[float] | Floats, *, positive: bool = False) -> Floats:
    values = np.asarray(seconds, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise SeriesError(f"expected times of one or more steps in one dimension, got shape {values.shape}")
    bad = ~np.isfinite(values) | (values < 0) | (positive & (values == 0))
    if bad.any():
        step = int(np.argmax(bad))
        raise SeriesError(f"step {step} took {values[step]} s: expected a finite time above zero")
    return values
