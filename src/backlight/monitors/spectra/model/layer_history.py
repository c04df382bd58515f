"""The measured layers of a run by step. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.measure.noise_scale import Interval, NoiseScale, noise_scale
from backlight.store.format.spectra import Layer, Measurement
from backlight.store.read.run import Run
from backlight.store.read.spectra import layers, measurements
from backlight.text import number

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


def joint_noise_scale(histories: Sequence[LayerHistory]) -> NoiseScale:
    """Return the noise scale of the gradient of several layers, ``tr Sigma / |G|^2``, at their last steps.

    Squared norms and products add up over layers; a median of layers would weigh the smallest like the
    largest. Layers of another number of replicates or another batch, or runs of an earlier release, have a
    value without an interval.
    """
    last = [history.last for history in histories]
    alike = len({(one["batch"], len(one.squares), one.step) for one in last}) == 1
    if alike and len(last[0].squares) > 1:
        squares, products = (np.sum([getattr(one, of) for one in last], axis=0) for of in _MOMENTS)
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
