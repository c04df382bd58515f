"""Background thread that measures captured steps, one after another."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from backlight import clock
from backlight.devices import GATE, own_streams
from backlight.interrupts import is_interrupt
from backlight.measure.spectra.measurement import SpectralEcho, spectral_echo
from backlight.measure.spectra.randomized_svd import (
    singular_values,
    stable_rank,
    stable_rank_of_values,
    subspace_overlap,
)
from backlight.measure.stats.kernels import promoted
from backlight.monitor import Recorder
from backlight.monitors.spectra.instrument.layers import matrices
from backlight.monitors.spectra.instrument.rank_group import RankGroup
from backlight.monitors.spectra.instrument.replicate_buffer import CapturedStep, Target
from backlight.monitors.spectra.model.echo_records import record_arrays, record_measured
from backlight.monitors.spectra.settings import SpectraError, SpectraSettings
from backlight.store.spectra import PREFIX
from backlight.threads import BackgroundThread

if TYPE_CHECKING:
    from backlight.monitors.spectra.instrument.layer_selection import LayerSelection
    from backlight.notifier import Notifier


# Measures the captured replicates of one step after another, on the worker thread.
#
# Layers are measured one by one, and their replicates freed. What cannot be measured is reported once for
# each reason and step, and does not affect the other layers.

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
        size, report = captured.size, StepReport()
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
                "bytes": size,
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
            scalars = {f"{PREFIX}/{name}/stable_rank_{of}": v for of, v in ranks.items() if v is not None}
            if scalars:
                self._writer.scalars(captured.step, scalars)

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
    sizes = sorted({n for n in captured.samples if n is not None})
    if len(sizes) > 1:
        return (
            f"microbatches of {', '.join(map(str, sizes))} samples: replicates must be of one size; "
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


# The replicates of all ranks of a watched run, brought to the rank that measures each parameter.
#
# Only where it was requested. Everything here runs on the worker thread, in the same order on all ranks, and
# gives up after a timeout: a rank that does not answer costs the measurement, never the training run.


@dataclass(frozen=True)
class Offer:
    """Part of a step that one rank has captured."""

    step: int
    counts: Mapping[str, int] = field(default_factory=dict)
    """Replicates by parameter; a parameter without all of its gradients is left out."""
    kinds: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Type and shape of a replicate, by parameter."""
    samples: tuple[int | None, ...] = ()
    """Samples of each replicate; None where unknown."""
    owners: Mapping[str, int] = field(default_factory=dict)
    """Rank of every parameter that this rank has."""
    scale: float = 1.0
    """The loss scale."""
    reason: str = ""
    """Why this rank has nothing; empty if it has."""


def cost(rows: int, columns: int) -> int:
    """Return the cost of decomposing a matrix, up to a factor: ``min^2 max``."""
    return min(rows, columns) ** 2 * max(rows, columns)


