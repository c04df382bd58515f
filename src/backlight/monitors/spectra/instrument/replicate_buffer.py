"""Replicates of one step on their way to be measured, in memory that does not grow beyond a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from backlight.devices import synchronize
from backlight.store.format.spectra import Layer


@dataclass(frozen=True)
class Target:
    """A parameter whose gradient is caught.

    Attributes
    ----------
    key
        Its row in the parameter table.
    name
        As in that table.
    layers
        The matrices that it holds: one, or the parts of a fused weight.
    size
        Bytes of one replicate.
    device
        Where its gradient is made.
    """

    key: int
    name: str
    layers: tuple[Layer, ...]
    size: int
    device: str = "cpu"


def fitting(targets: Sequence[Target], copies: int, budget: int) -> tuple[Target, ...]:
    """Return the targets of which so many copies fit into the budget, the largest first."""
    chosen, held = [], 0
    for target in sorted(targets, key=lambda t: (-t.size, t.key)):
        if held + copies * target.size <= budget:
            held += copies * target.size
            chosen.append(target)
    return tuple(chosen)


@dataclass
class Caught:
    """What was caught of one step; what is measured is let go.

    Attributes
    ----------
    step
        Of the attempt.
    replicates
        By name of the parameter, in the order of the microbatches.
    samples
        Of each replicate; None where unknown.
    weights, before, momenta
        By name of the parameter: after the step, before it, and what the optimizer keeps.
    scale
        What the loss was multiplied with, by a gradient scaler.
    skipped
        Whether the scaler skipped the step.
    cut
        Microbatches that were not kept, for want of memory or because there were more than asked for.
    reason
        Why nothing of the step can be measured; empty if something can.
    lacking
        Why single parameters cannot, by name.
    extra, extra_seconds
        Forwards and backwards that were run for this alone, and what they took.
    arrivals
        Events of devices from which copies are on their way.
    """

    step: int
    replicates: dict[str, list[Tensor]] = field(default_factory=dict)
    samples: list[int | None] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    momenta: dict[str, Tensor] = field(default_factory=dict)
    scale: Tensor | None = None
    skipped: bool | Tensor | None = None
    cut: int = 0
    reason: str = ""
    lacking: dict[str, str] = field(default_factory=dict)
    extra: int = 0
    extra_seconds: float = 0.0
    arrivals: list[Any] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes that are held."""
        singles = (self.weights, self.before, self.momenta)
        return sum(x.nbytes for parts in self.replicates.values() for x in parts) + sum(
            x.nbytes for held in singles for x in held.values()
        )


class Waiting:
    """Takes the gradients of backward after backward, as long as whole replicates fit.

    Parameters
    ----------
    targets
        What is caught.
    budget
        Bytes that all replicates together may take.
    most
        Replicates that are kept at most.
    place
        ``"host"`` or ``"device"``.
    """

    def __init__(self, targets: Sequence[Target], budget: int, most: int, place: str) -> None:
        self._targets = {target.key: target for target in targets}
        self._each = sum(target.size for target in targets)
        self._budget, self._most, self._place = budget, most, place
        self._open: dict[int, Tensor] = {}
        self._whole: list[Mapping[int, Tensor]] = []
        self.samples: list[int | None] = []
        self.cut = 0
        self.broken = 0

    def begin(self) -> bool:
        """Tell whether one more replicate is kept; else it is counted as cut."""
        self._open = {}
        count = len(self._whole) + 1
        if count > self._most or count * self._each > self._budget:
            self.cut += 1
            return False
        return True

    def take(self, key: int, gradient: Tensor) -> None:
        """Copy a gradient; a further one of the same backward is added."""
        if key in self._open:
            if gradient.device.type == "cuda":
                # What came first may still be on its way to the host.
                synchronize(gradient.device)
            self._open[key] += gradient.detach().to(self._open[key].device)
            return
        self._open[key] = copied(gradient, self._place)

    def end(self, *, whole: bool, samples: int | None) -> None:
        """Close a replicate; one of a backward that raised is let go."""
        held, self._open = self._open, {}
        if not whole:
            self.broken += 1
        elif held:
            self._whole.append(held)
            self.samples.append(samples)

    def caught(self, step: int) -> Caught:
        """Return what was kept; a parameter that some of the replicates lack is not."""
        out = Caught(step, samples=list(self.samples), cut=self.cut)
        for key, target in self._targets.items():
            parts = [one[key] for one in self._whole if key in one]
            if len(parts) == len(self._whole):
                out.replicates[target.name] = parts
            else:
                lacking, count = len(self._whole) - len(parts), len(self._whole)
                out.lacking[target.name] = f"no gradient in {lacking} of {count} microbatches"
        return out


def copied(tensor: Tensor, place: str) -> Tensor:
    """Return a copy of a tensor, on the host or on its device, without waiting for it."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if place == "device" or tensor.device.type == "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    if tensor.device.type != "cuda":
        return tensor.to("cpu")
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
