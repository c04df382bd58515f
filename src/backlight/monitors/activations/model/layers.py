"""What was measured of each layer of a stored run."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from backlight.store.read.run import Run

LAYERS = "activation_layers"
"""Kind of the event that describes layers, in the order of their first call."""

COLUMNS = {
    "rms": "root mean square of the output",
    "gradient": "root mean square of the gradient at the output",
    "zeros": "share of values that are exactly zero, of layers without parameters",
    "saturated": "share of values of a bounded activation that are at its ends",
    "spread": "largest difference between two samples, relative to the largest magnitude",
    "input_spread": "the same of the input",
    "rank": "effective rank of the output",
    "dead": "share of units that gave nothing in the last measured steps",
}
"""Numbers of a layer, each the scalar ``activations/<column>/<layer>``, and what they are."""


@dataclass(frozen=True)
class LayerNumbers:
    """One number of a layer at the steps at which it was measured, [S] each."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def ending(self, count: int) -> NDArray[np.float64]:
        """Return the last ``count`` values, none where there are fewer."""
        return self.values[-count:] if len(self.values) >= count else self.values[:0]

    def since(self, limit: float) -> int:
        """Return the step from which on every value has been at least ``limit``; the last one does."""
        below = np.flatnonzero(~(self.values >= limit))
        return int(self.steps[below[-1] + 1 if len(below) else 0])


NOTHING = LayerNumbers(np.empty(0, np.int64), np.empty(0))


@dataclass(frozen=True)
class MeasuredLayer:
    """A call of a layer in the forward pass: what it is, and its numbers by column.

    ``model`` is the prefix of the names of its model. ``size`` is the number of values and ``units`` that of
    units at the first call; ``is_hidden`` is whether a layer with parameters was called later. ``input``
    names the layer whose output it was given, empty where that is none of these. ``line`` is that of the
    user's code.
    """

    name: str
    model: str
    kind: str
    size: int
    units: int
    has_parameters: bool
    is_hidden: bool
    input: str
    line: str
    columns: dict[str, LayerNumbers] = field(default_factory=dict)

    def __getitem__(self, column: str) -> LayerNumbers:
        """Return a column, without values where it was not measured."""
        return self.columns.get(column, NOTHING)


def measured_layers(run: Run) -> list[MeasuredLayer]:
    """Return the layers of a run in the order of their first call."""
    layers: dict[str, MeasuredLayer] = {}
    for event in run.events(LAYERS):
        for entry in event.payload["layers"]:
            name = str(entry["name"])
            layers.setdefault(
                name,
                MeasuredLayer(
                    name, str(entry["model"]), str(entry["kind"]), int(entry["size"]), int(entry["units"]),
                    bool(entry["parameters"]), bool(entry["hidden"]), str(entry["input"]), str(entry["line"]),
                ),
            )  # fmt: skip
    for scalar_name in run.scalar_names("backlight"):
        family, _, rest = scalar_name.partition("/")
        column, _, name = rest.partition("/")
        if family == "activations" and name in layers and column in COLUMNS:
            scalar = run.scalar(scalar_name)
            layers[name].columns[column] = LayerNumbers(scalar.steps, scalar.values)
    return list(layers.values())
