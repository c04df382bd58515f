"""Writes layers, parameters that are left out, and the spectral echo of a layer at a step into a run.

A writer has the methods of :class:`backlight.store.write.writer.RunWriter`; a queue in front of one will do.
The layout is that of :mod:`backlight.store.format.spectra`.
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
    """The methods of a writer that are used here."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars of a step."""

    def array(
        self, name: str, step: int, values: ArrayLike, *, dims: tuple[str, ...] = ..., unit: str = ...
    ) -> None:
        """Write an array of a step."""

    def event(self, step: int | None, kind: str, payload: Mapping[str, Any]) -> None:
        """Write an event."""


def record_layer(writer: Writer, layer: Layer) -> None:
    """Write the description of a layer; once per layer and attempt, by one rank."""
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


def record_left_out(writer: Writer, parameter: str, reason: str) -> None:
    """Write that a parameter is not measured, and why."""
    writer.event(None, LEFT_OUT, {"parameter": parameter, "reason": reason})


def record_arrays(writer: Writer, step: int, parameter: str, result: SpectralEcho) -> None:
    """Write the arrays of a layer at a step, in float32."""
    name = f"{PREFIX}/{parameter}"
    measured = np.flatnonzero(~np.isnan(result.singular_values).all(axis=0))
    values_RJ = result.singular_values[:, : int(measured[-1]) + 1 if measured.size else 1]
    writer.array(
        f"{name}/singular_values",
        step,
        values_RJ.astype(np.float32),
        dims=("replicate", "direction"),
        unit="gradient",
    )
    # At least one column: an empty array does not show what it would hold.
    table_FK = np.stack([by_name for by_name in _fields(result).values()])[:, : max(1, result.measured)]
    writer.array(f"{name}/directions", step, table_FK.astype(np.float32), dims=("field", "direction"))


def record_measured(
    writer: Writer,
    step: int,
    parameter: str,
    result: SpectralEcho,
    *,
    batch: float = math.nan,
    stable_ranks: Mapping[str, float | None] | None = None,
    drift: Mapping[str, float] | None = None,
) -> None:
    """Write the numbers of a layer at a step, and the event that marks it as measured.

    Comes after :func:`record_arrays`. Where a process that is killed between the two must not leave the
    event without its arrays, the writer is flushed between them. ``batch`` are the samples of one replicate;
    without it there is no noise scale. ``stable_ranks`` are by ``"weight"``, ``"gradient"`` (the mean over
    the replicates), ``"update"`` and ``"momentum"``; ``drift`` holds the numbers of
    :data:`backlight.store.format.spectra.NUMBERS` that begin with that word.
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
