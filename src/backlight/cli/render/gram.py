"""Prints the outer products of a recipe's gradients: metrics, eigenvalues and blocks, or one JSON object."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from backlight.cli.console import Page, make_table
from backlight.terminal import make_console
from backlight.text import count, number, percent

if TYPE_CHECKING:
    from backlight.diagnose.recipe_gram import RecipeGram
    from backlight.measure.gram.eigenvalues import Spectrum
    from backlight.measure.noise_scale import NoiseScale

_METRICS = {
    "trace": "mean squared norm of a sample's gradient",
    "noise_scale": "samples at which noise and signal are equal",
    "coherence": "squared norm of the mean gradient over the trace",
    "effective_rank": "exponential of the eigenvalues' entropy",
    "participation_ratio": "squared trace over squared Frobenius norm",
    "numerical_rank": "eigenvalues above the rounding of gradients",
}


def show(found: RecipeGram, rows: int) -> None:
    """Print the metrics of the whole model, its leading eigenvalues, and the metrics of its blocks."""
    page, console = Page(), make_console()
    head = f"{count(found.gram.samples, 'sample')}, {count(found.parameters, 'parameter')}"
    page.say((head, "bold"), f", mean loss {number(found.loss)}")
    metrics = found.second_moment.metrics()
    scales = found.gram.noise_scales()
    table = make_table("metric", "value", "meaning", folded=("meaning",))
    for name, meaning in _METRICS.items():
        if name in metrics:
            more = f"; {_interval(scales['model'])}" if name == "noise_scale" and "model" in scales else ""
            table.add_row(name.replace("_", " "), number(metrics[name]), meaning + more)
    console.print(table)
    if found.gram.unchecked:
        page.note(f"that samples are independent was not checked: {found.gram.unchecked}")
    page.say("")
    console.print(_eigenvalues(found, rows))
    page.say("")
    console.print(_blocks(found, rows))
    if len(found.blocks) > rows:
        page.note(f"{len(found.blocks) - rows} more blocks; --rows N prints more")


def _eigenvalues(found: RecipeGram, rows: int) -> Any:
    spectrum, centred = found.second_moment, found.covariance.eigenvalues
    table = make_table("direction", "eigenvalue", "share", "cumulative", "centred")
    shares = spectrum.eigenvalues / spectrum.trace if spectrum.trace > 0 else spectrum.eigenvalues * np.nan
    for index, value in enumerate(spectrum.eigenvalues[:rows]):
        table.add_row(
            str(index + 1), number(float(value)), percent(float(shares[index])),
            percent(float(shares[: index + 1].sum())), number(float(centred[index])),
        )  # fmt: skip
    return table


def _blocks(found: RecipeGram, rows: int) -> Any:
    table = make_table("block", "trace", "share", "noise scale", "coherence", "effective rank")
    total = found.second_moment.trace
    largest = sorted(found.blocks.items(), key=lambda block: -block[1].trace)[:rows]
    for name, spectrum in largest:
        share = spectrum.trace / total if total > 0 else math.nan
        table.add_row(
            name, number(spectrum.trace), percent(share), number(spectrum.noise_scale),
            number(spectrum.coherence), number(spectrum.effective_rank),
        )  # fmt: skip
    return table


def as_object(found: RecipeGram) -> dict[str, Any]:
    """Return what was measured as JSON types; what is not defined is null."""
    return {
        "recipe": str(found.recipe),
        "samples": found.gram.samples,
        "parameters": found.parameters,
        "loss": found.loss,
        "unchecked": found.gram.unchecked or None,
        "second_moment": _spectrum(found.second_moment),
        "covariance": _spectrum(found.covariance),
        "blocks": {name: _spectrum(spectrum) for name, spectrum in found.blocks.items()},
        "noise_scales": {
            name: {
                "value": _defined(one.value),
                "low": _defined(one.interval.low),
                "high": _defined(one.interval.high),
            }
            for name, one in found.gram.noise_scales().items()
        },
    }


def _spectrum(spectrum: Spectrum) -> dict[str, Any]:
    metrics = {name: _defined(value) for name, value in spectrum.metrics().items()}
    return {**metrics, "eigenvalues": [_defined(float(value)) for value in spectrum.eigenvalues]}


def _interval(scale: NoiseScale) -> str:
    low, high = scale.interval
    if math.isnan(low) or math.isinf(low):
        return "no interval"
    return f"95 %: {number(low, 3)} " + ("or more" if math.isinf(high) else f"to {number(high, 3)}")


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value
