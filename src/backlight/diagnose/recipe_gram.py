"""Gradient outer products of one batch of a recipe: spectrum, noise scale and Gram, exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from backlight.answer import Answer, Column, Table, word
from backlight.capture.batches import moved, samples
from backlight.launch.recipe import RecipeError, read_recipe
from backlight.measure.gram.eigenvalues import Spectrum
from backlight.measure.noise_scale import NoiseScale
from backlight.monitors.grokking.instrument.gram.checks import GramError
from backlight.monitors.grokking.instrument.gram.gram_measurement import gram
from backlight.text import count, number, percent

if TYPE_CHECKING:
    from torch import Tensor, nn

    from backlight.monitors.grokking.instrument.gram.result import Gram


REDUCTIONS = ("mean", "sum")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class RecipeGram:
    """Gram of N samples, its spectrum, and that of each block of the model.

    ``loss`` is the mean loss of the batch, ``parameters`` the number of scalars with a gradient.
    """

    recipe: Path
    loss: float
    parameters: int
    gram: Gram
    second_moment: Spectrum
    covariance: Spectrum
    blocks: Mapping[str, Spectrum]

    def arrays(self) -> dict[str, tuple[Any, tuple[str, ...], str]]:
        """Return values, names of the axes and unit of each result, by name: what a file of it holds."""
        square = "squared gradient"
        axes = ("sample", "other sample")
        arrays: dict[str, tuple[Any, tuple[str, ...], str]] = {
            "matrix": (self.gram.matrix.cpu().numpy(), axes, square),
            "eigenvalues": (self.second_moment.eigenvalues, ("direction",), square),
            "centred_eigenvalues": (self.covariance.eigenvalues, ("direction",), square),
        }
        for name, matrix in self.gram.per_block.items():
            arrays[f"block/{name}"] = matrix.cpu().numpy(), axes, square
        return arrays


def measure_gram(
    path: Path,
    settings: Mapping[str, Any],
    *,
    checkpoint: Path | None = None,
    reduction: str = "mean",
    device: str | None = None,
    dtype: str | None = None,
) -> RecipeGram:
    """Measure the per-sample gradients of the first batch of a recipe.

    Parameters
    ----------
    path, settings, checkpoint:
        The recipe, its settings, and weights to load first.
    reduction:
        What the loss of the recipe is over the samples of a batch: their ``mean`` or ``sum``.
    device, dtype:
        Where and in which type model and batch are, None for that of the recipe.

    Raises
    ------
    RecipeError
        If the recipe cannot be used, or yields no batch.
    GramError
        If an option is unknown, or the samples of the batch have no separate gradients.
    """
    if reduction not in REDUCTIONS:
        raise GramError(f"--reduction {reduction}: expected one of {', '.join(REDUCTIONS)}")
    if dtype is not None and dtype not in DTYPES:
        raise GramError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    recipe = read_recipe(path, settings)
    model = recipe.build_model()
    if checkpoint is not None:
        recipe.load(model, checkpoint)
    place, kind = _device(device, model), DTYPES.get(dtype or "")
    model = model.to(device=place, dtype=kind)
    batch = next(recipe.batches(), None)
    if batch is None:
        raise RecipeError(f"{path}: batches yielded nothing; expected at least one batch")
    batch = moved(batch, place, kind)

    def summed(model: nn.Module, batch: Any) -> Tensor:
        loss = recipe.loss(model, batch)
        return loss * (samples(batch) or 1) if reduction == "mean" else loss

    measured = gram(model, summed, batch, detail="block")
    with torch.no_grad():
        loss = float(summed(model, batch)) / measured.samples
    return RecipeGram(
        recipe=path,
        loss=loss,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        gram=measured,
        second_moment=measured.spectrum(),
        covariance=measured.spectrum(centred=True),
        blocks={name: measured.spectrum(scope=f"block/{name}") for name in measured.per_block},
    )


def _device(name: str | None, model: nn.Module) -> torch.device:
    if name is None:
        return next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        first = str(error).strip().splitlines()[0]
        raise GramError(f"--device {name}: cannot be used here: {first}") from error


_METRICS = {
    "trace": "mean squared norm of a sample's gradient",
    "noise_scale": "samples at which noise and signal are equal",
    "coherence": "squared norm of the mean gradient over the trace",
    "effective_rank": "exponential of the eigenvalues' entropy",
    "participation_ratio": "squared trace over squared Frobenius norm",
    "numerical_rank": "eigenvalues above the rounding of gradients",
}


@dataclass(frozen=True)
class SpectrumRecord:
    """Metrics of a spectrum by name, and its eigenvalues."""

    metrics: dict[str, float]
    eigenvalues: list[float]

    @classmethod
    def of(cls, spectrum: Spectrum) -> SpectrumRecord:
        """Return the record of a spectrum."""
        return cls(spectrum.metrics(), spectrum.eigenvalues.tolist())


@dataclass(frozen=True)
class GramRecord:
    """What is printed of a Gram; ``unchecked`` is why samples were not checked to be independent."""

    recipe: str
    samples: int
    parameters: int
    loss: float
    unchecked: str
    second_moment: SpectrumRecord
    covariance: SpectrumRecord
    blocks: dict[str, SpectrumRecord]
    noise_scales: Mapping[str, NoiseScale]


def answer(measured: RecipeGram) -> Answer:
    """Return the answer of a Gram: the metrics of the whole model, its eigenvalues, and its blocks."""
    scales = measured.gram.noise_scales()
    record = GramRecord(
        str(measured.recipe), measured.gram.samples, measured.parameters, measured.loss,
        measured.gram.unchecked,
        SpectrumRecord.of(measured.second_moment), SpectrumRecord.of(measured.covariance),
        {name: SpectrumRecord.of(spectrum) for name, spectrum in measured.blocks.items()}, scales,
    )  # fmt: skip
    head = f"{count(record.samples, 'sample')}, {count(record.parameters, 'parameter')}"
    metrics = record.second_moment.metrics
    meanings = {**_METRICS, "noise_scale": f"{_METRICS['noise_scale']}; {_interval(scales['model'])}"}
    rows = [(name, metrics[name], meanings[name]) for name in _METRICS if name in metrics]
    unchecked = f"that samples are independent was not checked: {record.unchecked}"
    tables = (
        Table(
            (
                word("metric", lambda row: row[0].replace("_", " ")), Column("value", lambda row: row[1]),
                word("meaning", lambda row: row[2], "text"),
            ),
            rows, notes=(unchecked,) if record.unchecked else (),
        ),
        _eigenvalues(measured),
        _blocks(measured),
    )  # fmt: skip
    return Answer(f"{head}, mean loss {number(measured.loss)}", record, tables=tables)


def _eigenvalues(measured: RecipeGram) -> Table:
    spectrum, centred = measured.second_moment, measured.covariance.eigenvalues
    values = spectrum.eigenvalues
    shares = values / spectrum.trace if spectrum.trace > 0 else values * math.nan
    rows = zip(range(1, len(values) + 1), values, shares, shares.cumsum(), centred, strict=False)
    shows: tuple[Callable[[Any], str], ...] = (str, number, percent, percent, number)
    titles = ("direction", "eigenvalue", "share", "cumulative", "centred")
    columns = (
        Column(title, itemgetter(n), show) for n, (title, show) in enumerate(zip(titles, shows, strict=True))
    )
    return Table(tuple(columns), list(rows), brief=10)


def _blocks(measured: RecipeGram) -> Table:
    total = measured.second_moment.trace or math.nan
    return Table(
        (
            word("block", lambda row: row[0]), Column("trace", lambda row: row[1].trace),
            Column("share", lambda row: row[1].trace / total, percent),
            Column("noise scale", lambda row: row[1].noise_scale),
            Column("coherence", lambda row: row[1].coherence),
            Column("effective rank", lambda row: row[1].effective_rank),
        ),
        sorted(measured.blocks.items(), key=lambda block: -block[1].trace), brief=10,
    )  # fmt: skip


def _interval(scale: NoiseScale) -> str:
    low, high = scale.interval
    if math.isnan(low) or math.isinf(low):
        return "no interval"
    return f"95 %: {number(low, 3)} " + ("or more" if math.isinf(high) else f"to {number(high, 3)}")
