"""The measured layers of a run by step, and how a finding names them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.findings import phrases
from backlight.records import Evidence
from backlight.store.format.spectra import Layer, Measurement
from backlight.store.read.run import Run
from backlight.store.read.spectra import layers, measurements

MAX_EVIDENCE_LAYERS = 5
"""Layers in the evidence of one finding; its detail counts all of them."""

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
        return np.array([one.step for one in self.measured], np.int64)

    def values(self, name: str) -> NDArray[np.float64]:
        """Return a number of the layer at each of the steps."""
        return np.array([one[name] for one in self.measured], np.float64)


@dataclass(frozen=True)
class Hit:
    """A layer at a step with a measured value beyond a limit."""

    layer: Layer
    at: Measurement
    value: float
    limit: float


def layer_histories(run: Run) -> tuple[LayerHistory, ...]:
    """Return the layers that were measured at least once, in the order of the model."""
    found = (LayerHistory(layer, measurements(run, layer.parameter)) for layer in layers(run))
    return tuple(history for history in found if history.measured)


def worst_first(hits: Sequence[Hit], size: Callable[[Hit], float]) -> list[Hit]:
    """Return the hits by descending size; equal ones stay in the order of the model."""
    return sorted(hits, key=lambda hit: -size(hit))


def evidence(hits: Iterable[Hit], name: str, unit: str = "1") -> tuple[Evidence, ...]:
    """Return evidence of a stored number of the first few layers."""
    return tuple(
        Evidence(
            f"scalars/spectra/{hit.layer.parameter}/{name}",
            hit.at.step,
            phrases.plain(hit.at[name]),
            unit,
        )
        for hit in list(hits)[:MAX_EVIDENCE_LAYERS]
    )


def other_layers(hits: int, measured: int) -> str:
    """Return `` and 3 more layers (4 of 12)``, behind the name of the worst layer."""
    if hits == 1:
        return f" (1 of {measured} layers)" if measured > 1 else ""
    return f" and {hits - 1} more layer{'s' if hits > 2 else ''} ({hits} of {measured})"
