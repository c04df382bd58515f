"""Keras 3 on torch: ``model.fit(..., callbacks=[BacklightCallback(run="runs/first")])``.

Keras has optimizers of its own, which torch's hooks do not see: for the time of a fit their ``apply`` is
called from inside the step of a torch optimizer that does nothing else.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from backlight.integrations.hosted import HostedCallback
from backlight.integrations.versions import FrameworkError, require

VERSION = require("keras", "keras")
"""The release of Keras that is here."""

import torch  # noqa: E402 - only once Keras is known to be recent enough

try:
    import keras
except ImportError as error:  # the backend that Keras was told to use, or uses without being told, is missing
    raise FrameworkError(
        f"backlight.integrations.keras: expected Keras on torch, but keras cannot be imported ({error}); "
        "set KERAS_BACKEND=torch before keras is imported"
    ) from error

if keras.backend.backend() != "torch":
    raise FrameworkError(
        f"backlight.integrations.keras: expected Keras on torch, got {keras.backend.backend()}; "
        "set KERAS_BACKEND=torch before keras is imported"
    )


class BacklightCallback(HostedCallback, keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Watches every ``fit`` that it is given to.

    Gradients are taken as backward left them, before Keras clips or accumulates them inside its optimizer.
    The logs of an epoch are recorded at its end.

    It takes what :class:`backlight.integrations.hosted.HostedCallback` says: ``run`` (without it
    ``runs/<name of the model>-<time>``), ``samples``, ``on_end``, ``summary``, and the settings of
    :func:`backlight.watch` (``monitors``, ``every``, ``groups``, ``thresholds`` and others).
    """

    def _prepare(self) -> None:
        self._shadow: _Shadow | None = None
        _tell_of_fits()

    # Hooks, called by Keras

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Attach."""
        self._detach()
        with self._hosted.shield("on_train_begin", "anything of this training"):
            optimizer = self.model.optimizer
            trained = [variable.value for variable in self.model.trainable_variables]
            kind = type(type(optimizer).__name__, (_Shadow,), {})  # the name is recorded
            self._shadow = kind(trained, optimizer)
            step = int(optimizer.iterations.numpy())
            self._hosted.begin([self.model], [self._shadow], name=self.model.name, step=step)
            self._shadow.attach()
            _FITTING.add(self)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Record what Keras logs."""
        step = None if self.watch is None else self.watch.step
        self._hosted.log(logs or {}, step=step)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Close the run."""
        self._detach()
        self._hosted.end()

    def failed(self, error: BaseException) -> None:
        """Close the run of a fit that failed or was interrupted."""
        self._detach()
        self._hosted.end(error)

    def _detach(self) -> None:
        _FITTING.discard(self)
        if self._shadow is not None:
            self._shadow.detach()
            self._shadow = None


_FITTING: weakref.WeakSet[BacklightCallback] = weakref.WeakSet()


def _tell_of_fits() -> None:
    """Let ``Model.fit`` tell our callbacks when it raises: no event of Keras does."""
    original = keras.Model.fit
    if getattr(original, "tells_backlight", False):
        return

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except BaseException as error:
            for callback in [c for c in _FITTING if c.model is self]:
                callback.failed(error)
            raise

    fit.tells_backlight = True  # type: ignore[attr-defined]
    keras.Model.fit = fit


class _Shadow(torch.optim.Optimizer):
    """An optimizer in whose step that of Keras is taken, so that torch's hooks see it."""

    def __init__(self, parameters: list[torch.Tensor], optimizer: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._optimizer = optimizer
        self._call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def attach(self) -> None:
        """Take the place of the optimizer's ``apply``."""
        self._optimizer.apply = self._apply

    def detach(self) -> None:
        """Give ``apply`` back."""
        self._optimizer.__dict__.pop("apply", None)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it is given none
        """Let Keras take its step."""
        arguments, keywords = self._call
        type(self._optimizer).apply(self._optimizer, *arguments, **keywords)

    def _apply(self, *arguments: Any, **keywords: Any) -> None:
        self._call = arguments, keywords
        rate = getattr(self._optimizer, "learning_rate", None)
        value = getattr(rate, "value", rate)
        self.param_groups[0]["lr"] = value.detach() if isinstance(value, torch.Tensor) else value
        scale = getattr(self._optimizer, "dynamic_scale", None)
        if scale is not None:
            self.grad_scale = scale.value  # gradients of a scaled loss are divided by it inside apply
        try:
            self.step()
        finally:
            self._call = ((), {})
