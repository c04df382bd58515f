"""What the user passes to a watch: models, optimizers, samples and numbers to log. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def listed(given: Any, what: str, expected: str, attribute: str) -> list[Any]:
    """Return one object or several as a list; ValueError where one lacks the attribute of ``expected``."""
    if given is None:
        return []
    items = list(given) if isinstance(given, (list, tuple)) else [given]
    for item in items:
        if not hasattr(item, attribute):
            raise ValueError(f"watch: {what} is {type(item).__name__}, expected {expected} or a list of them")
    return items


def check_samples(samples: Any, models: Sequence[Any]) -> None:
    """Refuse samples that are no pair of a loss function and a batch, or not of a single model."""
    if not isinstance(samples, tuple) or len(samples) not in {2, 3} or not callable(samples[0]):
        raise ValueError(
            "watch: samples must be (loss_fn, batch): loss_fn(model, batch) returns the loss summed over "
            "the samples, batch is a fixed probe batch or a callable that gives one; or (loss_fn, batch, "
            "held_out) with a held-out batch; got "
            f"{type(samples).__name__}"
        )
    if len(models) != 1:
        raise ValueError(
            f"watch: samples are of one model, got {len(models)}; call watch(model, optimizer, ...)"
        )


def loggable(values: Mapping[str, Any] | None, scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a mapping and of keywords: floats, and copies of tensors to read later."""
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(
            "watch.log: expected numbers by name, as in watch.log({'accuracy': 0.9}), got "
            f"{type(values).__name__}"
        )
    return {str(name): _number(str(name), value) for name, value in {**(values or {}), **scalars}.items()}


def _number(name: str, value: Any) -> Any:
    try:
        if hasattr(value, "detach") and value.numel() == 1:
            return value.detach().reshape(()).clone()
        return float(value)
    except (TypeError, ValueError, AttributeError):
        kind = type(value).__name__
        raise TypeError(
            f"watch.log: {name}: expected a number or a tensor with one element, got {kind}"
        ) from None
