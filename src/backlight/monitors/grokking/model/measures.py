"""The measures of gradient geometry, their cadences, and the tiers in which they are stored.

All cadences count logged steps: with ``every = 10`` and ``gram = 5``, steps 0, 50, 100, … have a Gram.
A cadence of 0 is off.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from backlight.store.format.schema import COMPRESSIONS

if TYPE_CHECKING:
    from backlight.monitor import Recorder

SCOPES = ("full", "layers")
EIGENVALUE_DEVICES = ("host", "device")
PRECISIONS = ("float32", "float64")

SAMPLED = ("mean_gradient", "gram", "vectors", "agop", "influence", "ntk")
"""Measures that need per-sample gradients."""


@dataclass(frozen=True)
class Measures:
    """Cadences and sizes of the measurements of one run.

    Attributes
    ----------
    every:
        Steps between two logged steps; 0 takes the run's own spacing.
    gradients:
        Exact training gradient of every parameter, as backward left it.
    products:
        Eigenvalues of G Gᵀ of each matrix gradient, which are those of GᵀG, and their metrics.
    window, window_steps:
        Temporal product: the Gram of the last ``window_steps`` logged gradients, and its spectrum.
    mean_gradient:
        Mean per-sample gradient of the probe batch; needs samples, as Gram, vectors and AGOP do.
    gram:
        Gram of the per-sample gradients, its spectra, uncentred and centred, and their metrics.
    agop:
        Average outer product of the gradients by the input, where the input is real-valued.
    influence:
        Which samples of the probe batch carry the drop of the loss of a held-out batch; needs one.
    ntk:
        Empirical neural tangent kernel of the first samples of a fixed probe batch: trace, alignment with
        the labels, distance from the first one measured.
    sketch, sketch_rows:
        Frequent Directions sketch of all logged training gradients so far, with its certificate.
    scope:
        ``full``: the model, its blocks and its layers; ``layers``: layers only.
    vectors, top_k:
        The ``top_k`` leading eigenvectors in parameter space: k x M numbers each time.
    matrices:
        Store the matrices (Gram, window, AGOP) themselves and not their spectra alone.
    spectra:
        Store spectra as arrays; without them only the scalars are left.
    eigenvalues:
        Where eigenvalues are computed: on the ``host`` or on the ``device`` of the model.
    precision:
        Type in which gradients are stored; a Gram is always in float64.
    gather:
        Gather sharded parameters (FSDP2, tensor parallelism) at measured steps, on every rank; all ranks
        must be watched with the same measures. Without it a sharded model has no Gram and its gradients
        are not stored.
    compression, level:
        ``gzip`` with a level of 0 to 9, ``lzf`` or ``none``.
    """

    every: int = 0
    gradients: int = 1
    products: int = 10
    window: int = 10
    window_steps: int = 32
    mean_gradient: int = 10
    gram: int = 10
    vectors: int = 100
    agop: int = 10
    influence: int = 10
    ntk: int = 0
    sketch: int = 0
    sketch_rows: int = 32
    scope: str = "full"
    top_k: int = 100
    matrices: bool = True
    spectra: bool = True
    eigenvalues: str = "host"
    precision: str = "float32"
    compression: str = "gzip"
    level: int = 1
    gather: bool = False

    def __post_init__(self) -> None:
        least = {"window_steps": 2, "sketch_rows": 2, "top_k": 1}
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if isinstance(value, int) and not isinstance(value, bool) and value < least.get(name, 0):
                raise ValueError(f"measures.{name}={value}: expected {least.get(name, 0)} or more")
        for name, known in (
            ("scope", SCOPES),
            ("eigenvalues", EIGENVALUE_DEVICES),
            ("precision", PRECISIONS),
            ("compression", COMPRESSIONS),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"measures.{name}={getattr(self, name)!r}: expected {' or '.join(known)}")
        if self.level > 9:
            raise ValueError(f"measures.level={self.level}: expected 0 to 9")

    def logs(self, step: int) -> bool:
        """Return whether ``step`` is a logged step."""
        return self.every > 0 and step % self.every == 0

    def due(self, cadence: int, step: int) -> bool:
        """Return whether a measurement of this cadence is due at ``step``."""
        return cadence > 0 and self.logs(step) and (step // self.every) % cadence == 0

    def samples_at(self, step: int) -> bool:
        """Return whether something that needs samples is due at ``step``."""
        return any(self.due(getattr(self, name), step) for name in SAMPLED)

    def logged_every(self, steps: int) -> Measures:
        """Return these measures with ``steps`` between logged steps if ``every`` is 0."""
        return self if self.every else replace(self, every=max(1, steps))

    @property
    def sampled(self) -> bool:
        """Whether a measure needs per-sample gradients."""
        return any(getattr(self, name) for name in SAMPLED)


TIERS = ("full factors", "top-k", "Gram", "scalars")
"""What a run stores, from most to least: without full factors no gradient is stored, without top-k no
eigenvectors and no sketch, with scalars alone neither matrices nor spectra."""


def at_tier(measures: Measures, tier: str) -> Measures:
    """Return the measures as ``tier`` stores them; all are still computed."""
    if tier not in TIERS:
        raise ValueError(f"tier {tier!r}: expected one of {', '.join(TIERS)}")
    level = TIERS.index(tier)
    if level >= 1:
        measures = replace(measures, gradients=0, mean_gradient=0)
    if level >= 2:
        measures = replace(measures, vectors=0, sketch=0)
    if level >= 3:
        measures = replace(measures, matrices=False, spectra=False)
    return measures


def left_out(before: Measures, after: Measures) -> tuple[str, ...]:
    """Name what ``before`` stores and ``after`` does not."""
    names = {
        "gradients": "gradient",
        "mean_gradient": "mean_gradient",
        "vectors": "gram/*/vectors",
        "sketch": "sketch",
        "matrices": "matrices",
        "spectra": "eigenvalues",
    }
    return tuple(label for key, label in names.items() if getattr(before, key) and not getattr(after, key))


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that have a value: one that is undefined (a zero matrix) is left out, not NaN."""
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def free_bytes(path: Path) -> int:
    """Return the free bytes of the disk that holds ``path``, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


@dataclass
class DiskGuard:
    """Checks the free space at logged steps, and switches to the next cheaper tier when it is short.

    ``threshold`` bytes must stay free on the disk of ``path``; ``spacing`` is the number of logged steps
    between two checks. The recorder gets ``disk_warning`` and ``degradation`` events.
    """

    path: Path
    threshold: int
    recorder: Recorder
    tier: str = TIERS[0]
    spacing: int = 10
    free: Callable[[Path], int] = free_bytes
    checks: int = 0

    def cheaper_if_full(self, step: int, measures: Measures) -> Measures:
        """Return the measures to continue with; cheaper ones if less than the threshold is free."""
        self.checks += 1
        if (self.checks - 1) % self.spacing:
            return measures
        free = self.free(self.path)
        if free >= self.threshold:
            return measures
        warning = {"free": free, "threshold": self.threshold}
        if self.tier == TIERS[-1]:
            if self.checks == 1:
                action = "only scalars are stored already"
                self.recorder.event(step, "disk_warning", {**warning, "action": action})
            return measures
        before, self.tier = self.tier, TIERS[TIERS.index(self.tier) + 1]
        cheaper = at_tier(measures, self.tier)
        action = f"from here on {self.tier} instead of {before}"
        self.recorder.event(step, "disk_warning", {**warning, "action": action})
        reason = f"{free} bytes are free, {self.threshold} must stay free"
        self.recorder.event(step, "degradation", degradation(before, self.tier, reason, measures, cheaper))
        return cheaper


def degradation(
    before: str, after: str, reason: str, measures: Measures, cheaper: Measures
) -> dict[str, object]:
    """Return the payload of an event ``degradation``."""
    return {"from": before, "to": after, "reason": reason, "left_out": list(left_out(measures, cheaper))}
