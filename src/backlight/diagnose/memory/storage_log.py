"""The memory of a few steps as a ledger: which storage came and went when, of what kind, in which module.

A storage is counted once, however many tensors look at it. Order is that of the events, not of a clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


class Kind(enum.StrEnum):
    """What a storage is for; every storage is of exactly one kind."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    INPUTS = "inputs"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"
    HELD = "held"
    """There before the first recorded step, and none of the others: copies of weights, caches."""


@dataclass(slots=True)
class Storage:
    """One storage: bytes, what made it, and where it was made."""

    nbytes: int
    kind: Kind
    module: str
    phase: str
    operation: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Share:
    """Bytes under one name."""

    name: str
    nbytes: int


@dataclass
class Ledger:
    """What came and went, in order; a positive event is an index that came, a negative one has gone.

    Attributes
    ----------
    storages:
        Every storage that was seen, by index.
    events:
        ``index + 1`` for a storage that came, its negative for one that went.
    phases:
        Position in ``events`` at which a phase began, with its name, in order.
    """

    storages: list[Storage] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)

    def came(self, storage: Storage) -> int:
        """Enter a storage; returns its index."""
        self.storages.append(storage)
        self.events.append(len(self.storages))
        return len(self.storages) - 1

    def went(self, index: int) -> None:
        """Enter that a storage is gone."""
        self.events.append(-index - 1)

    def curve(self, granule: int = 1) -> Integers:
        """Return the bytes that are live after each event, int64 [events].

        Parameters
        ----------
        granule:
            Sizes are rounded up to a multiple of this, as an allocator does; 512 for CUDA.
        """
        return np.cumsum(self._changes(granule))

    def curves(self, granule: int = 1) -> Integers:
        """Return :meth:`curve` by kind, int64 [kinds, events], in the order of :class:`Kind`."""
        changes = self._changes(granule)
        rows = {kind: row for row, kind in enumerate(Kind)}
        of = np.array([rows[storage.kind] for storage in self.storages], dtype=np.int64)
        parts = np.zeros((len(rows), len(changes)), dtype=np.int64)
        if len(changes):
            parts[of[np.abs(np.array(self.events)) - 1], np.arange(len(changes))] = changes
        return np.cumsum(parts, axis=1)

    def _changes(self, granule: int) -> Integers:
        events = np.array(self.events, dtype=np.int64)
        if not len(events):
            return events
        signed: Integers = np.sign(events) * self.sizes(granule)[np.abs(events) - 1]
        return signed

    def peak(self, granule: int = 1, start: int = 0) -> tuple[int, int]:
        """Return the position of the first peak at or after event ``start``, and its bytes.

        Raises
        ------
        ValueError
            If no event was recorded there.
        """
        curve = self.curve(granule)[start:]
        if not len(curve):
            raise ValueError(f"no memory was recorded from event {start} on")
        position = int(np.argmax(curve))
        return start + position, int(curve[position])

    def live(self, position: int) -> list[int]:
        """Return the indices of the storages that are live after the event at ``position``."""
        events = np.array(self.events[: position + 1], dtype=np.int64)
        gone = np.zeros(len(self.storages), dtype=bool)
        there = np.zeros(len(self.storages), dtype=bool)
        there[events[events > 0] - 1] = True
        gone[-events[events < 0] - 1] = True
        return np.flatnonzero(there & ~gone).tolist()

    def phase_at(self, position: int) -> str:
        """Return the phase during the event at ``position``."""
        name = ""
        for begin, phase in self.phases:
            if begin > position:
                break
            name = phase
        return name

    def by_kind(self, position: int, granule: int = 1) -> dict[Kind, int]:
        """Return live bytes by kind, every kind named."""
        sizes, found = self.sizes(granule), dict.fromkeys(Kind, 0)
        for index in self.live(position):
            found[self.storages[index].kind] += int(sizes[index])
        return found

    def by_module(self, position: int, granule: int = 1) -> dict[str, dict[Kind, int]]:
        """Return live bytes by module and kind, each storage under the innermost module that made it."""
        sizes = self.sizes(granule)
        found: dict[str, dict[Kind, int]] = {}
        for index in self.live(position):
            storage = self.storages[index]
            kinds = found.setdefault(storage.module, {})
            kinds[storage.kind] = kinds.get(storage.kind, 0) + int(sizes[index])
        return found

    def largest(self, position: int, count: int) -> list[Storage]:
        """Return the ``count`` largest live storages, the largest first."""
        live = [self.storages[index] for index in self.live(position)]
        return sorted(live, key=lambda storage: -storage.nbytes)[:count]

    def sizes(self, granule: int = 1) -> Integers:
        """Return the bytes of each storage, int64 [storages], rounded up to a multiple of ``granule``."""
        sizes = np.array([storage.nbytes for storage in self.storages], dtype=np.int64)
        return -(-sizes // granule) * granule
