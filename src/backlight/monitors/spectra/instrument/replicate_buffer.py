"""Replicates of one step until they are measured, in memory that does not grow beyond a budget."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from backlight.devices import has_async_copies, synchronize
from backlight.store.spectra import Layer


@dataclass(frozen=True)
class Target:
    """A parameter whose gradient is captured."""

    key: int
    """Its row in the parameter table."""
    name: str
    layers: tuple[Layer, ...]
    """The matrices that it holds: one, or the parts of a fused weight."""
    size: int
    """Bytes of one replicate."""
    device: str = "cpu"
    """Device of its gradient."""


def fitting(targets: Sequence[Target], copies: int, budget: int) -> tuple[Target, ...]:
    """Return the targets of which so many copies fit into the budget, the largest first."""
    chosen, size = [], 0
    for target in sorted(targets, key=lambda t: (-t.size, t.key)):
        if size + copies * target.size <= budget:
            size += copies * target.size
            chosen.append(target)
    return tuple(chosen)


@dataclass
class CapturedStep:
    """The replicates and states that were captured of one step; they are freed as they are measured.

    ``weights``, ``before`` and ``momenta`` are tensors by parameter: after the step, before it, and those of
    the optimizer.
    """

    step: int
    replicates: dict[str, list[Tensor]] = field(default_factory=dict)
    """By parameter, in the order of the microbatches."""
    samples: list[int | None] = field(default_factory=list)
    """Samples of each replicate; None where unknown."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    momenta: dict[str, Tensor] = field(default_factory=dict)
    scale: Tensor | None = None
    """The loss scale."""
    skipped: bool | Tensor | None = None
    """Whether the gradient scaler skipped the step."""
    dropped: int = 0
    """Microbatches that exceeded the memory or the requested number."""
    reason: str = ""
    """Why nothing of the step can be measured; empty if something can."""
    lacking: dict[str, str] = field(default_factory=dict)
    """Why single parameters cannot be measured."""
    extra_passes: int = 0
    extra_seconds: float = 0.0
    copies_done: list[Any] = field(default_factory=list)
    """Events behind the asynchronous copies."""

    @property
    def loss_scale(self) -> float:
        """The factor of the gradients; waits for the device that holds it."""
        return 1.0 if self.scale is None else float(self.scale)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every replicate and state that is held."""
        for replicates in self.replicates.values():
            yield from replicates
        for states in (self.weights, self.before, self.momenta):
            yield from states.values()

    @property
    def size(self) -> int:
        """Bytes that are held."""
        return sum(tensor.nbytes for tensor in self.tensors())


class ReplicateBuffer:
    """Copies the gradients of one backward after another, as long as whole replicates fit.

    All replicates together take at most ``budget`` bytes, on the ``location`` ``"host"`` or ``"device"``.
    """

    def __init__(self, targets: Sequence[Target], budget: int, max_replicates: int, location: str) -> None:
        self._targets = {target.key: target for target in targets}
        self._bytes_each = sum(target.size for target in targets)
        self._budget, self._max_replicates, self._location = budget, max_replicates, location
        self._open: dict[int, Tensor] = {}
        self._complete: list[Mapping[int, Tensor]] = []
        self.samples: list[int | None] = []
        self.dropped = 0
        self.failed = 0

    def begin(self) -> bool:
        """Start a replicate and return whether it is kept; else it is counted as dropped."""
        self._open = {}
        count = len(self._complete) + 1
        if count > self._max_replicates or count * self._bytes_each > self._budget:
            self.dropped += 1
            return False
        return True

    def add(self, key: int, gradient: Tensor) -> None:
        """Copy a gradient; a further one of the same backward is summed."""
        if key in self._open:
            # The first one may still be on its way to the host.
            synchronize("second gradient of one backward", gradient.device)
            self._open[key] += gradient.detach().to(self._open[key].device)
            return
        self._open[key] = copied(gradient, self._location)

    def end(self, *, complete: bool, samples: int | None) -> None:
        """Close a replicate; that of a backward that raised is discarded."""
        gradients, self._open = self._open, {}
        if not complete:
            self.failed += 1
        elif gradients:
            self._complete.append(gradients)
            self.samples.append(samples)

    def captured(self, step: int) -> CapturedStep:
        """Return the replicates of a step, without parameters that some of the replicates lack."""
        out = CapturedStep(step, samples=list(self.samples), dropped=self.dropped)
        for key, target in self._targets.items():
            replicates = [replicate[key] for replicate in self._complete if key in replicate]
            if len(replicates) == len(self._complete):
                out.replicates[target.name] = replicates
            else:
                lacking, count = len(self._complete) - len(replicates), len(self._complete)
                out.lacking[target.name] = f"no gradient in {lacking} of {count} microbatches"
        return out


def copied(tensor: Tensor, location: str) -> Tensor:
    """Return a copy of a tensor, on the host or on its device, without waiting for it."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if location == "device" or tensor.device.type == "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    if not has_async_copies(tensor.device):
        return tensor.to("cpu")
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
