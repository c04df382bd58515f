"""Groups of parameters by pattern, and parameters that only the model or only the optimizer holds.

The ratio of one group's gradient to another's is ``(|g_A|/sqrt(n_A)) / (|g_B|/sqrt(n_B))``, with no epsilon;
docs/formulas.md, section 1.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from backlight.findings import phrases
from backlight.findings.limits import Limits, known_overrides, limit, with_overrides
from backlight.records import Evidence, ParameterRecord
from backlight.store.read.run import Run
from backlight.text import did_you_mean


class GroupError(ValueError):
    """A group of parameters that matches nothing."""


def members(names: Sequence[str], pattern: str) -> tuple[str, ...]:
    """Return those of ``names`` that a pattern means, in their order.

    A pattern holds shell-style alternatives separated by commas (``*``, ``?``, ``[...]``; ``*`` also
    matches dots). An alternative means a parameter when it matches its name or a module above it:
    ``encoder``, ``encoder.*`` and ``enc*`` all mean ``encoder.0.weight``.

    Raises
    ------
    GroupError
        If nothing matches, with the nearest name of a parameter or module.
    """
    wanted = [part.strip() for part in pattern.split(",") if part.strip()]
    matches = tuple(name for name in names if any(_means(part, name) for part in wanted))
    if matches:
        return matches
    places = sorted({place for name in names for place in _places(name)})
    hint = did_you_mean(wanted[0].strip("*.") if wanted else "", places)
    raise GroupError(f"the group pattern {pattern!r} matches none of {len(names)} parameters{hint}")


def ratio(rms_a: NDArray[np.float64] | float, rms_b: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """Return A over B: +inf where B is dead and A alive, NaN where both are dead or one is not measured."""
    a, b = np.broadcast_arrays(np.asarray(rms_a, dtype=np.float64), np.asarray(rms_b, dtype=np.float64))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.asarray(np.divide(a, b), dtype=np.float64)


@dataclass(frozen=True)
class GroupRms:
    """The rms of a group at each recorded step, NaN where none of its parameters was measured."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    names: tuple[str, ...]


def group_rms(run: Run, pattern: str) -> GroupRms:
    """Return the rms over all measured gradients of a group, per recorded step.

    It can be computed once and serve any number of ratios. Tied weights count once. Raises
    :class:`GroupError` where the pattern matches no parameter of the run.
    """
    frame, sizes = run.frame("gradient", "norm"), run.frame("gradient", "numel")
    names = members(frame.names, pattern)
    chosen = np.isin(np.asarray(frame.names, dtype=object), np.asarray(names, dtype=object))
    measured_SP = frame.measured[:, chosen]
    with np.errstate(over="ignore"):
        squares_S = np.sum(np.where(measured_SP, frame.values[:, chosen], 0.0) ** 2, axis=1)
    count_S = np.sum(np.where(measured_SP, sizes.values[:, chosen], 0), axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        values_S = np.sqrt(squares_S / np.where(count_S > 0, count_S, np.nan))
    return GroupRms(frame.steps, values_S, names)


def _places(name: str) -> list[str]:
    """Return a parameter's name and every module above it."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _means(pattern: str, name: str) -> bool:
    return any(fnmatch.fnmatchcase(place, pattern) for place in _places(name))


@dataclass(frozen=True)
class MembershipLimits(Limits, monitor="health"):
    """Limits that the rules ``no_gradient`` and ``no_update`` share."""

    no_gradient_steps: int = limit(
        5, "recorded steps before a parameter without any gradient is called unused", low=1
    )


def stale_parameters(run: Run) -> list[ParameterRecord]:
    """Return the parameters that an optimizer holds, no module does, and no gradient reached."""
    frame = run.frame("gradient", "norm")
    measured_SP = frame.measured if frame.any_rank is None else frame.any_rank
    measured = {frame.names[i] for i in np.flatnonzero(measured_SP.any(axis=0))}
    return [p for p in run.parameters() if not p.in_model and p.name not in measured and p.numel > 0]


def without_optimizer(run: Run, window: int) -> list[ParameterRecord]:
    """Return trainable parameters with ``window`` gradients that no watched optimizer holds.

    Empty where no optimizer holds any parameter: then none is watched.
    """
    records = run.parameters()
    outside = [p for p in records if not p.group and p.requires_grad]
    if not outside or not any(p.group for p in records):
        return []
    frame = run.frame("gradient", "norm")
    columns = [frame.names.index(p.name) for p in outside]
    counts = np.sum(frame.measured[:, columns] & (frame.values[:, columns] > 0), axis=0)
    return [p for p, count in zip(outside, counts, strict=True) if count >= window]


def untrained_parameters(run: Run) -> tuple[str, ...]:
    """Return the trainable parameters that never train: no gradient, only zeros, or in no watched optimizer.

    Empty before ``no_gradient_steps`` recorded steps. What backlight could not measure is left out.
    """
    overrides = known_overrides("health", run.overrides.get("health", {}))[0]
    window = with_overrides(MembershipLimits, overrides).no_gradient_steps
    if not run.has("gradient"):
        return ()
    frame = run.frame("gradient", "norm")
    measured_SP = frame.measured if frame.any_rank is None else frame.any_rank
    if np.count_nonzero(measured_SP.any(axis=1)) < window:
        return ()
    moves_P = (measured_SP & (frame.values != 0)).any(axis=0)
    moving = {name for name, moves in zip(frame.names, moves_P, strict=True) if moves}
    moving -= {record.name for record in without_optimizer(run, window)}
    skipped = {name for event in run.events("unmeasured") for name in event.payload.get("parameters") or ()}
    return tuple(
        record.name
        for record in run.parameters()
        if record.name not in moving | skipped
        and record.requires_grad and record.numel and not record.unmeasured and record.in_model
    )  # fmt: skip


def stale_evidence(run: Run, stale: Sequence[ParameterRecord]) -> tuple[Evidence, ...]:
    """Return what proves that an optimizer holds stale parameters: no gradient, a group, the first step."""
    frame = run.frame("gradient", "norm")
    last = int(frame.steps[np.flatnonzero(frame.measured.any(axis=1))[-1]])
    order = phrases.loudest(stale, lambda p: p.numel)
    return (
        *(Evidence(f"series/gradient/measured/{p.name}", last, 0, "1") for p in order),
        *(Evidence(f"parameters/group/{p.name}", None, p.group or "none", "1") for p in order[:1]),
        *(e for p in order[:1] for e in first_missing(run, p.name)),
    )


def first_missing(run: Run, name: str) -> list[Evidence]:
    """Return the event that records when an optimizer first stepped without a gradient of ``name``."""
    for event in run.events("no_grad_at_step"):
        if name in (event.payload.get("parameters") or ()):
            return [Evidence("events/no_grad_at_step", event.step, name, "parameter")]
    return []
