"""What one rank recorded in one attempt: its tables, rows and documents, read with care."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.records import Finding, Fingerprint, ParameterRecord
from backlight.store import blobs, documents
from backlight.store.attempt import document_name
from backlight.store.database import COUNTED
from backlight.store.errors import RunFormatError
from backlight.store.schema import SERIES
from backlight.store.snapshot import Snapshot

Table = tuple[ParameterRecord, ...]


class RankFile:
    """The database of one rank of one attempt, as far as it went when it was opened.

    Rows that a living writer adds later are not seen: all that one reader says belongs together.
    """

    def __init__(self, path: Path, *, attempt: int, rank: int, step_offset: int, live: bool) -> None:
        self.path = path
        self.attempt = attempt
        self.rank = rank
        self.step_offset = step_offset
        self._snapshot = Snapshot(path, live=live)
        union = " UNION ALL ".join(f"SELECT '{name}', max(id) FROM {name}" for name in COUNTED)
        self.last = {name: int(last or 0) for name, last in self._snapshot.rows(union)}
        self._tables: dict[int, Table] | None = None

    def tables(self) -> dict[int, Table]:
        """Return the parameter tables by id, in the order in which they came up."""
        if self._tables is None:
            rows = self._snapshot.rows(
                "SELECT id, json FROM parameter_table WHERE id <= ? ORDER BY id",
                (self.last["parameter_table"],),
            )
            try:
                self._tables = {
                    int(table): tuple(ParameterRecord.from_json(row) for row in json.loads(text))
                    for table, text in rows
                }
            except (ValueError, TypeError, KeyError) as error:
                raise RunFormatError(f"{self.path}: a parameter table is damaged: {error}") from error
        return self._tables

    def steps(self, series: str, part: int | None = None) -> npt.NDArray[np.int64]:
        """Return the global steps of a series, sorted, each once."""
        condition, values = ("", ()) if part is None else (" AND part = ?", (part,))
        rows = self._snapshot.rows(
            f"SELECT DISTINCT step FROM series_{series} WHERE id <= ?{condition} ORDER BY step",
            (self.last[f"series_{series}"], *values),
        )
        return np.array([step for (step,) in rows], dtype=np.int64) + self.step_offset

    def columns(
        self, series: str, names: Sequence[str], part: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], dict[str, npt.NDArray[Any]]]:
        """Return steps ``[S]``, table ids ``[S]`` and for each table id and column its values.

        The last mapping is keyed ``"<table>/<column>"`` with values ``[rows of that table, P]``.
        """
        schema = SERIES[series]
        rows = self._snapshot.rows(
            f"SELECT step, parameters, floats, ints FROM series_{series} WHERE part = ? AND id <= ?"
            " ORDER BY id",
            (part, self.last[f"series_{series}"]),
        )
        # A step that was written twice counts as written last.
        last = {row[0]: i for i, row in enumerate(rows)}
        if len(last) != len(rows) or any(a[0] >= b[0] for a, b in zip(rows, rows[1:], strict=False)):
            rows = [rows[last[step]] for step in sorted(last)]
        steps = np.array([row[0] for row in rows], dtype=np.int64) + self.step_offset
        ids = np.array([row[1] for row in rows], dtype=np.int64)
        out: dict[str, npt.NDArray[Any]] = {}
        tables = self.tables()
        for table in dict.fromkeys(ids.tolist()):
            if table not in tables:
                msg = f"{self.path}: rows of series {series!r} name parameter table {table}, which is missing"
                raise RunFormatError(msg)
            numel = np.array([p.numel for p in tables[table]], dtype=np.int64)
            mine = [row for row in rows if row[1] == table]
            P, floats, integers = len(numel), schema.floats, schema.integers
            for name in names:
                if name in integers:
                    ints = [row[3] for row in mine]
                    found = blobs.decode_integers(ints, P, len(integers), integers.index(name), numel)
                    out[f"{table}/{name}"] = found
                else:
                    data = [row[2] for row in mine]
                    out[f"{table}/{name}"] = blobs.decode_floats(data, P, len(floats), floats.index(name))
        return steps, ids, out

    def scalar_names(self) -> list[tuple[int, str, str]]:
        """Return id, source and name of each scalar."""
        sql = "SELECT id, source, name FROM scalar_name WHERE id <= ? ORDER BY id"
        return [(int(i), str(s), str(n)) for i, s, n in self._snapshot.rows(sql, (self.last["scalar_name"],))]

    def scalar(self, identifier: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the global steps and values of a scalar in the order in which they were logged."""
        rows = self._snapshot.rows(
            "SELECT step, value FROM scalar WHERE name = ? AND id <= ? ORDER BY id",
            (identifier, self.last["scalar"]),
        )
        steps = np.array([row[0] for row in rows], dtype=np.int64) + self.step_offset
        values = np.array([np.nan if row[1] is None else row[1] for row in rows], dtype=np.float64)
        return steps, values

    def events(self, kind: str | None) -> list[tuple[int | None, float, str, dict[str, Any]]]:
        """Return global step, time, kind and payload of the events, in the order of writing."""
        sql = "SELECT step, time, kind, payload FROM event WHERE id <= ? AND (?2 IS NULL OR kind = ?2) ORDER BY id"
        out = []
        for step, when, what, payload in self._snapshot.rows(
            sql.replace("?,", "?1,").replace("<= ?", "<= ?1"), (self.last["event"], kind)
        ):
            out.append((None if step is None else step + self.step_offset, when, what, json.loads(payload)))
        return out

    def findings(self) -> list[Finding]:
        """Return the findings that were stored, in the order of writing."""
        rows = self._snapshot.rows(
            "SELECT json FROM finding WHERE id <= ? ORDER BY id", (self.last["finding"],)
        )
        return [Finding.from_json(json.loads(text)) for (text,) in rows]

    def fingerprint(self) -> Fingerprint | None:
        """Return the fingerprint of this rank, or None where none was stored."""
        path = self.path.with_name(document_name(self.rank))
        if not path.exists():
            return None
        data = documents.read_document(path).get("fingerprint")
        return None if data is None else Fingerprint.from_json(data)

    def last_step(self) -> int:
        """Return the highest global step of any series or scalar, -1 where there is none."""
        union = " UNION ALL ".join(
            f"SELECT max(step) FROM {name}" for name in ("scalar", *(f"series_{s}" for s in SERIES))
        )
        steps = [row[0] for row in self._snapshot.rows(union) if row[0] is not None]
        return max(steps) + self.step_offset if steps else -1
