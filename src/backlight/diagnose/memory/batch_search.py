"""What fits: the largest batch within a budget, and what checkpointing blocks would save and cost.

Every number is a prediction of the whole step with that batch, or with those blocks wrapped; nothing is
extrapolated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backlight.diagnose.memory.prediction_result import Blocks, Prediction, PredictionError
from backlight.diagnose.memory.predictor import Predictor
from backlight.launch.recipe import Recipe

MOST = 2**20
"""Batch at which a search ends."""


@dataclass(frozen=True)
class Fit:
    """The largest batch whose step stays within a budget.

    Attributes
    ----------
    batch, peak:
        The answer and its predicted peak.
    above, peak_above:
        One more, and its peak, which is over the budget; None where ``batch`` is the end of the search.
    tried:
        Every prediction that was made: batch and peak, by batch.
    """

    setting: str
    budget: int
    batch: int
    peak: int
    above: int | None
    peak_above: int | None
    tried: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Saving:
    """What checkpointing would do, by a prediction with it.

    Attributes
    ----------
    blocks:
        The group of modules.
    wrapped:
        Names of those that the prediction had wrapped.
    peak, saved:
        Its peak, and by how much that is lower than without.
    flops, share:
        Operations that are computed again, and their share of the step without checkpointing.
    """

    blocks: Blocks
    wrapped: tuple[str, ...]
    peak: int
    saved: int
    flops: int
    share: float


def largest_batch(
    predictor: Predictor,
    recipe: Recipe,
    budget: int,
    *,
    setting: str = "batch",
    progress: Callable[[int, int], None] | None = None,
) -> Fit:
    """Return the largest batch whose predicted peak is within ``budget`` bytes.

    Parameters
    ----------
    setting:
        Name of the recipe's setting that is the batch.
    progress:
        Called with each batch and its peak.

    Raises
    ------
    PredictionError
        If not even one sample fits, or the setting changes nothing. RecipeError comes from a recipe
        without it.
    """
    peaks: dict[int, int] = {}

    def peak(batch: int) -> int:
        if batch not in peaks:
            peaks[batch] = predictor.predict(recipe.with_settings({setting: batch})).peak
            if progress is not None:
                progress(batch, peaks[batch])
        return peaks[batch]

    if peak(1) > budget:
        raise PredictionError(
            f"{recipe.path}: a step with {setting}=1 takes {peak(1):,} bytes, more than the budget of "
            f"{budget:,}; checkpoint blocks, take an optimizer with less state, or make the model smaller"
        )
    if peak(4) == peak(1) and peak(64) == peak(1):
        raise PredictionError(
            f"{recipe.path}: {setting}=1 and {setting}=64 have the same peak; is {setting!r} the size of the "
            "batch? --batch-setting names another"
        )
    low, high = (4 if peak(4) <= budget else 1), (None if peak(4) <= budget else 4)
    while low < MOST and (high is None or high - low > 1):
        low, high = _narrow(peak, peaks, low, high, budget)
    return Fit(
        setting,
        budget,
        low,
        peaks[low],
        high,
        None if high is None else peaks[high],
        tuple(sorted(peaks.items())),
    )


def _narrow(
    peak: Callable[[int], int], peaks: dict[int, int], low: int, high: int | None, budget: int
) -> tuple[int, int | None]:
    """Try one more batch: where the line through the two nearest predictions meets the budget."""
    below = sorted(batch for batch in peaks if batch <= low)
    first, second = (below[-2], below[-1]) if high is None and len(below) > 1 else (low, high or low + 1)
    slope = (peak(second) - peak(first)) / (second - first)
    guess = int(first + (budget - peaks[first]) / slope) if slope > 0 else 2 * low
    guess = min(max(guess, low + 1), MOST if high is None else high - 1)
    if peak(guess) > budget:
        return low, guess
    if high is None and guess < MOST and peak(guess + 1) > budget:  # a straight line is met at once
        return guess, guess + 1
    return guess, high


def checkpointing(predictor: Predictor, recipe: Recipe, base: Prediction) -> list[Saving]:
    """Return what it would do to wrap one block of each group, and to wrap all.

    Parameters
    ----------
    base:
        The prediction without.
    """
    found = []
    for blocks in base.blocks:
        middle = blocks.names[len(blocks.names) // 2]
        for wrapped in ((middle,), blocks.names):
            there = predictor.predict(recipe, checkpoint=wrapped)
            again = there.flops.recomputed - base.flops.recomputed
            share = again / base.flops.step if base.flops.step else 0.0
            found.append(Saving(blocks, wrapped, there.peak, base.peak - there.peak, again, share))
    return found
