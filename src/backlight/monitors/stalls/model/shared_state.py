"""Shared state of a rank: a page of memory from the training process to the watchdog. No torch.

The page is an array of 64-bit integers with fixed positions (:class:`Slot`). Each has one writer, and a store
of eight aligned bytes cannot be read half-written, so no lock is needed and a heartbeat is two stores. Times
are monotonic nanoseconds, which all processes of a machine share.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

from backlight.records import Phase

PAGE_BYTES = 16384

MAX_ROWS = 8192
"""Parameters of which the page holds singly whether their gradient has arrived."""

MAX_COLLECTIVES = 32
"""Latest collectives that the page holds."""

PHASES = tuple(Phase)
"""Phases by their number in the page."""

_MAGIC = 0x42_41_43_4B_4C_49_54_45
_LAYOUT = 2
_COLLECTIVE_SLOTS = 10
_COLLECTIVES_AT = 128  # in slots
_TEXTS_AT, _TEXT_BYTES = 4096, 96
_NODE_AT, _NODE_BYTES = 3840, 128
_ROWS_AT = PAGE_BYTES - MAX_ROWS


class Slot(enum.IntEnum):
    """Positions in the page, in units of eight bytes."""

    MAGIC = 0
    LAYOUT = 1
    PID = 2
    RANK = 3
    WORLD_SIZE = 4
    STATUS = 5
    MAIN_IDENT = 6
    MAIN_TID = 7
    HEARTBEAT = 8
    PROGRESS = 9
    PHASE = 10
    PHASE_SINCE = 11
    STEP = 12
    BACKWARDS = 13
    NODES_TOTAL = 14
    NODES_DONE = 15
    POSITION_HOOKS = 16
    ROW = 17
    REACHED = 18
    EXPECTED = 19
    NODE_SINCE = 20
    NODE_CALLS = 21
    BACKWARD_IDENT = 22
    COLLECTIVES = 23
    INSIDE = 24
    SAMPLER = 25
    DEVICE = 26
    DISTRIBUTED = 27
    TIMEOUT = 28
    BATCHES = 29
    FORWARDS = 30
    RAISED = 31
    ROWS = 32
    TYPICAL = 40  # one per phase


class RankStatus(enum.IntEnum):
    """Status of a rank as it reports it itself."""

    OPENING = 0
    RUNNING = 1
    FINISHED = 2
    FAILED = 3


@dataclass(frozen=True)
class Collective:
    """One collective call of a rank.

    ``number`` counts the calls of one group, ``left`` is 0 while the call runs, ``failed`` if it raised.
    ``group``, ``kind`` and ``shape`` are checksums of texts that are the same on every rank; ``text`` is for
    people.
    """

    group: int
    number: int
    kind: int
    shape: int
    entered: int
    left: int
    text: str
    asynchronous: bool = False
    failed: bool = False

    @property
    def inside(self) -> bool:
        """Whether the call has not returned."""
        return self.left == 0


@dataclass(frozen=True)
class StateSnapshot:
    """The shared state of a rank at one moment; times are monotonic nanoseconds.

    Attributes
    ----------
    heartbeat, progress:
        Time of the last sign of progress, and number of all so far.
    nodes_total, nodes_done, position_hooks:
        Autograd nodes of this backward pass, how many are done, and how many report their position.
    row, reached, expected, arrived:
        Row of the parameter whose gradient arrived last (-1: none), number of gradients that have arrived and
        of those expected, and a byte per row, 1 where it has arrived.
    node, node_since, node_calls:
        Custom function at work, since when (0: none), and number of calls in this backward pass.
    inside:
        Whether a blocking collective runs.
    sampler:
        Time at which the sampler thread last ran, 0 if never.
    timeout_s:
        Stall timeout of the user, None to derive it from the run.
    typical:
        Moving mean of the duration of each phase, in seconds.
    raised:
        Backward passes that ended with an exception.
    """

    taken: int
    pid: int
    rank: int
    world_size: int
    status: RankStatus
    main_ident: int
    main_tid: int
    heartbeat: int
    progress: int
    phase: Phase
    phase_since: int
    step: int
    backwards: int
    nodes_total: int
    nodes_done: int
    position_hooks: int
    row: int
    reached: int
    expected: int
    node: str
    node_since: int
    node_calls: int
    backward_ident: int
    inside: bool
    sampler: int
    device: bool
    distributed: bool
    timeout_s: float | None
    forwards: int
    typical: dict[Phase, float]
    collectives: tuple[Collective, ...] = ()
    raised: int = 0
    arrived: bytes = field(default=b"", repr=False)

    @property
    def silence_s(self) -> float:
        """Seconds since the last heartbeat."""
        return max(self.taken - self.heartbeat, 0) / 1e9

    @property
    def phase_s(self) -> float:
        """Seconds since the phase began."""
        return max(self.taken - self.phase_since, 0) / 1e9

    @property
    def sampler_silence_s(self) -> float:
        """Seconds since the sampler thread last ran, infinite if it never did."""
        return (self.taken - self.sampler) / 1e9 if self.sampler else float("inf")

    @property
    def working_ident(self) -> int:
        """Python ident of the thread in which the phase runs."""
        in_backward = self.phase is Phase.BACKWARD and self.backward_ident
        return self.backward_ident if in_backward else self.main_ident

    @property
    def is_closed(self) -> bool:
        """Whether the rank has reported its end."""
        return self.status in {RankStatus.FINISHED, RankStatus.FAILED}

    @property
    def current_call(self) -> Collective | None:
        """The newest blocking collective that has not returned, None where there is none."""
        waiting = [c for c in self.collectives if c.inside and not c.asynchronous]
        return waiting[-1] if waiting else None


class SharedState:
    """The writing end; ``slots`` is the array itself, for writers on the step's path."""

    def __init__(self, path: Path) -> None:
        """Create the page.

        Raises
        ------
        OSError
            If the file exists or the memory is full: the page is reserved here, because a store into a page
            that cannot be allocated would kill the process.
        """
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)
            self._map = mmap.mmap(descriptor, PAGE_BYTES)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self.slots = memoryview(self._map).cast("q")
        self.rows = memoryview(self._map)[_ROWS_AT:]

    def open(
        self, *, rank: int, world_size: int, main_ident: int, main_tid: int, timeout_s: float | None
    ) -> None:
        """Write the identity of the rank; from now on it is watched."""
        slots, now = self.slots, time.monotonic_ns()
        slots[Slot.PID], slots[Slot.RANK], slots[Slot.WORLD_SIZE] = os.getpid(), rank, world_size
        slots[Slot.MAIN_IDENT], slots[Slot.MAIN_TID] = main_ident, main_tid
        slots[Slot.TIMEOUT] = 0 if timeout_s is None else int(timeout_s * 1e9)
        slots[Slot.PHASE] = PHASES.index(Phase.OTHER)
        slots[Slot.HEARTBEAT] = slots[Slot.PHASE_SINCE] = now
        slots[Slot.STATUS] = RankStatus.RUNNING
        slots[Slot.LAYOUT], slots[Slot.MAGIC] = _LAYOUT, _MAGIC

    def write_node(self, name: bytes) -> None:
        """Write the name of the custom function at work."""
        self._map[_NODE_AT : _NODE_AT + _NODE_BYTES] = name[: _NODE_BYTES - 1].ljust(_NODE_BYTES, b"\0")

    def enter_collective(
        self, group: int, number: int, kind: int, shape: int, text: bytes, *, blocking: bool
    ) -> int:
        """Record the begin of a collective; return its index, for :meth:`leave_collective`."""
        slots = self.slots
        count = slots[Slot.COLLECTIVES]
        index = count % MAX_COLLECTIVES
        at = _COLLECTIVES_AT + index * _COLLECTIVE_SLOTS
        now = time.monotonic_ns()
        slots[at + 6] = -1  # invalid while the record is being written
        slots[at], slots[at + 1], slots[at + 2], slots[at + 3] = group, number, kind, shape
        slots[at + 4], slots[at + 5], slots[at + 7], slots[at + 8] = now, 0, 0 if blocking else 1, 0
        begin = _TEXTS_AT + index * _TEXT_BYTES
        self._map[begin : begin + _TEXT_BYTES] = text[: _TEXT_BYTES - 1].ljust(_TEXT_BYTES, b"\0")
        slots[at + 6] = count
        slots[Slot.COLLECTIVES] = count + 1
        if blocking:
            slots[Slot.INSIDE] += 1
        slots[Slot.PROGRESS] += 1
        slots[Slot.HEARTBEAT] = now
        return index

    def leave_collective(self, index: int, *, blocking: bool, failed: bool = False) -> None:
        """Record that a collective has returned, or raised."""
        slots, now = self.slots, time.monotonic_ns()
        at = _COLLECTIVES_AT + index * _COLLECTIVE_SLOTS
        slots[at + 8] = failed
        slots[at + 5] = now
        if blocking:
            slots[Slot.INSIDE] = max(slots[Slot.INSIDE] - 1, 0)
        slots[Slot.PROGRESS] += 1
        slots[Slot.HEARTBEAT] = now

    def close(self, status: RankStatus) -> None:
        """Write that watching has ended; the page stays for the reader."""
        self.slots[Slot.STATUS] = status


