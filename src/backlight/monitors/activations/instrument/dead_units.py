"""Units that gave nothing in all samples of several measured steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.devices import widest_float
from backlight.monitors.activations.instrument.layer_outputs import LayerOutput

DEAD_STEPS, DEAD_VALUES = 4, 256
"""Measured steps in a row, and values of a unit in them, after which a unit that gave nothing is dead."""

GATED = frozenset({"Threshold", "Hardswish"})
"""Activations besides those with ReLU in their name whose output is zero over a half-line."""


@dataclass
class _Silence:
    """For how many measured steps and values each unit has given nothing, and how many there were."""

    steps: Tensor
    values: Tensor
    of_steps: int = 0
    of_values: int = 0


class DeadUnits:
    """Follows the units of each layer over the measured steps, on its device.

    A unit of a ReLU gives nothing where its output is zero for every sample. One of a layer with parameters
    gives nothing where its output is never positive and its gradient is zero for every sample, as in front of
    a ReLU that is a function: a dead unit gets no gradient, whatever follows.
    """

    def __init__(self) -> None:
        self._layers: dict[str, _Silence] = {}

    def clear(self) -> None:
        """Forget every layer."""
        self._layers.clear()

    def share(self, output: LayerOutput) -> Tensor | None:
        """Add a step of a layer; return the share of its units that are dead, None where it is too early."""
        silent = _silent(output)
        if silent is None:
            return None
        silence = self._layers.get(output.name)
        if silence is None or silence.steps.shape != silent.shape or silence.steps.device != silent.device:
            none = torch.zeros_like(silent, dtype=torch.int64)
            silence = self._layers[output.name] = _Silence(none, none)
        silence.steps = (silence.steps + 1) * silent
        silence.values = (silence.values + output.rows) * silent
        silence.of_steps, silence.of_values = silence.of_steps + 1, silence.of_values + output.rows
        if silence.of_steps < DEAD_STEPS or silence.of_values < DEAD_VALUES:
            return None
        is_dead = (silence.steps >= DEAD_STEPS) & (silence.values >= DEAD_VALUES)
        return is_dead.to(widest_float(is_dead.device)).mean()


def _silent(output: LayerOutput) -> Tensor | None:
    low, high = output.low, output.high
    if low is None or high is None:
        return None
    if not output.has_parameters:
        is_gated = "relu" in output.kind.lower() or output.kind in GATED
        return (high == 0) & (low == 0) if is_gated else None
    if output.gradient_low is None or output.gradient_high is None:
        return None
    return (high <= 0) & (output.gradient_low == 0) & (output.gradient_high == 0)
