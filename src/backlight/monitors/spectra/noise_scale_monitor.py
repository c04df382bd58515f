"""The noise scale of chosen steps, from the forward and backward pass that the training run makes anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from backlight import clock
from backlight.monitor import Monitor, RunHandle, StoredStep, next_due
from backlight.monitors.spectra.settings import SpectraSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from backlight.capture.step_summary import StepSummary
    from backlight.measure.noise_scale import NoiseScale
    from backlight.monitors.spectra.instrument.microbatch_noise import MicrobatchMeasurement
    from backlight.session.settings import Settings
    from backlight.session.step_recorder import StepRecord

EVENT = "noise_scale"
"""Kind of the event with everything of one measured step."""

MAX_PENDING = 64
"""Measurements that may wait for the writer thread before the oldest is dropped."""


class NoiseScaleMonitor(Monitor):
    """Measures the first microbatch of a step that is due; docs/formulas.md, section 2."""

    name = "noise_scale"
    requested_by = None
    records = "noise scale"

    def __init__(self, every: int) -> None:
        self._every = every

    @classmethod
    def from_settings(cls, settings: Settings) -> Monitor | None:
        """Return the monitor if ``noise_scale`` is set."""
        every = SpectraSettings.of(settings).noise_scale
        return None if every is None else cls(every)

    def attach(self, run: RunHandle) -> None:
        """Listen to forward and backward passes."""
        from backlight.capture.microbatches import Microbatches  # noqa: PLC0415
        from backlight.capture.per_sample import LayerCalls  # noqa: PLC0415 - torch

        class DueMicrobatches(Microbatches):
            every_step = False

        self._run = run
        self._due, self._next = False, 0
        self._measurement: MicrobatchMeasurement | None = None
        self._names: dict[int, str] = {}
        self._leaves: dict[int, torch.Tensor] = {}
        self._inside = self._finished = False
        self._reason = ""
        self._seconds = 0.0
        self._pending: dict[int, tuple[MicrobatchMeasurement, dict[int, str], float]] = {}
        self._layer_calls, self._microbatches = LayerCalls(self), DueMicrobatches(self)
        self._allowed = run.world_size == 1
        if not self._allowed:
            self._refuse(None, f"there are {run.world_size} ranks, and it is measured in one process only")
            return
        run.listen(self._layer_calls)
        run.listen(self._microbatches)
        run.follow_forwards()

    def detach(self, error: BaseException | None) -> None:
        """Remove all hooks."""
        self._layer_calls.restart(wanted=False)
        self._microbatches.remove_hooks()
        self._measurement = None

    # Steps

    def on_step_start(self, step: int) -> None:
        """Drop what is left of the step before, and follow the first forward of one that is due."""
        self._due = self._allowed and step >= self._next
        if self._due:
            self._next = next_due(step, self._every)
            if not self._run.scope.table.records:
                self._run.scope.refresh()
        self._measurement, self._reason, self._seconds = None, "", 0.0
        self._inside = self._finished = False
        self._microbatches.restart()
        self._layer_calls.restart(wanted=self._due)

    def wants_step(self, step: int) -> bool:
        """Return whether the step is due."""
        return self._due

    def next_step(self, step: int) -> int:
        """Return the next step that is due."""
        return max(step + 1, self._next)

    def on_step_end(self, summary: StepSummary, record: StepRecord) -> None:
        """Keep what was measured for the writer thread, which waits for the device."""
        if not self._due:
            return
        self._due = False
        measurement, reason = self._measurement, self._reason
        if self._microbatches.in_closure:
            reason = reason or "the optimizer evaluates a closure several times"
        if measurement is None:
            reason = reason or "no forward pass of the watched model was observed before its backward pass"
        elif not self._finished:
            reason = reason or "no backward pass from one forward pass was observed"
        self._measurement = None
        self._layer_calls.restart(wanted=False)
        if reason or measurement is None:
            self._refuse(record.step, reason)
            return
        while len(self._pending) >= MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        self._pending[record.step] = measurement, self._names, self._seconds

    # The forward pass

    def begins(self, module: nn.Module, samples: int | None) -> Sequence[nn.Module]:
        """Return the layers with a kernel, unless the samples of this model cannot be told apart."""
        from torch import nn  # noqa: PLC0415

        from backlight.capture.modules import unwrapped  # noqa: PLC0415
        from backlight.measure.gram.layers import kernel_of  # noqa: PLC0415
        from backlight.monitors.spectra.instrument.microbatch_noise import (  # noqa: PLC0415 - scipy
            MicrobatchMeasurement,
            refused,
        )

        begin = clock.thread_time()
        self._reason = refused(module, samples)
        layers: list[nn.Module] = []
        if not self._reason and samples is not None:
            self._measurement = MicrobatchMeasurement(samples)
            every = nn.Module.modules(unwrapped(module))
            layers = [m for m in every if kernel_of(m) is not None and _is_trained(m)]
        self._seconds += clock.thread_time() - begin
        return layers

    def skips(self, layer: nn.Module, reason: str) -> None:
        """Leave out the parameters of a layer."""
        if self._measurement is not None:
            self._measurement.skip(layer, reason)

    def arrives(self, layer: nn.Module, x: torch.Tensor, delta: torch.Tensor) -> None:
        """Add a call, while the backward of this forward runs."""
        if self._measurement is None or self._finished:
            return
        begin = clock.thread_time()
        if self._inside:
            self._measurement.add(layer, x, delta)
        else:
            self._reason = "the loss function differentiates through the model, as a gradient penalty does"
        self._seconds += clock.thread_time() - begin

    # The backward pass

    def leaves(self) -> Sequence[tuple[int, torch.Tensor]]:
        """Return the trainable parameters, for the first backward after the forward."""
        if self._measurement is None or self._finished or self._reason:
            return ()
        from backlight.capture.parameters import local  # noqa: PLC0415

        table = self._run.scope.table
        self._inside = True
        tensors = ((row, table.tensor(row)) for row in range(len(table.records)))
        self._leaves = {row: t for row, t in tensors if t is not None and t.requires_grad and local(t) is t}
        self._names = {row: table.records[row].name for row in self._leaves}
        return list(self._leaves.items())

    def takes(self, key: int, gradient: torch.Tensor) -> None:
        """Measure a parameter whose gradient arrives."""
        if self._measurement is None or self._reason or self._measurement.reason:
            return
        begin = clock.thread_time()
        self._measurement.close(key, self._leaves[key], gradient)
        took = clock.thread_time() - begin
        self._seconds += took
        # Requested by name, and stated on its own: the default monitors do not record less because of it.
        from backlight.capture.hub import HUB  # noqa: PLC0415 - torch

        HUB.spent -= took

    def ends(self, *, whole: bool, samples: int | None) -> None:
        """Close the measurement; what follows in this step is not of its microbatch."""
        self._finished, self._leaves = True, {}
        if self._measurement is not None:
            self._measurement.release()
        if not whole:
            self._reason = "its backward pass raised"
        elif samples is None:
            self._reason = "several forward passes, or none, belong to its backward pass"

    def trouble(self, error: Exception) -> None:
        """Detach after an error inside a hook."""
        self._run.disable(error)

    # On the writer thread

    def on_step_stored(self, step: StoredStep) -> None:
        """Compute the noise scales of a measured step."""
        if (pending := self._pending.pop(step.step, None)) is None:
            return
        measurement, names, seconds = pending
        noise = measurement.result(names)
        if noise.reason or noise.model is None:
            self._refuse(step.step, noise.reason or _reasons(noise.unmeasured))
            return
        scalars = step.scalars
        scalars.update(_scalars("", noise.model))
        for layer, scale in noise.layers.items():
            scalars.update(_scalars(f"/{layer}", scale))
        scalars["noise_scale_covered"], scalars["noise_scale_samples"] = noise.covered, float(noise.samples)
        scalars["noise_scale_seconds"] = seconds
        payload = {
            "samples": noise.samples,
            "covered": noise.covered,
            "shares": noise.shares,
            "unmeasured": [
                {"parameter": name, "reason": reason, "share": share}
                for name, (reason, share) in noise.unmeasured.items()
            ],
        }
        self._run.recorder.event(step.step, EVENT, payload)

    def _refuse(self, step: int | None, reason: str) -> None:
        self._run.notifier.event("unmeasured", {"what": "noise scale", "reason": reason}, step)
        if "NaN" not in reason:  # which a gradient scaler makes on purpose
            at = "" if step is None else f" at step {step}"
            self._run.notifier.warn("noise scale", f"the noise scale is not measured{at}: {reason}")


def _is_trained(layer: nn.Module) -> bool:
    return any(p is not None and p.requires_grad for p in layer._parameters.values())


def _reasons(unmeasured: dict[str, tuple[str, float]]) -> str:
    name, (reason, _) = max(unmeasured.items(), key=lambda entry: entry[1][1])
    return f"no parameter could be measured; {name}: {reason}"


def _scalars(suffix: str, scale: NoiseScale) -> dict[str, float]:
    values: dict[str, Any] = {"noise_scale": scale.value}
    values |= {"noise_scale_low": scale.interval.low, "noise_scale_high": scale.interval.high}
    return {f"{name}{suffix}": float(value) for name, value in values.items()}
