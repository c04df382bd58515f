"""Numbers of several runs side by side: final values, and medians over the last steps that all recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.findings.losses import losses_of
from backlight.monitors.health.model.parameters import untrained_parameters
from backlight.monitors.health.model.score import health_series
from backlight.monitors.steptime.model.evidence import StoredProfile, peak_memory, read_profile
from backlight.report.overlay import median_updates
from backlight.report.source import rate_labels
from backlight.store.format.names import storable
from backlight.store.read.run import Run
from backlight.text import number, percent, size

MAX_PARAMETERS = 10
"""Parameters whose medians differ most, per column."""

COLUMNS = (("gradient", "rms"), ("update", "ratio"))
"""Per-parameter columns whose medians are compared."""

LAST_PART = 0.25
"""Last part of the common steps, over which medians are taken."""

Series = tuple[NDArray[np.int64], NDArray[np.float64]]


@dataclass(frozen=True)
class MatchedRow:
    """One number of each run, None where it was not measured; ``ratio`` is B over A, of two runs."""

    name: str
    unit: str
    values: tuple[float | None, ...]
    ratio: float | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The values as they are printed."""
        shown = {"B": size, "%": percent}.get(self.unit, number)
        return tuple("not measured" if value is None else shown(value) for value in self.values)

    @property
    def is_equal(self) -> bool:
        """Whether all values are equal as printed."""
        return len(set(self.texts)) == 1


def last_part(runs: Sequence[Run]) -> tuple[int, int] | None:
    """Return first and last step of the last part of the steps that all runs recorded."""
    for name in ("loss", "total_norm"):
        steps, _ = common_steps([read_scalar(run, name) for run in runs])
        if len(steps):
            return int(steps[math.floor(len(steps) * (1 - LAST_PART))]), int(steps[-1])
    return None


def series_rows(runs: Sequence[Run], steps: tuple[int, int] | None) -> Iterator[MatchedRow]:
    """Yield the numbers of which at least one run has a value, with medians over the given steps."""
    for row in _series_rows(runs, steps):
        if any(value is not None for value in row.values):
            yield row


def _series_rows(runs: Sequence[Run], steps: tuple[int, int] | None) -> Iterator[MatchedRow]:
    losses = losses_by_label(runs)
    for label, each in losses.items():
        best = [_lowest(loss) for loss in each]
        yield _row(f"final {label}", "1", [_last(loss) for loss in each])
        yield _row(f"best {label}", "1", [value for _, value in best])
        yield MatchedRow(f"step of the best {label}", "", tuple(step for step, _ in best))
    if steps is not None:
        series: dict[str, list[Series]] = {
            **{f"median {label}": each for label, each in losses.items()},
            "median gradient norm": [read_scalar(run, "total_norm") for run in runs],
            "median update / weight": [median_updates(run) for run in runs],
            "median clip factor": [read_scalar(run, "clip/factor") for run in runs],
        }
        for name, each in series.items():
            yield _row(name, "1", [_median_between(series, steps) for series in each])
        yield _row("median health", "1", [_median_health(run, steps) for run in runs])
    for name, label in learning_rates(runs).items():
        yield _row(f"final {label}", "1", [_last(read_scalar(run, name)) for run in runs])
    for name in dict.fromkeys(name for run in runs for name in run.scalar_names("user")):
        yield _row(f"final {name}", "1", [_last(read_scalar(run, name, "user")) for run in runs])
    clipped = [read_scalar(run, "clip/factor")[1] for run in runs]
    yield _row("steps clipped", "%", [float(np.mean(v < 1)) if len(v) else None for v in clipped])
    peaks = [peak_memory(run, read_profile(run) or StoredProfile({}))[0] for run in runs]
    yield _row("peak memory", "B", [peak or None for peak in peaks])


def _median_health(run: Run, steps: tuple[int, int]) -> float | None:
    """Return the median score, None where a parameter never trained: the others' would read as the run's."""
    if untrained_parameters(run):
        return None
    health = health_series(run)
    return _median_between((health.steps, health.score), steps)


