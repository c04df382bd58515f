"""The measured layers of a run by step. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.store.format.spectra import Layer, Measurement
from backlight.store.read.run import Run
from backlight.store.read.spectra import layers, measurements

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


def layer_histories(run: Run) -> tuple[LayerHistory, ...]:
    """Return the layers that were measured at least once, in the order of the model."""
    found = (LayerHistory(layer, measurements(run, layer.parameter)) for layer in layers(run))
    return tuple(history for history in found if history.measured)
