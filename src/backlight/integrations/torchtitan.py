"""torchtitan: ``with watch(trainer): trainer.train()``, and loops in its style.

A torchtitan-style loop of your own gives model parts and optimizers instead of a trainer.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from backlight.integrations.hosted import Hosted, HostedWatch, OnEnd, require
from backlight.session.settings import suggest_keywords

VERSION = require("torchtitan", "torchtitan")
"""The release of torchtitan that is here."""

if TYPE_CHECKING:
    from torch import nn

    from backlight.monitor import Samples


class TitanWatch(HostedWatch):
    """One watched training run, made by :func:`watch`."""

    def __init__(
        self, trainer: Any, parts: list[nn.Module], optimizers: Any, step: int, hosted: Hosted
    ) -> None:
        super().__init__(hosted)
        self._trainer = trainer
        self._parts = parts
        self._optimizers = optimizers
        self._step = step
        self._logger: Any = None

    def _attach(self) -> None:
        """Begin; with a trainer at its first step, when its checkpoint is loaded."""
        if self._trainer is None:
            self._begin(self._step)
            return
        with self._hosted.shield("watch", "anything of this training run"):
            self._await_first_step()
        with self._hosted.shield("watch", "the metrics of the trainer"):
            metrics = self._trainer.metrics_processor
            self._logger, metrics.logger = metrics.logger, _Logger(metrics.logger, self._hosted)

    def _detach(self) -> None:
        if self._trainer is not None:
            self._trainer.__dict__.pop("train_step", None)
            if self._logger is not None:
                self._trainer.metrics_processor.logger = self._logger

    def _begin(self, step: int) -> None:
        name = type(self._parts[0]).__name__.removeprefix("FSDP") if self._parts else "training"
        self._hosted.begin(self._parts, [self._optimizers], name=name, step=step)

    def _await_first_step(self) -> None:
        trainer = self._trainer
        original = trainer.train_step

        @functools.wraps(original)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            del trainer.train_step
            # The trainer counts a step before it takes it.
            self._begin(max(int(getattr(trainer, "step", 1)) - 1, 0))
            return original(*args, **kwargs)

        trainer.train_step = train_step


@suggest_keywords
def watch(
    trained: Any,
    optimizers: Any = None,
    *,
    run: str | os.PathLike[str] | None = None,
    step: int = 0,
    samples: Samples | None = None,
    on_end: OnEnd | None = None,
    summary: bool = True,
    **settings: Any,
) -> TitanWatch:
    """Watch a torchtitan ``Trainer``, or a loop in its style; use the result as a context manager.

    Parameters
    ----------
    trained:
        A ``torchtitan.trainer.Trainer``; or the model, or the model parts of a pipeline.
    optimizers:
        With a model: its optimizer, several, or torchtitan's container of them.
    step:
        With a model: optimizer steps done before. A trainer has that number.
    run, samples, on_end, summary, **settings:
        As for :class:`backlight.integrations.hosted.HostedCallback`. ``run`` is by default
        ``runs/<model>-<time>``.

    Returns
    -------
    TitanWatch
        Not yet attached. What a trainer's metrics processor logs is recorded while it is entered.

    Raises
    ------
    TypeError
        If ``trained`` is neither a trainer nor models with their optimizers.
    ValueError
        If a setting is out of range.
    """
    hosted = Hosted("torchtitan.watch", run, settings, samples=samples, on_end=on_end, summary=summary)
    if hasattr(trained, "model_parts") and hasattr(trained, "train_step"):
        return TitanWatch(trained, list(trained.model_parts), trained.optimizers, step, hosted)
    parts: Sequence[Any] = trained if isinstance(trained, (list, tuple)) else [trained]
    if optimizers is None or not all(hasattr(part, "parameters") for part in parts):
        raise TypeError(
            f"torchtitan.watch: got {type(trained).__name__} and {type(optimizers).__name__}; expected a "
            "torchtitan Trainer, or a model (or its parts) together with its optimizers"
        )
    return TitanWatch(None, list(parts), optimizers, step, hosted)


class _Logger:
    """Replaces the logger of a metrics processor, and records what it is given."""

    def __init__(self, inner: Any, hosted: Hosted) -> None:
        self._inner = inner
        self._hosted = hosted

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Pass the metrics on, and record them."""
        self._inner.log(metrics, step)
        self._hosted.log(metrics, step=step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
