"""From the replicates of one step of a training to what is recorded; runs beside the training.

Layer after layer, each let go when it is done. What cannot be measured is said with its reason, once for
each reason and step, and costs the other layers nothing.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor

from backlight.measure.spectra.decomposition import SMALL_SIDE, decompose
from backlight.measure.spectra.measurement import SpectralEcho, spectral_echo
from backlight.measure.spectra.replicates import promoted
from backlight.measure.spectra.spectrum import drift, singular_values, stable_rank, stable_rank_of_values
from backlight.monitors.spectra.instrument.layers import matrices
from backlight.monitors.spectra.instrument.replicate_buffer import Caught, Target
from backlight.monitors.spectra.model.options import Catching
from backlight.monitors.spectra.model.recording import Writer, record_arrays, state_measured
from backlight.store.format.spectra import PREFIX

COST = "spectra_cost"
"""Kind of the event that says what a measured step took."""

LEAST = 3
"""Replicates without which there is no echo."""

_NAMED = re.compile(r"^(?:layer '[^']*'|the layer): ?")


@dataclass
class _Place:
    """Leading directions of a layer at the step at which it was measured last."""

    left_pk: Tensor
    right_qk: Tensor


@dataclass
class Report:
    """What is said of a step.

    Attributes
    ----------
    unmeasured
        Parameters by the reason for which they were not measured.
    measured
        Number of layers that were.
    """

    unmeasured: dict[str, list[str]] = field(default_factory=dict)
    measured: int = 0

    def lacks(self, parameter: str, reason: str) -> None:
        """Note that a parameter was not measured."""
        self.unmeasured.setdefault(_NAMED.sub("", reason).rstrip("."), []).append(parameter)


class Measuring:
    """Measures step after step; remembers where the leading directions were.

    Parameters
    ----------
    catching
        What is measured.
    writer
        Where results go.
    stop
        Asked between layers; True ends the work.
    """

    def __init__(self, catching: Catching, writer: Writer, stop: Callable[[], bool] = lambda: False) -> None:
        self._catching, self._writer, self._stop = catching, writer, stop
        self._places: dict[str, _Place] = {}

    def step(self, caught: Caught, targets: Sequence[Target]) -> Report:
        """Measure what was caught of a step.

        Whatever fails of a layer is in the report; nothing is raised for it.
        """
        began, cpu = time.perf_counter(), time.thread_time()
        held, report = caught.size, Report()
        for event in caught.arrivals:
            event.synchronize()
        scale = scale_of(caught)
        reason = refused(caught)
        for target in targets:
            if target.name not in caught.replicates and target.name not in caught.weights:
                continue
            if target.name in caught.lacking:
                report.lacks(target.name, caught.lacking[target.name])
            if self._stop():
                report.lacks(target.name, "the training ended before it was measured")
                continue
            if reason and target.name in caught.replicates:
                report.lacks(target.name, reason)
            self._parameter(caught, target, scale, report, echo=not reason)
        self._writer.event(
            caught.step,
            COST,
            {
                "seconds": time.perf_counter() - began,
                "processor_seconds": time.thread_time() - cpu,
                "bytes": held,
                "replicates": len(caught.samples),
                "not_kept": caught.cut,
                "layers": report.measured,
                "extra_passes": caught.extra,
                "extra_seconds": caught.extra_seconds,
            },
        )
        return report

    def _parameter(self, caught: Caught, target: Target, scale: float, report: Report, *, echo: bool) -> None:
        parts_R = caught.replicates.pop(target.name, [])
        split_R = [self._split(target, part) for part in parts_R]
        parts_R.clear()
        single = {of: self._split(target, tensor) for of, tensor in _singles(caught, target.name).items()}
        for layer in target.layers:
            name = layer.parameter
            try:
                ranks = self._moving(caught.step, name, {of: those[name] for of, those in single.items()})
            except ValueError as error:
                # Weights that hold NaN had gradients that do: said once, of those.
                ranks = {}
                if not echo or not split_R:
                    report.lacks(name, str(error))
            except Exception as error:  # noqa: BLE001 - the other layers are worth having
                report.lacks(name, f"{type(error).__name__}: {_first(error)}")
                ranks = {}
            if echo and split_R:
                try:
                    G = [_unscaled(those.pop(name), scale) for those in split_R]
                    self._layer(caught, name, G, ranks, self._catching.device or target.device)
                    report.measured += 1
                    continue
                except ValueError as error:
                    report.lacks(name, str(error))
                except Exception as error:  # noqa: BLE001 - the other layers are worth having
                    report.lacks(name, f"{type(error).__name__}: {_first(error)}")
            self._ranks_alone(caught.step, name, ranks)

    def _split(self, target: Target, tensor: Tensor) -> dict[str, Tensor]:
        return matrices(target.name, self._catching.parts(target.name, tensor))

    def _layer(
        self, caught: Caught, name: str, G: list[Tensor], ranks: dict[str, float | None], device: str
    ) -> None:
        result = spectral_echo(G, layer=name, max_directions=self._catching.max_directions, device=device)
        mean = _mean(G).to(device)
        ranks = {**ranks, "gradient": stable_rank(mean, layer=name)}
        followed = self._follow(name, mean, result)
        batch = caught.samples[0] if caught.samples and caught.samples[0] else math.nan
        record_arrays(self._writer, caught.step, name, result)
        state_measured(
            self._writer, caught.step, name, result, batch=float(batch), stable_ranks=ranks, drift=followed
        )

    def _moving(self, step: int, name: str, single: Mapping[str, Tensor]) -> dict[str, float | None]:
        ranks: dict[str, float | None] = {}
        for of, matrix in single.items():
            if of == "weight":
                ranks[of] = stable_rank(matrix, layer=name)
                continue
            values_D = singular_values(matrix, layer=name)
            ranks[of] = stable_rank_of_values(values_D[~np.isnan(values_D)])
            most = self._catching.max_directions or len(values_D)
            self._writer.array(
                f"{PREFIX}/{name}/{of}_singular_values",
                step,
                values_D[:most].astype(np.float32),
                dims=("direction",),
                unit="weight" if of == "update" else of,
            )
        return ranks

    def _ranks_alone(self, step: int, name: str, ranks: Mapping[str, float | None]) -> None:
        known = {f"{PREFIX}/{name}/stable_rank_{of}": v for of, v in ranks.items() if v is not None}
        if known:
            self._writer.scalars(step, known)

    def _follow(self, name: str, mean: Tensor, result: SpectralEcho) -> dict[str, float]:
        """Return how far the leading directions of the mean have moved since the layer was measured last."""
        k = min(self._catching.drift, result.identifiable)
        before = self._places.pop(name, None)
        if k == 0:
            return {}
        method: Literal["svd", "randomized"] = "svd" if min(mean.shape) <= SMALL_SIDE else "randomized"
        found = decompose(mean[None], k, method=method, layer=name)
        here = _Place(found.left[0, :, :k].clone(), found.right[0, :, :k].clone())
        self._places[name] = here
        if before is None:
            return {}
        m = min(k, before.left_pk.shape[1])
        return {
            "drift_left": drift(before.left_pk[:, :m], here.left_pk[:, :m]).overlap,
            "drift_right": drift(before.right_qk[:, :m], here.right_qk[:, :m]).overlap,
            "drift_directions": float(m),
        }


def scale_of(caught: Caught) -> float:
    """Return what the gradients of a step are multiplied with."""
    return 1.0 if caught.scale is None else float(caught.scale)


def refused(caught: Caught, least: int = LEAST) -> str:
    """Return why a step has no echo, empty if it may have one; ``least`` replicates are needed."""
    count, scale = len(caught.samples), scale_of(caught)
    if caught.reason:
        return caught.reason
    if caught.skipped is not None and bool(caught.skipped):
        return "the gradient scaler skipped the step: its gradients hold NaN or infinite values"
    if not math.isfinite(scale) or scale == 0:
        return f"the gradients are scaled by {scale}"
    if count < least:
        return few(count)
    known = sorted({n for n in caught.samples if n is not None})
    if len(known) > 1:
        return (
            f"microbatches of {', '.join(map(str, known))} samples: replicates must be of one size; "
            "drop the last, shorter one (drop_last=True of the DataLoader)"
        )
    return ""


def few(count: int) -> str:
    """Return why so few microbatches have no echo."""
    what = "one microbatch gives" if count == 1 else f"{count} microbatches give"
    return (
        f"{what} no echo, which needs {LEAST} replicates: accumulate, or let a lone microbatch be split "
        "(spectra={'split': 8} with samples=(loss_fn, batch)), or exchange those of all ranks "
        "(spectra={'exchange': True})"
    )


def _singles(caught: Caught, name: str) -> dict[str, Tensor]:
    out = {}
    weight, before = caught.weights.pop(name, None), caught.before.pop(name, None)
    if weight is not None:
        out["weight"] = weight
        if before is not None:
            out["update"] = promoted(weight) - promoted(before)
    if (momentum := caught.momenta.pop(name, None)) is not None:
        out["momentum"] = momentum
    return out


def _unscaled(matrix: Tensor, scale: float) -> Tensor:
    return matrix if scale == 1 else promoted(matrix) / scale


def _mean(G: Sequence[Tensor]) -> Tensor:
    total = promoted(G[0]).clone()
    for part in G[1:]:
        total += promoted(part)
    return total / len(G)


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""
