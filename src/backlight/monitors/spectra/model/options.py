"""Options of the spectra monitor: layers, replicates, memory and ranks. No torch."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

EVERY_STEPS = 200
"""Steps between two measured ones by default."""

BUFFERS = ("host", "device")
RANKS = ("auto", "spread", "each")
STATES = ("update", "momentum")

_LOW = {"every": 0, "replicates": 3, "memory": 1, "drift": 0, "split": 0, "timeout": 1, "batch": 0}


class SpectraError(ValueError):
    """Spectra that cannot be measured; the message names what, why, and the fix."""


@dataclass(frozen=True)
class SpectraOptions:
    """Capture of replicates in a watched run.

    Attributes
    ----------
    every:
        Measure every Nth step; 0 takes ``every`` of the watch, or 200.
    include, exclude:
        Patterns over names of matrices, weights and modules, as those of ``backlight spectra``.
    fused:
        Names of the equal parts of fused weights along their first dimension, by a pattern over names:
        ``{"*.qkv.weight": ("q", "k", "v")}``.
    replicates:
        Most microbatches of a step that are kept.
    memory:
        Bytes that replicates, and the copies of updates and momenta, may take on a rank; the largest layers
        first.
    buffer:
        Where replicates wait to be measured: on the ``host``, or on the ``device`` of the gradient.
    device:
        Where they are decomposed; empty for the device of the gradient.
    max_directions:
        Most directions to measure of a layer.
    states:
        Spectra besides those of the gradient: ``update``, ``momentum``.
    drift:
        Leading directions whose subspace is compared from one measured step to the next; 0 for none.
    split:
        Parts into which the batch of ``samples`` is split where a step has a single microbatch: as many extra
        forward and backward passes at each measured step. 0, or 3 and more.
    ranks:
        ``spread``: each layer is measured by one rank, from its own microbatches, for ranks that hold the
        same model; ``each``: every rank measures what it holds; ``auto``: spread under DDP or FSDP2.
    exchange:
        Bring the replicates of all ranks together, over a process group of backlight's own.
    timeout:
        Seconds to wait for another rank in an exchange, and for the last step at the end of the watch.
    batch:
        Samples of a microbatch, where they cannot be observed; 0 for what the model is called with.
    """

    every: int = 0
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    fused: dict[str, tuple[str, ...]] = field(default_factory=dict)
    replicates: int = 64
    memory: int = 2**30
    buffer: str = "host"
    device: str = ""
    max_directions: int | None = None
    states: tuple[str, ...] = STATES
    drift: int = 8
    split: int = 0
    ranks: str = "auto"
    exchange: bool = False
    timeout: float = 120.0
    batch: int = 0

    def __post_init__(self) -> None:
        for name, low in _LOW.items():
            if getattr(self, name) < low:
                raise ValueError(f"spectra.{name}={getattr(self, name)}: expected {low} or more")
        if self.max_directions is not None and self.max_directions < 1:
            raise ValueError(f"spectra.max_directions={self.max_directions}: expected 1 or more")
        if self.split in {1, 2}:
            raise ValueError(f"spectra.split={self.split}: expected 0, or 3 and more replicates")
        for name, known in (("buffer", BUFFERS), ("ranks", RANKS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"spectra.{name}={getattr(self, name)!r}: expected one of {', '.join(known)}"
                )
        for state in self.states:
            if state not in STATES:
                raise ValueError(f"spectra.states: {state!r} is unknown; expected {', '.join(STATES)}")
        for pattern, parts in self.fused.items():
            if len(parts) < 2 or len(set(parts)) < len(parts):
                raise ValueError(f"spectra.fused: {pattern!r} needs two or more parts with different names")
        if self.exchange and self.ranks == "each":
            raise ValueError(
                "spectra.exchange is for ranks that hold the same model, ranks='each' for others"
            )

    def parts(self, name: str, tensor: Tensor) -> Mapping[str, Tensor]:
        """Return the equal parts of a fused weight or its gradient; the tensor itself if not fused."""
        for pattern, parts in self.fused.items():
            if fnmatch.fnmatchcase(name, pattern):
                if not tensor.ndim or tensor.shape[0] % len(parts):
                    raise SpectraError(
                        f"spectra.fused: {name!r} of shape {tuple(tensor.shape)} cannot be divided into "
                        f"{len(parts)} equal parts along its first dimension"
                    )
                chunks = tensor.chunk(len(parts), dim=0)
                return {f"{name}:{part}": chunk for part, chunk in zip(parts, chunks, strict=True)}
        return {name: tensor}
