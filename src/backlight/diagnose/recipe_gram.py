"""Gradient outer products of one batch of a recipe: spectrum, noise scale and Gram, exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.batches import moved, samples
from backlight.launch.recipe import RecipeError, read_recipe
from backlight.measure.gram.eigenvalues import Spectrum
from backlight.monitors.grokking.instrument.gram.checks import GramError
from backlight.monitors.grokking.instrument.gram.gram import gram

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
        found: dict[str, tuple[Any, tuple[str, ...], str]] = {
            "matrix": (self.gram.matrix.cpu().numpy(), axes, square),
            "eigenvalues": (self.second_moment.eigenvalues, ("direction",), square),
            "centred_eigenvalues": (self.covariance.eigenvalues, ("direction",), square),
        }
        for name, matrix in self.gram.per_block.items():
            found[f"block/{name}"] = matrix.cpu().numpy(), axes, square
        return found


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

    found = gram(model, summed, batch, detail="block")
    with torch.no_grad():
        loss = float(summed(model, batch)) / found.samples
    return RecipeGram(
        recipe=path,
        loss=loss,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        gram=found,
        second_moment=found.spectrum(),
        covariance=found.spectrum(centred=True),
        blocks={name: found.spectrum(scope=f"block/{name}") for name in found.per_block},
    )


def _device(name: str | None, model: nn.Module) -> torch.device:
    if name is None:
        return next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        first = str(error).strip().splitlines()[0]
        raise GramError(f"--device {name}: cannot be used here: {first}") from error
