"""Outputs of layers at chosen steps: their size, zeros, saturation, dead units, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from backlight.devices import widest_float
from backlight.monitor import Monitor, RunHandle, StoredStep, next_due
from backlight.monitors.activations.instrument.layer_outputs import (
    MAX_LAYERS,
    FollowedLayer,
    ForwardPass,
    LayerOutput,
    OutputCalls,
    layers_of,
)
from backlight.monitors.activations.model.layers import LAYERS
from backlight.monitors.activations.settings import ActivationsSettings

if TYPE_CHECKING:
    from torch import nn

    from backlight.capture.step_summary import StepSummary
    from backlight.measure.transfer import Transfer
    from backlight.session.step_recorder import StepRecord


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


MAX_PENDING = 64
"""Measured steps that may wait for the writer thread before the oldest is dropped."""

FIRST_STEPS = 8
"""Measured steps before the cost decides how far the next one is."""

BUDGET = 0.007
"""Processor time of the measured steps, as a share of the time of all steps."""

GRADIENT = "activations/gradient/"
"""Begin of the names of numbers that a loss scale is a factor of."""


MISSED_STEPS = 3
"""Steps that were due, had a backward pass and no forward that it reached, after which that is recorded."""

UNSEEN = (
    "no call of a watched model was observed that a backward pass reached: its layers are called by another "
    "method than forward, or what calls it is compiled"
)
"""Why nothing is measured."""


@dataclass(frozen=True)
class _Pending:
    """Numbers of a step on their way to the host: name and factor of each, and the loss scale."""

    names: list[str]
    factors: list[float]
    transfers: list[tuple[list[int], Transfer]]
    scale: Any


class ActivationsMonitor(Monitor):
    """Measures a forward and backward of each model in steps that are due; docs/formulas.md, section 7."""

    name = "activations"
    records = "activations"

    def attach(self, run: RunHandle) -> None:
        """Listen to forward passes."""
        settings = ActivationsSettings.of(run.settings)
        self._run, self._every = run, settings.every
        self._calls = OutputCalls(self._layers, run.disable, wants_rank=settings.rank)
        self._due, self._next, self._until, self._measured, self._missed = False, 0, -1, 0, 0
        self._units = DeadUnits()
        self._described: set[str] = set()
        self._refused: set[str] = set()
        self._pending: dict[int, _Pending] = {}
        run.listen(self._calls)
        run.follow_forwards()

    def detach(self, error: BaseException | None) -> None:
        """Remove all hooks."""
        self._calls.restart(wanted=False)
        self._units.clear()

    # Steps

    def on_step_start(self, step: int) -> None:
        """Follow the forwards of a step that is due."""
        if step >= self._next:
            self._next = next_due(step, self._every or 0)
            # Of optimizers that step in turn, every power of two would be a step of the same one.
            self._until = step if self._every else step + max(len(self._run.scope.numbers), 1) - 1
        self._due = step <= self._until
        self._calls.restart(wanted=self._due)
        if self._due and not self._run.scope.table.records:
            self._run.scope.refresh()

    def wants_step(self, step: int) -> bool:
        """Return whether the step is due."""
        return self._due

    def next_step(self, step: int) -> int:
        """Return the next step that is due."""
        return step + 1 if step < self._until else max(step + 1, self._next)

    def on_step_end(self, summary: StepSummary, record: StepRecord) -> None:
        """Send what was measured to the writer thread, which waits for the device."""
        if not self._due:
            return
        self._due = False
        passes = self._calls.passes()
        for kind in sorted(self._calls.left_out):
            reason = "their values are on several ranks, or on their way: reading them would wait"
            self._refuse(f"activations of the class {kind}", reason)
        seconds = self._calls.seconds
        self._calls.restart(wanted=False)
        if not passes:
            self._missed += summary.backwards > 0
            if self._missed == MISSED_STEPS and not self._measured:
                self._refuse("activations", UNSEEN)
            return
        for forward in passes:
            self._describe(forward, record.step)
            if any(output.in_region and output.gradient is None for output in forward.outputs):
                what = "gradients at outputs of layers inside of re-entrant checkpointing"
                self._refuse(what, "its forward has no graph; use_reentrant=False has one")
        self._send([output for forward in passes for output in forward.outputs], summary.scale, record)
        record.add_scalars({"activations_seconds": seconds})
        self._measured += 1
        if self._every is None and self._measured > FIRST_STEPS:
            step_s = max(summary.seconds - seconds, 1e-5)
            self._next = max(self._next, record.step + math.ceil(seconds / (BUDGET * step_s)))

    def _layers(self, root: nn.Module) -> tuple[str, Sequence[FollowedLayer]]:
        prefix = self._run.scope.prefix(root)
        layers = layers_of(root, prefix)
        for layer in layers:
            if layer.is_compiled:
                self._refuse(
                    f"activations inside `{layer.name}`",
                    "it is compiled or scripted: its output is measured, and no layer inside of it",
                )
        if len(layers) > MAX_LAYERS:
            what = f"activations of {len(layers) - MAX_LAYERS} layers behind `{layers[MAX_LAYERS - 1].name}`"
            self._refuse(what, f"{MAX_LAYERS} layers of a model are measured")
        return prefix, layers[:MAX_LAYERS]

    def _refuse(self, what: str, reason: str) -> None:
        if what not in self._refused:
            self._refused.add(what)
            self._run.notifier.unmeasured(what, reason)

    def _describe(self, forward: ForwardPass, step: int) -> None:
        """Record what is known of layers that were not measured before."""
        outputs = forward.outputs
        last = max((place for place, output in enumerate(outputs) if output.has_parameters), default=-1)
        layers = [
            {
                "name": output.name,
                "model": forward.model,
                "kind": output.kind,
                "size": output.numel,
                "units": output.numel // output.rows,
                "parameters": output.has_parameters,
                "hidden": place < last,
                "input": output.input,
                "line": output.line,
            }
            for place, output in enumerate(outputs)
            if output.name not in self._described
        ]
        if layers:
            self._described |= {output.name for output in outputs}
            self._run.recorder.event(step, LAYERS, {"layers": layers})

    def _send(self, outputs: Sequence[LayerOutput], scale: Any, record: StepRecord) -> None:
        names: list[str] = []
        factors: list[float] = []
        at: dict[torch.device, list[int]] = {}
        tensors: dict[torch.device, list[Tensor]] = {}
        for output in outputs:
            size = 1 / math.sqrt(output.numel)
            numbers = (
                ("rms", output.norm, size),
                ("gradient", output.gradient, size),
                ("zeros", output.zeros, 1 / output.numel),
                ("saturated", output.saturated, 1.0),
                ("spread", output.spread, 1.0),
                ("input_spread", output.input_spread, 1.0),
                ("rank", output.rank, 1.0),
                ("dead", self._units.share(output), 1.0),
            )
            for column, tensor, factor in numbers:
                if tensor is not None:
                    at.setdefault(tensor.device, []).append(len(names))
                    tensors.setdefault(tensor.device, []).append(tensor.to(widest_float(tensor.device)))
                    names.append(f"activations/{column}/{output.name}")
                    factors.append(factor)
        with torch.no_grad():
            transfers = [(at[device], record.transfer.add(torch.stack(tensors[device]))) for device in at]
        while len(self._pending) >= MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        copied = None
        if isinstance(scale, torch.Tensor):
            copied = record.transfer.add(scale.detach().reshape(1).to(widest_float(scale.device)))
        self._pending[record.step] = _Pending(names, factors, transfers, copied)

    # On the writer thread

    def on_step_stored(self, step: StoredStep) -> None:
        """Add the numbers of a measured step."""
        if (pending := self._pending.pop(step.step, None)) is None:
            return
        scale = 1.0 if pending.scale is None else float(pending.scale.read()[0])
        for places, transfer in pending.transfers:
            for place, value in zip(places, transfer.read().tolist(), strict=True):
                name, factor = pending.names[place], pending.factors[place]
                if name.startswith(GRADIENT):
                    factor /= scale
                step.scalars[name] = value * factor
