"""The losses of a run: one, or those of several networks, which are never compared with each other."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from backlight.records import ParameterRecord
from backlight.store.read.run import Run, Scalar

LONE_STEPS = 2
"""First steps whose loss has no optimizer, since the second one was not known yet."""


def losses_of(run: Run) -> dict[str, Scalar]:
    """Return the losses of a run by what they are called; of several, each is that of one optimizer.

    A step with a single loss for several optimizers has the loss of all.
    """
    loss = run.scalar("loss")
    names = [name for name in run.scalar_names("backlight") if name.startswith("loss/")]
    scalars = {name: scalar for name in sorted(names) if len((scalar := run.scalar(name)).steps)}
    if len(scalars) < 2:
        return {run.loss_label(): loss} if len(loss.steps) else {}
    stored = run.fingerprint()
    labels = loss_labels(scalars, run.parameters(), () if stored is None else stored.optimizers)
    by_label = {labels[name]: scalar for name, scalar in scalars.items()}
    rest = ~np.isin(loss.steps, np.concatenate([scalar.steps for scalar in by_label.values()]))
    if rest.sum() > LONE_STEPS:
        by_label["loss of all"] = Scalar(loss.steps[rest], loss.values[rest], loss.unit)
    return by_label


def loss_name(run: Run, group: str) -> str:
    """Return the scalar that is the loss of the parameters of ``group``, as ``0/1`` of optimizer 0."""
    of_optimizer = f"loss/{group.partition('/')[0]}"
    return of_optimizer if len(losses_of(run)) > 1 and len(run.scalar(of_optimizer).steps) else "loss"


def sole_loss(run: Run) -> Scalar:
    """Return the loss of a run that has one, and no values where several networks have their own."""
    several = losses_of(run)
    empty = Scalar(np.empty(0, np.int64), np.empty(0), "loss")
    return next(iter(several.values())) if len(several) == 1 else empty


def loss_labels(
    names: Collection[str], records: Sequence[ParameterRecord], optimizers: Sequence[str]
) -> Mapping[str, str]:
    """Return ``loss of discriminator`` for ``loss/1``: the module that holds the optimizer's parameters.

    ``optimizers`` describes them by number, and names those whose parameters no single module holds.
    """
    modules = {}
    for name in names:
        number = name.partition("/")[2]
        paths = [r.name.split(".") for r in records if r.group.partition("/")[0] == number and r.in_model]
        alike = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
        modules[name] = ".".join(parts[0] for parts in alike)
    labels = {}
    for name, module in modules.items():
        if module and list(modules.values()).count(module) == 1:
            labels[name] = f"loss of {module}"
        else:
            number = name.partition("/")[2]
            index = int(number) if number.isdecimal() else len(optimizers)
            kind = optimizers[index].partition("(")[0] if index < len(optimizers) else "optimizer"
            labels[name] = f"loss of {kind} {number}"
    return labels