def learning_rates(runs: Sequence[Run]) -> dict[str, str]:
    """Return the label of each learning rate of any run, by the optimizers' names where there are several."""
    labels: dict[str, dict[str, None]] = {}
    for run in runs:
        names = [name for name in run.scalar_names("backlight") if name[:3] == "lr/"]
        for name, label in rate_labels(run, names).items():
            labels.setdefault(name, {})[label] = None
    if len(labels) == 1:
        return dict.fromkeys(labels, "learning rate")
    return {name: f"learning rate of {' or '.join(of)}" for name, of in labels.items()}


def parameter_rows(runs: Sequence[Run], steps: tuple[int, int] | None) -> Iterator[MatchedRow]:
    """Yield the parameters of one name and shape whose medians differ most, per column."""
    if steps is None:
        return
    shared = set.intersection(*({(p.name, p.shape) for p in run.parameters()} for run in runs))
    for series, column in COLUMNS:
        if not all(run.has(series) for run in runs):
            continue
        medians: list[dict[str, float | None]] = []
        for run in runs:
            frame = run.frame(series, column)
            rows = (frame.steps >= steps[0]) & (frame.steps <= steps[1])
            values, measured = frame.values[rows], frame.measured[rows]
            medians.append({name: _median(values[measured[:, i], i]) for i, name in enumerate(frame.names)})
        label = "gradient" if series == "gradient" else "update / weight"
        table = [
            _row(f"{name}: {label}", "1", [each.get(name) for each in medians])
            for name in dict.fromkeys(p.name for p in runs[0].parameters() if (p.name, p.shape) in shared)
        ]
        yield from sorted((row for row in table if _spread(row)), key=lambda row: -_spread(row))[
            :MAX_PARAMETERS
        ]


def _spread(row: MatchedRow) -> float:
    """Return the logarithm of the largest over the smallest value; 0 where one is missing or not positive."""
    values = [value for value in row.values if value is not None and 0 < value < math.inf]
    return math.log(max(values) / min(values)) if len(values) == len(row.values) else 0.0


def _row(name: str, unit: str, values: Sequence[float | None]) -> MatchedRow:
    pair = [value for value in values if value is not None and math.isfinite(value)]
    ratio = pair[1] / pair[0] if len(values) == len(pair) == 2 and pair[0] else None
    return MatchedRow(name, unit, tuple(values), ratio)


def losses_by_label(runs: Sequence[Run]) -> dict[str, list[Series]]:
    """Return the losses of each run by what they are called there, without values where a run has none."""
    losses = [losses_of(run) for run in runs]
    empty: Series = (np.empty(0, np.int64), np.empty(0))
    return {
        label: [(of[label].steps, of[label].values) if label in of else empty for of in losses]
        for label in dict.fromkeys(label for of in losses for label in of)
    }


def read_scalar(run: Run, name: str, source: str = "backlight") -> Series:
    """Return steps and values of a scalar; none of one that the run does not have."""
    if source == "user" and storable(name) not in run.scalar_names("user"):
        return np.empty(0, np.int64), np.empty(0)
    scalar = run.scalar(name, source)
    return scalar.steps, scalar.values


def common_steps(series: Sequence[Series]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the steps [S] that all series have, and their values [runs, S]."""
    steps = series[0][0]
    for others, _ in series[1:]:
        steps = np.intersect1d(steps, others)
    values = [values[np.searchsorted(at, steps)] for at, values in series]
    return steps, np.array(values, dtype=np.float64).reshape(len(series), len(steps))


def is_equal_at(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return where all runs have the same value, NaN included."""
    return np.asarray(((values == values[:1]) | (np.isnan(values) & np.isnan(values[:1]))).all(axis=0))


def _median_between(series: Series, between: tuple[int, int]) -> float | None:
    """Return the median of the values of some steps; NaN where one of them is not finite."""
    steps, values = series
    return _median(values[(steps >= between[0]) & (steps <= between[1])])


def _median(values: NDArray[np.float64]) -> float | None:
    if not len(values):
        return None
    return float(np.median(values)) if np.isfinite(values).all() else math.nan


def _lowest(series: Series) -> tuple[int | None, float | None]:
    """Return the step of the smallest finite value, and that value; None where there is none."""
    steps, values = series
    if not np.isfinite(values).any():
        return None, None
    row = int(np.nanargmin(np.where(np.isfinite(values), values, np.nan)))
    return int(steps[row]), float(values[row])


def _last(series: Series) -> float | None:
    return float(series[1][-1]) if len(series[1]) else None
