"""Layers, parameters that are left out, and the spectral echo of a layer at a step, as they are stored.

The layout is that of :mod:`backlight.store.spectra`. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from backlight.answer import NOT_MEASURED, Column, Table, word
from backlight.measure.noise_scale import Interval, NoiseScale, noise_scale
from backlight.monitor import Recorder
from backlight.store.read.run import Run
from backlight.store.spectra import (
    FIELDS,
    LAYER,
    LEFT_OUT,
    MEASURED,
    NUMBERS,
    PREFIX,
    Layer,
    Measurement,
    layers,
    measurements,
)
from backlight.text import number

if TYPE_CHECKING:
    from backlight.measure.spectra.measurement import SpectralEcho


CHECKPOINT = "spectra_checkpoint"
"""Kind of the events of a run whose replicates were drawn at checkpoints, not by a training run."""


@dataclass(frozen=True)
class LayerHistory:
    """A layer with its measurements, by step."""

    layer: Layer
    measured: tuple[Measurement, ...]

    @property
    def name(self) -> str:
        """Name of the layer."""
        return self.layer.parameter

    @property
    def last(self) -> Measurement:
        """The last measurement."""
        return self.measured[-1]

    @property
    def steps(self) -> NDArray[np.int64]:
        """Steps at which the layer was measured, ascending."""
        return np.array([entry.step for entry in self.measured], np.int64)

    def values(self, name: str) -> NDArray[np.float64]:
        """Return a number of the layer at each of the steps."""
        return np.array([entry[name] for entry in self.measured], np.float64)


def layer_histories(run: Run) -> tuple[LayerHistory, ...]:
    """Return the layers that were measured at least once, in the order of the model."""
    histories = (LayerHistory(layer, measurements(run, layer.parameter)) for layer in layers(run))
    return tuple(history for history in histories if history.measured)


def joint_noise_scale(histories: Sequence[LayerHistory]) -> NoiseScale:
    """Return the noise scale of the gradient of several layers, ``tr Sigma / |G|^2``, at their last steps.

    Squared norms and products add up over layers; a median of layers would weigh the smallest like the
    largest. Layers of another number of replicates or another batch, or runs of an earlier release, have a
    value without an interval.
    """
    last = [history.last for history in histories]
    alike = len({(m["batch"], len(m.squares), m.step) for m in last}) == 1
    if alike and len(last[0].squares) > 1:
        squares, products = (np.sum([getattr(m, of) for m in last], axis=0) for of in _MOMENTS)
        return noise_scale(squares, products, last[0]["batch"])
    noise = signal = 0.0
    for history in histories:
        entries = history.last["noise_sigma"] ** 2 * history.layer.rows * history.layer.columns
        share = history.last["signal_share"]
        noise += entries * history.last["batch"]
        # T = sigma^2 p q / (1 - rho), of which rho is signal.
        signal += entries * share / (1 - share) if share < 1 else math.inf
    none = Interval(math.nan, math.nan)
    return NoiseScale(noise / signal if signal > 0 else math.inf, none, math.nan, none, 0)


_MOMENTS = ("squares", "products")


def bounds(low: float, high: float) -> str:
    """Return an interval in words."""
    if math.isnan(low):
        return "no interval"
    return f"{number(low, 3)} or more" if math.isinf(high) else f"{number(low, 3)} to {number(high, 3)}"


def by_signal(histories: Iterable[LayerHistory]) -> tuple[LayerHistory, ...]:
    """Return the layers by signal share at their last step, the largest first."""

    def signal(history: LayerHistory) -> float:
        share = history.last["signal_share"]
        return math.inf if math.isnan(share) else -share

    return tuple(sorted(histories, key=signal))


def layer_table(histories: Sequence[LayerHistory], brief: int) -> Table:
    """Return the last measurement of layers."""

    def numbers(title: str, name: str) -> Column:
        return Column(title, lambda history: history.last[name], digits)

    return Table(
        (
            word("layer", "name"), Column("shape", lambda row: f"{row.layer.rows}x{row.layer.columns}", str),
            Column("step", lambda row: row.last.step), numbers("signal", "signal_share"),
            numbers("noise scale", "noise_scale"), Column("95 %", _interval, str),
            Column("found", lambda row: f"{row.last.identifiable} of {row.layer.directions}", str),
            numbers("rank", "stable_rank_gradient"), numbers("rank of the weight", "stable_rank_weight"),
            numbers("replicates", "replicates"),
        ),
        histories, brief=brief, wide=2,
    )  # fmt: skip


def digits(value: float) -> str:
    """Return a number of a layer in three digits."""
    if math.isnan(value):
        return NOT_MEASURED
    return "no signal" if math.isinf(value) else number(value, 3)


def between(low: float, high: float) -> str:
    """Return the interval of a noise scale, as a cell of a table has it."""
    if math.isnan(low):
        return NOT_MEASURED
    return f"> {low:.2g}" if math.isinf(high) else f"{low:.2g}-{high:.2g}"


def _interval(history: LayerHistory) -> str:
    return between(history.last["noise_scale_low"], history.last["noise_scale_high"])


def record_layer(writer: Recorder, layer: Layer) -> None:
    """Write the description of a layer; once per layer and attempt, by one rank."""
    writer.event(None, LAYER, {**asdict(layer), "fields": tuple(FIELDS)})


def record_left_out(writer: Recorder, parameter: str, reason: str) -> None:
    """Write that a parameter is not measured, and why."""
    writer.event(None, LEFT_OUT, {"parameter": parameter, "reason": reason})


def record_arrays(writer: Recorder, step: int, parameter: str, result: SpectralEcho) -> None:
    """Write the arrays of a layer at a step, in float32."""
    name = f"{PREFIX}/{parameter}"
    measured = np.flatnonzero(~np.isnan(result.singular_values).all(axis=0))
    values_RJ = result.singular_values[:, : int(measured[-1]) + 1 if measured.size else 1]
    dims = ("replicate", "direction")
    writer.array(f"{name}/singular_values", step, values_RJ.astype(np.float32), dims=dims, unit="gradient")
    # At least one column: an empty array does not show what it would hold.
    table_FK = np.stack(list(_fields(result).values()))[:, : max(1, result.measured)]
    writer.array(f"{name}/directions", step, table_FK.astype(np.float32), dims=("field", "direction"))


def record_measured(
    writer: Recorder,
    step: int,
    parameter: str,
    result: SpectralEcho,
    *,
    batch: float = math.nan,
    stable_ranks: Mapping[str, float | None] | None = None,
    drift: Mapping[str, float] | None = None,
) -> None:
    """Write the numbers of a layer at a step, and the event that marks it as measured.

    Comes after :func:`record_arrays`, and after a flush where a kill between the two must not leave the event
    without its arrays. ``batch`` are the samples of one replicate; without it there is no noise scale.
    ``stable_ranks`` are by ``"weight"``, ``"update"`` and ``"momentum"``; ``drift`` are numbers of
    :data:`backlight.store.spectra.NUMBERS`.

    Raises
    ------
    ValueError
        If a number is not one of the format.
    """
    ranks = {"gradient": result.stable_rank, **(stable_ranks or {})}
    p, q = result.shape
    low, high = result.noise.noise_scale_interval(batch) if batch > 0 else (math.nan, math.nan)
    numbers = {
        "replicates": float(result.replicates),
        "batch": float(batch),
        "noise_sigma": result.noise.sigma,
        "edge": result.noise.edge,
        "signal_share": result.noise.signal_share,
        "noise_scale": result.noise.noise_scale(batch) if batch > 0 else math.nan,
        "noise_scale_low": low,
        "noise_scale_high": high,
        "identifiable": float(result.identifiable),
        "measured": float(result.measured),
        "aspect_ratio": min(p, q) / max(p, q),
        **{f"stable_rank_{of}": math.nan if rank is None else rank for of, rank in ranks.items()},
        **(drift or {}),
    }
    unknown = ", ".join(numbers.keys() - NUMBERS.keys())
    if unknown:
        raise ValueError(f"{unknown}: is no number of a layer; there are {', '.join(NUMBERS)}")
    writer.scalars(step, {f"{PREFIX}/{parameter}/{name}": value for name, value in numbers.items()})
    payload = {
        "parameter": parameter,
        "method": result.method,
        "estimator": "triple",
        "blocks": result.blocks,
        "numbers": numbers,
        # Of each replicate; both add up over layers.
        "squares": result.noise.squares,
        "products": result.noise.products,
    }
    writer.event(step, MEASURED, payload)


def _fields(result: SpectralEcho) -> dict[str, NDArray[np.float64]]:
    block = np.full(len(result.echo), np.nan)
    for index, (begin, end) in enumerate(result.blocks):
        block[begin:end] = index
    other = {
        "unbiased": result.diagonal,
        "echo_null": result.null,
        "block": block,
        "alignment_score": np.median(result.score, axis=0),
        "ambiguity": np.median(result.ambiguity, axis=0),
        "solver_residual": np.median(result.solver_residual, axis=0),
    }
    intervals = {
        "singular_value": result.singular_value_interval,
        "echo": result.interval,
        "pooled": result.pooled_interval,
        "unbiased": result.diagonal_interval,
    }
    for name, interval_D2 in intervals.items():
        other[f"{name}_low"], other[f"{name}_high"] = interval_D2.T
    return {name: other[name] if name in other else getattr(result, name) for name in FIELDS}
