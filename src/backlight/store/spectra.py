"""Gradient spectra of a stored run: what is stored of them, and one table per layer and step.

Two arrays per layer and step hold the numbers per direction: ``spectra/<parameter>/singular_values`` ``[R,
J]``, descending in each replicate, and ``spectra/<parameter>/directions`` ``[fields, K]``, whose rows are
named in an event ``spectra``, once per layer: an array for each row would make a run of many layers slow to
read. Numbers of the whole layer are scalars ``spectra/<parameter>/<name>`` and also one event
``spectra_measured``, which marks that a layer was measured at a step.

R replicates, D = min(rows, columns) directions, of which the K strongest were measured.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight import codec
from backlight.store.read.run import Run

PREFIX = "spectra"
LAYER, LEFT_OUT, MEASURED = "spectra", "spectra_left_out", "spectra_measured"
"""Kinds of events: a layer that is measured, a parameter that is not, a layer measured at a step."""

FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "singular_value": "gradient",
        "singular_value_low": "gradient",
        "singular_value_high": "gradient",
        "echo": "1",
        "echo_low": "1",
        "echo_high": "1",
        "echo_null": "1",
        "pooled": "1",
        "pooled_low": "1",
        "pooled_high": "1",
        "unbiased": "gradient",
        "unbiased_low": "gradient",
        "unbiased_high": "gradient",
        "residual": "1",
        "block": "1",
        "block_echo": "1",
        "strength": "gradient",
        "expected": "1",
        "shrunk": "gradient",
        "left_alignment": "1",
        "right_alignment": "1",
        "alignment_score": "1",
        "ambiguity": "1",
        "solver_residual": "1",
    }
)
"""Numbers of each direction of :class:`backlight.measure.spectra.measurement.SpectralEcho`, with their units.

