"""The spectra of a stored run: one table per layer and step; see :mod:`backlight.store.format.spectra`."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight import codec
from backlight.store.format.spectra import (
    FIELDS,
    LAYER,
    LEFT_OUT,
    MEASURED,
    NUMBERS,
    PREFIX,
    Layer,
    Measurement,
    Table,
)
from backlight.store.read.run import Run


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


def tables(run: Run, parameter: str) -> tuple[Table, ...]:
    """Return the tables of a layer, by step; a step whose arrays were lost is left out."""
    known = {layer.parameter: layer for layer in layers(run)}
    if parameter not in known:
        raise KeyError(f"{run.path}: no spectra of {parameter!r}; there are {', '.join(known) or 'none'}")
    layer = known[parameter]
    names = _events(run).fields[parameter]
    values = _by_step(run, f"{PREFIX}/{parameter}/singular_values")
    directions = _by_step(run, f"{PREFIX}/{parameter}/directions")
    return tuple(
        Table(
            layer,
            one,
            _padded(values[one.step], layer.directions),
            MappingProxyType(_fields(names, directions[one.step], layer.directions)),
        )
        for one in measurements(run, parameter)
        if one.step in values and one.step in directions
    )


def table(run: Run, step: int, parameter: str) -> Table:
    """Return the table of a layer at a step."""
    found = {one.measurement.step: one for one in tables(run, parameter)}
    if step not in found:
        there = ", ".join(map(str, found)) or "none"
        raise KeyError(f"{run.path}: {parameter!r} was not measured at step {step}; it was at {there}")
    return found[step]


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
        found: dict[tuple[int, str], Measurement] = {}
        for event in run.events(MEASURED):
            if event.step is not None:
                given = event.payload.get("numbers", {})
                numbers = {name: given.get(name, math.nan) for name in NUMBERS}
                one = codec.convert({**event.payload, "step": event.step, "numbers": numbers}, Measurement)
                found[one.step, one.parameter] = one
        by_step = tuple(found[key] for key in sorted(found, key=lambda key: key[0]))
        of: dict[str, list[Measurement]] = {}
        for one in by_step:
            of.setdefault(one.parameter, []).append(one)
        _parsed[run] = _Events(
            tuple(sorted(described.values(), key=lambda layer: layer.index)),
            fields,
            by_step,
            {parameter: tuple(found) for parameter, found in of.items()},
        )
    return _parsed[run]


def _fields(names: tuple[str, ...], stored: NDArray[Any], D: int) -> dict[str, NDArray[np.float64]]:
    missing = np.full(D, np.nan)
    missing.flags.writeable = False
    by_name = dict(zip(names, _padded(stored, D), strict=False))
    return {name: by_name.get(name, missing) for name in FIELDS}


def _by_step(run: Run, name: str) -> dict[int, NDArray[Any]]:
    at, values = run.array(name)
    return dict(zip(at.tolist(), values, strict=True))


def _padded(stored: NDArray[Any], D: int) -> NDArray[np.float64]:
    out = np.full((len(stored), D), np.nan)
    width = min(D, stored.shape[1])
    out[:, :width] = stored[:, :width]
    out.flags.writeable = False
    return out
