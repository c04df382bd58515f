"""The step before which all ranks stop together, agreed upon without a collective.

Rank 0 writes it into the store through which the ranks have formed their process group. Ranks that train in
lockstep see it in time: it lies at least two steps ahead, and no rank is ahead of rank 0 by more than one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from backlight import clock, codec
from backlight.interrupts import is_interrupt
from backlight.records import Finding

CHECK_STEPS = 8
"""Steps between two looks into the store, which may be on another machine."""

LAST_RANK_TIMEOUT_S = 30.0
"""Seconds that a rank waits for the others before it leaves: a launcher ends the rest when one has left."""

POLL_PERIOD_S = 0.1


class StopAgreement:
    """What the ranks of one process group have agreed on; without a group each rank is on its own.

    ``number`` counts the watches of a process, which all ranks enter in the same order. ``on_error`` is
    called once with what the store raises; this rank is on its own from there on.
    """

    def __init__(self, number: int, on_error: Callable[[Exception], None]) -> None:
        self._on_error = on_error
        self._store: Any = None
        self._is_broken = False
        self._key = f"backlight/stop/{number}"
        self._agreed: tuple[int, Finding] | None = None

    def propose(self, step: int, finding: Finding) -> int:
        """Return the step before which all ranks stop; on rank 0, before ``step``."""
        agreed = (step // CHECK_STEPS + 1) * CHECK_STEPS
        if agreed < step + 2:
            agreed += CHECK_STEPS
        text = json.dumps({"step": agreed, "finding": codec.plain(finding)})
        return step if self._ask("set", self._key, text) is None else agreed

    def finding_at(self, step: int) -> Finding | None:
        """Return the finding on which this rank is to stop before ``step``, None where it goes on."""
        if self._agreed is None and step % CHECK_STEPS == 0 and self._ask("check", [self._key]):
            agreed = json.loads(self._ask("get", self._key) or "null")
            if agreed is not None:
                self._agreed = agreed["step"], codec.convert(agreed["finding"], Finding)
        return self._agreed[1] if self._agreed is not None and step >= self._agreed[0] else None

    def wait_for_others(self, world_size: int) -> None:
        """Wait until all ranks have come here, up to a limit."""
        left, end = f"{self._key}/left", clock.monotonic() + LAST_RANK_TIMEOUT_S
        count = self._ask("add", left, 1)
        while count is not None and count < world_size and clock.monotonic() < end:
            clock.sleep(POLL_PERIOD_S)
            count = self._ask("add", left, 0)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the store; None where there is none, or it fails."""
        if self._is_broken:
            return None
        try:
            if self._store is None:
                if not (dist.is_available() and dist.is_initialized()):
                    return None  # the script may form its process group late
                # Private, and the only way to the store of an existing group.
                self._store = dist.distributed_c10d._get_default_store()
            found = getattr(self._store, method)(*arguments)
        except Exception as error:
            if is_interrupt(error):
                raise
            self._is_broken = True
            self._on_error(error)
            return None
        return True if found is None else found
