"""Growth of a quantity with the swept settings: exponents of a power law, with intervals. No torch.

``log y = c + sum of e_k log x_k`` by least squares; an interval is Student's over the residuals. It shows how
well a power law fits these sizes, not that one holds beyond them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from backlight.student_t import student_quantile

MAX_EXTRAPOLATION = 2.0
"""Factor beyond the measured range up to which a fit may be evaluated."""


class ScalingError(ValueError):
    """A fit is not possible, or was evaluated too far from the measured sizes."""


@dataclass(frozen=True)
class Exponent:
    """The power with which a quantity grows with one setting, and its interval."""

    quantity: str
    setting: str
    value: float
    low: float
    high: float

    @property
    def faster_than_linear(self) -> bool:
        """Whether the whole interval lies above 1."""
        return self.low > 1.0


@dataclass(frozen=True)
class PowerLaw:
    """A quantity as a power law of settings, one exponent for each; ``points`` is the number of sizes.

    ``misfit`` is the largest relative deviation of a point from the fit.
    """

    quantity: str
    exponents: tuple[Exponent, ...]
    points: int
    misfit: float
    constant: float
    ranges: Mapping[str, tuple[float, float]]

    def at(self, sizes: Mapping[str, float]) -> float:
        """Return the quantity at other sizes, within twice the measured range."""
        check_reach(self.ranges, sizes)
        total = sum(e.value * float(np.log(float(sizes[e.setting]))) for e in self.exponents)
        return float(np.exp(self.constant + total))


def check_reach(ranges: Mapping[str, tuple[float, float]], sizes: Mapping[str, float]) -> None:
    """Raise unless every setting has a size within twice its measured range.

    Raises
    ------
    ScalingError
        If one lacks its size, or lies beyond.
    """
    for setting, (low, high) in ranges.items():
        if setting not in sizes:
            raise ScalingError(f"no value of {setting}; expected one for each swept setting")
        size = float(sizes[setting])
        if not low / MAX_EXTRAPOLATION <= size <= high * MAX_EXTRAPOLATION:
            raise ScalingError(
                f"{setting}={size:g} lies beyond twice the range that was measured ({low:g} to {high:g}): "
                "a power law is not known to hold there. Sweep nearer sizes"
            )


def fit(
    quantity: str,
    sizes: Mapping[str, Sequence[float]],
    values: Sequence[float],
    confidence: float = 0.95,
) -> PowerLaw:
    """Fit a power law of positive ``sizes`` by setting, each [points], to positive ``values`` [points]."""
    names = list(sizes)
    count = len(values)
    if count < len(names) + 2:
        raise ScalingError(
            f"{quantity}: {count} points for {len(names)} settings; an interval takes {len(names) + 2} or "
            "more"
        )
    table = np.array([[1.0] * count, *(sizes[name] for name in names)], dtype=np.float64).T
    target = np.asarray(values, dtype=np.float64)
    if (table <= 0).any() or (target <= 0).any() or not np.isfinite(target).all():
        raise ScalingError(f"{quantity}: a power law takes positive numbers")
    x, y = np.log(table), np.log(target)
    x[:, 0] = 1.0
    if np.linalg.matrix_rank(x) < x.shape[1]:
        raise ScalingError(
            f"{quantity}: {' and '.join(names)} move together, so that their exponents are not determined"
        )
    solution = np.linalg.lstsq(x, y, rcond=None)[0]
    rest = y - x @ solution
    freedom = count - x.shape[1]
    errors = np.sqrt(np.diag(np.linalg.inv(x.T @ x)) * float(rest @ rest) / freedom)
    reach = student_quantile(freedom, 0.5 + confidence / 2)
    exponents = tuple(
        Exponent(quantity, name, float(value), float(value - reach * error), float(value + reach * error))
        for name, value, error in zip(names, solution[1:], errors[1:], strict=True)
    )
    ranges = {name: (float(min(sizes[name])), float(max(sizes[name]))) for name in names}
    misfit = float(np.abs(np.expm1(rest)).max())
    return PowerLaw(quantity, exponents, count, misfit, float(solution[0]), ranges)
