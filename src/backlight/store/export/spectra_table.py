"""Spectra of gradients as a long table for other tools: one row per step, layer and direction.

Numbers of a whole layer stand in each of its rows. What was not measured is void, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.store.errors import ExportError
from backlight.store.export.chunk import Chunk
from backlight.store.format import spectra
from backlight.store.format.names import storable
from backlight.store.format.spectra import Layer, Measurement, Table
from backlight.store.read.run import Run

_OF_DIRECTION: Mapping[str, str] = MappingProxyType(
    {
        "singular_value": "singular_value",
        "singular_value_low": "singular_value_low",
        "singular_value_high": "singular_value_high",
        "spectral_echo": "echo",
        "spectral_echo_low": "echo_low",
        "spectral_echo_high": "echo_high",
        "spectral_echo_null": "echo_null",
        "left_alignment": "left_alignment",
        "right_alignment": "right_alignment",
        "unbiased": "unbiased",
        "unbiased_low": "unbiased_low",
        "unbiased_high": "unbiased_high",
        "residual": "residual",
        "block_echo": "block_echo",
        "shrunk": "shrunk",
    }
)
"""Columns with a number per direction, by the field of :data:`backlight.store.format.spectra.FIELDS`."""

_OF_LAYER = (
    "stable_rank_weight",
    "stable_rank_gradient",
    "stable_rank_update",
    "stable_rank_momentum",
    "noise_sigma",
    "noise_edge",
    "signal_share",
    "noise_scale",
    "aspect_ratio",
    "batch",
)
_COUNTS = ("replicates", "identifiable")

COLUMNS = ("step", "parameter", "layer", "shape", "direction", *_OF_DIRECTION, *_OF_LAYER, *_COUNTS)
"""Columns of the table; ``direction`` counts from 0, the strongest first."""

TEXTS = frozenset(("parameter", "layer", "shape"))
FLOATS = frozenset((*_OF_DIRECTION, *_OF_LAYER))


def spectra_chunks(run: Run, max_directions: int | None = None) -> Iterator[Chunk]:
    """Yield the table, one layer at a time in the order of the model, by step and direction.

    Parameters
    ----------
    run
        The stored run.
    max_directions
        Most directions of a layer; without it those that were measured. A layer of which none could be
        measured has one row, for the numbers of the layer, without a direction.

    Raises
    ------
    ExportError
        If ``max_directions`` is not positive, or the run holds no spectra.
    """
    if max_directions is not None and max_directions < 1:
        raise ExportError(f"--max-directions must be at least 1, got {max_directions}")
    known = spectra.layers(run)
    if not known:
        raise ExportError(f"{run.path}: holds no spectra, so there are no rows of them; export parameters")
    for layer in known:
        by_step: dict[int, Table] = {t.measurement.step: t for t in spectra.tables(run, layer.parameter)}
        for measurement in spectra.measurements(run, layer.parameter):
            yield _rows(layer, measurement, by_step.get(measurement.step), max_directions)


def _rows(layer: Layer, at: Measurement, table: Table | None, most: int | None) -> Chunk:
    D = 0
    if table is not None:
        seen = np.flatnonzero(~np.isnan(table["singular_value"]) | ~np.isnan(table["echo"]))
        D = int(seen[-1]) + 1 if seen.size else 0
        D = D if most is None else min(D, most)
    N = max(1, D)
    columns: dict[str, npt.NDArray[Any]] = {
        "step": np.full(N, at.step, dtype=np.int64),
        "parameter": np.full(N, storable(layer.parameter), dtype=object),
        "layer": np.full(N, storable(layer.layer), dtype=object),
        "shape": np.full(N, "x".join(map(str, layer.shape)), dtype=object),
        "direction": np.arange(N, dtype=np.int64),
    }
    void = {name: np.zeros(N, dtype=bool) for name in columns}
    void["direction"][:] = D == 0
    for name, field in _OF_DIRECTION.items():
        columns[name] = table[field][:N].copy() if table is not None and D else np.full(N, np.nan)
    for name in _OF_LAYER:
        columns[name] = np.full(N, at[{"noise_edge": "edge"}.get(name, name)])
    for name in (*_OF_DIRECTION, *_OF_LAYER):
        void[name] = np.isnan(columns[name])
    for name in _COUNTS:
        missing = bool(np.isnan(at[name]))
        columns[name] = np.full(N, 0 if missing else int(at[name]), dtype=np.int64)
        void[name] = np.full(N, missing)
    return Chunk(columns, void)
