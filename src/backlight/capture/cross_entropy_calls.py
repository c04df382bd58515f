"""Calls of cross-entropy while they are observed, by whatever name a script calls it."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from backlight.capture.hooks import Patches, is_transforming
from backlight.capture.hub import HUB
from backlight.devices import is_capturing_graph


class CrossEntropyCalls:
    """Reports the input of each call to the hub. Compiled code is neither changed nor observed."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._is_on = False

    def start(self) -> None:
        """Observe from here on, unless something is compiled in this process, which would notice."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        if not self._is_on and (dynamo is None or not dynamo.counters["frames"]):
            self._is_on = self._patches.replace(torch._C._nn, "cross_entropy_loss", _wrapped)

    def stop(self) -> None:
        """Observe no longer."""
        if self._is_on:
            self._is_on = False
            self._patches.undo()


def _wrapped(original: Any) -> Any:
    @functools.wraps(original)
    def cross_entropy_loss(input: Any, *args: Any, **kwargs: Any) -> Any:
        is_traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        is_plain = not (is_traced or is_transforming() or is_capturing_graph())
        if is_plain and isinstance(input, torch.Tensor) and input.requires_grad:
            HUB.emit("cross_entropy", input)
        return original(input, *args, **kwargs)

    return cross_entropy_loss
