"""The cost of a run before it starts: time, memory and disk from a few timed steps; the tier that fits."""

from __future__ import annotations

import statistics
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from backlight import devices
from backlight.answer import Answer, Column, Table, word
from backlight.experiments.config import Configuration
from backlight.experiments.experiment import Duration
from backlight.experiments.runner import build, measures_of, named_gradients, probe_of, torch_threads
from backlight.experiments.task import Task
from backlight.monitors.grokking.instrument.probe_batch import ROWS, ProbedModel
from backlight.monitors.grokking.instrument.tracker import MeasureTracker
from backlight.monitors.grokking.model.measures import TIERS, at_tier, free_bytes, left_out
from backlight.monitors.grokking.settings import SAMPLED, Measures
from backlight.processes import available_memory, resident_memory
from backlight.text import duration, size

MEASURED = (
    "gradients", "products", "window", "mean_gradient", "gram", "vectors", "agop", "influence", "ntk",
    "sketch",
)  # fmt: skip
"""Measures by the key of their cadence."""

HELD = {"window", "sketch"}
"""Measures that hold memory between steps."""

SCALAR_BYTES = 22
CHECKPOINT_BYTES_PER_S = 2e8
SCALARS_PER_MEASURE = 30
REPEAT_BELOW_S = 5.0
"""Measurements that take less are timed twice."""


@dataclass(frozen=True)
class Cost:
    """Cost of one part: ``seconds`` and ``disk`` bytes for each of ``times``; peak ``memory`` in bytes."""

    name: str
    times: int
    seconds: float
    disk: int
    memory: int

    @property
    def total_seconds(self) -> float:
        """Seconds over the run."""
        return self.times * self.seconds

    @property
    def total_disk(self) -> int:
        """Bytes over the run."""
        return self.times * self.disk


@dataclass(frozen=True)
class Estimate:
    """The costs of a configuration and the free resources, in seconds and bytes.

    ``base_memory`` is the resident memory of the process during training; ``reserve`` must stay free on disk.
    """

    training: tuple[Cost, ...]
    measured: tuple[Cost, ...]
    base_memory: int
    free_disk: int
    reserve: int
    free_memory: int
    measures: Measures = field(repr=False)

    def seconds(self, tier: str = TIERS[0]) -> float:
        """Return the seconds of the whole run."""
        return sum(c.total_seconds for c in (*self.training, *self.at(tier)))

    def disk(self, tier: str = TIERS[0]) -> int:
        """Return the bytes of the whole run."""
        return sum(c.total_disk for c in (*self.training, *self.at(tier)))

    def memory(self, tier: str = TIERS[0]) -> int:
        """Return the peak bytes: training, what is held between steps, and the largest measurement."""
        kept_bytes = sum(c.memory for c in self.at(tier) if c.name in HELD)
        largest = max((c.memory for c in self.at(tier) if c.name not in HELD), default=0)
        return self.base_memory + kept_bytes + largest

    def at(self, tier: str) -> tuple[Cost, ...]:
        """Return the costs of the measures at ``tier``."""
        kept = at_tier(self.measures, tier)
        scalars_only = not kept.spectra
        return tuple(
            replace(cost, disk=min(cost.disk, SCALARS_PER_MEASURE * SCALAR_BYTES)) if scalars_only else cost
            for cost in self.measured
            if getattr(kept, cost.name)
        )

    def problem(self, tier: str) -> str:
        """Return why the run does not fit at ``tier``; empty if it fits."""
        disk, memory = self.disk(tier), self.memory(tier)
        if disk + self.reserve > self.free_disk:
            free = f"{size(self.free_disk)} are free, of which {size(self.reserve)} must stay free"
            return f"{size(disk)} of disk are needed and {free}"
        if memory - self.base_memory > self.free_memory:
            more = size(memory - self.base_memory)
            return f"{more} more memory are needed and {size(self.free_memory)} are available"
        return ""

    def fitting(self) -> str:
        """Return the first tier that fits; empty if none does."""
        return next((tier for tier in TIERS if not self.problem(tier)), "")

    def left_out(self, tier: str) -> tuple[str, ...]:
        """Return the names of what ``tier`` does not store."""
        return left_out(self.measures, at_tier(self.measures, tier))

    def answer(self) -> Answer:
        """Return whether everything fits, and what each part takes."""
        tier, whole = self.fitting(), TIERS[0]
        facts = [
            f"in all: {duration(self.seconds())}, {size(self.disk())} of disk and {size(self.memory())} of "
            "memory",
            f"this machine: {size(self.free_disk)} of disk and {size(self.free_memory)} of memory are free",
        ]
        if tier and tier != whole:
            facts.append(f"with --degrade: {tier}; left out: {', '.join(self.left_out(tier))}")
        elif not tier:
            facts.append(f"not even scalars alone fit: {self.problem(TIERS[-1])}")
        parts = Table(
            (
                word("part", "name"), Column("times", "times", str), Column("each", "seconds", duration),
                Column("time", "total_seconds", duration), Column("disk", "total_disk", _bytes),
                Column("memory", "memory", _bytes),
            ),
            (*self.training, *self.measured), brief=len(self.training) + len(self.measured),
        )  # fmt: skip
        verdict = "everything fits" if tier == whole else f"does not fit: {self.problem(whole)}"
        return Answer(verdict, self.as_mapping(), tuple(facts), (parts,))

    def as_mapping(self) -> dict[str, Any]:
        """Return the estimate as plain values."""
        tier = self.fitting()
        parts = [
            {"name": c.name, "times": c.times, "seconds": c.total_seconds,
             "disk_bytes": c.total_disk, "memory_bytes": c.memory}
            for c in (*self.training, *self.measured)
        ]  # fmt: skip
        return {
            "parts": parts,
            "seconds": self.seconds(),
            "disk_bytes": self.disk(),
            "memory_bytes": self.memory(),
            "free_disk_bytes": self.free_disk,
            "reserve_bytes": self.reserve,
            "free_memory_bytes": self.free_memory,
            "tiers": {
                tier: {
                    "fits": not (reason := self.problem(tier)),
                    "reason": reason,
                    "disk_bytes": self.disk(tier),
                }
                for tier in TIERS
            },
            "tier": tier,
            "left_out": list(self.left_out(tier)) if tier else [],
        }