def longest_first(costs: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Return the owner of each layer: the longest first, each to the rank with the least to do so far.

    Graham's rule (SIAM J. Appl. Math. 17, 1969): the busiest rank has at most 4/3 of its work in the best
    schedule. Ties go to the first layer and the first rank.
    """
    load = [0] * ranks
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = load.index(min(load))
        owners[index] = owner
        load[owner] += costs[index]
    return tuple(owners)


def owners(targets: Sequence[Target], ranks: int) -> dict[str, int]:
    """Return the rank that measures each parameter, by name: the costliest are assigned first."""
    costs = [sum(cost(layer.rows, layer.columns) for layer in target.layers) for target in targets]
    return {t.name: rank for t, rank in zip(targets, longest_first(costs, ranks), strict=True)}


def agreed_owners(offers: Sequence[Offer]) -> dict[str, int]:
    """Return the rank that measures each parameter that any rank has: the lowest rank decides."""
    owners: dict[str, int] = {}
    for offer in offers:
        for name, owner in offer.owners.items():
            owners.setdefault(name, owner)
    return owners


def common_parameters(
    offers: Sequence[Offer], names: Iterable[str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the parameters that all ranks can measure together, and the others with the reason."""
    together: list[str] = []
    dropped: dict[str, str] = {}
    for name in names:
        lacking = [rank for rank, offer in enumerate(offers) if not offer.counts.get(name)]
        kinds = {offer.kinds[name] for offer in offers if name in offer.kinds}
        if lacking:
            dropped[name] = f"no whole set of gradients on rank {', '.join(map(str, lacking))}"
        elif len(kinds) > 1:
            dropped[name] = "its gradients have another type or shape on some ranks"
        else:
            together.append(name)
    return tuple(together), dropped


def offer_of(captured: CapturedStep, owner_of: Mapping[str, int], reason: str) -> Offer:
    """Return the offer of this rank for a step."""
    if reason:
        return Offer(captured.step, owners=owner_of, reason=reason)
    return Offer(
        step=captured.step,
        counts={name: len(replicates) for name, replicates in captured.replicates.items()},
        kinds={n: (str(x[0].dtype), tuple(x[0].shape)) for n, x in captured.replicates.items() if x},
        samples=tuple(captured.samples),
        owners=owner_of,
        scale=captured.loss_scale,
    )


def exchange(group: RankGroup, captured: CapturedStep, offer: Offer, budget: int) -> dict[str, str]:
    """Send the replicates of each parameter to its owner; return what no rank measures, with the reason.

    Every rank calls this for every chosen step, also where it has nothing, and gets the same result; what
    stays in ``captured`` is measured here. ``budget`` bounds the bytes that a rank receives.

    Raises
    ------
    SpectraError
        If the ranks are not at the same step.
    """
    offers = group.all_gather(offer)
    steps = sorted({offer.step for offer in offers})
    if len(steps) > 1:
        raise SpectraError(f"the ranks are at different steps: {', '.join(map(str, steps))}")
    owner_of = agreed_owners(offers)
    reasons = [f"rank {rank}: {offer.reason}" for rank, offer in enumerate(offers) if offer.reason]
    if not reasons and len({offer.scale for offer in offers}) > 1:
        reasons = ["the ranks scale their gradients differently"]
    if reasons:
        captured.replicates.clear()
        return dict.fromkeys(owner_of, reasons[0])
    together, dropped = common_parameters(offers, owner_of)
    received = [0] * group.size
    for name in together:
        owner, (type_name, shape) = owner_of[name], offers[0].kinds[name]
        dtype = getattr(torch, type_name.removeprefix("torch."))
        counts = [offer.counts[name] for offer in offers]
        size = dtype.itemsize * torch.Size(shape).numel() * (sum(counts) - counts[owner])
        # Counted the same way on all ranks, so that they agree on what is left out.
        if received[owner] + size > budget:
            dropped[name] = f"the replicates of all ranks do not fit into spectra.memory of rank {owner}"
            continue
        received[owner] += size
        replicates = captured.replicates.pop(name)
        sources = [rank for rank, count in enumerate(counts) for _ in range(count)]
        gathered = group.gather_at(owner, replicates, sources, shape=shape, dtype=dtype)
        if owner == group.rank:
            captured.replicates[name] = gathered
    for name in dropped:
        captured.replicates.pop(name, None)
    captured.samples = [samples for offer in offers for samples in offer.samples]
    return dropped


MAX_BACKLOG_STEPS = 8
"""Steps that may wait to be measured."""

_NICE = 10


class WorkerThread:
    """Background thread that measures captured steps; without ``group`` only those of this rank."""

    def __init__(
        self, options: SpectraSettings, results: Recorder, notifier: Notifier, group: RankGroup | None
    ) -> None:
        self._options, self._results, self._notifier = options, results, notifier
        self._group = group
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending = self._held_bytes = 0
        self._lock = threading.Lock()
        self._stopping = False
        self._measurement = StepMeasurement(options, results, lambda: self._stopping)
        self._thread = BackgroundThread(target=self._run, name="backlight-spectra")

    def busy(self, size: int) -> bool:
        """Return whether a step of so many bytes must be skipped while earlier ones are measured."""
        with self._lock:
            waiting, in_use = self._pending, self._held_bytes
        return waiting >= MAX_BACKLOG_STEPS or (waiting > 0 and in_use + size > self._options.memory)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, captured: CapturedStep, targets: LayerSelection) -> None:
        """Enqueue a captured step."""
        # In an exchange the ranks agree later on the owner of each parameter.
        all_targets = self._group is not None
        mine = tuple(t for t in targets.captured if all_targets or t.name in targets.mine)
        size = captured.size
        with self._lock:
            self._pending += 1
            self._held_bytes += size
        self._jobs.put(_Job(captured, mine, dict(targets.owner_of), size))

    def stop(self, timeout_s: float) -> None:
        """Wait for the enqueued steps; after ``timeout_s`` seconds the thread ends between two layers."""
        self._jobs.put(None)
        if not self._thread.is_alive():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._stopping = True
            self._thread.join(5.0)
        if self._thread.is_alive():
            reason = f"the last measurement did not end within spectra.timeout={timeout_s:g} seconds"
            self._results.event(None, "unmeasured", {"what": "spectra", "reason": reason})
            self._notifier.warn("spectra timeout", f"spectra of the last step are not measured: {reason}")

    def _run(self) -> None:
        _lower_priority()
        while (job := self._jobs.get()) is not None:
            try:
                devices = [target.device for target in job.targets]
                with torch.no_grad(), own_streams(devices, job.captured.tensors()):
                    self._step(job)
            except Exception as error:  # noqa: BLE001 - the other steps can still be measured
                self._notifier.trouble(error, f"spectra of step {job.captured.step}")
            with self._lock:
                self._pending -= 1
                self._held_bytes -= job.size

    def _step(self, job: _Job) -> None:
        captured = job.captured
        dropped: Mapping[str, str] = {}
        if self._group is not None:
            dropped = self._run_exchange(self._group, job)
        report = self._measurement.measure(captured, job.targets)
        for name, reason in dropped.items():
            report.add(name, reason)
        self._report(captured.step, report)

    def _run_exchange(self, group: RankGroup, job: _Job) -> Mapping[str, str]:
        captured = job.captured
        for event in captured.copies_done:
            GATE.wait(event)
        try:
            mine = offer_of(captured, job.owner_of, why_no_echo(captured, min_replicates=1))
            unmeasured = exchange(group, captured, mine, self._options.memory // 2)
        except Exception as error:  # noqa: BLE001 - the other steps can still be measured
            # A rank that timed out cannot take part again: the others may be at any step.
            self._group = None
            self._notifier.trouble(error, "spectra over the replicates of all ranks, from here on")
            captured.reason = "the exchange with the other ranks failed"
            return {}
        captured.lacking.clear()  # reported by the exchange, the same on all ranks
        return unmeasured

    def _report(self, step: int, report: StepReport) -> None:
        for reason, parameters in report.unmeasured.items():
            self._results.event(
                step, "unmeasured", {"what": "spectra", "reason": reason, "parameters": parameters}
            )
            more = f" and {len(parameters) - 3} more" if len(parameters) > 3 else ""
            self._notifier.warn(
                f"spectra {re.sub('[0-9]+', '#', reason)}",
                f"spectra of {', '.join(parameters[:3])}{more} are not measured at step {step}: {reason}",
            )


@dataclass(frozen=True)
class _Job:
    captured: CapturedStep
    targets: tuple[Target, ...]
    owner_of: Mapping[str, int]
    size: int


def _lower_priority() -> None:
    """Lower the priority of this thread, where the system supports it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
