"""Options of the spectra monitor: layers, replicates, memory and ranks. No torch."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from backlight.settings import MonitorSettings, Option, SettingError

if TYPE_CHECKING:
    from torch import Tensor

EVERY_STEPS = 200
"""Steps between two measured ones by default."""

BUFFERS = ("host", "device")
RANKS = ("auto", "spread", "each")
STATES = ("update", "momentum")


class SpectraError(ValueError):
    """Spectra that cannot be measured; the message names what, why, and the fix."""


@dataclass(frozen=True)
class SpectraSettings(MonitorSettings):
    """Capture of replicates in a watched run."""

    name: ClassVar[str] = "spectra"
    without_monitor: ClassVar[frozenset[str]] = frozenset({"noise_scale"})

    every: Annotated[
        int, Option("Measure every Nth step; 0 takes ``every`` of the watch, or 200.", at_least=0)
    ] = 0
    include: Annotated[
        tuple[str, ...],
        Option("Patterns over names of matrices, weights and modules, as those of ``backlight spectra``."),
    ] = ()
    exclude: Annotated[
        tuple[str, ...],
        Option("Patterns over names of matrices, weights and modules, as those of ``backlight spectra``."),
    ] = ()
    fused: Annotated[
        dict[str, tuple[str, ...]],
        Option(
            "Names of the equal parts of fused weights along their first dimension, by a "
            'pattern over names: ``{"*.qkv.weight": ("q", "k", "v")}``.'
        ),
    ] = field(default_factory=dict)
    replicates: Annotated[int, Option("Most microbatches of a step that are kept.", at_least=3)] = 64
    memory: Annotated[
        int,
        Option(
            "Bytes that replicates, and the copies of updates and momenta, may take on a "
            "rank; the largest layers first.",
            at_least=1,
        ),
    ] = 2**30
    buffer: Annotated[
        str,
        Option(
            "Where replicates wait to be measured: on the ``host``, or on the ``device`` of the gradient."
        ),
    ] = "host"
    device: Annotated[str, Option("Where they are decomposed; empty for the device of the gradient.")] = ""
    max_directions: Annotated[int | None, Option("Most directions to measure of a layer.", at_least=1)] = None
    states: Annotated[
        tuple[str, ...], Option("Spectra besides those of the gradient: ``update``, ``momentum``.")
    ] = STATES
    drift: Annotated[
        int,
        Option(
            "Leading directions whose subspace is compared from one measured step to the next; 0 for none.",
            at_least=0,
        ),
    ] = 8
    split: Annotated[
        int,
        Option(
            "Parts into which the batch of ``samples`` is split where a step has a single "
            "microbatch: as many extra forward and backward passes at each measured step. 0, "
            "or 3 and more.",
            at_least=0,
        ),
    ] = 0
    ranks: Annotated[
        str,
        Option(
            "``spread``: each layer is measured by one rank, from its own microbatches, for "
            "ranks that hold the same model; ``each``: every rank measures what it holds; "
            "``auto``: spread under DDP or FSDP2."
        ),
    ] = "auto"
    exchange: Annotated[
        bool, Option("Bring the replicates of all ranks together, over a process group of backlight's own.")
    ] = False
    timeout: Annotated[
        float,
        Option(
            "Seconds to wait for another rank in an exchange, and for the last step at the end of the watch.",
            at_least=1,
        ),
    ] = 120.0
    noise_scale: Annotated[
        int | None,
        Option("Measure the noise scale every N steps (0: at growing intervals).", at_least=0),
    ] = None
    batch: Annotated[
        int,
        Option(
            "Samples of a microbatch, where they cannot be observed; 0 for what the model is called with.",
            at_least=0,
        ),
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split in {1, 2}:
            raise SettingError("spectra.split", f"{self.split}: expected 0, or 3 and more replicates")
        for name, choices in (("buffer", BUFFERS), ("ranks", RANKS)):
            if getattr(self, name) not in choices:
                raise SettingError(
                    f"spectra.{name}", f"{getattr(self, name)!r}: expected one of {', '.join(choices)}"
                )
        for state in self.states:
            if state not in STATES:
                raise SettingError("spectra.states", f"{state!r} is unknown; expected {', '.join(STATES)}")
        for pattern, parts in self.fused.items():
            if len(parts) < 2 or len(set(parts)) < len(parts):
                raise SettingError(
                    "spectra.fused", f"{pattern!r} needs two or more parts with different names"
                )
        if self.exchange and self.ranks == "each":
            raise SettingError(
                "spectra.exchange", "is for ranks that hold the same model, ranks='each' for others"
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
