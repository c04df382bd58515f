"""A thread that ends the watchdog process when what it watched has ended and its main thread hangs."""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from pathlib import Path

from backlight import clock, processes
from backlight.threads import BackgroundThread
from backlight.watchdog import runtime_dir
from backlight.watchdog.shared_state import read_state

END_TIMEOUT_S = 0.7
"""Time that the watchdog may wait for anything once all ranks have ended."""

END_POLL_S = 0.25
"""Interval in which the end guard reads whether a rank that lives on has reported its end."""

_BUSY_POLL_S = 0.05


class EndGuard:
    """Ends this process when the watched ones have ended and its main thread waits for something else.

    Whatever blocks it, such as a hung file system, must not keep the user's terminal or pipe open. Time in
    which the main thread ran, or had no core to run on, does not count.
    """

    def __init__(
        self, directory: Path, starter: int, timeout_s: Callable[[], float] = lambda: END_TIMEOUT_S
    ) -> None:
        self._directory, self._starter, self._timeout_s = directory, starter, timeout_s
        self._main = os.getpid()
        self._pidfds: dict[int, int] = {}

    def start(self) -> None:
        """Start the thread."""
        BackgroundThread(self._run, "backlight-end-guard").start()

    def _run(self) -> None:
        """Wait for the end of the watched processes, then for the main thread."""
        while living := self._living():
            # The kernel reports the end of a process at once.
            select.select([one for one in living.values() if one >= 0], [], [], END_POLL_S)
        began, busy_s = clock.monotonic(), self._busy_s()
        while clock.monotonic() - began - (self._busy_s() - busy_s) < self._timeout_s():
            clock.sleep(_BUSY_POLL_S)
        os._exit(1)

    def _living(self) -> dict[int, int]:
        """Return the ranks that have neither ended nor reported so; without any, the starter if it lives.

        Each is a process with its descriptor, which is -1 where the kernel gives none.
        """
        paths = [
            runtime_dir.state_path(self._directory, rank) for rank in runtime_dir.ranks_in(self._directory)
        ]
        states = [state for path in paths if (state := read_state(path)) is not None]
        pids = [state.pid for state in states if not state.is_closed] if states else [self._starter]
        return {pid: self._pidfds.get(pid, -1) for pid in pids if self._is_alive(pid)}

    def _is_alive(self, pid: int) -> bool:
        if pid not in self._pidfds:
            try:
                self._pidfds[pid] = os.pidfd_open(pid)
            except OSError:
                return processes.is_alive(pid)
        return not select.select([self._pidfds[pid]], [], [], 0)[0]

    def _busy_s(self) -> float:
        main = next((t for t in processes.read_threads(self._main) if t.tid == self._main), None)
        return 0.0 if main is None else (main.ran_ns + main.queued_ns) / 1e9
