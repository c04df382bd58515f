"""One database of a run: its tables and rows, checked row by row.

Damaged rows are left out and reported in ``losses``; all readable rows are returned.
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
from backlight.store.format.schema import COUNTED, SERIES
from backlight.store.read.snapshot import Rows, Snapshot

POSITION = "backwards_seen"
"""Scalar by which the steps of ranks are aligned."""

T = TypeVar("T")
Table = tuple[ParameterRecord, ...]
Steps = npt.NDArray[np.int64]
Logged = tuple[Steps, npt.NDArray[np.float64]]
"""Global steps and values of a scalar, in the order in which they were logged."""


@dataclass(slots=True)
class Columns:
    """Columns of a series as stored: ``tables[s]`` is the id of the parameter table of row s.

    ``values[(table, column)]`` is ``[rows with that table, P]``, in the order of ``steps``.
    """

    steps: Steps
    tables: npt.NDArray[np.int64]
    values: dict[tuple[int, str], npt.NDArray[Any]] = field(default_factory=dict)


class RankFile:
    """One database of one rank of one attempt, as far as it went when it was opened.

    Rows that a living writer adds later are ignored: all answers of one reader are consistent. With
    ``keeps_rows``, the encoded rows of a series stay in memory once they are read, with ``keeps_scalars`` all
    scalars; ``scalar_cache`` is asked for a scalar before the file is.
    """

    def __init__(self, path: Path, snapshot: Snapshot, *, attempt: int, rank: int, step_offset: int) -> None:
        self.path = path
        self.attempt = attempt
        self.rank = rank
        self.step_offset = step_offset
        self.losses: dict[str, None] = {}
        self.keeps_rows = False
        self.keeps_scalars = False
        self.scalar_cache: Callable[[RankFile, int], Logged | None] | None = None
        self._snapshot = snapshot
        self._kept_rows: dict[tuple[str, int], Rows] = {}
        self._ids_and_steps: dict[str, tuple[npt.NDArray[np.int64], Steps]] = {}
        self.last = self._last_rows()

    @functools.cached_property
    def tables(self) -> dict[int, Table]:
        """Parameter tables by id, in the order of their first use."""
        tables = {}
        for table, text in self._rows("id, json", "parameter_table", (int, str)):
            # Ranks that hold the same tensors have the same text: it is parsed once.
            parsed = self._parsed("parameter_table", text, _table_of)
            if parsed is not None:
                tables[int(table)] = parsed
        return tables

    def steps(self, series: str, part: int | None = None) -> Steps:
        """Return the global steps of a series, sorted, each once."""
        where = "" if part is None else f" AND part = {int(part)}"
        rows = self._rows("step", f"series_{series}", (int,), where)
        return np.unique(np.array([step for (step,) in rows], dtype=np.int64)) + self.step_offset

    def columns(
        self,
        series: str,
        names: Sequence[str],
        part: int,
        window: tuple[int, int] | None = None,
        after: int = 0,
    ) -> Columns:
        """Return the named stored columns of a series at every step of one part.

        ``window`` keeps the global steps from its first to before its second one; ``after`` keeps the rows
        with higher ids.
        """
        schema = SERIES[series]
        sizes = {
            table: np.array([p.numel for p in records], dtype=np.int64)
            for table, records in self.tables.items()
        }
        good = [row for row in self._checked_rows(series, window, after) if row[5] == part]
        if any(a[0] >= b[0] for a, b in itertools.pairwise(good)):
            # Of a step that was written twice the last row counts.
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
                    out.values[table, name] = column_codec.decode_integers(
                        [row[4] for row in mine], P, len(integers), integers.index(name), sizes[table]
                    )
                else:
                    out.values[table, name] = column_codec.decode_floats(
                        [row[3] for row in mine], P, len(floats), floats.index(name)
                    )
        return out

    def _checked_rows(self, series: str, window: tuple[int, int] | None, after: int) -> Rows:
        """Return step, table, checksum, floats, integers and part of the rows whose checksum is right.

        Callers ask for one column at a time, and every row holds all columns: with ``keeps_rows`` they stay.
        """
        if window is None and (series, after) in self._kept_rows:
            return self._kept_rows[series, after]
        condition, first, end = f" AND id > {int(after)}" if after else "", 0, 0
        if window is not None:
            first, end = window[0] - self.step_offset, window[1] - self.step_offset
            ids, steps = self._ids(series)
            inside = ids[(steps >= first) & (steps < end)]
            if not len(inside):
                return []
            condition += f" AND id BETWEEN {inside.min()} AND {inside.max()}"
        # All parts are read, so that a row whose part is damaged is missed and not passed over.
        columns, types = "step, parameters, crc, floats, ints, part", (int, int, int, bytes, bytes, int)
        rows = self._rows(columns, f"series_{series}", types, condition)
        if window is not None:
            rows = [row for row in rows if first <= row[0] < end]
        checked = [
            row
            for row in rows
            if row[1] in self.tables
            and row[2] == column_codec.checksum(row[5], row[0], row[1], row[3], row[4])
        ]
        if len(checked) != len(rows):
            self._lose(f"{len(rows) - len(checked)} rows of series {series!r} are damaged and left out")
        if self.keeps_rows and window is None:
            self._kept_rows[series, after] = checked
        return checked

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

    def _ids(self, series: str) -> tuple[npt.NDArray[np.int64], Steps]:
        """Return id and local step of the rows of a series."""
        if series not in self._ids_and_steps:
            rows = self._rows("id, step", f"series_{series}", (int, int))
            both = np.array(rows, dtype=np.int64).reshape(-1, 2)
            self._ids_and_steps[series] = both[:, 0], both[:, 1]
        return self._ids_and_steps[series]

    @functools.cached_property
    def scalar_names(self) -> tuple[tuple[int, str, str], ...]:
        """Id, source and name of each scalar, in the order of their first use."""
        rows = self._rows("id, source, name", "scalar_name", (int, str, str))
        return tuple((i, source, name) for i, source, name in rows)

    def scalar_ids(self, source: str, name: str) -> list[int]:
        """Return the ids of a scalar: one, or none."""
        return [i for i, of, called in self.scalar_names if (of, called) == (source, name)]

    def scalars(self, name: int | None = None, after: int = 0) -> dict[int, Logged]:
        """Return the scalars by id, of all names or of one, from the rows after ``after``."""
        condition = " AND 1" if name is None else f" AND name = {int(name)}"
        condition += f" AND id > {int(after)}" if after else ""
        rows = self._rows("name, step, value", "scalar", (int, int, (float, NoneType)), condition)
        by_name: dict[int, list[tuple[int, float | None]]] = {}
        for identifier, step, value in rows:
            by_name.setdefault(identifier, []).append((step, value))
        return {
            identifier: (
                np.array([step for step, _ in logged], dtype=np.int64) + self.step_offset,
                np.array([np.nan if value is None else value for _, value in logged], dtype=np.float64),
            )
            for identifier, logged in by_name.items()
        }

    def scalar(self, identifier: int) -> Logged:
        """Return one scalar."""
        found = None if self.scalar_cache is None else self.scalar_cache(self, identifier)
        if found is None:
            found = (self._all_scalars if self.keeps_scalars else self.scalars(identifier)).get(identifier)
        return (np.zeros(0, np.int64), np.zeros(0)) if found is None else found

    @functools.cached_property
    def _all_scalars(self) -> dict[int, Logged]:
        return self.scalars()

    @functools.cached_property
    def positions(self) -> dict[int, float]:
        """Backward passes since watching began, by global step: the steps of ranks are aligned by them."""
        found: dict[int, float] = {}
        for identifier in self.scalar_ids("backlight", POSITION):
            steps, values = self.scalar(identifier)
            found |= dict(zip(steps.tolist(), values.tolist(), strict=True))
        return found

    @functools.cached_property
    def _events(self) -> Rows:
        return self._rows("step, time, kind, payload", "event", ((int, NoneType), float, str, str))

    def events(self, kind: str | None = None) -> list[tuple[int | None, float, str, dict[str, Any]]]:
        """Return global step, time, kind and payload of the events, in the order of writing."""
        out = []
        for step, when, what, text in self._events:
            payload = self._parsed("event", text, _mapping) if kind in {None, what} else None
            if payload is not None:
                out.append((None if step is None else step + self.step_offset, when, what, payload))
        return out

    def findings(self) -> list[Finding]:
        """Return the stored findings, in the order of writing."""
        rows = self._rows("json", "finding", (str,))
        parsed = [self._parsed("finding", text, _finding) for (text,) in rows]
        return [finding for finding in parsed if finding is not None]

    @functools.cached_property
    def last_step(self) -> int:
        """Highest global step of any series or scalar, -1 where there is none."""
        steps: list[int] = []
        for table in ("scalar", *(f"series_{name}" for name in SERIES)):
            if not self.last[table]:
                continue
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
            found: dict[str, Any] = dict(self._snapshot.rows(" UNION ALL ".join(selects.values())))
        except RunFormatError:
            found = {}
            for name, select in selects.items():
                try:
                    found |= dict(self._snapshot.rows(select))
                except RunFormatError as error:
                    self._lose(f"table {name} is not readable: {error}")
        return {n: last if isinstance(last := found.get(n), int) and last > 0 else 0 for n in COUNTED}

    def _rows(self, columns: str, table: str, types: Sequence[Any], condition: str = "") -> Rows:
        """Return the readable rows whose values have the expected types: SQLite enforces none."""
        last = self.last[table]
        if not last:
            return []
        rows, lost = self._snapshot.salvage(f"SELECT {columns} FROM {table} WHERE 1{condition}", last)
        good = [row for row in rows if all(map(isinstance, row, types))]
        # Ids have no gaps, so without a condition a row that is not found at all is missing, too.
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
        raise ValueError("a name occurs twice")
    return table


def _mapping(text: str) -> dict[str, Any]:
    return dict(json.loads(text))


def _finding(text: str) -> Finding:
    return Finding.from_json(json.loads(text))
