"""Who writes a file, so precisely that a later reader can tell a running process from a dead one.

A process id alone is reused. Together with the boot of the machine, the process namespace and the
start time of the process it is not.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process for good: ``start`` is in clock ticks since boot, empty strings where unknown."""

    pid: int
    host: str
    boot: str
    namespace: str
    start: str

    @classmethod
    def of_this_process(cls) -> Self:
        """Return the identity of the calling process."""
        pid = os.getpid()
        return cls(pid, socket.gethostname(), _boot(), _namespace(), _start(pid))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what :func:`backlight.records.to_json` wrote; what is missing stays unknown."""
        pid = data.get("pid", 0)
        texts = {key: str(data.get(key, "")) for key in ("host", "boot", "namespace", "start")}
        return cls(pid=pid if isinstance(pid, int) else 0, **texts)

    def alive(self) -> bool | None:
        """Tell whether the process lives: None where that cannot be known from here.

        It can be known on the same host, and where the boot is known for certain: another boot of
        the same host means that the process is gone.
        """
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
    """Return field 22 of /proc/PID/stat, empty where there is none or the process is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return ""
    # The command name stands in parentheses and may itself hold spaces and parentheses.
    fields = stat[stat.rfind(b")") + 1 :].split()
    if len(fields) < 20 or fields[0] in {b"Z", b"X"}:
        return ""
    return fields[19].decode("ascii")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
