"""One database of a run: its tables and rows, checked row by row.

Damaged rows are left out and reported in ``losses``; all readable rows are returned.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from backlight import codec
from backlight.records import Finding, ParameterRecord
from backlight.series import SERIES
from backlight.store.errors import RunFormatError
from backlight.store.format import encoding
from backlight.store.format.encoding import BLOCK_VALUES, LoggedValues, decode_column
from backlight.store.format.manifest import AttemptEntry
from backlight.store.format.schema import (
    COUNTED,
    THINNED,
    TYPES,
    is_of_every_step,
    row_checksum,
    series_checksum,
)
from backlight.store.read import scalar_blocks
from backlight.store.read.snapshot import Rows, Snapshot
from backlight.text import visible

POSITION = "backwards_seen"
"""Scalar by which the steps of ranks are aligned."""

T = TypeVar("T")
Table = tuple[ParameterRecord, ...]
Steps = npt.NDArray[np.int64]
Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Logged = tuple[Steps, npt.NDArray[np.float64]]
"""Global steps and values of a scalar, in the order in which they were logged."""

Window = tuple[int, int]
"""The first global step, and the one behind the last."""

_SERIES_COLUMNS = "step, parameters, crc, floats, ints, part"
_SERIES_TYPES = (int, int, int, bytes, bytes, int)

NOTHING: Logged = np.zeros(0, np.int64), np.zeros(0)


@dataclass(frozen=True, slots=True)
class Block:
    """Stored columns of one rank or of joined ranks, over the same steps and parameters."""

    steps: Steps
    columns: Mapping[str, Array]
    measured: Mask
    any_rank: Mask | None = None

    @property
    def by_any_rank(self) -> Mask:
        """Whether any rank measured a value, ``[S, P]``."""
        return self.measured if self.any_rank is None else self.any_rank


def check_identity(path: Path, stated: Mapping[str, Any], rank: int, run_id: str, launch: str) -> None:
    """Refuse a file that states to be of another rank, or of another run and another start.

    A part of a run that was joined to it has its launch, but may have an id of its own.

    Raises
    ------
    RunFormatError
        If it is of another rank or run.
    """
    if str(stated.get("rank", rank)) != str(rank):
        raise RunFormatError(
            f"{path}: is of rank {visible(stated['rank'])}, its name says {rank}; it was left out: "
            "restore the file of this rank"
        )
    ids = {str(stated[key]) for key in ("run_id", "launch") if stated.get(key)}
    if ids and not ids & {run_id, launch}:
        raise RunFormatError(
            f"{path}: belongs to another run ({visible(min(ids))}, this one is {visible(run_id)}); it was "
            "left out: restore the file of this run"
        )


class RankFile:
    """One database of one rank of one attempt, as far as it went when it was opened.

    Rows that a living writer adds later are ignored: all answers of one reader are consistent. With
    ``keeps_rows``, the encoded rows of a series stay in memory once they are read, with ``keeps_scalars`` all
    scalars, of which ``scalar_source`` may know the older ones already.
    """

    def __init__(self, path: Path, snapshot: Snapshot, *, attempt: int, rank: int, step_offset: int) -> None:
        self.path = path
        self.inode = path.stat().st_ino
        self.attempt = attempt
        self.rank = rank
        self.step_offset = step_offset
        self.losses: dict[str, None] = {}
        self.keeps_rows = False
        self.keeps_scalars = False
        self.scalar_source: Callable[[RankFile], dict[int, Logged]] = RankFile.scalars
        self._snapshot = snapshot
        self._counted: set[str] = set()
        self._kept_rows: dict[tuple[str, int], Rows] = {}
        self._ids_and_steps: dict[tuple[str, int], tuple[Steps, Steps]] = {}
        self.last = self._last_rows()

    @functools.cached_property
    def tables(self) -> dict[int, Table]:
        """Parameter tables by id, in the order of their first use."""
        tables = {}
        for table, text in self._checked("parameter_table"):
            # Ranks that hold the same tensors have the same text: it is parsed once.
            parsed = self._parsed("parameter_table", text, table_of)
            if parsed is not None:
                tables[int(table)] = parsed
        return tables

    @functools.cached_property
    def table_names(self) -> dict[int, tuple[str, ...]]:
        """Names of the parameters of each table."""
        return {i: tuple(p.name for p in table) for i, table in self.tables.items()}

    def steps(self, series: str, part: int | None = None) -> Steps:
        """Return the global steps of a series, sorted, each once.

        Checksums cover the numbers of a row, too: where rows are not kept, they are compared with the values.
        """
        if self.keeps_rows:
            steps = [row[0] for row in self._checked_rows(series, None, 0) if part in {None, row[5]}]
        else:
            where = "" if part is None else f" AND part = {int(part)}"
            steps = [step for (step,) in self._rows("step", f"series_{series}", (int,), where)]
        return np.unique(np.array(steps, dtype=np.int64)) + self.step_offset

    def parts(self, series: str) -> list[int]:
        """Return the parts of which rows of a series were recorded, sorted."""
        return sorted({part for (part,) in self._rows("part", f"series_{series}", (int,))})

    def block(
        self,
        series: str,
        columns: Sequence[str],
        names: Sequence[str],
        part: int,
        window: Window | None = None,
        after: int = 0,
    ) -> Block:
        """Return stored columns of one part over the parameters ``names``, of rows above ``after``."""
        schema = SERIES[series]
        rows = [row for row in self._checked_rows(series, window, after) if row[5] == part]
        if any(a[0] >= b[0] for a, b in itertools.pairwise(rows)):
            # Of a step that was written twice the last row counts.
            rows = sorted({row[0]: row for row in rows}.values())
        steps_S, tables_S = (np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 1))
        S, P = len(rows), len(names)
        index = {name: i for i, name in enumerate(names)}
        out: dict[str, Array] = {
            name: np.zeros((S, P), np.int64 if name in schema.integers else np.float64)
            for name in (*columns, "measured")
        }
        for table in dict.fromkeys(tables_S.tolist()):
            rows_S = np.flatnonzero(tables_S == table)
            at_P = np.array([index[p.name] for p in self.tables[table]], dtype=np.int64)
            numel_P = np.array([p.numel for p in self.tables[table]], dtype=np.int64)
            whole = len(rows_S) == S and np.array_equal(at_P, np.arange(P))
            for name, target in out.items():
                kind, stored = ("i", schema.integers) if name in schema.integers else ("f", schema.floats)
                blobs = [rows[i][4 if kind == "i" else 3] for i in rows_S]
                at = stored.index(name)
                values = decode_column(blobs, kind, len(at_P), len(stored), at, numel_P)
                if whole:
                    out[name] = values
                else:
                    target[np.ix_(rows_S, at_P)] = values
        measured = out["measured"] != 0
        if not measured.all():
            for name in columns:
                out[name][~measured] = 0 if name in schema.integers else np.nan
        return Block(steps_S + self.step_offset, {name: out[name] for name in columns}, measured)

    def _checked_rows(self, series: str, window: Window | None, after: int) -> Rows:
        """Return step, table, checksum, floats, integers and part of the rows whose checksum is right.

        Callers ask for one column at a time, and every row holds all columns: with ``keeps_rows`` they stay.
        """
        if window is None and (series, after) in self._kept_rows:
            return self._kept_rows[series, after]
        condition, first, end = "", 0, 0
        if window is not None:
            first, end = window[0] - self.step_offset, window[1] - self.step_offset
            ids, steps = self._ids(series, after)
            inside = ids[(steps >= first) & (steps < end)]
            if not len(inside):
                return []
            condition = f" AND id BETWEEN {inside.min()} AND {inside.max()}"
        # All parts are read, so that a row whose part is damaged is missed and not passed over.
        rows = self._rows(_SERIES_COLUMNS, f"series_{series}", _SERIES_TYPES, condition, after)
        if window is not None:
            rows = [row for row in rows if first <= row[0] < end]
        checked = [row for row in rows if row[1] in self.tables and _is_series_row(row)]
        if len(checked) != len(rows):
            self._lose(f"{len(rows) - len(checked)} rows of series {series!r} are damaged and left out")
        if self.keeps_rows and window is None:
            self._kept_rows[series, after] = checked
        return checked

    def count(self, series: str, window: Window | None, after: int) -> int:
        """Return how many rows of a series, in any part, are within a window and have ids above ``after``."""
        if window is None:
            return self.last[f"series_{series}"] - after
        steps = self._ids(series, after)[1] + self.step_offset
        return int(np.count_nonzero((steps >= window[0]) & (steps < window[1])))

    def first_after(self, series: str, row: int) -> int | None:
        """Return the lowest global step of the rows of a series after ``row``, None where there are none."""
        steps = [step for (step,) in self._rows("step", f"series_{series}", (int,), after=row)]
        return min(steps) + self.step_offset if steps else None

    def _ids(self, series: str, after: int) -> tuple[Steps, Steps]:
        """Return id and local step of the rows of a series."""
        if (series, after) not in self._ids_and_steps:
            rows = self._rows("id, step", f"series_{series}", (int, int), after=after)
            both = np.array(rows, dtype=np.int64).reshape(-1, 2)
            self._ids_and_steps[series, after] = both[:, 0], both[:, 1]
        return self._ids_and_steps[series, after]

    @functools.cached_property
    def scalar_names(self) -> tuple[tuple[int, str, str], ...]:
        """Id, source and name of each scalar, in the order of their first use."""
        logged = [(i, source, name) for i, source, name in self._checked("scalar_name")]
        named = list(logged)
        # Fewer values are never thinned; no other event is looked for as long.
        if self.last["scalar"] > encoding.WHOLE_STEPS and self.last_event(THINNED) is not None:
            for kind, belongs in enumerate(encoding.SOURCES, 1):
                named += [
                    (i + kind * encoding.BY_SOURCE, belongs, name)
                    for i, source, name in logged
                    if source == "backlight" and is_of_every_step(name)
                ]
        return tuple(named)

    def is_thinned_after(self, row: int) -> bool:
        """Return whether values behind the first ``row`` are thinned by now."""
        return scalar_blocks.is_thinned(self._snapshot, row)

    def scalar_ids(self, source: str, name: str) -> list[int]:
        """Return the ids of a scalar: one, or none."""
        return [i for i, of, called in self.scalar_names if (of, called) == (source, name)]

    def scalars(self, name: int | None = None, after: int = 0) -> dict[int, Logged]:
        """Return the scalars by id, of all names or of one, from the rows after ``after``."""
        logged = self._logged(after)
        order = np.argsort(logged.names, kind="stable")
        if name is not None:
            order = np.flatnonzero(logged.names == name)
        names, steps, values = (column[order] for column in logged)
        cuts = np.flatnonzero(np.diff(names)) + 1
        parts = zip(*(np.split(column, cuts) for column in (names, steps, values)), strict=True)
        return {int(ids[0]): (steps + self.step_offset, values) for ids, steps, values in parts if len(ids)}

    def _logged(self, after: int = 0) -> LoggedValues:
        """Return the sound values of all scalars after the first ``after``, in the order of logging."""
        last = self.last["scalar"]
        if last <= after:
            return LoggedValues.of([])
        logged, missing = scalar_blocks.read(self._snapshot, last, after)
        if missing:
            self._lose(f"{missing} of {last} values of table scalar are damaged and left out")
        return logged

    def scalar(self, source: str, name: str) -> Logged:
        """Return one scalar; of a step that was logged twice the last value counts."""
        ids = self.scalar_ids(source, name)
        return latest(
            [(self._all_scalars if self.keeps_scalars else self.scalars(i)).get(i, NOTHING) for i in ids]
        )

    def last_scalar(self, source: str, name: str) -> float | None:
        """Return the value of a scalar that was logged last, without reading the others; None without one."""
        for identifier in self.scalar_ids(source, name):
            at = np.flatnonzero(self._last_block.names == identifier)
            if len(at):
                return float(self._last_block.values[at[-1]])
            if logged := self._last_scalars.get(identifier) or self.scalars(identifier).get(identifier):
                return float(logged[1][-1])
        return None

    @functools.cached_property
    def _last_block(self) -> LoggedValues:
        return scalar_blocks.read_last(self._snapshot, self.last["scalar"])

    @functools.cached_property
    def _last_scalars(self) -> dict[int, Logged]:
        return self.scalars(after=max(0, self.last["scalar"] - BLOCK_VALUES))

    @functools.cached_property
    def _all_scalars(self) -> dict[int, Logged]:
        return self.scalar_source(self)

    @functools.cached_property
    def positions(self) -> dict[int, float]:
        """Backward passes since watching began, by global step: the steps of ranks are aligned by them."""
        steps, values = self.scalar("backlight", POSITION)
        return dict(zip(steps.tolist(), values.tolist(), strict=True))

    @functools.cached_property
    def event_rows(self) -> Rows:
        """Local step, time, kind and JSON of the events."""
        return [row[1:] for row in self._checked("event")]

    def events(self, kind: str | None = None) -> list[tuple[int | None, float, str, dict[str, Any]]]:
        """Return global step, time, kind and payload of the events, in the order of writing."""
        out = []
        for step, when, what, text in self.event_rows:
            payload = self._parsed("event", text, _mapping) if kind in {None, what} else None
            if payload is not None:
                out.append((None if step is None else step + self.step_offset, when, what, payload))
        return out

    def last_event(self, kind: str) -> dict[str, Any] | None:
        """Return the payload of the last event of a kind, without reading the others; None without one."""
        select = "SELECT * FROM event WHERE kind = ? AND id <= ? ORDER BY id DESC LIMIT 1"
        types = TYPES["event"].values()
        with contextlib.suppress(RunFormatError):
            for row in self._snapshot.rows(select, (kind, self.last["event"])):
                if all(map(isinstance, row, types)) and row[-1] == row_checksum("event", row[:-1]):
                    return self._parsed("event", row[4], _mapping)
        return None

    def findings(self) -> list[Finding]:
        """Return the stored findings, in the order of writing."""
        parsed = [self._parsed("finding", text, _finding) for (text,) in self.finding_rows]
        return [finding for finding in parsed if finding is not None]

    @functools.cached_property
    def finding_rows(self) -> Rows:
        """JSON of the findings."""
        return [row[2:] for row in self._checked("finding")]

    @functools.cached_property
    def last_step(self) -> int:
        """Highest global step of any series or scalar, -1 where there is none."""
        found = [self._last_step_of(table) for table in ("scalar", *(f"series_{name}" for name in SERIES))]
        return max(found) + self.step_offset if max(found) >= 0 else -1

    def _last_step_of(self, table: str) -> int:
        """Return the highest local step of a table, -1 where it has none."""
        if not self.last[table]:
            return -1
        highest = scalar_blocks.highest(self._snapshot, table, "step")
        if highest >= 0 and self._is_sound(table, highest):
            return highest
        if table == "scalar":
            return int(self._logged().steps.max(initial=-1))
        steps = [row[0] for row in self._checked_rows(table.removeprefix("series_"), None, 0)]
        return max(steps, default=-1)

    def _is_sound(self, table: str, step: int) -> bool:
        """Return whether a row of a step has the right checksum, without reading the others."""
        if table == "scalar":
            return scalar_blocks.has_sound(self._snapshot, step)
        try:
            rows = self._snapshot.rows(f"SELECT {_SERIES_COLUMNS} FROM {table} WHERE step = {step} LIMIT 1")
        except RunFormatError:
            return False
        return all(map(_is_series_row, rows))

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

    def _rows(
        self, columns: str, table: str, types: Sequence[Any], condition: str = "", after: int = 0
    ) -> Rows:
        """Return the readable rows above ``after`` with the expected types: SQLite enforces none.

        ``condition`` further selects. Ids have no gaps: what is not found at all is missing, too.
        """
        last = self.last[table]
        if last <= after:
            return []
        above = f" AND id > {int(after)}" if after else ""
        rows, lost = self._snapshot.salvage(f"SELECT {columns} FROM {table} WHERE 1{above}{condition}", last)
        good = [row for row in rows if all(map(isinstance, row, types))]
        if condition:
            lost += len(rows) - len(good)
            self._lose_gaps(table)
        else:
            lost = last - after - len(good)
        if lost:
            self._lose(f"{lost} of {last} rows of table {table} are damaged and left out")
        return good

    def _lose_gaps(self, table: str) -> None:
        """Report the ids that a table lacks, once: a changed id ends the search of SQLite too early."""
        if table in self._counted:
            return
        self._counted.add(table)
        last = self.last[table]
        with contextlib.suppress(RunFormatError):  # what cannot be read is reported where it is read
            ((found,),) = self._snapshot.rows(f"SELECT count(*) FROM {table} WHERE id <= {last}")
            if found != last:
                self._lose(f"{last - found} of {last} rows of table {table} are damaged and left out")

    def _checked(self, table: str) -> Rows:
        """Return the rows of a table without blobs whose checksum is right."""
        rows = self._rows("*", table, [*TYPES[table].values()])
        checked = [row[:-1] for row in rows if row[-1] == row_checksum(table, row[:-1])]
        if len(checked) != len(rows):
            self._lose(f"{len(rows) - len(checked)} rows of table {table} were changed and are left out")
        return checked

    def _parsed(self, table: str, text: str, parse: Callable[[str], T]) -> T | None:
        try:
            return parse(text)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._lose(f"a row of table {table} is damaged: {type(error).__name__}: {error}")
            return None

    def _lose(self, what: str) -> None:
        self.losses[f"{self.path}: {what}"] = None


def open_rank_file(path: Path, rank: int, entry: AttemptEntry, run_id: str, **how: bool) -> RankFile:
    """Open a database of an attempt; ``how`` is as for a snapshot. Raises as :func:`check_identity`."""
    snapshot = Snapshot(path, **how)
    check_identity(path, snapshot.meta, rank, run_id, entry.launch)
    return RankFile(path, snapshot, attempt=entry.index, rank=rank, step_offset=entry.step_offset)


def latest(logged: Sequence[Logged]) -> Logged:
    """Concatenate scalars; of a step that occurs several times the last value counts, and steps ascend."""
    if not logged:
        return NOTHING
    steps, values = (np.concatenate(parts) for parts in zip(*logged, strict=True))
    if (np.diff(steps) <= 0).any():
        steps, at = np.unique(steps[::-1], return_index=True)
        values = values[::-1][at]
    return steps, values


def _is_series_row(row: tuple[Any, ...]) -> bool:
    """Return whether a row of a series has the right types and checksum."""
    return all(map(isinstance, row, _SERIES_TYPES)) and row[2] == series_checksum(
        row[5], row[0], row[1], row[3], row[4]
    )


@functools.lru_cache(maxsize=64)
def table_of(text: str) -> Table:
    """Return the records of a parameter table; raise ValueError where it is none."""
    table = codec.convert(codec.decode(text), tuple[ParameterRecord, ...], "ParameterRecord")
    for p in table:
        if not 0 <= p.numel < 2**63:
            raise ValueError(f"parameter {p.name!r} has {p.numel} scalars")
    if len({p.name for p in table}) != len(table):
        raise ValueError("a name occurs twice")
    return table


def _mapping(text: str) -> dict[str, Any]:
    return dict(codec.decode(text))


def _finding(text: str) -> Finding:
    return codec.convert(codec.decode(text), Finding)
