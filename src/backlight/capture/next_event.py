"""A listener that is called once, where the hooks may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from backlight.capture.hub import Listener

if TYPE_CHECKING:
    import torch


class NextEvent(Listener):
    """Calls a function at the next event at which torch iterates over no hooks: it may remove them."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def batch_begin(self, source: int) -> None:
        """Call the function."""
        self._function()

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Call the function."""
        self._function()
