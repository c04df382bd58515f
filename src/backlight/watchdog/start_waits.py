"""Waits before the first backward: processes that do no work, and are in a wait with a name. No torch."""

from __future__ import annotations

from pathlib import Path

from backlight import clock, processes
from backlight.watchdog.shared_state import StateSnapshot
from backlight.watchdog.timeouts import StallLimits, is_preparing
from backlight.watchdog.waits import WaitCause, WaitName, cpu_s, descendants

PERIOD_S = 10.0
"""Seconds between two readings of what the processes of a rank do, at most."""

MIN_PERIOD_S = 2.0
"""The same at least: the kernel counts CPU times by hundredths of a second."""

PERIODS = 4
"""Readings in the time after which a wait is reported, at least."""

WORKING_CORES = 0.03
"""Cores in use above which the processes work; the threads of backlight use a hundredth of one."""

MOVED_BYTES = 20_000
"""Bytes per second that are read or written above which they work."""

NAMES = frozenset(
    {
        WaitName.EXTENSION_LOCK,
        WaitName.FILE_LOCK,
        WaitName.INHERITED_LOCK,
        WaitName.LOCKED_WORKER,
        WaitName.DEAD_WORKER,
        WaitName.KILLED_WORKER,
    }
)
"""Waits that are reported: other ranks, storage and people may be slow to begin."""


class StartWait:
    """Since when a rank, which has not trained yet, does no work, itself or by its descendants.

    A script that downloads, compiles or prepares its data reads, writes or computes meanwhile.
    """

    def __init__(self, limits: StallLimits) -> None:
        self._limits = limits
        self._before: tuple[float, float, int] | None = None  # time, CPU seconds and bytes
        self._idle_since = 0.0
        self._next_report = 0.0
        self._last: WaitCause | None = None

    def update(self, state: StateSnapshot) -> None:
        """Read CPU times and counters of bytes, once in a period."""
        now, timeout_s = clock.monotonic(), self._timeout_s(state)
        if not is_preparing(state) or state.is_closed:
            self._before = None
            return
        if self._before is not None and now - self._before[0] < min(
            PERIOD_S, max(timeout_s / PERIODS, MIN_PERIOD_S)
        ):
            return
        table = processes.read_process_table()
        family = descendants(state.pid, table)
        moved = _moved_by_script(state.pid) + sum(map(_moved, family - {state.pid}))
        work = now, cpu_s(family, table), moved
        before, self._before = self._before, work
        if before is not None:
            passed = max(now - before[0], 1e-3)
            used, rate = (work[1] - before[1]) / passed, (work[2] - before[2]) / passed
            # Of a process that has ended the counters are gone: that is work as well.
            if 0 <= used <= WORKING_CORES and 0 <= rate <= MOVED_BYTES:
                return
        self._idle_since, self._last = now, None
        self._next_report = now + timeout_s

    @property
    def is_due(self) -> bool:
        """Whether the processes have done nothing for so long that their wait is to be named."""
        return self._before is not None and clock.monotonic() >= self._next_report

    def confirms(self, cause: WaitCause | None, state: StateSnapshot) -> bool:
        """Return whether a wait is one to be reported, that was the same a while ago."""
        now = clock.monotonic()
        is_named = cause is not None and cause.name in NAMES and not cause.progresses
        is_same = is_named and cause == self._last
        self._last = cause if is_named else None
        # One that has no name yet is looked at less and less often.
        idle_s = now - self._idle_since
        again_s = min(PERIOD_S, 0.5 * self._timeout_s(state))
        self._next_report = now + (again_s if is_named and not is_same else idle_s)
        return is_same

    def _timeout_s(self, state: StateSnapshot) -> float:
        return state.timeout_s if state.timeout_s is not None else self._limits.floor_start


def _moved_by_script(pid: int) -> int:
    """Return what the threads of a process that are not backlight's have read and written, in bytes."""
    try:
        threads = [path for path in Path(f"/proc/{pid}/task").iterdir() if not _is_own(path)]
    except OSError:
        return 0
    return sum(_moved(pid, int(path.name)) for path in threads)


def _is_own(task: Path) -> bool:
    try:
        return (task / "comm").read_text(encoding="utf-8").startswith("backlight")
    except OSError:
        return True


def _moved(pid: int, tid: int = 0) -> int:
    """Return the bytes that a process, or one thread of it, has read and written; 0 where not known."""
    return sum(int(line.split()[1]) for line in processes.transfers(pid, tid).splitlines()[:2])
