"""Shared state of a rank: a page of memory from the training process to the watchdog. No torch.

The page is an array of 64-bit integers with fixed positions (:class:`Slot`). Each has one writer, and a store
of eight aligned bytes cannot be read half-written, so no lock is needed and a heartbeat is two stores. Times
are monotonic nanoseconds, which all processes of a machine share.
"""

from __future__ import annotations

import dataclasses
import enum
import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backlight import clock, processes, untrusted_files
from backlight.records import Phase

PAGE_BYTES = 16384

MAX_ROWS = 8192
"""Parameters of which the page holds singly whether their gradient has arrived."""

MAX_COLLECTIVES = 32
"""Latest collectives that the page holds."""

PHASES = tuple(Phase)
"""Phases by their number in the page."""

_MAGIC = 0x42_41_43_4B_4C_49_54_45
_LAYOUT = 5

Slot = enum.IntEnum(
    "Slot",
    "MAGIC LAYOUT PID RANK WORLD_SIZE STATUS MAIN_IDENT MAIN_TID TIMEOUT DEVICE DISTRIBUTED ROWS "
    "RAISED SAMPLER COLLECTIVES INSIDE BACKWARD_IDENT NODES_TOTAL NODES_DONE POSITION_HOOKS ROW REACHED "
    "EXPECTED NODE_SINCE NODE_CALLS "
    # The board of the hub (backlight.capture.unrecorded); the last is one per phase.
    "HEARTBEAT PROGRESS PHASE PHASE_SINCE STEP FORWARDS BACKWARDS LONGEST_OTHER TYPICAL",
    start=0,
)
"""Positions in the page, in units of eight bytes."""

# A collective: its number in the page (-1 while it is being written), then the fields of `Collective`.
_CALL = struct.Struct("=9q96s")
_CALL_LEFT, _CALL_FAILED = 6, 8
_CALLS_AT = 1024
_NODE = struct.Struct("128s")
_NODE_AT = _CALLS_AT + MAX_COLLECTIVES * _CALL.size
_ROWS_AT = PAGE_BYTES - MAX_ROWS


class RankStatus(enum.IntEnum):
    """Status of a rank as it reports it itself."""

    OPENING = 0
    RUNNING = 1
    FINISHED = 2
    FAILED = 3


_STATUSES = frozenset(map(int, RankStatus))


@dataclass(frozen=True)
class Collective:
    """One collective call of a rank; ``group``, ``kind`` and ``shape`` are checksums that all ranks share."""

    group: int
    number: int  # counts the calls of one group
    kind: int
    shape: int
    entered: int
    left: int  # 0 while the call runs
    call: str  # without its number: `all_reduce(16 float32)`
    asynchronous: bool = False
    failed: bool = False
    index: int = -1  # counts all calls of the rank

    @property
    def inside(self) -> bool:
        """Whether the call has not returned."""
        return self.left == 0


@dataclass(frozen=True)
class StateSnapshot:
    """The shared state of a rank at one moment; times are monotonic nanoseconds."""

    taken: int
    pid: int
    rank: int
    world_size: int
    status: RankStatus
    main_ident: int
    main_tid: int
    heartbeat: int  # time of the last sign of progress
    progress: int
    phase: Phase
    phase_since: int
    step: int
    backwards: int
    nodes_total: (
        int  # autograd nodes of this backward pass, how many are done, how many report their position
    )
    nodes_done: int
    position_hooks: int
    row: int  # row of the parameter whose gradient arrived last, -1: none
    reached: int
    expected: int
    node: str  # custom function at work, since when (0: none), and number of calls in this backward pass
    node_since: int
    node_calls: int
    backward_ident: int
    inside: bool  # whether a blocking collective runs
    sampler: int  # time at which the sampler thread last ran, 0: never
    device: bool
    distributed: bool
    timeout_s: float | None  # of the user
    forwards: int
    typical: dict[Phase, float]  # moving mean of the duration of each phase, in seconds
    longest_other_s: float = 0.0  # longest time between phases so far
    collectives: tuple[Collective, ...] = ()
    raised: int = 0  # backward passes that ended with an exception
    arrived: bytes = field(default=b"", repr=False)  # a byte per row, 1 where the gradient has arrived

    @property
    def silence_s(self) -> float:
        """Seconds since the last heartbeat."""
        return max(self.taken - self.heartbeat, 0) / 1e9

    @property
    def phase_s(self) -> float:
        """Seconds since the phase began."""
        return max(self.taken - self.phase_since, 0) / 1e9

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
        return next((c for c in reversed(self.collectives) if c.inside and not c.asynchronous), None)


_kept: list[mmap.mmap] = []
"""Pages whose descriptor the script has closed: their end would close whatever has its number now."""


