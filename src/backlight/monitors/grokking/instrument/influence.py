"""Which samples of a probe batch carry the drop of a held-out loss, at one step (TracIn; 2002.08484)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from backlight.capture.model_state import preserve_state
from backlight.capture.modules import unwrapped
from backlight.monitors.grokking.instrument.gradient_history import record_array
from backlight.monitors.grokking.instrument.gram import inputs
from backlight.monitors.grokking.instrument.gram.checks import GramError
from backlight.monitors.grokking.instrument.gram.gram import gram

if TYPE_CHECKING:
    from backlight.monitor import Recorder


def sample_influences(
    model: nn.Module,
    sample_loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    held_out: Any,
    optimizers: Sequence[torch.optim.Optimizer],
) -> Tensor:
    """Return how much each of N samples lowers the mean held-out loss in one step, float64 ``[N]``.

    ``<g_n, D g'> / N``, with the mean gradient ``g'`` of the held-out batch and the learning rates D of the
    optimizers: to first order their sum is the drop in a step of gradient descent on the mean loss of the
    batch. docs/formulas.md, section 3.

    Raises
    ------
    GramError
        If no optimizer holds a parameter of the model, or as :func:`backlight.gram`.
    """
    rates = {
        id(parameter): float(group["lr"])
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    held = inputs.trainable(unwrapped(model))
    of = {name: rates[id(found.tensor)] for name, found in held.items() if id(found.tensor) in rates}
    if not of:
        raise GramError(
            "influence: no optimizer holds a parameter of the model, so no learning rate is known"
        )
    is_one = len(of) == len(held) and len(set(of.values())) == 1
    found = gram(model, sample_loss, batch, against=held_out, detail="model" if is_one else "parameter")
    total = (
        next(iter(of.values())) * found.influence()
        if is_one
        else torch.stack([rate * found.influence(f"parameter/{name}") for name, rate in of.items()]).sum(0)
    )
    return total / (len(total) * found.against)


def record_influences(
    step: int,
    model: nn.Module,
    sample_loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    held_out: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    recorder: Recorder,
    *,
    arrays: bool,
) -> None:
    """Record sums of the influences by sign, the mean held-out loss, and with ``arrays`` the influences."""
    found = sample_influences(model, sample_loss, batch, held_out, optimizers).cpu()
    with preserve_state(model), torch.no_grad():
        loss = float(sample_loss(model, held_out)) / inputs.count(held_out)
    values = {
        "drop": float(found.sum()),
        "lowering": float(found.clamp(min=0).sum()),
        "raising": float(found.clamp(max=0).sum()),
        "held_out_loss": loss,
    }
    recorder.scalars(step, {f"influence/{name}": value for name, value in values.items()})
    if arrays:
        record_array(recorder, "influence/samples", step, found, ("sample",))
