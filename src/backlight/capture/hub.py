"""The one place that touches a process: installs the hooks once and hands events to listeners.

Hooks are installed when the first listener arrives and taken off when the last one leaves. After a
fork the child is switched off for good: data-loader workers must not see anything of ours.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from backlight.capture import modules
from backlight.capture.events import Listener
from backlight.capture.hooks import backward, clipping, dataloader, grad_scaler, optimizers
from backlight.capture.hooks.patch import Patches


class Hub:
    """Keeps the listeners of this process and what is attached to torch for them."""

    def __init__(self) -> None:
        self.listeners: tuple[Listener, ...] = ()
        self._on_error: dict[int, Callable[[Exception], None]] = {}
        self.backward_depth = 0
        self.grad_depth = 0
        self.own_passes = 0
        self.seen = modules.SeenModules()
        self.optimizers = optimizers.SeenOptimizers()
        self._patches = Patches()
        self._handles: list[Any] = []
        self._pid = os.getpid()

    @property
    def active(self) -> bool:
        """Whether events are wanted, and this is not a forked child."""
        return bool(self.listeners) and not self.own_passes

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Report nothing meanwhile: what the model does is asked for by us and no part of the training."""
        self.own_passes += 1
        try:
            yield
        finally:
            self.own_passes -= 1

    def add(self, listener: Listener, on_error: Callable[[Exception], None] | None = None) -> None:
        """Report to ``listener`` from now on; installs the hooks if it is the first.

        ``on_error`` is called instead of :meth:`Listener.dropped` with what the listener raised.
        """
        if listener in self.listeners:
            return
        if not self.listeners:
            self._install()
        self.listeners = (*self.listeners, listener)
        if on_error is not None:
            self._on_error[id(listener)] = on_error

    def remove(self, listener: Listener) -> None:
        """Stop reporting to ``listener``; removes the hooks if it was the last."""
        if listener not in self.listeners:
            return
        self.listeners = tuple(other for other in self.listeners if other is not listener)
        self._on_error.pop(id(listener), None)
        if not self.listeners:
            self._uninstall()

    def emit(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the method ``event`` of every listener, shielding the training from their errors."""
        if self.own_passes:
            return
        for listener in self.listeners:
            begin = time.perf_counter()
            try:
                getattr(listener, event)(*args, **kwargs)
                listener.spent += time.perf_counter() - begin
            except Exception as error:  # noqa: BLE001 - never break the user's training
                on_error = self._on_error.get(id(listener), listener.dropped)
                self.remove(listener)
                _report(on_error, error)

    def _install(self) -> None:
        self.backward_depth = self.grad_depth = 0
        for part in (backward, clipping, grad_scaler, dataloader):
            part.install(self, self._patches)
        self._handles = [*optimizers.install(self, self._patches), *modules.install(self.seen)]

    def _uninstall(self) -> None:
        self._patches.undo()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.optimizers.rest()

    def switch_off(self) -> None:
        """Forget every listener without calling any, in a forked child."""
        self.listeners = ()
        self._on_error.clear()
        self.backward_depth = self.grad_depth = 0


def _report(on_error: Callable[[Exception], None], error: Exception) -> None:
    try:
        on_error(error)
    except Exception as second:  # noqa: BLE001 - nothing is left but to warn
        warnings.warn(
            f"backlight: stopped measuring after {type(error).__name__}: {error} "
            f"(and could not record that: {second}). Your training goes on unchanged.",
            RuntimeWarning,
            stacklevel=2,
        )


HUB = Hub()
"""The hub of this process."""

os.register_at_fork(after_in_child=HUB.switch_off)


def capturing_graph() -> bool:
    """Whether a CUDA graph is being captured, where nothing of ours may run."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
