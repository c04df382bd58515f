"""What the monitor writes into a run: layers, parameters left out.

And the spectral echo of a layer at a step.

Everything goes through a writer with the methods of :class:`backlight.store.write.writer.RunWriter`; a
queue that
hands them on later will do. The layout is that of :mod:`backlight.store.format.spectra`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from backlight.store.format.spectra import FIELDS, LAYER, LEFT_OUT, MEASURED, NUMBERS, PREFIX, Layer

if TYPE_CHECKING:
    from backlight.measure.spectra.measurement import SpectralEcho


class Writer(Protocol):
    """What is needed of a writer."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take scalars of a step."""

    def array(
        self, name: str, step: int, values: ArrayLike, *, dims: tuple[str, ...] = ..., unit: str = ...
    ) -> None:
        """Take an array of a step."""

    def event(self, step: int | None, kind: str, payload: Mapping[str, Any]) -> None:
        """Take an event."""


def describe(writer: Writer, layer: Layer) -> None:
    """Write what a layer is; once per layer and attempt, by one rank."""
    payload = {
        "parameter": layer.parameter,
        "layer": layer.layer,
        "shape": layer.shape,
        "split_of": layer.split_of,
        "rows": layer.rows,
        "columns": layer.columns,
        "index": layer.index,
        "fields": tuple(FIELDS),
    }
    writer.event(None, LAYER, payload)


def leave_out(writer: Writer, parameter: str, reason: str) -> None:
    """Write that a parameter is not measured, and why."""
    writer.event(None, LEFT_OUT, {"parameter": parameter, "reason": reason})


def record(
    writer: Writer,
    step: int,
    parameter: str,
    result: SpectralEcho,
    *,
    batch: float = math.nan,
    stable_ranks: Mapping[str, float | None] | None = None,
) -> None:
    """Write the spectral echo of a layer at a step; arrays in float32.

    Parameters
    ----------
    writer
        Where to.
    step
        Of the attempt.
    parameter
        Name of the layer, as :func:`describe` wrote it.
    result
        What was measured.
    batch
        Samples of one replicate; without it there is no noise scale.
    stable_ranks
        Stable ranks by ``"weight"``, ``"gradient"`` (the mean over the replicates), ``"update"`` and
        ``"momentum"``, as far as they were measured.

    Raises
    ------
    ValueError
        If a stable rank is of something else.
    """
    record_arrays(writer, step, parameter, result)
    state_measured(writer, step, parameter, result, batch=batch, stable_ranks=stable_ranks)


def record_arrays(writer: Writer, step: int, parameter: str, result: SpectralEcho) -> None:
    """Write the arrays alone, the first half of :func:`record`."""
    name = f"{PREFIX}/{parameter}"
    seen = np.flatnonzero(~np.isnan(result.singular_values).all(axis=0))
    values_RJ = result.singular_values[:, : int(seen[-1]) + 1 if seen.size else 1]
    writer.array(
        f"{name}/singular_values",
        step,
        values_RJ.astype(np.float32),
        dims=("replicate", "direction"),
        unit="gradient",
    )
    # One column at least: an array without any says nothing of what it would be of.
    table_FK = np.stack([by_name for by_name in _fields(result).values()])[:, : max(1, result.measured)]
    writer.array(f"{name}/directions", step, table_FK.astype(np.float32), dims=("field", "direction"))


def state_measured(
    writer: Writer,
    step: int,
    parameter: str,
    result: SpectralEcho,
    *,
    batch: float = math.nan,
    stable_ranks: Mapping[str, float | None] | None = None,
    drift: Mapping[str, float] | None = None,
) -> None:
    """Write the numbers of the layer and that it was measured, the second half of :func:`record`.

    Where a process that is killed between the halves must not leave a claim without its arrays, the writer
    is flushed between them. Parameters and errors are those of :func:`record`; ``drift`` holds the numbers
    of :data:`backlight.store.format.spectra.NUMBERS` that begin with that word, as far as they were measured.

    Raises
    ------
    ValueError
        If a stable rank is of something else.
    """
    numbers = _numbers(result, batch, stable_ranks or {}) | dict(drift or {})
    writer.scalars(step, {f"{PREFIX}/{parameter}/{name}": value for name, value in numbers.items()})
    payload = {
        "parameter": parameter,
        "method": result.method,
        "estimator": result.estimator,
        "blocks": result.blocks,
        "numbers": numbers,
    }
    writer.event(step, MEASURED, payload)


def _numbers(
    result: SpectralEcho, batch: float, stable_ranks: Mapping[str, float | None]
) -> dict[str, float]:
    p, q = result.shape
    numbers = {
        "replicates": float(result.replicates),
        "batch": float(batch),
        "noise_sigma": result.noise.sigma,
        "edge": result.noise.edge,
        "signal_share": result.noise.signal_share,
        "noise_scale": result.noise.noise_scale(batch) if batch > 0 else math.nan,
        "identifiable": float(result.identifiable),
        "measured": float(result.measured),
        "aspect_ratio": min(p, q) / max(p, q),
    }
    for of, value in stable_ranks.items():
        name = f"stable_rank_{of}"
        if name not in NUMBERS:
            known = [n.removeprefix("stable_rank_") for n in NUMBERS if n.startswith("stable_rank_")]
            raise ValueError(f"stable ranks are stored of {', '.join(known)}; got {of!r}")
        numbers[name] = math.nan if value is None else float(value)
    return numbers


def _fields(result: SpectralEcho) -> dict[str, NDArray[np.float64]]:
    D = len(result.echo)
    block = np.full(D, np.nan)
    for number, (begin, end) in enumerate(result.blocks):
        block[begin:end] = number
    fields = {
        "singular_value": result.singular_value,
        "singular_value_low": result.singular_value_interval[:, 0],
        "singular_value_high": result.singular_value_interval[:, 1],
        "echo": result.echo,
        "echo_low": result.interval[:, 0],
        "echo_high": result.interval[:, 1],
        "echo_null": result.null,
        "pooled": result.pooled,
        "pooled_low": result.pooled_interval[:, 0],
        "pooled_high": result.pooled_interval[:, 1],
        "unbiased": result.diagonal,
        "unbiased_low": result.diagonal_interval[:, 0],
        "unbiased_high": result.diagonal_interval[:, 1],
        "residual": result.residual,
        "block": block,
        "block_echo": result.block_echo,
        "strength": result.strength,
        "expected": result.expected,
        "shrunk": result.shrunk,
        "left_alignment": result.left_alignment,
        "right_alignment": result.right_alignment,
        "alignment_score": np.median(result.score, axis=0),
        "ambiguity": np.median(result.ambiguity, axis=0),
        "solver_residual": np.median(result.solver_residual, axis=0),
    }
    return {name: fields[name] for name in FIELDS}
