"""What the rules of this monitor share: layers by step, and how a finding names them. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from backlight.monitors.spectra.model.conditions import Condition
from backlight.monitors.spectra.model.reader import Layer, Measurement, layers, measurements
from backlight.records import Evidence
from backlight.store.read.run import Run

EVIDENCE_LAYERS = 5
"""Layers that the evidence of one finding lists; the claim says how many there are."""

CHECKPOINT = "spectra_checkpoint"
"""Kind of the events of a run whose replicates were drawn at checkpoints, not by a training."""


@dataclass(frozen=True)
class Followed:
    """A layer with what was measured of it, by step."""

    layer: Layer
    measured: tuple[Measurement, ...]

    @property
    def name(self) -> str:
        """Name of the layer."""
        return self.layer.parameter

    @property
    def last(self) -> Measurement:
        """What was measured last."""
        return self.measured[-1]


@dataclass(frozen=True)
class Hit:
    """A condition that holds for a layer at a step."""

    layer: Layer
    at: Measurement
    condition: Condition


def followed(run: Run) -> tuple[Followed, ...]:
    """Return the layers that were measured at least once, in the order of the model."""
    by_layer: dict[str, list[Measurement]] = {}
    for one in measurements(run):
        by_layer.setdefault(one.parameter, []).append(one)
    return tuple(
        Followed(layer, tuple(by_layer[layer.parameter]))
        for layer in layers(run)
        if layer.parameter in by_layer
    )


def worst(hits: Sequence[Hit], size: Callable[[Hit], float]) -> list[Hit]:
    """Return the hits, the worst first; those alike stay in the order of the model."""
    return sorted(hits, key=lambda hit: -size(hit))


def evidence(hits: Iterable[Hit], name: str, unit: str = "1") -> tuple[Evidence, ...]:
    """Point to a stored number of the first few layers."""
    return tuple(
        Evidence(f"scalars/spectra/{hit.layer.parameter}/{name}", hit.at.step, plain(hit.at[name]), unit)
        for hit in list(hits)[:EVIDENCE_LAYERS]
    )


def among(hits: int, layers_measured: int) -> str:
    """Write ``, and 3 more of 12 layers`` behind the worst of several."""
    if hits == 1:
        return f" (1 of {layers_measured} layers)" if layers_measured > 1 else ""
    return f" and {hits - 1} more layer{'s' if hits > 2 else ''} ({hits} of {layers_measured})"


def plain(value: float) -> float | str:
    """Return a float that JSON can carry; what is not finite becomes its name."""
    return float(value) if math.isfinite(value) else str(float(value))


def written(value: float) -> str:
    """Write a number with three significant digits."""
    return "NaN" if math.isnan(value) else "infinite" if math.isinf(value) else f"{value:.3g}"
