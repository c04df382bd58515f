"""Asynchronous copies of small tables from a device to the host, one per device and step.

A table that leaves a device on its own costs a launch and an event. A :class:`TransferBatch` collects the
tables of a step and copies them together when the step ends; :class:`PendingArrays` reads them later, from
any thread.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight import devices

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


Arrays = tuple[NDArray[np.float64], NDArray[np.int64]]
"""float64 ``[P, F]`` and int64 ``[P, I]``: a row per tensor, a column per number."""


class Transfer(Protocol):
    """A table on its way to the host: an :class:`AsyncCopy`, a :class:`Slot` of a shared one, or there."""

    def done(self) -> bool:
        """Return whether the host may read, without waiting."""

    def read(self) -> NDArray[np.generic]:
        """Wait for this copy only, and return the table."""


@dataclass(frozen=True)
class AsyncCopy:
    """A copy to the host, and the event behind it: None where the values were on the host from the start."""

    host: Tensor
    event: torch.Event | None = None
    source: Tensor | None = None  # keeps the memory on the device alive until the copy is done

    def done(self) -> bool:
        """Return whether the host may read, without waiting."""
        return self.event is None or devices.GATE.is_done(self.event)

    def read(self) -> NDArray[np.generic]:
        """Wait for this copy only, and return the table."""
        if self.event is not None:
            devices.GATE.wait(self.event)
        array: NDArray[np.generic] = self.host.numpy()
        return array


@dataclass(frozen=True)
class HostParts:
    """Parts of a table of float64 that are on the host already; they are joined when it is read."""

    parts: list[Tensor]

    def done(self) -> bool:
        """Return True."""
        return True

    def read(self) -> NDArray[np.generic]:
        """Return the table."""
        return np.concatenate([np.empty(0), *map(Tensor.numpy, self.parts)])


def start_copy(table: Tensor) -> AsyncCopy:
    """Start the copy of a small table to the host, into pinned memory where possible, and return at once."""
    if table.device.type == "cpu":
        return AsyncCopy(table)
    if not devices.has_async_copies(table.device):
        return AsyncCopy(table.cpu())
    host = PINNED.take(table.shape, table.dtype)
    host.copy_(table, non_blocking=True)
    return AsyncCopy(host, devices.record_event(table.device), table)


def first_number(value: Tensor) -> Tensor:
    """Return the first number of a tensor, its real part, as float ``[1]`` on the same device."""
    value = value.detach().reshape(-1)[:1]
    return (value.real if value.is_complex() else value).to(devices.widest_float(value.device))


@dataclass
class Slot:
    """The part of one table in the shared copy of its device."""

    batch: TransferBatch
    device: torch.device
    begin: int
    count: int
    dtype: torch.dtype

    def done(self) -> bool:
        """Return whether the host may read, without waiting."""
        copy = self.batch.copies.get(self.device)
        return copy is not None and copy.done()

    def read(self) -> NDArray[np.generic]:
        """Wait for the copy only, and return this table; start the copy if that has not happened."""
        if self.device not in self.batch.copies:
            self.batch.start()
        words = self.batch.copies[self.device].read()[self.begin : self.begin + self.count]
        return words.view(np.float64) if self.dtype is torch.float64 else words


class TransferBatch:
    """Collects the tables of a step, of float64 or int64; ``copies`` are those started, by device."""

    def __init__(self) -> None:
        self.copies: dict[torch.device, AsyncCopy] = {}
        self._enqueued: dict[torch.device, list[Tensor]] = {}
        self._length: dict[torch.device, int] = {}

    def add(self, table: Tensor) -> Transfer:
        """Enqueue a table. One on the host, or one that comes after :meth:`start`, is copied on its own."""
        if _travels_alone(table) or table.device in self.copies:
            return start_copy(table)
        begin = self._length.get(table.device, 0)
        self._enqueued.setdefault(table.device, []).append(table.reshape(-1).view(torch.int64))
        self._length[table.device] = begin + table.numel()
        return Slot(self, table.device, begin, table.numel(), table.dtype)

    def start(self) -> None:
        """Start one copy per device, behind the work of its current stream."""
        for device, tables in self._enqueued.items():
            self.copies[device] = start_copy(torch.cat(tables))
        self._enqueued.clear()


def _travels_alone(table: Tensor) -> bool:
    return table.device.type == "cpu" or table.dtype not in {torch.float64, torch.int64}


class PendingArrays:
    """Numbers per tensor that may still be on their way; nothing waits until :meth:`arrays` is called.

    ``finish`` turns the received tables, in order, into the two arrays: once, in the first thread that asks.
    """

    def __init__(
        self, transfers: Sequence[Transfer], finish: Callable[[list[NDArray[np.generic]]], Arrays]
    ) -> None:
        self._transfers = tuple(transfers)
        self._finish: Callable[[list[NDArray[np.generic]]], Arrays] | None = finish
        self._arrays: Arrays | None = None
        self._lock = threading.Lock()

    def ready(self) -> bool:
        """Return whether :meth:`arrays` would return at once."""
        return all([transfer.done() for transfer in self._transfers])

    def arrays(self) -> Arrays:
        """Return float64 ``[P, F]`` and int64 ``[P, I]``, after waiting for this result's own copies only.

        Rows of tensors that were not measured hold zeros, also in the column ``measured``.
        """
        with self._lock:
            if self._arrays is None:
                assert self._finish is not None
                self._arrays = self._finish([transfer.read() for transfer in self._transfers])
                self._transfers, self._finish = (), None  # releases the memory on the device
            return self._arrays
