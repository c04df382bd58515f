"""One database of a run: its tables and rows, compared with their checksums.

Damaged rows are left out and reported in ``losses``; all readable rows are returned.
"""

from __future__ import annotations

import contextlib
import functools
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
from backlight.store.format import row_codec
from backlight.store.format.manifest import AttemptEntry
from backlight.store.format.row_codec import BLOCK_VALUES, LoggedValues, decode_column, decode_scalars
from backlight.store.format.schema import (
    ROWS,
    THINNED,
    TYPES,
    ScalarRow,
    SeriesRow,
    is_of_every_step,
    is_sound,
)
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
        self._kept_rows: dict[tuple[str, int], list[SeriesRow]] = {}
        self.last = self._last_rows()

    @functools.cached_property
    def tables(self) -> dict[int, Table]:
        """Parameter tables by id, in the order of their first use."""
        # Ranks that hold the same tensors have the same text: it is parsed once.
        rows = self._rows("parameter_table")
        parsed = {row.id: self._parsed("parameter_table", row.json, table_of) for row in rows}
        return {i: table for i, table in parsed.items() if table is not None}

    @functools.cached_property
    def table_names(self) -> dict[int, tuple[str, ...]]:
        """Names of the parameters of each table."""
        return {i: tuple(p.name for p in table) for i, table in self.tables.items()}

    def steps(self, series: str, part: int | None = None, after: int = 0) -> Steps:
        """Return the global steps of a series, sorted, each once, of its recorded steps behind ``after``."""
        parts = [steps for of, steps in self._parts_and_steps(series, after) if part in {None, of}]
        return np.unique(np.concatenate([NOTHING[0], *parts])) + self.step_offset

    def parts(self, series: str) -> list[int]:
        """Return the parts of which rows of a series were recorded, sorted."""
        return sorted({part for part, _ in self._parts_and_steps(series)})

    def block(
        self,
        series: str,
        columns: Sequence[str],
        names: Sequence[str],
        part: int,
        window: Window | None = None,
        after: int = 0,
    ) -> Block:
        """Return stored columns of one part over ``names``, of the recorded steps behind ``after``."""
        schema = SERIES[series]
        rows = [row for row in self._series_rows(series, window, after) if row.part == part]
        steps_S = np.concatenate([NOTHING[0], *(_steps_of(row.steps) for row in rows)]) + self.step_offset
        tables_S = np.repeat([row.parameters for row in rows], [len(row.steps) // 8 for row in rows])
        S, P = len(steps_S), len(names)
        index = {name: i for i, name in enumerate(names)}
        out: dict[str, Array] = {
            name: np.zeros((S, P), np.int64 if name in schema.integers else np.float64)
            for name in (*columns, "measured")
        }
        for table in dict.fromkeys(row.parameters for row in rows):
            rows_S = np.flatnonzero(tables_S == table)
            at_P = np.array([index[p.name] for p in self.tables[table]], dtype=np.int64)
            numel_P = np.array([p.numel for p in self.tables[table]], dtype=np.int64)
            whole = len(rows_S) == S and np.array_equal(at_P, np.arange(P))
            mine = [row for row in rows if row.parameters == table]
            for name, target in out.items():
                kind, stored = ("i", schema.integers) if name in schema.integers else ("f", schema.floats)
                blobs = ((len(row.steps) // 8, row.ints if kind == "i" else row.floats) for row in mine)
                at = stored.index(name)
                values = decode_column(blobs, kind, len(at_P), len(stored), at, numel_P)
                if whole:
                    out[name] = values
                else:
                    target[np.ix_(rows_S, at_P)] = values
        # Of a step that was written twice the last row counts.
        steps, at_S = np.unique(steps_S[::-1], return_index=True)
        at_S = S - 1 - at_S
        if window is not None:
            at_S = at_S[(steps >= window[0]) & (steps < window[1])]
        if not np.array_equal(at_S, np.arange(S)):
            steps_S, out = steps_S[at_S], {name: values[at_S] for name, values in out.items()}
        measured = out["measured"] != 0
        if not measured.all():
            for name in columns:
                out[name][~measured] = 0 if name in schema.integers else np.nan
        return Block(steps_S, {name: out[name] for name in columns}, measured)

    def _series_rows(self, series: str, window: Window | None = None, after: int = 0) -> list[SeriesRow]:
        """Return the sound rows of a series with steps in a window.

        Callers ask for one column at a time, and every row holds all columns: with ``keeps_rows`` they stay.
        """
        if window is None and (series, after) in self._kept_rows:
            return self._kept_rows[series, after]
        where = ""
        if window is not None:
            first, end = (int(step) - self.step_offset for step in window)
            where = f" AND step >= {first} AND lowest < {end}"
        rows = self._rows(
            f"series_{series}", after, where,
            lambda row: row.parameters in self.tables and len(row.steps) == 8 * (row.id - row.first + 1),
        )  # fmt: skip
        if self.keeps_rows and window is None:
            self._kept_rows[series, after] = rows
        return rows

    def _parts_and_steps(self, series: str, after: int = 0) -> list[tuple[int, Steps]]:
        """Return part and local steps of each row of a series.

        Where rows are not kept, they are read without numbers, and compared with the checksum later.
        """
        if self.keeps_rows:
            return [(row.part, _steps_of(row.steps)) for row in self._series_rows(series, None, after)]
        table = f"series_{series}"
        rows = self._snapshot.salvage(
            f"SELECT id, part, steps FROM {table} WHERE {self._within(table, after)}"
        )
        return [
            (part, _steps_of(steps)) for _, part, steps in rows
            if isinstance(part, int) and isinstance(steps, bytes) and not len(steps) % 8
        ]  # fmt: skip

    @functools.cached_property
    def scalar_names(self) -> tuple[tuple[int, str, str], ...]:
        """Id, source and name of each scalar, in the order of their first use."""
        logged = [(row.id, row.source, row.name) for row in self._rows("scalar_name")]
        named = list(logged)
        # Fewer values are never thinned.
        if self.last["scalar"] > row_codec.WHOLE_STEPS and self.last_event(THINNED) is not None:
            for kind, belongs in enumerate(row_codec.SOURCES, 1):
                named += [
                    (i + kind * row_codec.BY_SOURCE, belongs, name)
                    for i, source, name in logged
                    if source == "backlight" and is_of_every_step(name)
                ]
        return tuple(named)

    def is_thinned_after(self, row: int) -> bool:
        """Return whether values behind the first ``row`` are thinned by now."""
        select = f"SELECT 1 FROM scalar WHERE id > {row} AND size < id - first + 1 LIMIT 1"
        with contextlib.suppress(RunFormatError):
            return bool(self._snapshot.rows(select))
        return False

    def scalar_ids(self, source: str, name: str) -> list[int]:
        """Return the ids of a scalar: one, or none."""
        return [i for i, of, called in self.scalar_names if (of, called) == (source, name)]

    def scalars(self, name: int | None = None, after: int = 0) -> dict[int, Logged]:
        """Return the scalars by id, of all names or of one, from the values behind the first ``after``."""
        logged = self._logged(after)
        order = np.argsort(logged.names, kind="stable")
        if name is not None:
            order = np.flatnonzero(logged.names == name)
        names, steps, values = (column[order] for column in logged)
        cuts = np.flatnonzero(np.diff(names)) + 1
        parts = zip(*(np.split(column, cuts) for column in (names, steps, values)), strict=True)
        return {int(ids[0]): (steps + self.step_offset, values) for ids, steps, values in parts if len(ids)}

    def _logged(self, after: int = 0) -> LoggedValues:
        """Return the sound values of all scalars behind the first ``after``, in the order of logging."""
        parts: list[LoggedValues] = []

        def is_readable(row: ScalarRow) -> bool:
            if row.size > row.id - row.first + 1:  # fewer, where old steps were thinned
                return False
            first, end = max(row.first, after + 1), min(row.id, self.last["scalar"]) + 1
            with contextlib.suppress(RunFormatError):
                block = decode_scalars(row.size, row.floats, row.ints)
                parts.append(block.between(first - row.first, end - row.first))
                return True
            return False

        self._rows("scalar", after, usable=is_readable)
        return LoggedValues.join(parts)

    def scalar(self, source: str, name: str) -> Logged:
        """Return one scalar; of a step that was logged twice the last value counts."""
        ids = self.scalar_ids(source, name)
        return latest(
            [(self._all_scalars if self.keeps_scalars else self.scalars(i)).get(i, NOTHING) for i in ids]
        )

    def last_scalar(self, source: str, name: str) -> float | None:
        """Return the value of a scalar that was logged last, without reading the others; None without one."""
        for i in self.scalar_ids(source, name):
            if logged := self._last_scalars.get(i) or self.scalars(i).get(i):
                return float(logged[1][-1])
        return None

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
        return [row[1:-1] for row in self._rows("event")]

    def events(self, kind: str | None = None) -> list[tuple[int | None, float, str, dict[str, Any]]]:
        """Return global step, time, kind and payload of the events, in the order of writing."""
        out = []
        for step, when, what, text in self.event_rows:
            payload = self._parsed("event", text, _mapping) if kind in {None, what} else None
            if payload is not None:
                out.append((None if step is None else step + self.step_offset, when, what, payload))
        return out

    def last_event(self, kind: str) -> dict[str, Any] | None:
        """Return the payload of the last event of a kind, None without one."""
        events = self.events(kind)
        return events[-1][3] if events else None

    def findings(self) -> list[Finding]:
        """Return the stored findings, in the order of writing."""
        parsed = [self._parsed("finding", text, _finding) for (text,) in self.finding_rows]
        return [finding for finding in parsed if finding is not None]

    @functools.cached_property
    def finding_rows(self) -> Rows:
        """JSON of the findings."""
        return [(row.json,) for row in self._rows("finding")]

    @functools.cached_property
    def last_step(self) -> int:
        """Highest global step of any series or scalar, -1 where there is none."""
        highest = max(
            self._last_step_of(table) for table in ("scalar", *(f"series_{name}" for name in SERIES))
        )
        return highest + self.step_offset if highest >= 0 else -1

    def _last_step_of(self, table: str) -> int:
        """Return the highest local step of a table, -1 where it has none."""
        if not self.last[table]:
            return -1
        with contextlib.suppress(RunFormatError):
            # All other rows are read only where this one is damaged.
            select = f"SELECT * FROM {table} WHERE step = (SELECT max(step) FROM {table}) LIMIT 1"
            for row in self._snapshot.rows(select):
                if is_sound(table, row):
                    return int(ROWS[table](*row).step)
        return max((row.step for row in self._rows(table)), default=-1)

    def _last_rows(self) -> dict[str, int]:
        """Return how far each table goes, all at one moment between two flushes of a living writer."""
        selects = {name: f"SELECT '{name}', max(id) FROM {name}" for name in ROWS}
        try:
            last_ids: dict[str, Any] = dict(self._snapshot.rows(" UNION ALL ".join(selects.values())))
        except RunFormatError:
            last_ids = {}
            for name, select in selects.items():
                try:
                    last_ids |= dict(self._snapshot.rows(select))
                except RunFormatError as error:
                    self._lose(f"table {name} is not readable: {error}")
        return {n: last if isinstance(last := last_ids.get(n), int) and last > 0 else 0 for n in ROWS}

    def _within(self, table: str, after: int) -> str:
        # A living writer adds to the last block of scalars, whose id grows with it.
        return f"id > {int(after)} AND {'first' if 'first' in TYPES[table] else 'id'} <= {self.last[table]}"

    def _rows(
        self, table: str, after: int = 0, where: str = "", usable: Callable[[Any], bool] = lambda _: True
    ) -> list[Any]:
        """Return the sound rows behind ``after`` that are ``usable``, and report how many are missing.

        ``where`` selects further. Ids have no gaps: what is not in the table at all is missing, too.
        """
        last = self.last[table]
        if last <= after:
            return []
        select = f"SELECT * FROM {table} WHERE {self._within(table, after)}{where}"
        blocks = [
            ROWS[table](*row) if is_sound(table, row) else None for row in self._snapshot.salvage(select)
        ]
        rows = [row for row in blocks if row is not None and usable(row)]
        if where:
            self._lose_gaps(table)
            if len(rows) != len(blocks):
                self._lose(f"{len(blocks) - len(rows)} blocks of table {table} are damaged and left out")
        elif (missing := last - after - sum(_span(row, after, last) for row in rows)) > 0:
            self._lose(f"{missing} of {last} rows of table {table} are damaged and left out")
        return rows

    def _lose_gaps(self, table: str) -> None:
        """Report what a table of blocks lacks, once: a changed id ends the search of SQLite too early."""
        if table in self._counted:
            return
        self._counted.add(table)
        last = self.last[table]
        with contextlib.suppress(RunFormatError):  # what cannot be read is reported where it is read
            ((total,),) = self._snapshot.rows(f"SELECT sum(id - first + 1) FROM {table} WHERE id <= {last}")
            if total != last:
                self._lose(f"the blocks of table {table} are not {last} rows: some are damaged and left out")

    def _parsed(self, table: str, text: str, parse: Callable[[str], T]) -> T | None:
        try:
            return parse(text)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._lose(f"a row of table {table} is damaged: {type(error).__name__}: {error}")
            return None

    def _lose(self, what: str) -> None:
        self.losses[f"{self.path}: {what}"] = None


def _steps_of(data: bytes) -> Steps:
    return np.frombuffer(data, "<i8").astype(np.int64)


def _span(row: Any, after: int, last: int) -> int:
    """Return how many of the rows or values behind ``after`` and up to ``last`` a row holds."""
    first: int = getattr(row, "first", row.id)
    return min(int(row.id), last) - max(first, after + 1) + 1


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
