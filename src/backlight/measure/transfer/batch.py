"""One copy per device for everything that a step has measured there.

Each small table that leaves a device on its own is a launch and an event of its own. A carrier takes
tables while the step goes on, and sends them together when it is told that the step is over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backlight.measure.transfer.pending import Flight, send


@dataclass
class Seat:
    """The place of one table in the copy of its device; read like a :class:`Flight` of its own."""

    carrier: Carrier
    device: torch.device
    begin: int
    count: int
    dtype: torch.dtype

    def landed(self) -> bool:
        """Tell, without waiting, whether the host may read."""
        flight = self.carrier.flights.get(self.device)
        return flight is not None and flight.landed()

    def read(self) -> NDArray[np.generic]:
        """Wait for the copy alone, and return this table's part; sends what has not been sent."""
        if self.device not in self.carrier.flights:
            self.carrier.send()
        words = self.carrier.flights[self.device].read()[self.begin : self.begin + self.count]
        return words.view(np.float64) if self.dtype is torch.float64 else words


class Carrier:
    """Gathers the tables of a step; each is a flat tensor of float64 or int64.

    Attributes
    ----------
    flights:
        The copies that are under way, by device.
    """

    def __init__(self) -> None:
        self.flights: dict[torch.device, Flight] = {}
        self._waiting: dict[torch.device, list[Tensor]] = {}
        self._length: dict[torch.device, int] = {}

    def take(self, table: Tensor) -> Flight | Seat:
        """Take a table along; what is on the host already, or comes too late, travels on its own."""
        if _alone(table) or table.device in self.flights:
            return send(table)
        begin = self._length.get(table.device, 0)
        self._waiting.setdefault(table.device, []).append(table.reshape(-1).view(torch.int64))
        self._length[table.device] = begin + table.numel()
        return Seat(self, table.device, begin, table.numel(), table.dtype)

    def send(self) -> None:
        """Start one copy per device, behind the work of its current stream."""
        for device, tables in self._waiting.items():
            self.flights[device] = send(torch.cat(tables))
        self._waiting.clear()


def _alone(table: Tensor) -> bool:
    return table.device.type == "cpu" or table.dtype not in {torch.float64, torch.int64}
