"""Findings, events and evidence of the watchdog of one machine, in a file of its own.

The file has the tables of a rank's database, so that one reader serves both. It is created with the first
row: a run in which nothing stalls has none.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backlight import clock, codec
from backlight.records import Finding
from backlight.store.errors import RunFormatError
from backlight.store.format.arrays import write_evidence
from backlight.store.format.manifest import read_document, read_manifest, write_document
from backlight.store.format.names import attempt_folder, safe_name, storable
from backlight.store.format.schema import WATCHDOG_RANK
from backlight.store.write.database import Batch, RankDatabase

HOST_VARIABLE = "BACKLIGHT_HOST"
"""Environment variable that names this machine, where several have the same host name."""

_QUESTION = "watchdog-asked.json"


def host_name() -> str:
    """Return the name of this machine: of the environment variable, else its host name."""
    return os.environ.get(HOST_VARIABLE) or socket.gethostname()


class WatchdogWriter:
    """Writes for the watchdog of the machine ``host``; not thread-safe."""

    def __init__(self, run: Path, attempt_folder: Path, host: str = "") -> None:
        self._run = run
        self._folder = attempt_folder
        self.host = host or host_name()
        self._database: RankDatabase | None = None
        self.lost: str | None = None

    def event(self, step: int | None, kind: str, payload: Mapping[str, Any]) -> None:
        """Store an event at once; on failure ``lost`` holds the reason."""
        self._write(Batch(events=[(step, clock.unix_time(), storable(kind), codec.encode_row(payload))]))

    def finding(self, finding: Finding) -> None:
        """Store a finding at once; on failure ``lost`` holds the reason."""
        self._write(Batch(findings=[(clock.unix_time(), codec.encode_row(finding))]))

    def evidence(self, name: str, data: bytes | str) -> str:
        """Store a file that findings cite; return its path below the run directory, empty if it is lost."""
        try:
            return write_evidence(self._folder, name, data).relative_to(self._run).as_posix()
        except OSError as error:
            self.lost = str(error)
            return ""

    def ask(self, question: Mapping[str, Any]) -> None:
        """Publish a question to the watchdogs of the other machines, if the file system allows it."""
        with contextlib.suppress(OSError):
            write_document(self._folder / _QUESTION, {"host": self.host, **question})

    def asked(self) -> dict[str, Any] | None:
        """Return the newest question, None where there is none or it cannot be read."""
        try:
            return read_document(self._folder / _QUESTION)
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
                self._database = self._create()
            self._database.write(batch, {})
        except (sqlite3.Error, OSError) as error:
            self.lost = f"{type(error).__name__}: {error}"

    def _identity(self) -> dict[str, str]:
        with contextlib.suppress(RunFormatError):
            manifest = read_manifest(self._run)
            for entry in manifest.attempts:
                if attempt_folder(entry.index) == self._folder.name:
                    return {"run_id": manifest.run_id, "launch": entry.launch}
        return {}

    def _create(self) -> RankDatabase:
        host = safe_name(self.host, "host")
        number = 0
        while True:
            path = self._folder / f"watchdog-{host}{f'-{number}' if number else ''}.db"
            if not path.exists():
                return RankDatabase(path, {"rank": str(WATCHDOG_RANK), "host": host, **self._identity()})
            number += 1
