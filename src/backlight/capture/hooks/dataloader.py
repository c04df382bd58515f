"""Batches: how long the loop waited for a DataLoader, and which batch it got.

Only torch's own DataLoader says so; any other source of data is part of "between steps".
"""

from __future__ import annotations

import functools
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.utils.data import dataloader

if TYPE_CHECKING:
    from backlight.capture.hooks.patch import Patches
    from backlight.capture.hub import Hub


_AHEAD = "accelerate.data_loader"


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
            ahead = _fetches_ahead(sys._getframe(1))
            begin = time.perf_counter()
            try:
                item = original(self)
            except BaseException as error:
                last = int(getattr(self, "_num_yielded", 0)) - 1
                if ahead and last >= 0 and isinstance(error, StopIteration):
                    hub.emit("batch", last, time.perf_counter() - begin)  # the one that was held back
                else:
                    hub.emit("batch_missing")
                raise
            index = int(getattr(self, "_num_yielded", 0)) - 1 - ahead
            if index < 0:
                hub.emit("batch_missing")  # the loop gets none of this call
            else:
                hub.emit("batch", index, time.perf_counter() - begin)
            return item

        return __next__

    patches.replace(base, "__next__", wrap)


def _fetches_ahead(caller: FrameType) -> int:
    """Return how many batches the caller holds back: Accelerate, and so the Trainer, gives the one before."""
    return int(caller.f_code.co_name == "__iter__" and caller.f_globals.get("__name__") == _AHEAD)
