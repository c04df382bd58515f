"""The board: one shared page per rank, written by the training and read by the sidecar. No torch.

The page is an array of 64-bit integers at fixed places. Each has one writer; a store of eight aligned
bytes cannot be read half-written, so no lock is needed and a beat is two stores. Times are of the
monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import dataclasses
import enum
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from backlight.records import Phase

SIZE = 16384
"""Bytes of a board."""

ROWS = 8192
"""Parameters of which the board tells singly whether their gradient has arrived."""

MAGIC = 0x42_41_43_4B_4C_49_54_45
LAYOUT = 2

PHASES = tuple(Phase)
"""Phases by their number on the board."""

RING = 32
"""Collectives that a board remembers."""

_RECORD = 10
_RING_AT = 128
_TEXT_AT = 4096
_TEXT = 96
_NODE_AT = 3840
_NODE = 128
_ROWS_AT = SIZE - ROWS


class Slot(enum.IntEnum):
    """Places on the board, in units of eight bytes."""

    MAGIC = 0
    LAYOUT = 1
    PID = 2
    RANK = 3
    WORLD = 4
    STATE = 5
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
    HOOKS = 16
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
    STALL = 28
    BATCHES = 29
    FORWARDS = 30
    RAISED = 31
    ROWS = 32
    TYPICAL = 40  # one per phase


class State(enum.IntEnum):
    """How a rank stands, as it says itself."""

    OPENING = 0
    RUNNING = 1
    FINISHED = 2
    FAILED = 3


@dataclass(frozen=True)
class Collective:
    """One collective call of a rank. ``number`` counts those of one group; ``left`` is 0 while it runs.

    ``failed``: it raised. A call that has not returned, or that raised, was waiting for somebody.

    ``group``, ``kind`` and ``shape`` are checksums of texts that are the same on every rank; ``text`` is
    for people. Times are monotonic nanoseconds.
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
    """What a board said at one moment; times are monotonic nanoseconds, ``typical`` seconds by phase.

    ``raised`` counts backwards that ended with an exception; ``arrived`` has a byte per parameter, 1 once its
    gradient has arrived in this backward.
    """

    taken: int
    pid: int
    rank: int
    world: int
    state: State
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
    hooks: int
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
    stall: float | None
    forwards: int
    typical: dict[Phase, float]
    collectives: tuple[Collective, ...] = ()
    raised: int = 0
    arrived: bytes = b""

    @property
    def silence_s(self) -> float:
        """Seconds since the last beat."""
        return max(self.taken - self.heartbeat, 0) / 1e9

    @property
    def phase_s(self) -> float:
        """Seconds since the phase began."""
        return max(self.taken - self.phase_since, 0) / 1e9

    @property
    def sampler_silence_s(self) -> float:
        """Seconds since the helper thread inside the process could run; infinite if it never did."""
        return (self.taken - self.sampler) / 1e9 if self.sampler else float("inf")

    @property
    def current_call(self) -> Collective | None:
        """The newest collective that has not returned, None where there is none."""
        waiting = [c for c in self.collectives if c.inside and not c.asynchronous]
        return waiting[-1] if waiting else None

    @property
    def percent(self) -> float | None:
        """Share of the nodes of this backward that are done, None where the position is not known."""
        if self.nodes_total <= 0 or self.nodes_done <= 0:
            return None
        return min(100.0 * self.nodes_done / self.nodes_total, 100.0)