def read_state(path: Path, now: int | None = None) -> StateSnapshot | None:
    """Read the page of a rank; None where there is none, or it is not complete yet."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(raw) < PAGE_BYTES:
        return None
    slots = struct.unpack(f"={PAGE_BYTES // 8}q", raw[:PAGE_BYTES])
    if slots[Slot.MAGIC] != _MAGIC or slots[Slot.LAYOUT] != _LAYOUT:
        return None
    return StateSnapshot(
        taken=time.monotonic_ns() if now is None else now,
        pid=slots[Slot.PID],
        rank=slots[Slot.RANK],
        world_size=slots[Slot.WORLD_SIZE],
        status=RankStatus(slots[Slot.STATUS]),
        main_ident=slots[Slot.MAIN_IDENT],
        main_tid=slots[Slot.MAIN_TID],
        heartbeat=slots[Slot.HEARTBEAT],
        progress=slots[Slot.PROGRESS],
        phase=PHASES[slots[Slot.PHASE] % len(PHASES)],
        phase_since=slots[Slot.PHASE_SINCE],
        step=slots[Slot.STEP],
        backwards=slots[Slot.BACKWARDS],
        nodes_total=slots[Slot.NODES_TOTAL],
        nodes_done=slots[Slot.NODES_DONE],
        position_hooks=slots[Slot.POSITION_HOOKS],
        row=slots[Slot.ROW] - 1,
        reached=slots[Slot.REACHED],
        expected=slots[Slot.EXPECTED],
        node=_read_text(raw, _NODE_AT, _NODE_BYTES),
        node_since=slots[Slot.NODE_SINCE],
        node_calls=slots[Slot.NODE_CALLS],
        backward_ident=slots[Slot.BACKWARD_IDENT],
        inside=slots[Slot.INSIDE] > 0,
        sampler=slots[Slot.SAMPLER],
        device=bool(slots[Slot.DEVICE]),
        distributed=bool(slots[Slot.DISTRIBUTED]),
        timeout_s=slots[Slot.TIMEOUT] / 1e9 if slots[Slot.TIMEOUT] else None,
        forwards=slots[Slot.FORWARDS],
        typical={p: slots[Slot.TYPICAL + i] / 1e9 for i, p in enumerate(PHASES)},
        collectives=_read_collectives(raw, slots),
        raised=slots[Slot.RAISED],
        arrived=raw[_ROWS_AT : _ROWS_AT + min(slots[Slot.ROWS], MAX_ROWS)],
    )


def _read_collectives(raw: bytes, slots: tuple[int, ...]) -> tuple[Collective, ...]:
    count = slots[Slot.COLLECTIVES]
    found = []
    for number in range(max(count - MAX_COLLECTIVES, 0), count):
        index = number % MAX_COLLECTIVES
        at = _COLLECTIVES_AT + index * _COLLECTIVE_SLOTS
        if slots[at + 6] != number:
            continue  # overwritten while it was read
        text = _read_text(raw, _TEXTS_AT + index * _TEXT_BYTES, _TEXT_BYTES)
        group, number_in_group, kind, shape, entered, left = slots[at : at + 6]
        flags = bool(slots[at + 7]), bool(slots[at + 8])
        found.append(Collective(group, number_in_group, kind, shape, entered, left, text, *flags))
    return tuple(found)


def _read_text(raw: bytes, at: int, size: int) -> str:
    return raw[at : at + size].split(b"\0", 1)[0].decode("utf-8", "replace")
