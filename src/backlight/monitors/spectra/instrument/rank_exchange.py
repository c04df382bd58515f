"""Replicates of all ranks brought together while a training runs, over a process group of our own.

Only where it was asked for. Everything here runs in a thread beside the training, in the same order on all
ranks, and gives up after a time: a rank that does not come costs the measurement, never the training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backlight.monitors.spectra.model.errors import SpectraError

CHUNK = 16 * 2**20
"""Bytes of a replicate that travel at once."""


@dataclass(frozen=True)
class Offer:
    """What one rank has of a step.

    Attributes
    ----------
    step
        Of the attempt.
    counts
        Replicates by name of the parameter; a parameter without all of its gradients is not there.
    kinds
        Type and shape of them, by name.
    samples
        Of each replicate; None where unknown.
    owners
        Rank by name of every parameter that this rank knows of.
    scale
        What the loss was multiplied with.
    reason
        Why this rank has nothing; empty if it has.
    """

    step: int
    counts: Mapping[str, int] = field(default_factory=dict)
    kinds: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    samples: tuple[int | None, ...] = ()
    owners: Mapping[str, int] = field(default_factory=dict)
    scale: float = 1.0
    reason: str = ""


class Exchange:
    """A process group of our own, with a time limit.

    Parameters
    ----------
    group
        The group; all ranks are in it.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @classmethod
    def open(cls, patience: float) -> Exchange:
        """Make the group; all ranks call this, where they enter the watch.

        Raises
        ------
        SpectraError
            If there is no process group to be a part of.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise SpectraError("no process group exists yet: call init_process_group before watch")
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))
        return cls(group)

    def offers(self, mine: Offer) -> list[Offer]:
        """Return what every rank has, by rank."""
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, mine, group=self._group)
        return out

    def gathered(
        self,
        held: Sequence[Tensor],
        counts: Sequence[int],
        owner: int,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> list[Tensor]:
        """Bring the replicates of a parameter to its owner, a bounded piece at a time.

        Parameters
        ----------
        held
            Those of this rank, on the host.
        counts
            How many each rank has.
        owner
            The rank that gets them.
        shape, dtype
            Of one of them.

        Returns
        -------
        list[Tensor]
            All of them, by rank, on the owner; none elsewhere.
        """
        out: list[Tensor] = []
        for source, count in enumerate(counts):
            for number in range(count):
                if source == self.rank == owner:
                    out.append(held[number].to("cpu"))
                elif source == self.rank:
                    for piece in _pieces(held[number].to("cpu").contiguous()):
                        dist.send(piece, owner, group=self._group)
                elif owner == self.rank:
                    arrived = torch.empty(tuple(shape), dtype=dtype)
                    for piece in _pieces(arrived):
                        dist.recv(piece, source, group=self._group)
                    out.append(arrived)
        return out


def agreed(offers: Sequence[Offer]) -> dict[str, int]:
    """Return the rank that measures each parameter that any rank knows of: the lowest rank decides."""
    found: dict[str, int] = {}
    for offer in offers:
        for name, owner in offer.owners.items():
            found.setdefault(name, owner)
    return found


def common(offers: Sequence[Offer], names: Iterable[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the parameters that all ranks can measure together, and the others with the reason.

    Every rank comes to the same result, because each has the same offers.
    """
    together: list[str] = []
    dropped: dict[str, str] = {}
    for name in names:
        lacking = [rank for rank, offer in enumerate(offers) if not offer.counts.get(name)]
        kinds = {offer.kinds[name] for offer in offers if name in offer.kinds}
        if lacking:
            listed = ", ".join(map(str, lacking))
            dropped[name] = f"no whole set of gradients on rank {listed}"
        elif len(kinds) > 1:
            dropped[name] = "its gradients have another type or shape on some ranks"
        else:
            together.append(name)
    return tuple(together), dropped


def _pieces(x: Tensor) -> Iterator[Tensor]:
    flat = x.view(-1)
    step = max(1, CHUNK // x.element_size())
    for begin in range(0, len(flat), step):
        yield flat[begin : begin + step]
