"""Calls of functional dropout and of attention during one forward, with the line of each."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch.nn import functional

from backlight.capture.hooks import Patches
from backlight.user_code import SourceLine, user_line


class DropoutCalls:
    """Notes calls that drop values although no argument says that this is training.

    ``found`` has function, probability and line of each. ``F.dropout`` with ``training=True`` written out is
    meant, and left out. Compiled code is neither changed nor observed.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, float, SourceLine | None]] = []
        self._patches = Patches()

    def start(self) -> bool:
        """Observe from here on; False where something is compiled in this process, which would notice."""
        dynamo = sys.modules.get("torch._dynamo.utils")
        if dynamo is not None and dynamo.counters["frames"]:
            return False
        self._patches.replace(functional, "dropout", self._wrap_dropout)
        self._patches.replace(functional, "scaled_dot_product_attention", self._wrap_attention)
        return True

    def stop(self) -> None:
        """Observe no longer."""
        self._patches.undo()

    def _wrap_dropout(self, original: Any) -> Any:
        @functools.wraps(original)
        def dropout(input: Any, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
            if p > 0 and not args and "training" not in kwargs:
                self._note("dropout", p)
            return original(input, p, *args, **kwargs)

        return dropout

    def _wrap_attention(self, original: Any) -> Any:
        @functools.wraps(original)
        def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
            p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            if p:
                self._note("scaled_dot_product_attention", float(p))
            return original(*args, **kwargs)

        return scaled_dot_product_attention

    def _note(self, name: str, p: float) -> None:
        if not torch.compiler.is_compiling():
            self.found.append((name, p, user_line(sys._getframe(2))))
