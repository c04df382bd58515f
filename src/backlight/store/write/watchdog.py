"""What the watchdog of one machine writes into a run: findings, events and evidence, in a file of its own.

The file has the tables of a rank's database, so that one reader serves both. It appears with the first thing
that there is to say: a run in which nothing stalls has none.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backlight.records import Finding
from backlight.store.errors import RunFormatError
from backlight.store.format.names import safe_name, storable
from backlight.store.platform import atomic_json
from backlight.store.write.batch import Batch
from backlight.store.write.database import RankDatabase
from backlight.store.write.evidence import write_evidence

RANK = -1
"""Rank under which a reader gives the watchdog's events: it belongs to none."""

_NAME = re.compile(r"watchdog-.+\.db")


_ASKED = "watchdog-asked.json"

VARIABLE = "BACKLIGHT_HOST"
"""Environment variable that names this machine, where several call themselves the same."""


def host_name() -> str:
    """Return the name of this machine, as the environment says or as it calls itself."""
    return os.environ.get(VARIABLE) or socket.gethostname()


class WatchdogWriter:
    """Writes for the watchdog of this machine; not for several threads at a time.

    Parameters
    ----------
    run, attempt_folder:
        The run directory, and the folder of the attempt inside it.
    host:
        Name of this machine, empty for what it calls itself.
    """

    def __init__(self, run: Path, attempt_folder: Path, host: str = "") -> None:
        self._run = run
        self._folder = attempt_folder
        self.host = host or host_name()
        self._database: RankDatabase | None = None
        self.lost: str | None = None

    def event(self, step: int | None, kind: str, payload: Mapping[str, Any]) -> None:
        """Store an event at once; where that fails, ``lost`` says why."""
        batch = Batch()
        batch.events.append((step, time.time(), storable(kind), atomic_json.dump(payload)))
        self._write(batch)

    def finding(self, finding: Finding) -> None:
        """Store a finding at once; where that fails, ``lost`` says why."""
        batch = Batch()
        batch.findings.append((time.time(), atomic_json.dump(finding)))
        self._write(batch)

    def evidence(self, name: str, data: bytes | str) -> str:
        """Store a file for findings to cite; return its path below the run directory.

        Empty where it is lost.
        """
        raw = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
        try:
            return write_evidence(self._folder, name, raw).relative_to(self._run).as_posix()
        except OSError as error:
            self.lost = str(error)
            return ""

    def ask(self, question: Mapping[str, Any]) -> None:
        """Ask the watchdogs of the other machines; where that fails, nobody answers."""
        with contextlib.suppress(OSError):
            text = atomic_json.dump({"host": self.host, **question})
            atomic_json.write_atomically(self._folder / _ASKED, text.encode())

    def asked(self) -> dict[str, Any] | None:
        """Return the newest question, None where there is none or it cannot be read."""
        try:
            return atomic_json.read_document(self._folder / _ASKED)
        except RunFormatError:
            return None

    def close(self) -> None:
        """Close the file."""
        if self._database is not None:
            with contextlib.suppress(sqlite3.Error, OSError):
                self._database.close()
            self._database = None

    def _write(self, batch: Batch) -> None:
        try:
            if self._database is None:
                self._database = self._opened()
            self._database.write(batch, {})
        except (sqlite3.Error, OSError) as error:
            self.lost = f"{type(error).__name__}: {error}"

    def _opened(self) -> RankDatabase:
        host = safe_name(self.host, "host")
        number = 0
        while True:
            path = self._folder / f"watchdog-{host}{f'-{number}' if number else ''}.db"
            if not path.exists():
                return RankDatabase(path, {"rank": str(RANK), "host": host})
            number += 1


def watchdog_files(attempt_folder: Path) -> list[Path]:
    """Return the watchdogs' files in the folder of an attempt, sorted."""
    return sorted(p for p in attempt_folder.iterdir() if _NAME.fullmatch(p.name))
