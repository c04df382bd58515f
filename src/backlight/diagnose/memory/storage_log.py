"""Allocation log of a few training steps, and the account of their memory. No torch.

A storage is counted once, however many tensors are views of it. Events are ordered and carry no time.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

MAX_CURVE_POINTS = 2000
"""Points of a reduced curve."""


class MemoryKind(enum.StrEnum):
    """Use of a storage; every storage has exactly one kind."""

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
    kind: MemoryKind
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

    def phase_at(self, position: int) -> str:
        """Return the phase during the event at ``position``."""
        return next((name for begin, name in reversed(self.phases) if begin <= position), "")


@dataclass(frozen=True, kw_only=True)
class ModuleMemory:
    """Bytes of a module at the peak: exclusive, those by kind, and inclusive of the modules inside it."""

    name: str
    exclusive: int
    inclusive: int
    kinds: dict[MemoryKind, int]


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Storages at the peak that have kind, module, operation, shape and dtype in common."""

    kind: MemoryKind
    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Account:
    """Memory of steps, from event ``start`` of a log on; sizes are rounded up to ``granule`` bytes.

    An allocator rounds as well: 512 for CUDA.
    """

    log: StorageLog
    start: int = 0
    granule: int = 1

    @cached_property
    def sizes(self) -> Integers:
        """Bytes of each storage, int64 [storages]."""
        sizes = np.array([storage.nbytes for storage in self.log.storages], dtype=np.int64)
        return -(-sizes // self.granule) * self.granule

    @cached_property
    def _whole_curve(self) -> Integers:
        events = np.array(self.log.events, dtype=np.int64)
        return np.cumsum(np.sign(events) * self.sizes[np.abs(events) - 1]) if len(events) else events

    @property
    def curve(self) -> Integers:
        """Live bytes after each event of the steps, int64 [events]."""
        return self._whole_curve[self.start :]

    @cached_property
    def position(self) -> int:
        """Index in the log of the event at which the peak is first reached; ValueError without events."""
        if not len(self.curve):
            raise ValueError(f"no memory was recorded from event {self.start} on")
        return self.start + int(np.argmax(self.curve))

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return int(self._whole_curve[self.position])

    @property
    def between_steps(self) -> int:
        """Bytes before the steps: what stays allocated between them."""
        return int(self._whole_curve[self.start - 1]) if self.start else 0

    @cached_property
    def live(self) -> list[int]:
        """Indices of the storages that are live at the peak."""
        events = np.array(self.log.events[: self.position + 1], dtype=np.int64)
        is_live = np.zeros(len(self.log.storages), dtype=bool)
        is_live[events[events > 0] - 1] = True
        is_live[-events[events < 0] - 1] = False
        return np.flatnonzero(is_live).tolist()

    def kinds(self) -> dict[MemoryKind, int]:
        """Return the bytes at the peak by kind, every kind listed."""
        by_kind = dict.fromkeys(MemoryKind, 0)
        for index in self.live:
            by_kind[self.log.storages[index].kind] += int(self.sizes[index])
        return by_kind

    def phase_peaks(self) -> dict[str, int]:
        """Return the highest point of each phase of the steps."""
        peaks: dict[str, int] = {}
        borders = [*self.log.phases, (len(self.log.events), "")]
        for (begin, name), (end, _) in pairwise(borders):
            part = self.curve[max(0, begin - self.start) : max(0, end - self.start)]
            if len(part):
                peaks[name] = max(peaks.get(name, 0), int(part.max()))
        return peaks

    def modules(self) -> list[ModuleMemory]:
        """Return the modules that hold memory at the peak, the largest without those inside it first.

        A storage is held by the innermost module that allocated it.
        """
        exclusive: defaultdict[str, Counter[MemoryKind]] = defaultdict(Counter)
        inclusive: Counter[str] = Counter()
        for index in self.live:
            storage, size = self.log.storages[index], int(self.sizes[index])
            exclusive[storage.module][storage.kind] += size
            above = storage.module
            inclusive[above] += size
            while above:
                above = above.rpartition(".")[0]
                inclusive[above] += size
        modules = [
            ModuleMemory(
                name=name, exclusive=exclusive[name].total(), inclusive=total, kinds=dict(exclusive[name])
            )
            for name, total in inclusive.items()
        ]
        return sorted(modules, key=lambda module: (-module.exclusive, module.name))

    def largest(self, count: int) -> list[TensorGroup]:
        """Return the largest live tensors at the peak, equal ones grouped."""
        groups: dict[tuple[MemoryKind, str, str, tuple[int, ...], str], list[int]] = {}
        for index in self.live:
            s = self.log.storages[index]
            groups.setdefault((s.kind, s.module, s.operation, s.shape, s.dtype), []).append(index)
        tensors = [
            TensorGroup(
                kind=kind, module=module, operation=operation, shape=shape, dtype=dtype,
                count=len(ids), bytes=int(self.sizes[ids].sum()),
            )
            for (kind, module, operation, shape, dtype), ids in groups.items()
        ]  # fmt: skip
        return sorted(tensors, key=lambda group: -group.bytes)[:count]

    def new_gradients(self) -> int:
        """Return the bytes of the gradients that the steps allocate; DDP's buckets take as much."""
        new = (self.log.storages[event - 1] for event in self.log.events[self.start :] if event > 0)
        return sum(storage.nbytes for storage in new if storage.kind is MemoryKind.GRADIENTS)

    def curve_by_kind(self, points: int = MAX_CURVE_POINTS) -> tuple[Integers, Integers]:
        """Return positions [P] within the steps, and bytes [K, P] by kind, ordered as :class:`MemoryKind`.

        With more events than ``points``, each range of events is represented by its highest.
        """
        order = list(MemoryKind)
        row_of = np.array([order.index(storage.kind) for storage in self.log.storages], dtype=np.int64)
        changes = np.diff(self._whole_curve, prepend=0)
        rows = np.zeros((len(order), len(changes)), dtype=np.int64)
        if len(changes):
            rows[row_of[np.abs(np.array(self.log.events)) - 1], np.arange(len(changes))] = changes
        rows, total = np.cumsum(rows, axis=1)[:, self.start :], self.curve
        if len(total) <= points:
            return np.arange(len(total), dtype=np.int64), rows
        edges = np.linspace(0, len(total), points + 1).astype(np.int64)
        highest = np.array(
            [int(a + np.argmax(total[a:b])) for a, b in pairwise(edges) if b > a], dtype=np.int64
        )
        return highest, rows[:, highest]
