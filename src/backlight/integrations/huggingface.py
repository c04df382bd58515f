"""Hugging Face Trainer: ``Trainer(..., callbacks=[BacklightCallback()])``."""

from __future__ import annotations

import functools
import os
import weakref
from typing import TYPE_CHECKING, Any

from backlight.integrations.hosted import HostedCallback, require

VERSION = require("transformers", "huggingface")
"""The release of transformers that is here."""

from transformers import Trainer, TrainerCallback  # noqa: E402 - only once it is known to be recent enough

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class BacklightCallback(HostedCallback, TrainerCallback):
    """Watches every ``train`` of the Trainer that it is given to.

    The Trainer sets gradients to None before ``on_step_end``, and clips them before
    ``on_pre_optimizer_step``; here they are taken as backward left them, after accumulation and unscaling
    and before clipping. What the Trainer logs (``loss``, ``grad_norm``, ``learning_rate``, ``eval_...``) is
    recorded as it logs it, with ``global_step``.

    Parameters are those of :class:`backlight.integrations.hosted.HostedCallback`: ``run`` (without it
    ``runs/<run_name or name of the model>-<time>``), ``samples``, ``on_end``, ``summary``, and the settings
    of :func:`backlight.watch` (``monitors``, ``every``, ``groups``, ``thresholds`` and others).
    """

    def _prepare(self) -> None:
        self._trainer: weakref.ref[Any] | None = None
        _tell_of_training()

    # Hooks, called by the Trainer on every rank

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach: the model is wrapped and restored, nothing has been trained."""
        with self._hosted.shield("on_train_begin", "anything of this training run"):
            model, optimizer = kwargs["model"], kwargs["optimizer"]
            trainer = self._trainer() if self._trainer is not None else None
            wrapped = getattr(trainer, "model_wrapped", None)
            self._hosted.begin(
                [model if wrapped is None else wrapped],
                [optimizer],
                name=str(args.run_name or type(model).__name__).replace(os.sep, "-"),
                step=state.global_step,
            )

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record what the Trainer logs."""
        self._hosted.log(logs or {}, step=state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the run."""
        self._hosted.end()

    def training(self, trainer: Any) -> None:
        """Remember the trainer: only it has the wrapper of its model."""
        self._trainer = weakref.ref(trainer)

    def failed(self, error: BaseException) -> None:
        """Close a run that failed or was interrupted."""
        self._hosted.end(error)


def _tell_of_training() -> None:
    """Have ``Trainer.train`` notify the callback when it raises: the Trainer has no event for it."""
    original = Trainer.train
    if getattr(original, "tells_backlight", False):
        return

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        for callback in _ours(self):
            callback.training(self)
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            for callback in _ours(self):
                callback.failed(error)
            raise

    train.tells_backlight = True  # type: ignore[attr-defined]
    Trainer.train = train  # type: ignore[method-assign]  # the only point that sees the error


def _ours(trainer: Any) -> list[BacklightCallback]:
    handler = getattr(trainer, "callback_handler", None)
    return [c for c in getattr(handler, "callbacks", ()) if isinstance(c, BacklightCallback)]
