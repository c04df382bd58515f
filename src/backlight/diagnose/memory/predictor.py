"""Predict the memory of a recipe's step without allocating it, in a subprocess; search the largest batch.

The process sees no accelerator, so that a recipe builds on the CPU, where fake tensors are safe; it serves as
many predictions as a search needs. Every number is a prediction of the whole step; nothing is extrapolated.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from backlight.diagnose.memory.result import Fit, PredictedMemory, PredictionError, Saving
from backlight.launch.recipe import Recipe, RecipeError, read_recipe
from backlight.launch.subprocess import ProcessTree, start

MAX_BATCH = 2**20
"""Batch at which a search ends."""

EXIT_TIMEOUT_S = 5

# Without a GPU a recipe cannot choose one; compiled code would hide its operations.
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True)
class Request:
    """Step to predict; the recipe has to take the settings ``accepts`` as well."""

    path: Path
    settings: Mapping[str, Any]
    checkpoint: tuple[str, ...] = ()
    reentrant: bool = False
    device: str = "cuda"
    accepts: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnreadRecipe:
    """A recipe with its settings that only the subprocess reads."""

    path: Path
    settings: Mapping[str, Any]

    def with_settings(self, settings: Mapping[str, Any]) -> UnreadRecipe:
        """Return the same recipe with ``settings`` over those that it has."""
        return UnreadRecipe(self.path, {**self.settings, **settings})


def predict(
    recipe: Recipe,
    *,
    checkpoint: Collection[str] = (),
    reentrant: bool = False,
    device: str = "cuda",
) -> PredictedMemory:
    """Return the memory and the operations of one training step of a recipe, with its settings.

    The forwards of the modules ``checkpoint`` are recomputed in backward. ``device`` is cuda or cpu: whose
    autocast and attention are assumed, and how sizes are rounded up (to 512 bytes on cuda). A step that
    cannot run on fake tensors raises :class:`PredictionError`.
    """
    with Predictor() as predictor:
        return predictor.predict(recipe, checkpoint=checkpoint, reentrant=reentrant, device=device)


class Predictor(AbstractContextManager["Predictor"]):
    """A subprocess that predicts; several predictions share its start."""

    def __init__(self) -> None:
        self._pipe, child = Pipe()
        mark = uuid.uuid4().hex
        command = [sys.executable, "-m", "backlight.diagnose.memory.predictor", str(child.fileno())]
        environment = {**os.environ, **_ENVIRONMENT}
        self._process = start(command, Path.cwd(), environment, mark, 2, None, inherit=[child.fileno()])
        self._tree = ProcessTree(self._process.pid, mark)
        child.close()

    def __exit__(self, *exception: object) -> None:
        """End the subprocess."""
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=EXIT_TIMEOUT_S)
        self._tree.end(grace=0.0)
        self._process.wait()

    def predict(
        self,
        recipe: Recipe | UnreadRecipe,
        *,
        checkpoint: Collection[str] = (),
        reentrant: bool = False,
        device: str = "cuda",
        accepts: Collection[str] = (),
    ) -> PredictedMemory:
        """Return a prediction; see :func:`predict`. PredictionError also if the subprocess died."""
        settings = dict(recipe.settings)
        request = Request(recipe.path, settings, tuple(checkpoint), reentrant, device, tuple(accepts))
        try:
            self._pipe.send(request)
            reply = self._pipe.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise PredictionError(
                f"{recipe.path}: the prediction process ended with {how}; its last output is above"
            ) from None
        if isinstance(reply, PredictedMemory):
            return reply
        raise PredictionError(str(reply))


def largest_batch(
    predictor: Predictor,
    recipe: Recipe | UnreadRecipe,
    budget: int,
    *,
    setting: str = "batch",
    progress: Callable[[int, int], None] | None = None,
) -> Fit:
    """Return the largest batch, of the given ``setting``, whose peak is within ``budget`` bytes."""
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
            f"{budget:,}; checkpoint blocks, use an optimizer with less state, or make the model smaller"
        )
    if peak(4) == peak(1) and peak(64) == peak(1):
        raise PredictionError(
            f"{recipe.path}: {setting}=1 and {setting}=64 have the same peak; is {setting!r} the size of the "
            "batch? --batch-setting names another"
        )
    low, high = (4 if peak(4) <= budget else 1), (None if peak(4) <= budget else 4)
    while low < MAX_BATCH and (high is None or high - low > 1):
        low, high = _narrow(peak, peaks, low, high, budget)
    return Fit(
        setting=setting,
        budget=budget,
        batch=low,
        peak=peaks[low],
        above=high,
        peak_above=None if high is None else peaks[high],
        tried=tuple(sorted(peaks.items())),
    )


def _narrow(
    peak: Callable[[int], int], peaks: dict[int, int], low: int, high: int | None, budget: int
) -> tuple[int, int | None]:
    """Predict one more batch: where the line through the two nearest predictions meets the budget."""
    below = sorted(batch for batch in peaks if batch <= low)
    first, second = (below[-2], below[-1]) if high is None and len(below) > 1 else (low, high or low + 1)
    slope = (peak(second) - peak(first)) / (second - first)
    guess = int(first + (budget - peaks[first]) / slope) if slope > 0 else 2 * low
    guess = min(max(guess, low + 1), MAX_BATCH if high is None else high - 1)
    if peak(guess) > budget:
        return low, guess
    if high is None and guess < MAX_BATCH and peak(guess + 1) > budget:  # a straight line is met at once
        return guess, guess + 1
    return guess, high


def checkpointing_savings(
    predictor: Predictor, recipe: Recipe | UnreadRecipe, base: PredictedMemory
) -> tuple[Saving, ...]:
    """Return the effect of checkpointing one block of each group, and all of them, against ``base``."""
    savings = []
    for blocks in base.blocks:
        middle = blocks.names[len(blocks.names) // 2]
        for wrapped in ((middle,), blocks.names):
            there = predictor.predict(recipe, checkpoint=wrapped)
            recomputed = there.flops.recomputed - base.flops.recomputed
            savings.append(
                Saving(
                    parent=blocks.parent,
                    type=blocks.type,
                    wrapped=wrapped,
                    peak=there.peak,
                    saved=base.peak - there.peak,
                    recomputed_flops=recomputed,
                    share_of_step=recomputed / base.flops.step if base.flops.step else 0.0,
                )
            )
    return tuple(savings)


def answer(request: Request) -> PredictedMemory | str:
    """Return the prediction, or one line on why there is none; runs in the subprocess."""
    # Torch is imported by the subprocess alone.
    from backlight.diagnose.memory.prediction import explain_error, predict_step  # noqa: PLC0415

    try:
        recipe = read_recipe(request.path, request.settings)
        if request.accepts:
            recipe.with_settings(dict.fromkeys(request.accepts, 1))
        return predict_step(
            recipe.build_model,
            partial(_first_batch, recipe),
            recipe.loss,
            recipe.build_optimizer if recipe.has("build_optimizer") else None,
            checkpoint=request.checkpoint,
            reentrant=request.reentrant,
            device=request.device,
        )
    except (RecipeError, PredictionError) as error:
        text = str(error)
        return text if text.startswith(str(request.path)) else f"{request.path}: {text}"
    except Exception as error:  # noqa: BLE001 - a recipe may raise anything
        problem = explain_error(error, [request.path])
        if problem is None:
            first = (str(error).strip().splitlines() or [""])[0]
            problem = f"fails on fake tensors: {type(error).__name__}: {first}"
        return problem if problem.startswith(request.path.name) else f"{request.path}: {problem}"


def _first_batch(recipe: Recipe) -> Any:
    try:
        return next(recipe.batches())
    except StopIteration:
        raise RecipeError(f"{recipe.path}: batches gave no batch") from None


def serve(pipe: Connection) -> None:
    """Answer requests until the other end closes."""
    warnings.simplefilter("ignore")
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        pipe.send(answer(request))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
