"""Rule ``activations``: layers that pass nothing on, forward or backward."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.activations.model.layers import LayerNumbers, MeasuredLayer, measured_layers
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import count, percent

RANDOM = ("Drop", "Stochastic")
"""Parts of the names of classes whose output is constant in some steps by chance."""


@dataclass(frozen=True)
class ActivationsLimits(Limits, monitor="activations"):
    """Limits of the rule ``activations``."""

    steps: int = limit(4, "measured steps in a row at which a layer must be so: a start is no state", low=2)
    dead_units: int = limit(8, "units that a layer must have: of few, some may be off on purpose", low=1)
    dead_share: float = limit(0.9, "share of dead units above which it is a warning", high=1.0)
    dead_noted: float = limit(0.5, "share of dead units above which it is noted", high=1.0)
    saturated_share: float = limit(0.9, "share of values of a hidden activation at its ends", high=1.0)
    constant_spread: float = limit(1e-6, "spread of an output whose samples are equal, as rounding leaves it")
    varying_spread: float = limit(1e-3, "spread of an input whose samples differ")
    depth_factor: float = limit(
        1e6, "factor over depth between the largest signal of the first and of the last third of the layers"
    )
    depth_layers: int = limit(6, "layers with parameters below which there is no depth to speak of", low=3)


@rule("activations", monitor="activations", limits=ActivationsLimits)
def activations(run: Run, limits: ActivationsLimits) -> Iterator[Finding]:
    """Find layers whose units are dead, saturated or constant, and signal that is lost over depth."""
    layers = measured_layers(run)
    dead = _dead_layers(layers, limits)
    saturated = [layer for layer in layers if _is_saturated(layer, layers, limits)]
    constant = [layer for layer in layers if _is_constant(layer, limits)]
    yield from _dead(dead, limits)
    yield from _saturated(saturated, limits)
    yield from _constant([layer for layer in constant if layer not in [*dead, *saturated]], limits)
    if not dead:
        yield from _depth(layers, limits)


def _evidence(column: str, layer: MeasuredLayer, unit: str = "1") -> Evidence:
    numbers = layer[column]
    name = f"activations/{column}/{layer.name}"
    return phrases.scalar(name, int(numbers.steps[-1]), float(numbers.values[-1]), unit)


def _subject(layer: MeasuredLayer, step: int) -> Subject:
    return Subject(module=layer.name, step=step, line=layer.line or None)


def _named(layers: Sequence[MeasuredLayer]) -> str:
    return phrases.parameters([layer.name for layer in layers], len(layers))


def _begin(column: LayerNumbers, since: int, limits: ActivationsLimits) -> int:
    """Return the step with which a state begins that needs several measured steps until it is recorded."""
    return int(column.steps[max(0, int(np.searchsorted(column.steps, since)) - limits.steps + 1)])


# Dead units


def _dead_layers(layers: Sequence[MeasuredLayer], limits: ActivationsLimits) -> list[MeasuredLayer]:
    """Return the layers with many dead units; a layer in front of a dead activation is left out."""
    dead = [
        layer
        for layer in layers
        if len(values := layer["dead"].values)
        and values[-1] >= limits.dead_noted
        and layer.units >= limits.dead_units
        and (layer.is_hidden or not layer.has_parameters)
    ]
    inputs = {layer.input for layer in dead if not layer.has_parameters}
    return [layer for layer in dead if layer.name not in inputs]


def _dead(dead: Sequence[MeasuredLayer], limits: ActivationsLimits) -> Iterator[Finding]:
    many = [layer for layer in dead if layer["dead"].values[-1] >= limits.dead_share]
    for layers, severity, least in (
        (many, Severity.WARNING, limits.dead_share),
        ([layer for layer in dead if layer not in many], Severity.INFO, limits.dead_noted),
    ):
        if not layers:
            continue
        worst = max(layers, key=lambda layer: float(layer["dead"].values[-1]))
        share = float(worst["dead"].values[-1])
        since = worst["dead"].since(least)
        begin = _begin(worst["rms"], since, limits)
        how = "gives zero" if not worst.has_parameters else "is never positive, and gets no gradient,"
        more = f" {count(len(layers) - 1, 'more layer')} in the same state." if len(layers) > 1 else ""
        number = round(share * worst.units)
        is_whole = all(layer["dead"].values[-1] == 1 for layer in layers)
        part = f"{'Up to ' if len(layers) > 1 else ''}{percent(share)} of the"
        yield Finding(
            severity=severity,
            title=f"{'All' if is_whole else part} units of {_named(layers)} are dead",
            detail=(
                f"{phrases.share(number, worst.units, 'units')} of `{worst.name}` ({worst.kind}) are dead: "
                f"each {how} for every sample at all measured steps from step {begin} on. What is in "
                f"front of a dead unit is not trained through it.{more}"
            ),
            subject=_subject(worst, begin),
            evidence=tuple(_evidence("dead", layer) for layer in layers[: phrases.EVIDENCE_ROWS]),
            fix=(
                "Lower the learning rate or the scale of the inputs, warm up, start biases at 0, put a "
                "normalisation in front of the activation, or use LeakyReLU or GELU."
            ),
            refuted_if=(
                f"a unit of `{worst.name}` gives another value for some sample at a step between those."
            ),
        )


# Saturation


def _is_saturated(layer: MeasuredLayer, layers: Sequence[MeasuredLayer], limits: ActivationsLimits) -> bool:
    ending = layer["saturated"].ending(limits.steps)
    # A softmax and an output may be sharp on purpose.
    if not len(ending) or not (ending >= limits.saturated_share).all() or layer.kind.startswith("Softmax"):
        return False
    return _feeds({layer.name}, layers)


def _feeds(names: Collection[str], layers: Sequence[MeasuredLayer]) -> bool:
    """Return whether outputs are the input of a layer with parameters, perhaps behind layers without."""
    next_layers = [layer for layer in layers if layer.input in names]
    if any(layer.has_parameters for layer in next_layers):
        return True
    return bool(next_layers) and _feeds({layer.name for layer in next_layers}, layers)


def _saturated(layers: Sequence[MeasuredLayer], limits: ActivationsLimits) -> Iterator[Finding]:
    if not layers:
        return
    worst = max(layers, key=lambda layer: float(layer["saturated"].values[-1]))
    column = worst["saturated"]
    since = column.since(limits.saturated_share)
    from_start = since == column.steps[0]
    yield Finding(
        severity=Severity.WARNING if from_start else Severity.INFO,
        title=f"{_named(layers)} {'is' if len(layers) == 1 else 'are'} saturated",
        detail=(
            f"{percent(float(column.values[-1]))} of the values of `{worst.name}` ({worst.kind}) are at its "
            f"ends, {'from the first step on' if from_start else f'since step {since}'}: its derivative is "
            "nearly 0 there, so that little gradient reaches the layers in front of it."
        ),
        subject=_subject(worst, since),
        evidence=tuple(_evidence("saturated", layer) for layer in layers[: phrases.EVIDENCE_ROWS]),
        fix=(
            "Scale the inputs and the initial weights so that the values in front of it are of the order "
            "of 1, lower the learning rate, or put a normalisation in front of it."
        ),
        refuted_if=f"`{worst.name}` is a gate that is meant to be open or closed.",
    )


# Outputs that do not depend on the sample


def _is_constant(layer: MeasuredLayer, limits: ActivationsLimits) -> bool:
    outputs, inputs = layer["spread"].ending(limits.steps), layer["input_spread"].ending(limits.steps)
    return (
        len(outputs) == len(inputs) > 0
        and bool((outputs <= limits.constant_spread).all())
        and bool((inputs >= limits.varying_spread).all())
        and not any(part in layer.kind for part in RANDOM)
    )


def _constant(layers: Sequence[MeasuredLayer], limits: ActivationsLimits) -> Iterator[Finding]:
    if not layers:
        return
    first = layers[0]
    column = first["spread"]
    above = np.flatnonzero(~(column.values <= limits.constant_spread))
    begin = int(column.steps[above[-1] + 1 if len(above) else 0])
    value = float(first["input_spread"].values[-1])
    is_zero = float(first["rms"].values[-1]) == 0
    yield Finding(
        severity=Severity.WARNING,
        title=f"The output of {_named(layers)} is the same for every sample",
        detail=(
            f"At the measured steps from step {begin} on `{first.name}` ({first.kind}) gives every sample of "
            f"the batch {'zeros' if is_zero else 'the same values'}, while its inputs differ by up to "
            f"{phrases.number(value)} of their largest value. What follows it knows nothing of the input."
        ),
        subject=_subject(first, begin),
        evidence=(_evidence("spread", first), _evidence("input_spread", first)),
        fix=(
            "Look for a normalisation or softmax over a dimension of size 1, weights that are zero and get "
            "no gradient, or inputs so large that the activation is at its end for all of them."
        ),
        refuted_if=f"the output of `{first.name}` differs between two samples of a batch.",
    )


# Depth


def _depth(layers: Sequence[MeasuredLayer], limits: ActivationsLimits) -> Iterator[Finding]:
    for model in dict.fromkeys(layer.model for layer in layers):
        deep = [layer for layer in layers if layer.model == model and layer.has_parameters]
        for column in ("gradient", "rms"):
            measured = [layer for layer in deep if len(layer[column].ending(limits.steps))]
            if len(measured) >= limits.depth_layers:
                yield from _lost(measured, column, limits)


def _lost(layers: Sequence[MeasuredLayer], column: str, limits: ActivationsLimits) -> Iterator[Finding]:
    """Compare the largest signal of the first and the last third of the layers, at each of the last steps."""
    # Of the gradient the norm: its rms falls with the number of values, which is no loss.
    sizes = [layer.size**0.5 if column == "gradient" else 1.0 for layer in layers]
    values_LT = np.array([layer[column].ending(limits.steps) for layer in layers]) * np.array(sizes)[:, None]
    third = len(layers) // 3
    first_T, last_T = values_LT[:third].max(axis=0), values_LT[-third:].max(axis=0)
    if not (np.isfinite(values_LT).all() and (first_T > 0).all() and (last_T > 0).all()):
        return
    factors_T = first_T / last_T if column == "gradient" else last_T / first_T
    shrinks = bool((factors_T * limits.depth_factor <= 1).all())
    if not shrinks and not (factors_T >= limits.depth_factor).all():
        return
    ends = [layers[0], layers[-1]] if column == "rms" else [layers[-1], layers[0]]
    what = "signal" if column == "rms" else "gradient"
    verb = "shrinks" if shrinks else "grows"
    factor = float(factors_T[-1] if not shrinks else 1 / factors_T[-1])
    yield Finding(
        severity=Severity.WARNING,
        title=f"The {what} {verb} {phrases.number(factor)}-fold from `{ends[0].name}` to `{ends[1].name}`",
        detail=(
            f"Over {len(layers)} layers with parameters, the largest {what} in the "
            f"{'last' if column == 'rms' else 'first'} third is {phrases.number(float(factors_T[-1]))} times "
            f"that in the {'first' if column == 'rms' else 'last'} third, at each of the last {limits.steps} "
            "measured steps."
        ),
        subject=_subject(ends[1], int(ends[1][column].steps[-limits.steps])),
        evidence=tuple(
            _evidence(column, layer, "gradient" if column == "gradient" else "1") for layer in ends
        ),
        fix="Add normalisations or residual connections, or scale the initial weights by their fan-in.",
        refuted_if="the profile over depth in the report is level.",
    )
