"""Measures the captured replicates of one step after another, on the worker thread.

Layers are measured one by one, and their replicates freed. What cannot be measured is reported once for each
reason and step, and does not affect the other layers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from backlight import clock
from backlight.devices import GATE
from backlight.interrupts import is_interrupt
from backlight.measure.spectra.measurement import SpectralEcho, spectral_echo
from backlight.measure.spectra.spectrum import (
    singular_values,
    stable_rank,
    stable_rank_of_values,
    subspace_overlap,
)
from backlight.measure.stats.kernels import promoted
from backlight.monitor import Recorder
from backlight.monitors.spectra.instrument.layers import matrices
from backlight.monitors.spectra.instrument.replicate_buffer import CapturedStep, Target
from backlight.monitors.spectra.model.echo_records import record_arrays, record_measured
from backlight.monitors.spectra.settings import SpectraSettings
from backlight.store.format.spectra import PREFIX

COST = "spectra_cost"
"""Kind of the event with the cost of a measured step."""

MIN_REPLICATES = 3
"""Replicates that an echo needs."""

_LAYER_PREFIX = re.compile(r"^(?:layer '[^']*'|the layer): ?")


@dataclass
class StepReport:
    """The parameters that were not measured, by reason, and the number of layers that were."""

    unmeasured: dict[str, list[str]] = field(default_factory=dict)
    measured: int = 0

    def add(self, parameter: str, reason: str) -> None:
        """Record that a parameter was not measured."""
        self.unmeasured.setdefault(_LAYER_PREFIX.sub("", reason).rstrip("."), []).append(parameter)


class StepMeasurement:
    """Measures one step after another and keeps the leading directions of each layer for the drift.

    ``should_stop`` is called between layers; True ends the work.
    """

    def __init__(
        self, options: SpectraSettings, writer: Recorder, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        self._options, self._writer, self._should_stop = options, writer, should_stop
        self._leading: dict[str, tuple[Tensor, Tensor]] = {}  # left [p, k] and right [q, k] by layer

    def measure(self, captured: CapturedStep, targets: Sequence[Target]) -> StepReport:
        """Measure a captured step; failures of a layer are in the report, nothing is raised for them."""
        began, cpu = clock.perf_counter(), clock.thread_time()
        held, report = captured.size, StepReport()
        for event in captured.copies_done:
            GATE.wait(event)
        scale = captured.loss_scale
        reason = why_no_echo(captured)
        for target in targets:
            if target.name not in captured.replicates and target.name not in captured.weights:
                continue
            if target.name in captured.lacking:
                report.add(target.name, captured.lacking[target.name])
            if self._should_stop():
                report.add(target.name, "the run ended before it was measured")
                continue
            if reason and target.name in captured.replicates:
                report.add(target.name, reason)
            with GATE.work(filter(None, (target.device, self._options.device))):
                self._parameter(captured, target, scale, report, echo=not reason)
        self._writer.event(
            captured.step,
            COST,
            {
                "seconds": clock.perf_counter() - began,
                "processor_seconds": clock.thread_time() - cpu,
                "bytes": held,
                "replicates": len(captured.samples),
                "not_kept": captured.dropped,
                "layers": report.measured,
                "extra_passes": captured.extra_passes,
                "extra_seconds": captured.extra_seconds,
            },
        )
        return report

    def _parameter(
        self, captured: CapturedStep, target: Target, scale: float, report: StepReport, *, echo: bool
    ) -> None:
        replicates = captured.replicates.pop(target.name, [])
        by_replicate = [self._matrices(target, replicate) for replicate in replicates]
        replicates.clear()
        states = {of: self._matrices(target, x) for of, x in _pop_states(captured, target.name).items()}
        for layer in target.layers:
            name = layer.parameter
            try:
                ranks = self._states(captured.step, name, {of: parts[name] for of, parts in states.items()})
            except Exception as error:
                if is_interrupt(error):
                    raise
                # Weights that hold NaN had gradients that do: reported once, of those.
                if not isinstance(error, ValueError) or not echo or not by_replicate:
                    report.add(name, _reason(error))
                ranks = {}
            if echo and by_replicate:
                try:
                    G = [parts.pop(name) for parts in by_replicate]
                    G = G if scale == 1 else [promoted(matrix) / scale for matrix in G]
                    self._layer(captured, name, G, ranks, self._options.device or target.device)
                    report.measured += 1
                    continue
                except Exception as error:
                    if is_interrupt(error):
                        raise
                    report.add(name, _reason(error))
            known = {f"{PREFIX}/{name}/stable_rank_{of}": v for of, v in ranks.items() if v is not None}
            if known:
                self._writer.scalars(captured.step, known)

    def _matrices(self, target: Target, tensor: Tensor) -> dict[str, Tensor]:
        return matrices(target.name, self._options.parts(target.name, tensor))

    def _layer(
        self, captured: CapturedStep, name: str, G: list[Tensor], ranks: dict[str, float | None], device: str
    ) -> None:
        result = spectral_echo(G, layer=name, max_directions=self._options.max_directions, device=device)
        moved = self._drift(name, result)
        batch = captured.samples[0] or math.nan
        record_arrays(self._writer, captured.step, name, result)
        record_measured(
            self._writer, captured.step, name, result, batch=batch, stable_ranks=ranks, drift=moved
        )

    def _states(self, step: int, name: str, states: Mapping[str, Tensor]) -> dict[str, float | None]:
        """Return the stable ranks of weight, update and momentum; write singular values of the last two."""
        ranks: dict[str, float | None] = {}
        for of, matrix in states.items():
            if of == "weight":
                ranks[of] = stable_rank(matrix, layer=name)
                continue
            values_D = singular_values(matrix, layer=name)
            ranks[of] = stable_rank_of_values(values_D[~np.isnan(values_D)])
            self._writer.array(
                f"{PREFIX}/{name}/{of}_singular_values",
                step,
                values_D[: self._options.max_directions or len(values_D)].astype(np.float32),
                dims=("direction",),
                unit="weight" if of == "update" else of,
            )
        return ranks

    def _drift(self, name: str, result: SpectralEcho) -> dict[str, float]:
        """Return the drift of the leading directions of the mean since the layer was measured last."""
        k = min(self._options.drift, result.identifiable)
        before = self._leading.pop(name, None)
        if k == 0:
            return {}
        left_pk, right_qk = (side[0, :, :k].clone() for side in (result.mean.left, result.mean.right))
        self._leading[name] = (left_pk, right_qk)
        if before is None:
            return {}
        m = min(k, before[0].shape[1])
        return {
            "drift_left": subspace_overlap(before[0][:, :m], left_pk[:, :m]),
            "drift_right": subspace_overlap(before[1][:, :m], right_qk[:, :m]),
            "drift_directions": float(m),
        }


def why_no_echo(captured: CapturedStep, min_replicates: int = MIN_REPLICATES) -> str:
    """Return why a step has no echo, empty if it may have one."""
    count, scale = len(captured.samples), captured.loss_scale
    if captured.reason:
        return captured.reason
    if captured.skipped is not None and bool(captured.skipped):
        return "the gradient scaler skipped the step: its gradients hold NaN or infinite values"
    if not math.isfinite(scale) or scale == 0:
        return f"the gradients are scaled by {scale}"
    if count < min_replicates:
        what = "one microbatch gives" if count == 1 else f"{count} microbatches give"
        return (
            f"{what} no echo, which needs {MIN_REPLICATES} replicates: accumulate, or split a single "
            "microbatch (spectra={'split': 8} with samples=(loss_fn, batch)), or exchange those of all ranks "
            "(spectra={'exchange': True})"
        )
    known = sorted({n for n in captured.samples if n is not None})
    if len(known) > 1:
        return (
            f"microbatches of {', '.join(map(str, known))} samples: replicates must be of one size; "
            "drop the last, shorter one (drop_last=True of the DataLoader)"
        )
    return ""


def _pop_states(captured: CapturedStep, name: str) -> dict[str, Tensor]:
    states = {}
    weight, before = captured.weights.pop(name, None), captured.before.pop(name, None)
    if weight is not None:
        states["weight"] = weight
        if before is not None:
            states["update"] = promoted(weight) - promoted(before)
    if (momentum := captured.momenta.pop(name, None)) is not None:
        states["momentum"] = momentum
    return states


def _reason(error: Exception) -> str:
    """Return the message of a measurement that is refused, or type and first line of another error."""
    if isinstance(error, ValueError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
