"""What all ranks bring of a step, joined: each parameter on the rank that owns it, or on none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from backlight.monitors.spectra.instrument.rank_exchange import Exchange, Offer, agreed, common
from backlight.monitors.spectra.instrument.replicate_buffer import Caught, Target
from backlight.monitors.spectra.model.errors import SpectraError
from backlight.monitors.spectra.model.ownership import cost, longest_first


def owners(targets: Sequence[Target], ranks: int) -> dict[str, int]:
    """Return the rank that measures each parameter, by name: the costliest are dealt out first."""
    costs = [sum(cost(layer.rows, layer.columns) for layer in target.layers) for target in targets]
    return {t.name: rank for t, rank in zip(targets, longest_first(costs, ranks), strict=True)}


def offered(caught: Caught, owner_of: Mapping[str, int], scale: float, reason: str) -> Offer:
    """Return what a rank tells the others of a step."""
    if reason:
        return Offer(caught.step, owners=owner_of, reason=reason)
    return Offer(
        step=caught.step,
        counts={name: len(parts) for name, parts in caught.replicates.items()},
        kinds={n: (str(x[0].dtype), tuple(x[0].shape)) for n, x in caught.replicates.items() if x},
        samples=tuple(caught.samples),
        owners=owner_of,
        scale=scale,
    )


def joined(
    exchange: Exchange,
    caught: Caught,
    mine: Offer,
    budget: int,
) -> dict[str, str]:
    """Bring the replicates of each parameter to its owner; what is left in ``caught`` is to be measured here.

    Every rank calls this for every step that was chosen, also where it has nothing.

    Parameters
    ----------
    exchange
        Of all ranks.
    caught
        What this rank has; changed in place.
    mine
        The same as an offer.
    budget
        Bytes that may arrive on a rank.

    Returns
    -------
    dict[str, str]
        Parameters that no rank measures, with the reason: the same on all ranks.

    Raises
    ------
    SpectraError
        If the ranks are not at the same step.
    """
    offers = exchange.offers(mine)
    steps = sorted({offer.step for offer in offers})
    if len(steps) > 1:
        raise SpectraError(f"the ranks are at different steps: {', '.join(map(str, steps))}")
    owner_of = agreed(offers)
    found = [f"rank {rank}: {offer.reason}" for rank, offer in enumerate(offers) if offer.reason]
    if not found and len({offer.scale for offer in offers}) > 1:
        found = ["the ranks scale their gradients differently"]
    if found:
        caught.replicates.clear()
        return dict.fromkeys(owner_of, found[0])
    together, dropped = common(offers, owner_of)
    arriving = [0] * exchange.size
    for name in together:
        owner, (dtype, shape) = owner_of[name], offers[0].kinds[name]
        kind = getattr(torch, dtype.removeprefix("torch."))
        counts = [offer.counts[name] for offer in offers]
        size = kind.itemsize * torch.Size(shape).numel() * (sum(counts) - counts[owner])
        # Counted alike on all ranks: they agree on what is left out.
        if arriving[owner] + size > budget:
            dropped[name] = f"the replicates of all ranks do not fit into spectra.memory of rank {owner}"
            continue
        arriving[owner] += size
        held = caught.replicates.pop(name)
        arrived = exchange.gathered(held, counts, owner, shape, kind)
        if owner == exchange.rank:
            caught.replicates[name] = arrived
    for name in dropped:
        caught.replicates.pop(name, None)
    caught.samples = [samples for offer in offers for samples in offer.samples]
    return dropped
