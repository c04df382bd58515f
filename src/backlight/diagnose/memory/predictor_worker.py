"""The process that predicts; started by :class:`backlight.diagnose.memory.predictor.Predictor`."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from backlight.diagnose.memory.prediction import explained, predict_step
from backlight.diagnose.memory.prediction_result import Prediction, PredictionError
from backlight.diagnose.memory.predictor import Request
from backlight.launch.recipe import Recipe, RecipeError, read_recipe


def answer(request: Request) -> Prediction | str:
    """Return the prediction, or one line on why there is none."""
    try:
        recipe = read_recipe(request.path, request.settings)
        return predict_step(
            recipe.build_model,
            partial(_first, recipe),
            recipe.loss,
            recipe.build_optimizer if recipe.has("build_optimizer") else None,
            checkpoint=request.checkpoint,
            reentrant=request.reentrant,
            granule=request.granule,
        )
    except (RecipeError, PredictionError) as error:
        text = str(error)
        return text if text.startswith(str(request.path)) else f"{request.path}: {text}"
    except Exception as error:  # noqa: BLE001 - whatever a recipe raises is told to the one who asked
        known = explained(error, [request.path])
        if known is None:
            first = (str(error).strip().splitlines() or [""])[0]
            known = f"fails on fake tensors: {type(error).__name__}: {first}"
        return known if known.startswith(request.path.name) else f"{request.path}: {known}"


def _first(recipe: Recipe) -> Any:
    try:
        return next(recipe.batches())
    except StopIteration:
        raise RecipeError(f"{recipe.path}: batches gave no batch") from None


def main(handle: int) -> None:
    """Answer requests until the other end closes."""
    warnings.simplefilter("ignore")
    with Connection(handle) as pipe:
        while True:
            try:
                request = pipe.recv()
            except EOFError:
                return
            pipe.send(answer(request))


if __name__ == "__main__":
    main(int(sys.argv[1]))
