"""Digests of what collectives gave this rank, and of what it sent to or got from another one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from backlight.capture.hooks import is_transforming
from backlight.devices import is_capturing_graph
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.instrument.tensor_digests import digests_and_norms
from backlight.monitors.correctness.model.digests import norms_of
from backlight.monitors.correctness.model.transfers import TRANSFER

if TYPE_CHECKING:
    from backlight.capture.transfers import Transfer
    from backlight.monitor import RunContext
    from backlight.monitors.correctness.instrument.check import Schedule

CHANNEL_CALLS = 16
"""Transfers of one channel that are read at one step."""

STEP_CALLS = 48
"""Transfers of all channels that are read at one step."""

EXACT = ("gloo",) if torch.version.hip else ("gloo", "nccl")
"""Backends that compute each sum once: others may round on each rank, as RCCL, which has the name of NCCL."""


class TransferDigests(Check):
    """``replicas_differ``: the first transfers of observed steps, where there are several ranks.

    Ranks are compared by the rule: no collective is needed.
    """

    def __init__(self, run: RunContext, schedule: Schedule) -> None:
        super().__init__(run, schedule)
        self._step = -1
        self._calls: Counter[str] = Counter()

    def transferred(self, transfer: Transfer) -> None:
        """Read the tensors of a transfer."""
        if self.run.world_size < 2 or not self.due or is_transforming() or is_capturing_graph():
            return
        if transfer.call == "all_reduce" and not any(one in transfer.backend for one in EXACT):
            return
        step = self.run.clock.index
        if step != self._step:
            self._step, self._calls = step, Counter()
        self._calls[transfer.channel] += 1
        if self._calls[transfer.channel] > CHANNEL_CALLS or self._calls.total() > STEP_CALLS:
            return
        tensors = [one.detach() for one in transfer.tensors if one.numel()]
        if not tensors or any(one.layout is not torch.strided for one in tensors):
            return
        if len({one.device for one in tensors}) > 1:
            return
        facts = {
            "call": transfer.call,
            "end": transfer.end,
            "channel": transfer.channel,
            "number": transfer.number,
            "form": [f"{one.numel()} {str(one.dtype).removeprefix('torch.')}" for one in tensors[:4]],
        }

        def store(known: NDArray[np.generic]) -> None:
            # Tensors that changed places count as a difference.
            order = np.arange(1, known.shape[1] + 1)
            digest = int((known[0].astype(np.int64) * order).sum())
            norm = float(np.sqrt(np.square(norms_of(known[1]).astype(np.float64)).sum()))
            self.run.notifier.event(
                TRANSFER, {**facts, "digest": f"{digest & 2**64 - 1:x}", "norm": norm}, step
            )

        self.when_known(store, digests_and_norms(tensors))
