"""Allocation log of a few training steps, and the account of their memory. No torch.

A storage is counted once, however many tensors are views of it. Events are ordered and carry no time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

Integers = npt.NDArray[np.int64]

MAX_CURVE_POINTS = 2000
"""Points of a reduced curve."""


class Kind(enum.StrEnum):
    """What a storage is used for; every storage has exactly one kind."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    INPUTS = "inputs"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"
    HELD = "held"
    """Allocated before the first recorded step and none of the others: copies of weights, caches."""


@dataclass(slots=True)
class Storage:
    """One storage: its bytes, and where it was allocated."""

    nbytes: int
    kind: Kind
    module: str
    phase: str
    operation: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class StorageLog:
    """Allocations and frees in order.

    ``events`` hold ``index + 1`` of a storage for its allocation, and the negative for its free; ``phases``
    hold the position in ``events`` at which a phase began, with its name.
    """

    storages: list[Storage] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)

    def allocate(self, storage: Storage) -> int:
        """Append an allocation and return the index of the storage."""
        self.storages.append(storage)
        self.events.append(len(self.storages))
        return len(self.storages) - 1

    def free(self, index: int) -> None:
        """Append a free."""
        self.events.append(-index - 1)

    def sizes(self, granule: int = 1) -> Integers:
        """Return the bytes of each storage, int64 [storages], rounded up to a multiple of ``granule``."""
        sizes = np.array([storage.nbytes for storage in self.storages], dtype=np.int64)
        return -(-sizes // granule) * granule

    def curve(self, granule: int = 1) -> Integers:
        """Return the live bytes after each event, int64 [events].

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
        row_of = np.array([rows[storage.kind] for storage in self.storages], dtype=np.int64)
        parts = np.zeros((len(rows), len(changes)), dtype=np.int64)
        if len(changes):
            parts[row_of[np.abs(np.array(self.events)) - 1], np.arange(len(changes))] = changes
        return np.cumsum(parts, axis=1)

    def _changes(self, granule: int) -> Integers:
        events = np.array(self.events, dtype=np.int64)
        if not len(events):
            return events
        signed: Integers = np.sign(events) * self.sizes(granule)[np.abs(events) - 1]
        return signed

    def peak(self, granule: int = 1, start: int = 0) -> tuple[int, int]:
        """Return the position of the first peak at or after event ``start``, and its bytes."""
        curve = self.curve(granule)[start:]
        if not len(curve):
            raise ValueError(f"no memory was recorded from event {start} on")
        position = int(np.argmax(curve))
        return start + position, int(curve[position])

    def live(self, position: int) -> list[int]:
        """Return the indices of the storages that are live after the event at ``position``."""
        events = np.array(self.events[: position + 1], dtype=np.int64)
        live = np.zeros(len(self.storages), dtype=bool)
        live[events[events > 0] - 1] = True
        live[-events[events < 0] - 1] = False
        return np.flatnonzero(live).tolist()

    def phase_at(self, position: int) -> str:
        """Return the phase during the event at ``position``."""
        return next((name for begin, name in reversed(self.phases) if begin <= position), "")

    def by_kind(self, position: int, granule: int = 1) -> dict[Kind, int]:
        """Return live bytes by kind, every kind listed."""
        sizes, found = self.sizes(granule), dict.fromkeys(Kind, 0)
        for index in self.live(position):
            found[self.storages[index].kind] += int(sizes[index])
        return found

    def by_module(self, position: int, granule: int = 1) -> dict[str, dict[Kind, int]]:
        """Return live bytes by module and kind, each storage under the innermost module that allocated it."""
        sizes = self.sizes(granule)
        found: dict[str, dict[Kind, int]] = {}
        for index in self.live(position):
            storage = self.storages[index]
            kinds = found.setdefault(storage.module, {})
            kinds[storage.kind] = kinds.get(storage.kind, 0) + int(sizes[index])
        return found


class Record(BaseModel):
    """Base of the records: immutable, and no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class ModuleMemory(Record):
    """Bytes of a module at the peak: its own, those by kind, and inclusive of the modules inside it."""

    name: str
    own: int
    inclusive: int
    kinds: dict[Kind, int]


class TensorGroup(Record):
    """Storages at the peak that have kind, module, operation, shape and dtype in common."""

    kind: Kind
    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Account:
    """Memory of steps, from event ``start`` of a log on; sizes are rounded up to ``granule`` bytes."""

    log: StorageLog
    start: int = 0
    granule: int = 1

    @cached_property
    def curve(self) -> Integers:
        """Live bytes after each event of the steps, int64 [events]."""
        return self.log.curve(self.granule)[self.start :]

    @cached_property
    def position(self) -> int:
        """Index in the log of the event at which the peak is reached."""
        return self.log.peak(self.granule, self.start)[0]

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return int(self.curve[self.position - self.start])

    @property
    def between_steps(self) -> int:
        """Bytes before the steps: what stays allocated between them."""
        return int(self.log.curve(self.granule)[self.start - 1]) if self.start else 0

    def kinds(self) -> dict[Kind, int]:
        """Return the bytes at the peak by kind, every kind listed."""
        return self.log.by_kind(self.position, self.granule)

    def phase_peaks(self) -> dict[str, int]:
        """Return the highest point of each phase of the steps."""
        found: dict[str, int] = {}
        borders = [*self.log.phases, (len(self.log.events), "")]
        for (begin, name), (end, _) in pairwise(borders):
            part = self.curve[max(0, begin - self.start) : max(0, end - self.start)]
            if len(part):
                found[name] = max(found.get(name, 0), int(part.max()))
        return found

    def modules(self) -> list[ModuleMemory]:
        """Return the modules that hold memory at the peak, the largest own first."""
        own = self.log.by_module(self.position, self.granule)
        inclusive: dict[str, int] = {}
        for name, kinds in own.items():
            total, above = sum(kinds.values()), name
            while True:
                inclusive[above] = inclusive.get(above, 0) + total
                if not above:
                    break
                above = above.rpartition(".")[0]
        modules = [
            ModuleMemory(name=name, own=sum(kinds.values()), inclusive=total, kinds=kinds)
            for name, total in inclusive.items()
            for kinds in (own.get(name, {}),)
        ]
        return sorted(modules, key=lambda module: (-module.own, module.name))

    def largest(self, count: int) -> list[TensorGroup]:
        """Return the largest live tensors at the peak, equal ones grouped."""
        groups: dict[tuple[Kind, str, str, tuple[int, ...], str], list[int]] = {}
        for index in self.log.live(self.position):
            s = self.log.storages[index]
            groups.setdefault((s.kind, s.module, s.operation, s.shape, s.dtype), []).append(index)
        sizes = self.log.sizes(self.granule)
        found = [
            TensorGroup(
                kind=kind, module=module, operation=operation, shape=shape, dtype=dtype,
                count=len(ids), bytes=int(sizes[ids].sum()),
            )
            for (kind, module, operation, shape, dtype), ids in groups.items()
        ]  # fmt: skip
        return sorted(found, key=lambda group: -group.bytes)[:count]

    def new_gradients(self) -> int:
        """Return the bytes of the gradients that the steps allocate; DDP's buckets take as much."""
        allocated = {event - 1 for event in self.log.events[self.start :] if event > 0}
        return sum(
            s.nbytes for i, s in enumerate(self.log.storages) if i in allocated and s.kind is Kind.GRADIENTS
        )

    def curve_by_kind(self, points: int = MAX_CURVE_POINTS) -> tuple[Integers, Integers]:
        """Return positions [P] within the steps, and bytes [K, P] by kind, in the order of :class:`Kind`.

        With more events than ``points``, each range of events is represented by its highest.
        """
        rows = self.log.curves(self.granule)[:, self.start :]
        total = self.curve
        if len(total) <= points:
            return np.arange(len(total), dtype=np.int64), rows
        edges = np.linspace(0, len(total), points + 1).astype(np.int64)
        highest = np.array(
            [int(a + np.argmax(total[a:b])) for a, b in pairwise(edges) if b > a], dtype=np.int64
        )
        return highest, rows[:, highest]
