"""The replicates of all ranks of a watched run, brought to the rank that measures each parameter.

Only where it was requested. Everything here runs on the worker thread, in the same order on all ranks, and
gives up after a timeout: a rank that does not answer costs the measurement, never the training run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from backlight.monitors.spectra.instrument.rank_group import RankGroup
from backlight.monitors.spectra.instrument.replicate_buffer import CapturedStep, Target
from backlight.monitors.spectra.settings import SpectraError


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
    found: dict[str, int] = {}
    for offer in offers:
        for name, owner in offer.owners.items():
            found.setdefault(name, owner)
    return found


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


def exchange(group: RankGroup, captured: CapturedStep, own: Offer, budget: int) -> dict[str, str]:
    """Send the replicates of each parameter to its owner; return what no rank measures, with the reason.

    Every rank calls this for every chosen step, also where it has nothing, and gets the same result; what
    stays in ``captured`` is measured here. ``budget`` bounds the bytes that a rank receives.

    Raises
    ------
    SpectraError
        If the ranks are not at the same step.
    """
    offers = group.all_gather(own)
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
        held = captured.replicates.pop(name)
        sources = [rank for rank, count in enumerate(counts) for _ in range(count)]
        gathered = group.gather_at(owner, held, sources, shape=shape, dtype=dtype)
        if owner == group.rank:
            captured.replicates[name] = gathered
    for name in dropped:
        captured.replicates.pop(name, None)
    captured.samples = [samples for offer in offers for samples in offer.samples]
    return dropped