def _bytes(amount: int) -> str:
    return size(amount) if amount else ""


class _ByteCounter:
    """A recorder that counts the bytes that would be stored."""

    def __init__(self) -> None:
        self.bytes = 0

    def scalars(self, step: int, values: Mapping[str, float], source: str = "backlight") -> None:
        self.bytes += SCALAR_BYTES * len(values)

    def array(self, name: str, step: int, values: Any, **options: Any) -> None:
        self.bytes += stored_bytes(np.asarray(values))

    def event(self, step: int | None, kind: str, payload: Mapping[str, Any]) -> None:
        self.bytes += 200


def stored_bytes(values: np.ndarray, sample: int = 1 << 20) -> int:
    """Return the stored bytes of an array, by compressing a part of it as the store does."""
    raw = np.ascontiguousarray(values).reshape(-1)
    part = raw[: max(1, sample // raw.itemsize)]
    if part.nbytes < 4096:
        return raw.nbytes
    shuffled = part.view(np.uint8).reshape(len(part), part.itemsize).T.copy()
    return int(raw.nbytes * min(1.0, len(zlib.compress(shuffled.tobytes(), 1)) / part.nbytes))


def estimate_of(
    configuration: Configuration,
    path: Path,
    *,
    budget: float = 2.0,
    on_part: Callable[[str], None] = lambda _name: None,
) -> Estimate:
    """Return the cost of a run of ``configuration`` into ``path``; errors are those of building it.

    Parameters
    ----------
    budget:
        Seconds for the timed steps; at least three are timed. Every measure is timed as well.
    on_part:
        Called with the name of each part before it is timed.
    """
    task = build(configuration)  # trained for the timed steps, so it serves nothing else
    duration: Duration = configuration.settings.training
    measures = measures_of(configuration)
    probe = probe_of(task, measures)
    with torch_threads(configuration.run.threads):
        on_part("training")
        step_seconds = _step_seconds(task, budget)
        base = resident_memory()
        on_part("evaluation")
        cheap = _timed(lambda: task.evaluate(thorough=False))
        thorough = _timed(lambda: task.evaluate(thorough=True))
        measured = []
        for name in MEASURED:
            if getattr(measures, name) and (probe is not None or name not in SAMPLED):
                on_part(name)
                measured.append(_measure(task, duration.steps, measures, probe, name))
    logs = -(-duration.steps // duration.log_every)
    costly = min(logs, -(-duration.steps // duration.thorough_every))
    state = _state_bytes(task)
    saved = state + _held_bytes(task, measures)
    checkpoints = min(configuration.run.checkpoints, 1 + duration.steps // configuration.run.checkpoint_every)
    training = (
        Cost("training", duration.steps, step_seconds, 0, state),
        Cost("evaluation", logs - costly, cheap, 10 * SCALAR_BYTES, 0),
        Cost("thorough evaluation", costly + 1, thorough, 20 * SCALAR_BYTES, 0),
        Cost("checkpoints", checkpoints, saved / CHECKPOINT_BYTES_PER_S, saved, saved),
    )
    reserve, memory = configuration.run.disk_free, available_memory()
    return Estimate(training, tuple(measured), base, free_bytes(path), reserve, memory, measures)


def _step_seconds(task: Task, budget: float) -> float:
    seconds: list[float] = []
    begin = time.perf_counter()
    while len(seconds) < 3 or (time.perf_counter() - begin < budget and len(seconds) < 50):
        seconds.append(_timed(lambda: task.train_step(len(seconds))))
    return statistics.median(seconds[1:])


def _measure(task: Task, steps: int, measures: Measures, probe: ProbedModel | None, name: str) -> Cost:
    """Return the cost of one measure, timed with all others off."""
    at = measures.window_steps
    cadences: dict[str, Any] = dict.fromkeys(MEASURED, 0) | {name: at}
    recorder = _ByteCounter()
    tracker = MeasureTracker(
        replace(measures, every=1, **cadences), recorder, probe, warn=lambda _what, _reason: None
    )
    gradients = named_gradients(task.model)
    if name == "window":
        for step in range(1, at):  # fills the window without a measurement
            tracker.measure(step, gradients)
    recorder.bytes = 0
    seconds = _timed(lambda: tracker.measure(at, gradients))
    stored = recorder.bytes
    if seconds < REPEAT_BELOW_S:  # the first measurement of a process also imports and compiles
        seconds = min(seconds, _timed(lambda: tracker.measure(2 * at, gradients)))
    tensors = [g for _, g in gradients if g is not None]
    size, outer = sum(g.nbytes for g in tensors), sum(g.numel() for g in tensors)
    samples = len(task.probe[0])
    memory = {
        "window": measures.window_steps * size,
        "gradients": size,
        "products": 2 * size,
        "mean_gradient": size + 8 * samples**2,
        "gram": 8 * samples**2 * (2 + len({n.rsplit(".", 1)[0] for n, _ in gradients})),
        "vectors": 2 * min(measures.top_k, samples) * outer * 8,
        "sketch": 2 * measures.sketch_rows * outer * 8,
        "agop": 0,
        "influence": 8 * (2 * samples) ** 2,
        "ntk": 3 * 8 * ROWS**2,
    }[name]
    return Cost(name, -(-steps // (measures.every * getattr(measures, name))), seconds, stored, memory)


def _timed(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    devices.synchronize("time of a step")
    return time.perf_counter() - begin


def _state_bytes(task: Task) -> int:
    tensors = list(task.model.state_dict().values())
    tensors += [v for state in task.optimizer.state.values() for v in state.values()]
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


def _held_bytes(task: Task, measures: Measures) -> int:
    """Return the bytes that a tracker holds between steps, which a checkpoint contains as well."""
    parameters = [p for p in task.model.parameters() if p.requires_grad]
    window = measures.window_steps * sum(p.nbytes for p in parameters)
    sketch = 2 * measures.sketch_rows * 8 * sum(p.numel() for p in parameters)
    return (window if measures.window else 0) + (sketch if measures.sketch else 0)


class DoesNotFitError(ValueError):
    """A run that would not fit; the message gives needed and free bytes and the way out."""


@dataclass(frozen=True)
class Choice:
    """The tier of a run, and why it is not the full one."""

    tier: str = TIERS[0]
    reason: str = ""


def choose(costs: Estimate, *, degrade: bool, ask: Callable[[str], bool] | None = None) -> Choice:
    """Return the tier that fits: the full one, or a cheaper one if ``degrade`` is set or ``ask`` says so.

    Raises
    ------
    DoesNotFitError
        If nothing fits, or a cheaper tier is not allowed.
    """
    tier, reason = costs.fitting(), costs.problem(TIERS[0])
    if tier == TIERS[0]:
        return Choice()
    if not tier:
        raise DoesNotFitError(
            f"this run does not fit, even with scalars alone: {costs.problem(TIERS[-1])}; free some space, "
            "lower run.disk_free, or choose smaller settings"
        )
    missing = ", ".join(costs.left_out(tier)) or "nothing"
    if degrade or (ask is not None and ask(f"{reason}. Run with {tier} (left out: {missing})?")):
        return Choice(tier, reason)
    raise DoesNotFitError(
        f"this run does not fit: {reason}. With --degrade it runs with {tier} (left out: {missing}); "
        "or set sparser cadences, such as --set measures.gradients=10"
    )