``singular_value``, ``alignment_score``, ``ambiguity`` and ``solver_residual`` are medians over the
replicates, ``_low`` and ``_high`` bound an interval, ``unbiased`` is the diagonal, and ``block`` numbers the
blocks of directions that noise turns into one another."""

NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "replicates": "1",
        "batch": "samples",
        "noise_sigma": "gradient",
        "edge": "gradient",
        "signal_share": "1",
        "noise_scale": "samples",
        "noise_scale_low": "samples",
        "noise_scale_high": "samples",
        "identifiable": "1",
        "measured": "1",
        "aspect_ratio": "1",
        "stable_rank_weight": "1",
        "stable_rank_gradient": "1",
        "stable_rank_update": "1",
        "stable_rank_momentum": "1",
        "drift_left": "1",
        "drift_right": "1",
        "drift_directions": "1",
    }
)
"""Numbers of a whole layer, with their units. ``batch`` is the samples of one replicate, ``noise_scale``
in that unit, with its 95 % interval; ``stable_rank_gradient`` is that of the mean over the replicates.
``drift_left`` and ``drift_right`` are the mean squared cosines between the subspaces of the
``drift_directions`` strongest directions of that mean and those of the step before that was measured. NaN
where not measured."""


@dataclass(frozen=True)
class Layer:
    """A matrix whose gradient is measured: a parameter, or the part ``split_of`` a fused weight.

    The parameter has ``shape``; the matrix has ``rows`` and ``columns``. ``layer`` is its module,
    ``index`` its position in the model.
    """

    parameter: str
    layer: str
    shape: tuple[int, ...]
    split_of: str
    rows: int
    columns: int
    index: int = 0

    @property
    def directions(self) -> int:
        """D, the number of singular directions."""
        return min(self.rows, self.columns)


@dataclass(frozen=True)
class Measurement:
    """A layer at a step, in the :data:`NUMBERS` of the whole layer, NaN where not measured.

    ``blocks`` are ranges of directions that noise turns into one another. ``squares`` and ``products`` are
    the squared norm of each replicate, and its inner product with the sum of all; both add up over layers.
    """

    parameter: str
    step: int
    numbers: Mapping[str, float]
    method: str = ""
    estimator: str = ""
    blocks: tuple[tuple[int, int], ...] = ()
    squares: tuple[float, ...] = ()
    products: tuple[float, ...] = ()

    def __getitem__(self, name: str) -> float:
        """Return one of the numbers."""
        return self.numbers[name]

    @property
    def identifiable(self) -> int:
        """Number of directions that can be found in one replicate."""
        return _whole(self.numbers["identifiable"])

    @property
    def replicates(self) -> int:
        """R."""
        return _whole(self.numbers["replicates"])


@dataclass(frozen=True)
class SpectraTable:
    """A layer at a step with all its directions, strongest first; NaN where not measured.

    ``singular_values`` is ``[R, D]``, descending in each replicate; each of :data:`FIELDS` is ``[D]``.
    """

    layer: Layer
    measurement: Measurement
    singular_values: NDArray[np.float64]
    fields: Mapping[str, NDArray[np.float64]] = field(repr=False)

    def __getitem__(self, name: str) -> NDArray[np.float64]:
        """Return one field, ``[D]``."""
        return self.fields[name]


def _whole(value: float) -> int:
    return 0 if math.isnan(value) else int(value)


def layers(run: Run) -> tuple[Layer, ...]:
    """Return the layers of a run in the order of the model, as they were described last."""
    return _events(run).layers


def left_out(run: Run) -> dict[str, str]:
    """Return the parameters that are not measured, with the reason."""
    return {str(e.payload["parameter"]): str(e.payload["reason"]) for e in run.events(LEFT_OUT)}


def measurements(run: Run, parameter: str | None = None) -> tuple[Measurement, ...]:
    """Return the measurements of one layer or of all, by step; of two attempts the later one counts."""
    events = _events(run)
    return events.measurements if parameter is None else events.of.get(parameter, ())


def tables(run: Run, parameter: str) -> tuple[SpectraTable, ...]:
    """Return the tables of a layer, by step; a step whose arrays were lost is left out."""
    by_parameter = {layer.parameter: layer for layer in layers(run)}
    if parameter not in by_parameter:
        raise KeyError(
            f"{run.path}: no spectra of {parameter!r}; there are {', '.join(by_parameter) or 'none'}"
        )
    layer = by_parameter[parameter]
    names = _events(run).fields[parameter]
    values = _by_step(run, f"{PREFIX}/{parameter}/singular_values")
    directions = _by_step(run, f"{PREFIX}/{parameter}/directions")
    return tuple(
        SpectraTable(
            layer,
            measurement,
            _padded(values[measurement.step], layer.directions),
            MappingProxyType(_fields(names, directions[measurement.step], layer.directions)),
        )
        for measurement in measurements(run, parameter)
        if measurement.step in values and measurement.step in directions
    )


def table(run: Run, step: int, parameter: str) -> SpectraTable:
    """Return the table of a layer at a step."""
    by_step = {measured.measurement.step: measured for measured in tables(run, parameter)}
    if step not in by_step:
        there = ", ".join(map(str, by_step)) or "none"
        raise KeyError(f"{run.path}: {parameter!r} was not measured at step {step}; it was at {there}")
    return by_step[step]


@dataclass(frozen=True)
class _Events:
    """The events of a run about spectra, parsed once."""

    layers: tuple[Layer, ...]
    fields: Mapping[str, tuple[str, ...]]
    measurements: tuple[Measurement, ...]
    of: Mapping[str, tuple[Measurement, ...]]


# A run does not change once it is open; parsing its events for every layer would cost their square.
_parsed: weakref.WeakKeyDictionary[Run, _Events] = weakref.WeakKeyDictionary()


def _events(run: Run) -> _Events:
    if run not in _parsed:
        described: dict[str, Layer] = {}
        fields: dict[str, tuple[str, ...]] = {}
        for event in run.events(LAYER):
            layer = codec.convert(event.payload, Layer)
            described[layer.parameter] = layer
            # As they were written: a later release may know more of them.
            fields[layer.parameter] = tuple(str(name) for name in event.payload.get("fields", FIELDS))
        by_key: dict[tuple[int, str], Measurement] = {}
        for event in run.events(MEASURED):
            if event.step is not None:
                stored = event.payload.get("numbers", {})
                numbers = {name: stored.get(name, math.nan) for name in NUMBERS}
                measurement = codec.convert(
                    {**event.payload, "step": event.step, "numbers": numbers}, Measurement
                )
                by_key[measurement.step, measurement.parameter] = measurement
        by_step = tuple(by_key[key] for key in sorted(by_key, key=lambda key: key[0]))
        of: dict[str, list[Measurement]] = {}
        for measurement in by_step:
            of.setdefault(measurement.parameter, []).append(measurement)
        _parsed[run] = _Events(
            tuple(sorted(described.values(), key=lambda layer: layer.index)),
            fields,
            by_step,
            {parameter: tuple(measured) for parameter, measured in of.items()},
        )
    return _parsed[run]


def _fields(names: tuple[str, ...], stored: NDArray[Any], D: int) -> dict[str, NDArray[np.float64]]:
    missing = np.full(D, np.nan)
    missing.flags.writeable = False
    by_name = dict(zip(names, _padded(stored, D), strict=False))
    return {name: by_name.get(name, missing) for name in FIELDS}


def _by_step(run: Run, name: str) -> dict[int, NDArray[Any]]:
    at, values = run.array(name) if name in run.array_names() else ((), [])
    return dict(zip(map(int, at), values, strict=True))


def _padded(stored: NDArray[Any], D: int) -> NDArray[np.float64]:
    out = np.full((len(stored), D), np.nan)
    width = min(D, stored.shape[1])
    out[:, :width] = stored[:, :width]
    out.flags.writeable = False
    return out
