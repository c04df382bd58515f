"""Writing a run: buffered, thread-safe, and never in the way of the training.

One writer per process and rank. Calls on the path of a step only copy into buffers; :meth:`RunWriter.flush`,
called by a thread of the session, writes them as one transaction. A disk that fails stops the
recording, not the training: the writer keeps the reason in ``lost`` and drops what follows.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.records import Finding, Fingerprint, ParameterRecord, RunStatus, to_json
from backlight.store import blobs, database, documents
from backlight.store.attempt import (
    Entry,
    database_name,
    document_name,
    enter_as_first,
    enter_as_further,
)
from backlight.store.errors import RunExistsError, RunFormatError
from backlight.store.schema import FORMAT_VERSION, SERIES

__all__ = ["RunExistsError", "RunFormatError", "RunWriter"]

_Row = tuple[int, int, int, npt.NDArray[np.float64], npt.NDArray[np.int64]]


class RunWriter:
    """The writing end of a run folder; make one with :meth:`create`.

    Attributes
    ----------
    path, attempt, step_offset:
        The folder, the number of this attempt, and what is added to its steps for the global step.
    lost:
        Why recording stopped, or None. ``on_lost`` is called once when it is set.
    """

    def __init__(
        self,
        path: Path,
        entry: Entry,
        *,
        rank: int,
        max_disk: int | None,
        on_lost: Callable[[str], None] | None,
    ) -> None:
        self.path = path
        self.attempt = entry.attempt.index
        self.step_offset = entry.attempt.step_offset
        self.rank = rank
        self.lost: str | None = None
        self._entry = entry
        self._on_lost = on_lost
        self._max_disk = max_disk
        self._pid = os.getpid()
        self._buffers = threading.Lock()
        self._disk = threading.RLock()
        self._closed = False
        self._tables: dict[tuple[ParameterRecord, ...], int] = {}
        self._sizes: dict[int, npt.NDArray[np.int64]] = {}
        self._new_tables: list[tuple[int, str]] = []
        self._names: dict[tuple[str, str], int] = {}
        self._new_names: list[tuple[int, str, str]] = []
        self._series: dict[str, list[_Row]] = {name: [] for name in SERIES}
        self._scalars: list[tuple[int, int, float]] = []
        self._events: list[tuple[int | None, float, str, str]] = []
        self._findings: list[tuple[float, str]] = []
        self._fingerprint: Fingerprint | None = None
        self._db_path = entry.folder / database_name(rank)
        self._db = database.create(self._db_path)

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        name: str = "",
        rank: int = 0,
        world_size: int = 1,
        run_id: str | None = None,
        script: str = "",
        arguments: tuple[str, ...] = (),
        max_disk: int | None = None,
        overrides: Mapping[str, Mapping[str, float]] | None = None,
        groups: Mapping[str, str] | None = None,
        rooms: tuple[str, ...] = (),
        flush_interval: float = 1.0,
        step_offset: int | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> RunWriter:
        """Open a new run, or a new attempt of the run that is already at ``path``."""
        path = Path(path)
        if rank == 0:
            entry = enter_as_first(
                path,
                name=name,
                launch=run_id,
                world_size=world_size,
                script=script,
                arguments=tuple(arguments),
                rooms=tuple(rooms),
                groups=dict(groups or {}),
                overrides={room: dict(fields) for room, fields in (overrides or {}).items()},
                flush_interval=flush_interval,
                step_offset=step_offset,
            )
        else:
            entry = enter_as_further(path, rank=rank, launch=run_id)
        try:
            writer = cls(path, entry, rank=rank, max_disk=max_disk, on_lost=on_lost)
            writer._db.executemany(
                "INSERT INTO meta VALUES (?, ?)",
                [("format", str(FORMAT_VERSION)), ("run_id", entry.manifest.run_id), ("rank", str(rank))],
            )
            writer._write_document()
            if rank == 0:
                entry.manifest.write(path)
        except BaseException:
            entry.undo()
            raise
        return writer

    def fingerprint(self, fingerprint: Fingerprint) -> None:
        """Store the fingerprint of this rank, replacing an earlier one."""
        self._fingerprint = fingerprint
        self._write_document()

    def parameter_table(self, parameters: tuple[ParameterRecord, ...]) -> int:
        """Return the id of a table of parameters; an equal table has the same id."""
        with self._buffers:
            known = self._tables.get(parameters)
            if known is not None:
                return known
            table = len(self._tables) + 1
            self._tables[parameters] = table
            self._sizes[table] = np.array([p.numel for p in parameters], dtype=np.int64)
            self._new_tables.append((table, documents.dump(parameters)))
            return table

    def append(
        self,
        series: str,
        step: int,
        table: int,
        floats_PF: npt.NDArray[np.float64],
        ints_PI: npt.NDArray[np.int64],
        part: int = 0,
    ) -> None:
        """Buffer one recorded step of a per-parameter series."""
        schema = SERIES[series]
        P = len(self._sizes[table])
        floats = np.array(floats_PF, dtype=np.float64, copy=True)
        ints = np.array(ints_PI, dtype=np.int64, copy=True)
        if floats.shape != (P, len(schema.floats)) or ints.shape != (P, len(schema.integers)):
            msg = (
                f"series {series!r}: got floats {floats.shape} and integers {ints.shape}, expected"
                f" {(P, len(schema.floats))} and {(P, len(schema.integers))} for table {table}"
            )
            raise ValueError(msg)
        with self._buffers:
            if not self._off():
                self._series[series].append((part, int(step), table, floats, ints))

    def scalar(self, step: int, name: str, value: float, source: str = "backlight") -> None:
        """Buffer one scalar."""
        self.scalars(step, {name: value}, source)

    def scalars(self, step: int, values: Mapping[str, float], source: str = "backlight") -> None:
        """Buffer several scalars of one step."""
        with self._buffers:
            if self._off():
                return
            for name, value in values.items():
                known = self._names.get((source, name))
                if known is None:
                    known = self._names[source, name] = len(self._names) + 1
                    self._new_names.append((known, source, name))
                self._scalars.append((known, int(step), float(value)))

    def event(self, step: int | None, kind: str, payload: Mapping[str, Any]) -> None:
        """Buffer one event."""
        with self._buffers:
            if not self._off():
                self._events.append((step, time.time(), kind, documents.dump(payload)))

    def finding(self, finding: Finding) -> None:
        """Store a finding at once."""
        with self._buffers:
            if not self._off():
                self._findings.append((time.time(), documents.dump(finding)))
        self.flush()

    def flush(self) -> None:
        """Write what is buffered as one transaction."""
        if self._pid != os.getpid():
            return
        with self._disk:
            with self._buffers:
                if self._off():
                    return
                series, self._series = self._series, {name: [] for name in SERIES}
                tables, self._new_tables = self._new_tables, []
                names, self._new_names = self._new_names, []
                scalars, self._scalars = self._scalars, []
                events, self._events = self._events, []
                findings, self._findings = self._findings, []
            try:
                self._db.execute("BEGIN IMMEDIATE")
                many = self._db.executemany
                many("INSERT INTO parameter_table VALUES (?, ?)", tables)
                many("INSERT INTO scalar_name VALUES (?, ?, ?)", names)
                many("INSERT INTO scalar (name, step, value) VALUES (?, ?, ?)", scalars)
                many("INSERT INTO event (step, time, kind, payload) VALUES (?, ?, ?, ?)", events)
                many("INSERT INTO finding (time, json) VALUES (?, ?)", findings)
                for name, rows in series.items():
                    many(
                        f"INSERT INTO series_{name} (part, step, parameters, floats, ints)"
                        " VALUES (?, ?, ?, ?, ?)",
                        self._encoded(rows),
                    )
                self._db.execute("COMMIT")
            except (sqlite3.Error, OSError) as error:
                self._lose(f"{type(error).__name__}: {error}")

    def close(self, status: RunStatus = RunStatus.FINISHED) -> None:
        """Flush, state how the attempt ended, and close the files."""
        if self._pid != os.getpid():
            return
        self.flush()
        with self._disk:
            if self._closed:
                return
            self._closed = True
            attempt = self._entry.attempt
            try:
                self._db.close()
                attempt.status, attempt.ended = status, time.time()
                if self.rank == 0:
                    self._entry.manifest.write(self.path)
            except (sqlite3.Error, OSError) as error:
                self._lose(f"{type(error).__name__}: {error}")

    def _off(self) -> bool:
        return self._closed or self.lost is not None or self._pid != os.getpid()

    def _lose(self, reason: str) -> None:
        if self.lost is None:
            self.lost = reason
            if self._on_lost is not None:
                self._on_lost(reason)

    def _encoded(self, rows: list[_Row]) -> list[tuple[int, int, int, bytes, bytes]]:
        out: list[tuple[int, int, int, bytes, bytes]] = []
        first = 0
        for i in range(1, len(rows) + 1):
            if i == len(rows) or rows[i][2] != rows[first][2]:
                group = rows[first:i]
                floats = blobs.encode_floats(np.stack([row[3] for row in group]))
                ints = blobs.encode_integers(np.stack([row[4] for row in group]), self._sizes[group[0][2]])
                out += [(*row[:3], f, n) for row, f, n in zip(group, floats, ints, strict=True)]
                first = i
        return out

    def _write_document(self) -> None:
        document = {
            "kind": "backlight rank",
            "rank": self.rank,
            "process": to_json(self._entry.attempt.process),
            "fingerprint": to_json(self._fingerprint),
        }
        documents.write_atomically(
            self._entry.folder / document_name(self.rank), documents.dump(document).encode("ascii")
        )
