"""Blocks of pinned memory for small copies: to allocate such memory is slow, and may wait."""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK_BYTES = 8 * 2**20
"""Size of the block: hundreds of recorded steps of a model with a hundred parameters on their way at once."""

UPLOAD_BYTES = 2**20
"""Size of the block for copies to a device: tables of a hundred addresses take 4 KiB."""

ALIGNMENT = 64


class PinnedBlock:
    """Lends parts of one block, which is allocated at the first use.

    A part is lent again when its tensor, and every array that reads it, is gone. Where none is left, or a
    table is too large, memory of its own is allocated.
    """

    def __init__(self, size: int = BLOCK_BYTES) -> None:
        self._size = size
        self.reset()

    def reset(self) -> None:
        """Begin anew, in a forked child."""
        self._lock = threading.Lock()
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._free: list[tuple[int, int]] = []  # begin and end, in order
        self._returned: deque[tuple[int, int]] = deque()  # by whichever thread drops a tensor

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a pinned tensor on the host; its values are arbitrary."""
        nbytes = -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        with self._lock:
            part = self._find(nbytes) if 0 < nbytes <= self._size else None
            if part is None:
                return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
            # What shares the memory of a tensor, as an array that reads it, holds the array below.
            lent = self._bytes[part[0] : part[0] + math.prod(shape) * dtype.itemsize]
        weakref.finalize(lent, self._returned.append, part).atexit = False
        return torch.from_numpy(lent).view(dtype).view(tuple(shape))

    def _find(self, nbytes: int) -> tuple[int, int] | None:
        if not len(self._bytes):
            self._bytes = torch.empty(self._size, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
            self._free = [(0, self._size)]
        if self._returned:
            self._merge()
        for number, (begin, end) in enumerate(self._free):
            if end - begin >= nbytes:
                self._free[number : number + 1] = [(begin + nbytes, end)] if end - begin > nbytes else []
                return begin, begin + nbytes
        return None

    def _merge(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for begin, end in sorted(self._free):
            if merged and merged[-1][1] == begin:
                merged[-1] = merged[-1][0], end
            else:
                merged.append((begin, end))
        self._free = merged


PINNED = PinnedBlock()
"""The block of this process for copies to the host. A part may be lent again while a copy that nothing reads
any more still writes to it: the copies of a stream come in order."""

UPLOADS = PinnedBlock(UPLOAD_BYTES)
"""That for copies to a device, whose memory the host writes at once: no late copy may write to it."""

os.register_at_fork(after_in_child=PINNED.reset)
os.register_at_fork(after_in_child=UPLOADS.reset)
