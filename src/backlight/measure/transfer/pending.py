"""Results that may still be on their way from a device to the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = tuple[NDArray[np.float64], NDArray[np.int64]]
"""float64 ``[P, F]`` and int64 ``[P, I]``: a row per tensor, a column per number."""


@dataclass(frozen=True)
class Flight:
    """A table on its way to the host.

    ``done`` was recorded behind the copy and is None where the values were on the host from the
    beginning. ``source`` keeps the memory on the device alive until then.
    """

    host: Tensor
    done: torch.Event | None = None
    source: Tensor | None = None

    def landed(self) -> bool:
        """Tell, without waiting, whether the host may read."""
        return self.done is None or bool(self.done.query())

    def read(self) -> NDArray[np.generic]:
        """Wait for this copy alone, and return what it brought."""
        if self.done is not None:
            self.done.synchronize()
        array: NDArray[np.generic] = self.host.numpy()
        return array


def send(table: Tensor) -> Flight:
    """Start the copy of a small table to the host and return at once.

    On an accelerator the copy goes into pinned memory, behind the work of the current stream.
    """
    if table.device.type == "cpu":
        return Flight(table)
    pinned = table.device.type == "cuda"
    host = torch.empty(table.shape, dtype=table.dtype, device="cpu", pin_memory=pinned)
    host.copy_(table, non_blocking=pinned)
    if not pinned:
        return Flight(host)
    done = torch.Event(table.device)
    done.record(torch.accelerator.current_stream(table.device))
    return Flight(host, done, table)


class Arriving(Protocol):
    """Something on its way to the host: a :class:`Flight`, or a seat in a shared one."""

    def landed(self) -> bool:
        """Tell, without waiting, whether the host may read."""

    def read(self) -> NDArray[np.generic]:
        """Wait for it alone, and return what it brought."""


class Pending:
    """Numbers per tensor, possibly in flight; nothing waits until :meth:`arrays` is called.

    Parameters
    ----------
    flights
        What the host still has to receive.
    finish
        Turns what the flights brought, in their order, into the two arrays. It runs once, in the thread
        that asks first.
    """

    def __init__(
        self, flights: Sequence[Arriving], finish: Callable[[list[NDArray[np.generic]]], Arrays]
    ) -> None:
        self._flights = tuple(flights)
        self._finish: Callable[[list[NDArray[np.generic]]], Arrays] | None = finish
        self._arrays: Arrays | None = None
        self._lock = threading.Lock()

    def ready(self) -> bool:
        """Tell, without waiting, whether :meth:`arrays` would return at once."""
        return all(flight.landed() for flight in self._flights)

    def arrays(self) -> Arrays:
        """Return float64 ``[P, F]`` and int64 ``[P, I]``, after waiting for this result's own copies only.

        Rows of tensors that were not measured hold zeros, ``measured`` included.
        """
        with self._lock:
            if self._arrays is None:
                assert self._finish is not None
                self._arrays = self._finish([flight.read() for flight in self._flights])
                self._flights, self._finish = (), None
            return self._arrays
