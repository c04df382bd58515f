"""Identity of a process that writes a file, by which readers distinguish a running writer from a dead one.

A process id alone is reused. Together with the boot of the machine, the process namespace and the start time
of the process it is unique.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from backlight import processes


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, uniquely; ``start`` is in clock ticks since boot, empty strings where unknown."""

    pid: Any = 0  # an int; damage reads as 0, and does not make the whole document unreadable
    host: str = ""
    boot: str = ""
    namespace: str = ""
    start: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.pid, int):
            object.__setattr__(self, "pid", 0)

    @classmethod
    def of_this_process(cls) -> Self:
        """Return the identity of the calling process."""
        pid = os.getpid()
        return cls(pid, socket.gethostname(), _boot(), _namespace(), _start(pid))

    def alive(self) -> bool | None:
        """Return whether the process lives, None where that cannot be determined from here."""
        if self.pid <= 0 or not self.host or self.host != socket.gethostname():
            return None
        boot = _boot()
        if self.boot and boot and self.boot != boot:
            return False
        if self.namespace != _namespace():
            return None
        return _exists(self.pid) and (not self.start or _start(self.pid) == self.start)


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _start(pid: int) -> str:
    """Return the start in clock ticks since boot, empty where there is no process or a zombie.

    Not a wall-clock time: setting the clock must not end a living writer for readers.
    """
    found = processes.read_process(pid)
    return "" if found is None or found.is_dead else str(found.start)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
