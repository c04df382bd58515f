"""The per-parameter series: their columns in order, units, and how ranks join.

What measures, stores and shows them goes by these.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Join(enum.StrEnum):
    """Reduction of the values of one parameter on several ranks to one. MAX keeps NaN."""

    ROOT_SUM_SQUARES = "root_sum_squares"
    MAX = "max"
    SUM = "sum"


@dataclass(frozen=True, slots=True)
class SeriesColumn:
    """One number per row of a series."""

    name: str
    unit: str
    join: Join
    meaning: str
    integer: bool = False


@dataclass(frozen=True, slots=True)
class Derived:
    """A column that is not stored but computed by the reader."""

    name: str
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True)
class SeriesSchema:
    """The columns of a series; the integer column ``measured`` (0 or 1) is always the first."""

    name: str
    columns: tuple[SeriesColumn, ...]
    derived: tuple[Derived, ...] = ()

    @property
    def floats(self) -> tuple[str, ...]:
        """Names of the float64 columns, in the order of the blob."""
        return tuple(c.name for c in self.columns if not c.integer)

    @property
    def integers(self) -> tuple[str, ...]:
        """Names of the int64 columns, in the order of the blob."""
        return tuple(c.name for c in self.columns if c.integer)


def _int(name: str, meaning: str) -> SeriesColumn:
    return SeriesColumn(name, "1", Join.SUM, meaning, integer=True)


_MEASURED = SeriesColumn(
    "measured",
    "1",
    Join.MAX,
    "1 where this row was measured at this step, else 0 and every other column is void",
    integer=True,
)

GRADIENT = SeriesSchema(
    "gradient",
    (
        SeriesColumn("norm", "gradient", Join.ROOT_SUM_SQUARES, "L2 norm, accumulated in float64"),
        SeriesColumn("max_abs", "gradient", Join.MAX, "largest absolute value; NaN if any value is NaN"),
        SeriesColumn("sum", "gradient", Join.SUM, "sum of the values, accumulated in float64"),
        _MEASURED,
        _int("numel", "scalars in the local tensor"),
        _int("zeros", "values that are exactly zero"),
        _int("nan", "values that are NaN"),
        _int("inf", "values that are infinite"),
    ),
    (
        Derived("rms", "gradient", "norm / sqrt(numel)"),
        Derived("mean", "gradient", "sum / numel"),
        Derived("non_finite", "1", "nan + inf"),
        Derived("zero_share", "1", "zeros / numel"),
    ),
)

UPDATE = SeriesSchema(
    "update",
    (
        SeriesColumn("update_norm", "weight", Join.ROOT_SUM_SQUARES, "L2 norm of the step taken, sampled"),
        SeriesColumn("weight_norm", "weight", Join.ROOT_SUM_SQUARES, "L2 norm of the same weights before"),
        _MEASURED,
        _int("sampled", "weights in the fixed strided sample"),
        _int("numel", "weights in the tensor; the numbers are exact where sampled = numel"),
    ),
    (Derived("ratio", "1", "update_norm / weight_norm"),),
)

HISTOGRAM_LOWEST = -40
"""Exponent of the first bin: bin i counts 2^(LOWEST+i) <= |g| < 2^(LOWEST+i+1)."""

HISTOGRAM_BINS = 64
"""Bins of the exponent histogram; the first and the last also take what lies beyond."""

HISTOGRAM = SeriesSchema(
    "histogram",
    (
        _MEASURED,
        *(_int(f"b{i:02d}", f"values with exponent {HISTOGRAM_LOWEST + i}") for i in range(HISTOGRAM_BINS)),
    ),
)

SERIES: dict[str, SeriesSchema] = {s.name: s for s in (GRADIENT, UPDATE, HISTOGRAM)}
"""Every per-parameter series, by name."""
