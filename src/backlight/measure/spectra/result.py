"""What the measurement of a gradient's spectral echo returns. R replicates, D = min(p, q) directions."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.measure.spectra.noise import Noise

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class SpectralEcho:
    """Result of :func:`~backlight.measure.spectra.measurement.spectral_echo`; ``[D]`` is sorted by strength.

    Attributes
    ----------
    layer
        As given.
    shape
        p, q.
    replicates
        R.
    method
        What decomposed the replicates: ``"svd"``, ``"gram"`` or ``"randomized"``.
    estimator
        What ``echo`` was estimated by.
    noise
        Noise level, signal share, bulk edge; see :class:`backlight.measure.spectra.noise.Noise`.
    identifiable
        k, the number of directions that can be found in one replicate; the first k of every array.
    measured
        K, the number of directions that were measured.
    echo, interval, null
        ``[D]``, ``[D, 2]``, ``[D]``: the echo, its bootstrap interval over replicates, and the 95 %
        quantile of what chance shows, taken over all directions together.
    by_replicate
        ``[R, D]``: the echo of each replicate, by triple least squares.
    pooled, pooled_interval
        ``[D]``, ``[D, 2]``: the pooled estimate of the echo.
    diagonal, diagonal_interval
        ``[D]``, ``[D, 2]``: size of the gradient along the directions of a replicate, mean over the
        replicates, in the unit of the gradient; see :func:`backlight.measure.spectra.echo.unbiased_diagonal`.
    residual
        ``[D]``: how badly the model ``Z_ab = ζ_a ζ_b`` fits; see
        :func:`backlight.measure.spectra.echo.residual`.
    blocks, block_echo
        Ranges of identifiable directions that noise turns into one another, and ``[D]`` the echo of the
        block that each belongs to; NaN for blocks of more than 128.
    singular_values
        ``[R, D]``, descending in each replicate.
    singular_value, singular_value_interval
        ``[D]``, ``[D, 2]``: of the direction, median and quantiles over the replicates.
    strength
        ``[D]``: without noise, as the mean of the replicates shows it by the spiked model.
    expected
        ``[D]``: the echo that the spiked model expects at that strength.
    shrunk
        ``[D]``: what the Frobenius-optimal shrinker makes of ``singular_value``.
    left_alignment, right_alignment
        ``[D]``: median overlap of the directions with those of the mean of the other replicates.
    score, ambiguity
        ``[R, D]``: of the alignment; see :class:`backlight.measure.spectra.alignment.Alignment`.
    permutation
        int64 ``[R, D]``: which singular value of the replicate is direction i; -1 where not measured.
    solver_residual
        ``[R, D]``: ``|A v - s u|`` of the decomposition over the replicate's largest singular value.
    """

    layer: str
    shape: tuple[int, int]
    replicates: int
    method: str
    estimator: str
    noise: Noise
    identifiable: int
    measured: int
    echo: Float64
    interval: Float64
    null: Float64
    by_replicate: Float64
    pooled: Float64
    pooled_interval: Float64
    diagonal: Float64
    diagonal_interval: Float64
    residual: Float64
    blocks: tuple[tuple[int, int], ...]
    block_echo: Float64
    singular_values: Float64
    singular_value: Float64
    singular_value_interval: Float64
    strength: Float64
    expected: Float64
    shrunk: Float64
    left_alignment: Float64
    right_alignment: Float64
    score: Float64
    ambiguity: Float64
    permutation: Int64
    solver_residual: Float64


_BY_REPLICATE = frozenset(
    ("by_replicate", "singular_values", "score", "ambiguity", "permutation", "solver_residual")
)


def to_length(result: SpectralEcho, D: int) -> SpectralEcho:
    """Make every array as long as there are directions; NaN, or -1, where nothing was measured."""
    grown: dict[str, Any] = {}
    for field in fields(result):
        array = getattr(result, field.name)
        if isinstance(array, np.ndarray):
            axis = 1 if field.name in _BY_REPLICATE else 0
            missing = D - array.shape[axis]
            widths = [(0, 0)] * array.ndim
            widths[axis] = (0, max(0, missing))
            filler = -1 if array.dtype == np.int64 else np.nan
            grown[field.name] = np.pad(array, widths, constant_values=filler)
    return replace(result, **grown)
