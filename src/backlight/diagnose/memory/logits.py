"""The logits of a loss, and how many tensors of their size a step holds at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from backlight.diagnose.memory.prediction_result import Logits
from backlight.records import Phase

if TYPE_CHECKING:
    import torch

    from backlight.diagnose.memory.recorder import Recorder


class LogitsSeen:
    """Finds the largest tensor that a log-softmax reads, while a recorder is at work."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._shape: tuple[int, ...] = ()
        self._dtype = ""
        self._itemsize = 0
        self._index: int | None = None

    def see(self, tensor: torch.Tensor) -> None:
        """Look at what a log-softmax reads."""
        if not self._shape or tensor.numel() >= math.prod(self._shape):
            self._shape, self._itemsize = tuple(tensor.shape), tensor.dtype.itemsize
            self._dtype = str(tensor.dtype).removeprefix("torch.")
            self._index = self._recorder.index(tensor)

    def found(self, start: int = 0, granule: int = 1) -> Logits | None:
        """Return the logits of the steps from event ``start`` on; None if no log-softmax was seen."""
        if not self._shape:
            return None
        ledger = self._recorder.ledger
        elements = math.prod(self._shape)
        module = ledger.storages[self._index].module if self._index is not None else ""
        # Made by the same module, or outside of all modules once the forward is over.
        alike = {
            index
            for index, storage in enumerate(ledger.storages)
            if math.prod(storage.shape) == elements
            and (storage.module == module or not storage.module)
            and storage.phase in {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD}
        }
        live = most = count = copies = 0
        for event in ledger.events[start:]:
            index = abs(event) - 1
            if index in alike:
                size = -(-ledger.storages[index].nbytes // granule) * granule
                live, count = (live + size, count + 1) if event > 0 else (live - size, count - 1)
                most, copies = max(most, live), max(copies, count - 1)
        return Logits(
            self._shape, self._dtype, elements * self._itemsize, copies, most, elements * (self._itemsize + 4)
        )
