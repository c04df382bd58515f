"""What one rank recorded in one attempt: its tables and rows, read with care.

What is damaged is left out and said in ``losses``; what is readable is given.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from backlight.records import Finding, ParameterRecord
from backlight.store.errors import RunFormatError
from backlight.store.format import column_codec
from backlight.store.format.schema import SERIES
from backlight.store.read.snapshot import Snapshot
from backlight.store.write.batch import checksum
from backlight.store.write.database import COUNTED

Table = tuple[ParameterRecord, ...]
T = TypeVar("T")


@dataclass(slots=True)
class Columns:
    """Columns of a series as stored: ``tables[s]`` names the parameters of row s.

    ``values[(table, column)]`` is ``[rows with that table, P]``, in the order of ``steps``.
    """

    steps: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int64]
    values: dict[tuple[int, str], npt.NDArray[Any]] = field(default_factory=dict)


class RankFile:
    """One database of one rank of one attempt, as far as it went when it was opened.

    Rows that a living writer adds later are not seen: all that one reader says belongs together. With
    ``keeps``, the rows of a series stay in memory once they are read.
    """

    def __init__(self, path: Path, snapshot: Snapshot, *, attempt: int, rank: int, step_offset: int) -> None:
        self.path = path
        self.attempt = attempt
        self.rank = rank
        self.step_offset = step_offset
        self.losses: dict[str, None] = {}
        self._snapshot = snapshot
        self._tables: dict[int, Table] | None = None
        self._scalar_names: tuple[tuple[int, str, str], ...] | None = None
        self._positions: dict[str, dict[int, float]] = {}
        self._sound: dict[str, list[tuple[Any, ...]]] = {}
        self._steps: dict[str, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
        self.remembered: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]] = {}
        """Steps and values of scalars that a follower of the run has read already."""
        self.keeps = False
        self.last = self._last_rows()

    def meta(self) -> dict[str, str]:
        """Return what the file says of itself."""
        return {str(k): str(v) for k, v in self._snapshot.rows("SELECT key, value FROM meta")}

    def tables(self) -> dict[int, Table]:
        """Return the parameter tables by id, in the order in which they came up."""
        if self._tables is None:
            self._tables = {}
            for table, text in self._rows("id, json", "parameter_table", (int, str)):
                # Ranks that hold the same have the same text: it is parsed once.
                parsed = self._parsed("parameter_table", text, _table_of)
                if parsed is not None:
                    self._tables[int(table)] = parsed
        return self._tables

    def steps(self, series: str, part: int | None = None) -> npt.NDArray[np.int64]:
        """Return the global steps of a series, sorted, each once."""
        where = "" if part is None else f" AND part = {int(part)}"
        rows = self._rows("step", f"series_{series}", (int,), where)
        return np.unique(np.array([step for (step,) in rows], dtype=np.int64)) + self.step_offset

    def columns(
        self, series: str, names: Sequence[str], part: int, window: tuple[int, int] | None = None
    ) -> Columns:
        """Return the named stored columns of a series at every step of one part.

        ``window`` leaves out what lies before its first global step, and from its second one on.
        """
        schema = SERIES[series]
        sizes = {
            table: np.array([p.numel for p in records], dtype=np.int64)
            for table, records in self.tables().items()
        }
        good = [row for row in self._sound_rows(series, window) if row[5] == part]
        if any(a[0] >= b[0] for a, b in itertools.pairwise(good)):
            # A step that was written twice counts as written last.
            good = sorted({row[0]: row for row in good}.values())
        out = Columns(
            np.array([row[0] for row in good], dtype=np.int64) + self.step_offset,
            np.array([row[1] for row in good], dtype=np.int64),
        )
        for table in dict.fromkeys(out.tables.tolist()):
            mine = [row for row in good if row[1] == table]
            P, floats, integers = len(sizes[table]), schema.floats, schema.integers
            for name in names:
                if name in integers:
                    ints, place = [row[4] for row in mine], integers.index(name)
                    out.values[table, name] = column_codec.decode_integers(
                        ints, P, len(integers), place, sizes[table]
                    )
                else:
                    data, place = [row[3] for row in mine], floats.index(name)
                    out.values[table, name] = column_codec.decode_floats(data, P, len(floats), place)
        return out

    def _sound_rows(self, series: str, window: tuple[int, int] | None = None) -> list[tuple[Any, ...]]:
        """Return step, table, checksum, floats, integers and part of the rows that are what was written.

        One column is asked for at a time, and every one is in every row: where ``keeps`` is set, the rows
        stay in memory.
        """
        if window is None and series in self._sound:
            return self._sound[series]
        between, first, end = "", 0, 0
        if window is not None:
            first, end = window[0] - self.step_offset, window[1] - self.step_offset
            ids, steps = self._ids(series)
            inside = ids[(steps >= first) & (steps < end)]
            if not len(inside):
                return []
            between = f" AND id BETWEEN {inside.min()} AND {inside.max()}"
        # All parts are read, so that a row whose part is damaged is missed and not passed over.
        rows = self._rows(
            "step, parameters, crc, floats, ints, part",
            f"series_{series}",
            (int, int, int, bytes, bytes, int),
            between,
        )
        if window is not None:
            rows = [row for row in rows if first <= row[0] < end]
        tables = self.tables()
        sound = [
            row
            for row in rows
            if row[1] in tables and row[2] == checksum(row[5], row[0], row[1], row[3], row[4])
        ]
        if len(sound) != len(rows):
            self._lose(f"{len(rows) - len(sound)} rows of series {series!r} are damaged and left out")
        if self.keeps and window is None:
            self._sound[series] = sound
        return sound

    def count(self, series: str, window: tuple[int, int] | None = None) -> int:
        """Return how many rows of a series there are, in any part, or within a window of global steps."""
        if window is None:
            return self.last[f"series_{series}"]
        steps = self._ids(series)[1] + self.step_offset
        return int(np.count_nonzero((steps >= window[0]) & (steps < window[1])))

    def first_after(self, table: str, row: int, condition: str = "") -> int | None:
        """Return the lowest global step of the rows of a table after ``row``, None where there are none."""
        if self.last[table] <= row:
            return None
        steps = [step for (step,) in self._rows("step", table, (int,), f" AND id > {int(row)}{condition}")]
        return min(steps) + self.step_offset if steps else None

    def _ids(self, series: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return id and local step of the rows of a series; asked for once."""
        if series not in self._steps:
            rows = self._rows("id, step", f"series_{series}", (int, int))
            both = np.array(rows, dtype=np.int64).reshape(-1, 2)
            self._steps[series] = both[:, 0], both[:, 1]
        return self._steps[series]

    def scalar_names(self) -> Sequence[tuple[int, str, str]]:
        """Return id, source and name of each scalar, in the order of their first use; read once."""
        if self._scalar_names is None:
            rows = self._rows("id, source, name", "scalar_name", (int, str, str))
            self._scalar_names = tuple((i, source, name) for i, source, name in rows)
        return self._scalar_names

    def scalar(self, identifier: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the global steps and values of a scalar in the order in which they were logged."""
        if identifier in self.remembered:
            return self.remembered[identifier]
        rows = self._rows("step, value", "scalar", (int, (float, NoneType)), f" AND name = {int(identifier)}")
        steps = np.array([row[0] for row in rows], dtype=np.int64) + self.step_offset
        return steps, np.array([np.nan if row[1] is None else row[1] for row in rows], dtype=np.float64)

    def positions(self, name: str) -> dict[int, float]:
        """Return the values of a scalar of backlight by global step; read once."""
        if name not in self._positions:
            found: dict[int, float] = {}
            for identifier, source, called in self.scalar_names():
                if (source, called) == ("backlight", name):
                    steps, values = self.scalar(identifier)
                    found |= dict(zip(steps.tolist(), values.tolist(), strict=True))
            self._positions[name] = found
        return self._positions[name]

    def events(self, kind: str | None = None) -> list[tuple[int | None, float, str, dict[str, Any]]]:
        """Return global step, time, kind and payload of the events, in the order of writing."""
        out = []
        types = ((int, NoneType), float, str, str)
        for step, when, what, text in self._rows("step, time, kind, payload", "event", types):
            payload = self._parsed("event", text, _mapping) if kind in {None, what} else None
            if payload is not None:
                out.append((None if step is None else step + self.step_offset, when, what, payload))
        return out

    def findings(self) -> list[Finding]:
        """Return the findings that were stored, in the order of writing."""
        rows = self._rows("json", "finding", (str,))
        parsed = [self._parsed("finding", text, _finding) for (text,) in rows]
        return [finding for finding in parsed if finding is not None]

    def last_step(self) -> int:
        """Return the highest global step of any series or scalar, -1 where there is none."""
        steps: list[int] = []
        for table in ("scalar", *(f"series_{name}" for name in SERIES)):
            try:
                steps += [row[0] for row in self._snapshot.rows(f"SELECT max(step) FROM {table}")]
            except RunFormatError:
                steps += [row[0] for row in self._rows("step", table, (int,))]
        found = [step for step in steps if isinstance(step, int)]
        return max(found) + self.step_offset if found else -1

    def _last_rows(self) -> dict[str, int]:
        """Return how far each table goes, all at one moment between two flushes of a living writer."""
        selects = {name: f"SELECT '{name}', max(id) FROM {name}" for name in COUNTED}
        try:
            found = dict(self._snapshot.rows(" UNION ALL ".join(selects.values())))
        except RunFormatError:
            found = {}
            for name, select in selects.items():
                try:
                    found |= dict(self._snapshot.rows(select))
                except RunFormatError as error:
                    self._lose(f"table {name} is not readable: {error}")
        return {n: last if isinstance(last := found.get(n), int) and last > 0 else 0 for n in COUNTED}

    def _rows(
        self, columns: str, table: str, types: Sequence[Any], condition: str = ""
    ) -> list[tuple[Any, ...]]:
        """Return the rows that can be read and hold the types that they should: SQLite enforces none."""
        last = self.last[table]
        rows, lost = self._snapshot.salvage(f"SELECT {columns} FROM {table} WHERE 1{condition}", last)
        good = [row for row in rows if all(map(isinstance, row, types))]
        # Ids are given without a gap, so a row that is not found at all is known to be missing too.
        lost = lost + len(rows) - len(good) if condition else last - len(good)
        if lost:
            self._lose(f"{lost} of {last} rows of table {table} are damaged and left out")
        return good

    def _parsed(self, table: str, text: str, parse: Callable[[str], T]) -> T | None:
        try:
            return parse(text)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._lose(f"a row of table {table} is damaged: {type(error).__name__}: {error}")
            return None

    def _lose(self, what: str) -> None:
        self.losses[f"{self.path}: {what}"] = None


@functools.lru_cache(maxsize=64)
def _table_of(text: str) -> Table:
    table = tuple(ParameterRecord.from_json(row) for row in json.loads(text))
    for p in table:
        shape = (*p.placement.local_shape, *p.placement.offset)
        if not (isinstance(p.name, str) and isinstance(p.numel, int) and 0 <= p.numel < 2**63):
            raise ValueError(f"a parameter is named {p.name!r} and has {p.numel!r} scalars")
        if not all(isinstance(n, int) for n in shape):
            raise ValueError(f"the placement of parameter {p.name!r} is not in whole numbers")
    if len({p.name for p in table}) != len(table):
        raise ValueError("a name stands twice")
    return table


def _mapping(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


def _finding(text: str) -> Finding:
    return Finding.from_json(json.loads(text))
