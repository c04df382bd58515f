"""The samples of a step that carry its gradient: what ``samples_of_step`` computes and a run stores.

A sample's share is ``<g_n, G> / |G|^2``: its contribution ``g_n`` to the gradient ``G`` of the step along
that gradient. Over all samples, forward passes and ranks shares add up to 1. What the norm would be without
some samples, ``|G - sum g_n|``, says whether they are the cause. docs/formulas.md, section 3.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from backlight.capture.step_inputs import ForwardCall
from backlight.interrupts import is_interrupt
from backlight.monitors.health.instrument.replay import Decomposed, Replay, ReplayError

LISTED = 16
"""Samples of a forward pass that are listed, those with the largest shares."""

WINDOW_SHARE = 0.8
"""Part of a sample's share that the shortest run of positions is to hold."""

COMMUNICATES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})
"""Namespaces of the operators of torch that communicate."""

REPLAYED = 1e-2
"""Largest relative difference of the replayed gradient from that of the step."""


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Refuses communication: other ranks do not compute the pass again, and would never answer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator that stays on this rank."""
        if func.namespace in COMMUNICATES:
            raise ReplayError("its forward pass communicates with other ranks, which do not compute it again")
        return func(*args, **(kwargs or {}))


def samples_of_step(
    calls: Sequence[ForwardCall],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    names: Sequence[str],
    *,
    scale: float,
    loss_scale: float,
    world_size: int,
) -> dict[str, Any]:
    """Decompose the gradient of a step by its samples.

    ``gradients`` are those of ``parameters`` when the step collects them, and contain the factor ``scale``;
    the gradients of outputs contain ``loss_scale``. Over several ranks a gradient is taken for the mean of
    theirs.

    Returns
    -------
    dict
        What JSON carries: ``total`` norm, ``covered`` part of its square, ``difference`` of the replayed
        gradient (None on several ranks), ``calls`` of the forward passes with their samples, ``reason`` why
        there are none.
    """
    kept = {
        id(p): (g.to_dense() if g.is_sparse else g).detach() / scale
        for p, g in zip(parameters, gradients, strict=True)
        if g is not None
    }
    named = {id(p): name for p, name in zip(parameters, names, strict=True)}
    found: list[tuple[int, ForwardCall, Decomposed]] = []
    reasons: list[str] = []
    for number, call in enumerate(calls):
        try:
            with _alone_of(world_size):
                replay = Replay(call, kept, named, 1 / (loss_scale * world_size))
                found.append((number, call, replay.run()))
        except ReplayError as error:
            reasons.append(str(error))
        except Exception as error:
            if is_interrupt(error):
                raise
            reasons.append(f"{type(error).__name__}: {error}".split("\n")[0])
    total = sum(float(g.double().square().sum()) for g in kept.values())
    out: dict[str, Any] = {
        "total": _plain(math.sqrt(total)) if total >= 0 else None,
        "calls": [],
        "reason": "; ".join(dict.fromkeys(reasons)),
    }
    if not found:
        out["reason"] = out["reason"] or "no forward pass of the step was observed"
        return out
    uncovered = {name for _, _, one in found for name in one.uncovered}
    wanted = {key for key in kept if named[key] not in uncovered}
    covered = sum(float(kept[key].double().square().sum()) for key in wanted)
    is_finite = math.isfinite(total)
    out |= {
        "covered": covered / total if is_finite and total else None,
        "uncovered": sorted(uncovered)[:LISTED],
        "difference": _difference(found, kept, total) if world_size == 1 and is_finite else None,
    }
    if (out["difference"] or 0.0) > REPLAYED:
        out["reason"] = (
            f"the forward passes give another gradient when they are computed again "
            f"(relative difference {out['difference']:.2g})"
        )
        return out
    out["calls"] = [_described(number, call, one, covered) for number, call, one in found]
    return out


def _alone_of(world_size: int) -> contextlib.AbstractContextManager[Any]:
    return NoCollectives() if world_size > 1 else contextlib.nullcontext()  # type: ignore[no-untyped-call]


def _difference(
    found: Sequence[tuple[int, ForwardCall, Decomposed]], kept: Mapping[int, Tensor], total: float
) -> float:
    """Return the norm of what the replayed gradients lack, relative to that of the step."""
    away = 0.0
    for key, gradient in kept.items():
        replayed = sum(one.replayed[key].double() for _, _, one in found if key in one.replayed)
        away += float((gradient.double() - replayed).square().sum())
    return math.sqrt(away / total) if total else 0.0


def _described(number: int, call: ForwardCall, one: Decomposed, covered: float) -> dict[str, Any]:
    norms = one.gram.diagonal().clamp(min=0).sqrt().numpy()
    indices = call.indices if call.indices is not None and len(call.indices) == one.samples else None
    bad = np.flatnonzero(~np.isfinite(norms)).tolist()
    out: dict[str, Any] = {
        "number": number,
        "module": type(call.module).__name__,
        "samples": one.samples,
        "batch": call.batch,
        "indices": None if indices is None else list(indices),
        "is_row": call.indices is not None and indices is None,
        "distinct": len(set(one.copies)),
        "non_finite": bad[:LISTED],
        "non_finite_count": len(bad),
        "bad_inputs": one.bad_inputs[:LISTED],
        "median_norm": _plain(float(np.median(norms))),
        "median_loss": None if one.losses is None else _plain(float(one.losses.median())),
        "top": [],
        "highest": _highest(one.losses, indices),
        "share": None,
    }
    if bad or not (covered > 0 and math.isfinite(covered)):
        return out
    shares = (one.products / covered).numpy()
    firsts = np.array(one.copies)
    units = sorted(dict.fromkeys(one.copies), key=lambda f: -shares[firsts == f].sum())[:LISTED]
    chosen = np.zeros(one.samples, dtype=bool)
    K = one.gram.numpy()
    for first in units:
        members = firsts == first
        chosen |= members
        left = covered * (1 - 2 * shares[chosen].sum()) + K[np.ix_(chosen, chosen)].sum()
        out["top"].append(
            {
                "sample": int(first),
                "index": None if indices is None else int(indices[first]),
                "copies": int(members.sum()),
                "norm": _plain(float(norms[first])),
                "share": float(shares[members].sum()),
                "loss": None if one.losses is None else _plain(float(one.losses[first])),
                "without": math.sqrt(max(0.0, left)),  # the norm without it and those before it
                **_window(one.positions, int(first)),
            }
        )
    out["share"] = float(shares.sum())
    return out


def _highest(losses: Tensor | None, indices: Sequence[int] | None) -> list[dict[str, Any]]:
    """Return the samples with the highest losses, each with the mean loss without it and those before it."""
    if losses is None or not bool(losses.isfinite().all()):
        return []
    out, left, count = [], float(losses.sum()), len(losses)
    for n in losses.topk(min(LISTED, count - 1)).indices.tolist():
        left, count = left - float(losses[n]), count - 1
        index = None if indices is None else int(indices[n])
        out.append({"sample": n, "index": index, "loss": float(losses[n]), "without": left / count})
    return out


def _window(positions: Tensor | None, sample: int) -> dict[str, int | float]:
    """Return the shortest run of positions that holds most of a sample's share; nothing without positions."""
    if positions is None:
        return {}
    sums = np.concatenate([[0.0], np.cumsum(positions[sample].numpy())])
    total = sums[-1]
    if not total > 0:
        return {}
    length = len(sums) - 1
    for size in range(1, length + 1):
        held = sums[size:] - sums[:-size]
        if held.max() >= WINDOW_SHARE * total:
            first = int(held.argmax())
            return {
                "first": first,
                "last": first + size - 1,
                "positions": length,
                "held": float(held.max() / total),
            }
    return {}


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None