class SharedState:
    """The writing end; ``slots`` is the array itself, for those that write on the step's path."""

    def __init__(self, path: Path) -> None:
        """Create the page.

        An OSError passes through, also where the memory is full: the page is reserved here, because a
        store into a page that cannot be had would end the process.
        """
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)
            self._map = mmap.mmap(descriptor, SIZE)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self.slots = memoryview(self._map).cast("q")
        self.rows = memoryview(self._map)[_ROWS_AT:]

    def open(self, *, rank: int, world: int, main_ident: int, main_tid: int, stall: float | None) -> None:
        """State whose board this is, and that watching begins now."""
        slots, now = self.slots, time.monotonic_ns()
        slots[Slot.PID], slots[Slot.RANK], slots[Slot.WORLD] = os.getpid(), rank, world
        slots[Slot.MAIN_IDENT], slots[Slot.MAIN_TID] = main_ident, main_tid
        slots[Slot.STALL] = 0 if stall is None else int(stall * 1e9)
        slots[Slot.PHASE] = PHASES.index(Phase.OTHER)
        slots[Slot.HEARTBEAT] = slots[Slot.PHASE_SINCE] = now
        slots[Slot.STATE] = State.RUNNING
        slots[Slot.LAYOUT], slots[Slot.MAGIC] = LAYOUT, MAGIC

    def node(self, name: bytes) -> None:
        """Write the name of the node at work."""
        self._map[_NODE_AT : _NODE_AT + _NODE] = name[: _NODE - 1].ljust(_NODE, b"\0")

    def enter(self, group: int, number: int, kind: int, shape: int, text: bytes, *, waits: bool) -> int:
        """Note that a collective is entered; return its place, for :meth:`leave`."""
        slots = self.slots
        count = slots[Slot.COLLECTIVES]
        place = count % RING
        at = _RING_AT + place * _RECORD
        now = time.monotonic_ns()
        slots[at + 6] = -1  # nobody's, while the record is being written
        slots[at], slots[at + 1], slots[at + 2], slots[at + 3] = group, number, kind, shape
        slots[at + 4], slots[at + 5], slots[at + 7], slots[at + 8] = now, 0, 0 if waits else 1, 0
        begin = _TEXT_AT + place * _TEXT
        self._map[begin : begin + _TEXT] = text[: _TEXT - 1].ljust(_TEXT, b"\0")
        slots[at + 6] = count
        slots[Slot.COLLECTIVES] = count + 1
        if waits:
            slots[Slot.INSIDE] += 1
        slots[Slot.PROGRESS] += 1
        slots[Slot.HEARTBEAT] = now
        return place

    def leave(self, place: int, *, waits: bool, failed: bool = False) -> None:
        """Note that the collective at ``place`` has returned, or raised."""
        slots, now = self.slots, time.monotonic_ns()
        slots[_RING_AT + place * _RECORD + 8] = failed
        slots[_RING_AT + place * _RECORD + 5] = now
        if waits:
            slots[Slot.INSIDE] = max(slots[Slot.INSIDE] - 1, 0)
        slots[Slot.PROGRESS] += 1
        slots[Slot.HEARTBEAT] = now

    def close(self, state: State) -> None:
        """State that watching has ended; the page stays for the reader."""
        self.slots[Slot.STATE] = state


def read_state(path: Path, now: int | None = None) -> StateSnapshot | None:
    """Read a board; None where there is none, or one that is not complete yet. An OSError passes through."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(raw) < SIZE:
        return None
    slots = struct.unpack(f"={SIZE // 8}q", raw[:SIZE])
    if slots[Slot.MAGIC] != MAGIC or slots[Slot.LAYOUT] != LAYOUT:
        return None
    return StateSnapshot(
        taken=time.monotonic_ns() if now is None else now,
        pid=slots[Slot.PID],
        rank=slots[Slot.RANK],
        world=slots[Slot.WORLD],
        state=State(slots[Slot.STATE]),
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
        hooks=slots[Slot.HOOKS],
        row=slots[Slot.ROW] - 1,
        reached=slots[Slot.REACHED],
        expected=slots[Slot.EXPECTED],
        node=_text(raw, _NODE_AT, _NODE),
        node_since=slots[Slot.NODE_SINCE],
        node_calls=slots[Slot.NODE_CALLS],
        backward_ident=slots[Slot.BACKWARD_IDENT],
        inside=slots[Slot.INSIDE] > 0,
        sampler=slots[Slot.SAMPLER],
        device=bool(slots[Slot.DEVICE]),
        distributed=bool(slots[Slot.DISTRIBUTED]),
        stall=slots[Slot.STALL] / 1e9 if slots[Slot.STALL] else None,
        forwards=slots[Slot.FORWARDS],
        typical={p: slots[Slot.TYPICAL + i] / 1e9 for i, p in enumerate(PHASES)},
        collectives=_collectives(raw, slots),
        raised=slots[Slot.RAISED],
        arrived=raw[_ROWS_AT : _ROWS_AT + min(slots[Slot.ROWS], ROWS)],
    )


def _collectives(raw: bytes, slots: tuple[int, ...]) -> tuple[Collective, ...]:
    count = slots[Slot.COLLECTIVES]
    out = []
    for index in range(max(count - RING, 0), count):
        place = index % RING
        at = _RING_AT + place * _RECORD
        if slots[at + 6] != index:
            continue  # overwritten while we read
        out.append(
            Collective(
                group=slots[at],
                number=slots[at + 1],
                kind=slots[at + 2],
                shape=slots[at + 3],
                entered=slots[at + 4],
                left=slots[at + 5],
                text=_text(raw, _TEXT_AT + place * _TEXT, _TEXT),
                asynchronous=bool(slots[at + 7]),
                failed=bool(slots[at + 8]),
            )
        )
    return tuple(out)


def _text(raw: bytes, at: int, size: int) -> str:
    return raw[at : at + size].split(b"\0", 1)[0].decode("utf-8", "replace")


def at(state: StateSnapshot, now: int) -> StateSnapshot:
    """Return the same reading as if it had been taken at ``now``."""
    return dataclasses.replace(state, taken=now)
