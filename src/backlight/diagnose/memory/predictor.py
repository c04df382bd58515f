"""Predict the memory of a recipe's step without its memory, in a process of its own.

The process has no accelerator in sight, so that a recipe builds on the CPU, where fake tensors are safe;
it stays for as many predictions as a search takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from backlight.diagnose.memory.prediction_result import GRANULE, Prediction, PredictionError
from backlight.launch.recipe import Recipe


@dataclass(frozen=True)
class Request:
    """What is to be predicted."""

    path: Path
    settings: Mapping[str, Any]
    checkpoint: tuple[str, ...] = ()
    reentrant: bool = False
    granule: int = GRANULE


def predict(
    recipe: Recipe,
    *,
    checkpoint: Collection[str] = (),
    reentrant: bool = False,
    granule: int = GRANULE,
) -> Prediction:
    """Return the memory and the operations of one training step of a recipe, with its settings.

    Parameters
    ----------
    recipe:
        From :func:`backlight.launch.recipe.read_recipe`; without ``build_optimizer`` nothing is updated.
    checkpoint:
        Names of modules whose forward is computed again in backward.
    reentrant:
        The mode of ``torch.utils.checkpoint``.
    granule:
        Sizes are rounded up to a multiple of this; 512 as CUDA's caching allocator does, 1 for the CPU.

    Raises
    ------
    PredictionError
        If the step cannot be run on fake tensors; the message names the line and the way out.
    """
    with Predictor() as predictor:
        return predictor.predict(recipe, checkpoint=checkpoint, reentrant=reentrant, granule=granule)


class Predictor(AbstractContextManager["Predictor"]):
    """A process that predicts; several predictions share its start."""

    def __init__(self) -> None:
        ours, theirs = Pipe()
        # No GPU is seen, so that a recipe does not choose one; compiled code has no operations to see.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
        self._pipe = ours
        self._process = subprocess.Popen(
            [sys.executable, "-m", "backlight.diagnose.memory.predictor_worker", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=environment,
        )
        theirs.close()

    def __exit__(self, *exception: object) -> None:
        """End the process."""
        self._pipe.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def predict(
        self,
        recipe: Recipe,
        *,
        checkpoint: Collection[str] = (),
        reentrant: bool = False,
        granule: int = GRANULE,
    ) -> Prediction:
        """Return a prediction; see :func:`predict`.

        Raises
        ------
        PredictionError
            If the step cannot be run on fake tensors, or the process ended.
        """
        request = Request(recipe.path, dict(recipe.settings), tuple(checkpoint), reentrant, granule)
        try:
            self._pipe.send(request)
            answer = self._pipe.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise PredictionError(
                f"{recipe.path}: the process that predicts ended with {how}; what it said last stands above"
            ) from None
        if isinstance(answer, Prediction):
            return answer
        raise PredictionError(str(answer))
