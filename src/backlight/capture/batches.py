"""Batches: how long the loop waited for a DataLoader, and which batch it got.

Only torch's own DataLoader says so; any other source of data is part of "between steps".
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from torch.utils.data import dataloader

if TYPE_CHECKING:
    from backlight.capture.hub import Hub
    from backlight.capture.patching import Patches


def install(hub: Hub, patches: Patches) -> None:
    """Report every batch of every DataLoader to the hub, where torch has the class we know."""
    base = getattr(dataloader, "_BaseDataLoaderIter", None)
    if base is None:
        return

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def __next__(self: Any) -> Any:  # noqa: N807
            if not hub.active:
                return original(self)
            hub.emit("batch_begin", id(getattr(self, "_dataset", None)))
            begin = time.perf_counter()
            try:
                item = original(self)
            except BaseException:
                hub.emit("batch_missing")
                raise
            hub.emit("batch", int(getattr(self, "_num_yielded", 0)) - 1, time.perf_counter() - begin)
            return item

        return __next__

    patches.replace(base, "__next__", wrap)