class SharedState:
    """The writing end; ``slots`` is the array itself, for writers on the step's path."""

    def __init__(self, path: Path) -> None:
        """Create the page; raise OSError where the file exists or the memory is full."""
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            # Reserved here: a store into a page that cannot be allocated would kill the process.
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)
            self._map = mmap.mmap(descriptor, PAGE_BYTES)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._file = processes.HeldFiles(path)
        self.slots = memoryview(self._map).cast("q")
        self.rows = memoryview(self._map)[_ROWS_AT:]

    def open(
        self, *, rank: int, world_size: int, main_ident: int, main_tid: int, timeout_s: float | None
    ) -> None:
        """Write the identity of the rank; from now on it is watched."""
        slots = self.slots
        slots[Slot.PID], slots[Slot.RANK], slots[Slot.WORLD_SIZE] = os.getpid(), rank, world_size
        slots[Slot.MAIN_IDENT], slots[Slot.MAIN_TID] = main_ident, main_tid
        slots[Slot.TIMEOUT] = 0 if timeout_s is None else int(timeout_s * 1e9)
        slots[Slot.PHASE] = PHASES.index(Phase.OTHER)
        slots[Slot.HEARTBEAT] = slots[Slot.PHASE_SINCE] = clock.monotonic_ns()
        slots[Slot.STATUS] = RankStatus.RUNNING
        slots[Slot.LAYOUT], slots[Slot.MAGIC] = _LAYOUT, _MAGIC

    def write_node(self, name: bytes) -> None:
        """Write the name of the custom function at work."""
        _NODE.pack_into(self._map, _NODE_AT, name)

    def enter_collective(
        self, group: int, number: int, kind: int, shape: int, text: bytes, *, blocking: bool
    ) -> int:
        """Record the begin of a collective; return its index, for :meth:`leave_collective`."""
        count, now = self.slots[Slot.COLLECTIVES], clock.monotonic_ns()
        index = count % MAX_COLLECTIVES
        at = _CALLS_AT + index * _CALL.size
        _CALL.pack_into(self._map, at, -1, group, number, kind, shape, now, 0, not blocking, False, text)
        self.slots[at // 8] = count
        self.slots[Slot.COLLECTIVES] = count + 1
        self._move(now, inside=blocking)
        return index

    def leave_collective(self, index: int, *, blocking: bool, failed: bool = False) -> None:
        """Record that a collective has returned, or raised."""
        at, now = (_CALLS_AT + index * _CALL.size) // 8, clock.monotonic_ns()
        self.slots[at + _CALL_FAILED] = failed
        self.slots[at + _CALL_LEFT] = now
        self._move(now, inside=-blocking)

    def _move(self, now: int, inside: int) -> None:
        self.slots[Slot.INSIDE] = max(self.slots[Slot.INSIDE] + inside, 0)
        self.slots[Slot.PROGRESS] += 1
        self.slots[Slot.HEARTBEAT] = now

    def close(self, status: RankStatus) -> None:
        """Write that watching has ended; the page stays for the reader."""
        self.slots[Slot.STATUS] = status
        if not self._file.release():
            _kept.append(self._map)


_PLAIN = {
    f.name: slot for f in dataclasses.fields(StateSnapshot) for slot in Slot if slot.name == f.name.upper()
}
"""Fields of a snapshot that are slots of the same name."""


def read_state(path: Path, now: int | None = None) -> StateSnapshot | None:
    """Read the page of a rank; None where there is none, or it is not complete yet, or cannot be one."""
    try:
        raw = untrusted_files.read(path, PAGE_BYTES, owners={os.geteuid()})
    except OSError:
        return None
    if len(raw) < PAGE_BYTES:
        return None
    slots = memoryview(raw[:PAGE_BYTES]).cast("q")
    if slots[Slot.MAGIC] != _MAGIC or slots[Slot.LAYOUT] != _LAYOUT:
        return None
    if (
        slots[Slot.STATUS] not in _STATUSES
        or not slots[Slot.COLLECTIVES] >= 0
        or not 0 < slots[Slot.PID] < 2**31
    ):
        return None
    values: dict[str, Any] = {name: slots[slot] for name, slot in _PLAIN.items()}
    values |= {
        "taken": clock.monotonic_ns() if now is None else now,
        "status": RankStatus(slots[Slot.STATUS]),
        "phase": PHASES[slots[Slot.PHASE] % len(PHASES)],
        "row": slots[Slot.ROW] - 1,
        "node": _text(_NODE.unpack_from(raw, _NODE_AT)[0]),
        "inside": slots[Slot.INSIDE] > 0,
        "device": bool(slots[Slot.DEVICE]),
        "distributed": bool(slots[Slot.DISTRIBUTED]),
        "timeout_s": slots[Slot.TIMEOUT] / 1e9 or None,
        "longest_other_s": slots[Slot.LONGEST_OTHER] / 1e9,
        "typical": {p: slots[Slot.TYPICAL + i] / 1e9 for i, p in enumerate(PHASES)},
        "collectives": _read_collectives(raw, slots[Slot.COLLECTIVES]),
        "arrived": raw[_ROWS_AT : _ROWS_AT + min(slots[Slot.ROWS], MAX_ROWS)],
    }
    return StateSnapshot(**values)


def _read_collectives(raw: bytes, count: int) -> tuple[Collective, ...]:
    calls = []
    for number in range(max(count - MAX_COLLECTIVES, 0), count):
        at = _CALLS_AT + number % MAX_COLLECTIVES * _CALL.size
        written, group, count_in_group, kind, shape, entered, left, *flags, text = _CALL.unpack_from(raw, at)
        if written == number:  # else it was overwritten while it was read
            call = Collective(
                group,
                count_in_group,
                kind,
                shape,
                entered,
                left,
                _text(text),
                bool(flags[0]),
                bool(flags[1]),
                number,
            )
            calls.append(call)
    return tuple(calls)


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode("utf-8", "replace")
