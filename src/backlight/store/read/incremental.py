"""A run that is read again and again while it is written: what was decoded once is not decoded twice.

The rows of a file only ever grow, each with an id above those before it. So a reading that remembers the
last id of each column needs the rows after it alone; where ranks or attempts are joined, the steps of which
there is more. What does not fit that (a file that was replaced, or in which a step was written twice) is read
as a whole, as by :func:`backlight.store.read.run.open_run`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.store.format.names import storable
from backlight.store.format.schema import SERIES
from backlight.store.read import frames, incremental_join, join_ranks
from backlight.store.read.frames import Block, Frame
from backlight.store.read.incremental_join import Joined
from backlight.store.read.join_ranks import Spread
from backlight.store.read.rank_file import RankFile
from backlight.store.read.run import Run, Scalar

CARRIED_BYTES = 512 * 1024 * 1024
"""Bytes of columns that are remembered between two readings; the one that was not used longest goes first."""

MARKS = 16
"""Readings whose numbers of scalars are remembered: what is shown is a little older than what is read."""


class Grown:
    """An array whose first axis grows: rows are added in place, and what was given out stays what it was.

    Numbers are held as narrow as they go without loss, and given out as they came.
    """

    def __init__(self, rows: npt.NDArray[Any]) -> None:
        self._kind = rows.dtype
        self._monitor = _narrow(rows).copy()
        self._length = len(rows)

    @property
    def nbytes(self) -> int:
        """Return the bytes that are held."""
        return self._monitor.nbytes

    def rows(self, length: int | None = None) -> npt.NDArray[Any]:
        """Return the first ``length`` rows, or all, not to be written into."""
        view = self._monitor[: self._length if length is None else length]
        if view.dtype != self._kind:
            view = view.astype(self._kind)
        view.flags.writeable = False
        return view

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._length

    def add(self, rows: npt.NDArray[Any]) -> None:
        """Put ``rows`` behind the others."""
        needed = self._length + len(rows)
        kind = np.promote_types(self._monitor.dtype, _narrow(rows).dtype)
        if needed > len(self._monitor) or kind != self._monitor.dtype:
            longest = max(needed, len(self._monitor), self._length * 3 // 2)
            monitor = np.empty((longest, *self._monitor.shape[1:]), kind)
            monitor[: self._length] = self._monitor[: self._length]
            self._monitor = monitor
        self._monitor[self._length : needed] = rows
        self._length = needed


def _narrow(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return ``rows`` in the smallest type of their kind that holds them without loss."""
    if rows.dtype == np.int64:
        low, high = (int(rows.min()), int(rows.max())) if rows.size else (0, 0)
        fits = [
            kind
            for kind in (np.int8, np.int16, np.int32)
            if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max
        ]
        return rows.astype(fits[0]) if fits else rows
    if rows.dtype == np.float64:
        with np.errstate(over="ignore", invalid="ignore"):
            half = rows.astype(np.float32)
        return half if np.array_equal(half, rows, equal_nan=True) else rows
    return rows


@dataclass(slots=True)
class Column:
    """A column of a file as far as it was decoded: up to the row ``last``, for parameters ``names``.

    ``by`` is the reading that came as far.
    """

    last: int
    by: int
    names: tuple[str, ...]
    steps: Grown
    values: Grown
    measured: Grown

    @property
    def nbytes(self) -> int:
        """Return the bytes that are held."""
        return self.values.nbytes + self.measured.nbytes


@dataclass(slots=True)
class Logged:
    """The scalars of a file as far as they were read: steps and values by the id of their name.

    ``marks`` tells how many values each had at the last few readings, by the last row of these.
    """

    last: int
    by: int
    steps: dict[int, Grown]
    values: dict[int, Grown]
    marks: OrderedDict[int, dict[int, int]]

    def mark(self) -> None:
        """Remember how many values there are."""
        self.marks[self.last] = {name: len(steps) for name, steps in self.steps.items()}
        while len(self.marks) > MARKS:
            self.marks.popitem(last=False)


Place = tuple[Path, int, str, float]
"""A file and its attempt, with the id of its run and when that was made: another may come in its folder."""


class Memory:
    """What is remembered between two readings of one run."""

    def __init__(self) -> None:
        self.columns: OrderedDict[tuple[Any, ...], Column | Joined] = OrderedDict()
        self.logged: dict[Place, Logged] = {}
        self.readings = 0
        self.lock = threading.Lock()

    def keep(self, key: tuple[Any, ...], column: Column | Joined) -> None:
        """Remember ``column``, and forget what there is no room for."""
        self.columns[key] = column
        self.columns.move_to_end(key)
        while sum(one.nbytes for one in self.columns.values()) > CARRIED_BYTES and len(self.columns) > 1:
            self.columns.popitem(last=False)

    def replace(self, place: Place, logged: Logged) -> Logged:
        """Remember ``logged`` in place of what is known of a file in the same path, and return it."""
        self.logged = {known: one for known, one in self.logged.items() if known[0] != place[0]}
        self.logged[place] = logged
        return logged


class Later(RankFile):
    """The rows of ``file`` after one of them; its tables of parameters and names are all there."""

    def __init__(self, file: RankFile, after: int) -> None:
        self.__dict__.update(file.__dict__)
        self._sound, self._steps, self.keeps = (
            {},
            {},
            False,
        )  # all rows, kept for the columns to come: not these alone
        self._after = after

    def scalars(self) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float64]]]:
        """Yield, for each scalar with new rows, the id of its name, its global steps and its values."""
        rows = self._rows("name, step, value", "scalar", (int, int, (float, NoneType)), " AND 1")
        by_name: dict[int, list[tuple[int, float | None]]] = {}
        for name, step, value in rows:
            by_name.setdefault(name, []).append((step, value))
        for name, mine in by_name.items():
            steps = np.array([step for step, _ in mine], dtype=np.int64) + self.step_offset
            values = [np.nan if value is None else value for _, value in mine]
            yield name, steps, np.array(values, dtype=np.float64)

    def _rows(
        self, columns: str, table: str, types: Sequence[Any], condition: str = ""
    ) -> list[tuple[Any, ...]]:
        later = f" AND id > {self._after}" if table == "scalar" or table.startswith("series_") else ""
        return super()._rows(columns, table, types, condition + later)


class FollowedRun(Run):
    """A run as it was when it was opened, which decodes only what ``memory`` does not hold yet."""

    def __init__(self, path: Path, memory: Memory) -> None:
        self._memory = memory
        with memory.lock:
            memory.readings += 1
            self._reading = memory.readings
        super().__init__(path)

    def frame(
        self, series: str, column: str, *, attempt: int | None = None, rank: int | None = None, part: int = 0
    ) -> Frame:
        """Return one column of a series; see :meth:`backlight.store.read.run.Run.frame`."""
        key = (series, column, attempt, rank, part)
        file = self._alone(attempt, rank)
        known = series in SERIES and frames.unit(SERIES[series], column) is not None
        if file is not None and known and key not in self._cache:
            with self._memory.lock:
                found = self._grown(file, series, column, part)
            if found is not None:
                return self._kept(key, found)
        return super().frame(series, column, attempt=attempt, rank=rank, part=part)

    def frame_at(self, series: str, column: str, step: int, *, rank: int | None = None) -> Frame:
        """Return one step of a column; see :meth:`backlight.store.read.run.Run.frame_at`."""
        file = self._alone(None, rank)
        held = file is not None and (*self._place(file), series, column, 0) in self._memory.columns
        if file is None or held or series not in SERIES or frames.unit(SERIES[series], column) is None:
            return super().frame_at(series, column, step, rank=rank)
        # Nobody asked for the column yet: the one row is decoded, not all of them.
        wanted, names = frames.needs(SERIES[series], column), self._names()
        block = frames.rank_block(file, series, wanted, names, 0, (step, step + 1))
        unit = frames.unit(SERIES[series], column) or "1"
        return Frame(block.steps, names, frames.derive(column, block.columns), block.measured, unit)

    def scalar(
        self, name: str, source: str = "backlight", *, attempt: int | None = None, rank: int | None = None
    ) -> Scalar:
        """Return a scalar over global steps; see :meth:`backlight.store.read.run.Run.scalar`."""
        file = self._alone(attempt, rank)
        if file is not None:
            wanted = (storable(source), storable(name))
            known = [i for i, of, called in file.scalar_names() if (of, called) == wanted]
            if len(known) == 1:
                with self._memory.lock:
                    found = self._logged(file, known[0])
                if found is not None:
                    unit = super().scalar(name, source, attempt=-1).unit
                    return Scalar(*found, unit)
        more = ("clip/by_total", "clip/limit") if name in join_ranks.FROM_TOTAL else ()
        for files in self._by_attempt(attempt, rank):
            for called in (storable(name), *more):
                self._remind(files, (storable(source), called))
        return super().scalar(name, source, attempt=attempt, rank=rank)

    def spread(self, name: str, source: str = "backlight", *, attempt: int | None = None) -> Spread:
        """Return a scalar of every rank; see :meth:`backlight.store.read.run.Run.spread`."""
        for files in self._by_attempt(attempt, None):
            self._remind(files, (storable(source), storable(name)))
        return super().spread(name, source, attempt=attempt)

    def _joined(self, files: Sequence[RankFile], series: str, columns: Sequence[str], part: int) -> Block:
        """Return stored columns of one attempt, joining only what is new."""
        names = self._names()
        self._remind(files, ("backlight", join_ranks.POSITION))
        key = (*(self._place(file) for file in files), series, tuple(columns), part)
        kind = incremental_join.kind_of(files, names)
        with self._memory.lock:
            held = self._memory.columns.get(key)
            replaced = isinstance(held, Joined) and self._reading > held.by and held.is_ahead(files, series)
            if not isinstance(held, Joined) or held.held_for != kind or replaced:
                held = Joined(kind, self._reading)
            found = incremental_join.grown(held, files, series, columns, names, part)
            if found is not None:
                held.by = max(held.by, self._reading)
                self._memory.keep(key, held)
                return found
        return super()._joined(files, series, columns, part)

    def _remind(self, files: Sequence[RankFile], wanted: tuple[str, str]) -> None:
        """Give files the steps and values of a scalar that were read before."""
        for file in files:
            for identifier, source, name in file.scalar_names():
                if (source, name) == wanted and identifier not in file.remembered:
                    with self._memory.lock:
                        found = self._logged(file, identifier)
                    if found is not None:
                        file.remembered[identifier] = found

    def _place(self, file: RankFile) -> Place:
        """Return what tells ``file`` from all others, and from one that stood in its path before."""
        return file.path, file.attempt, self.run_id, self._manifest.created

    def _alone(self, attempt: int | None, rank: int | None) -> RankFile | None:
        """Return the file that holds all that was asked for, None where several must be joined."""
        chosen = self._by_attempt(attempt, rank)
        whole = len(self.attempts) == 1 and self.attempts[0].world_size == 1
        return chosen[0][0] if whole and len(chosen) == 1 and len(chosen[0]) == 1 else None

    def _replaced(self, held: Column | Logged, last: int) -> bool:
        """Tell whether a file that ends at ``last`` is another one than what is held was read from."""
        return held.last > last and self._reading > held.by

    def _grown(self, file: RankFile, series: str, column: str, part: int) -> Frame | None:
        """Return a column from what is remembered and the rows after it, None where those do not fit."""
        schema = SERIES[series]
        wanted = frames.needs(schema, column)
        names = self._names()
        key = (*self._place(file), series, column, part)
        carried = self._memory.columns.get(key)
        held = carried if isinstance(carried, Column) else None
        last = file.last[f"series_{series}"]
        unit = frames.unit(schema, column) or "1"
        if held is not None and (held.names != names or self._replaced(held, last)):
            held = None
        if held is not None and held.last > last:
            # This reading is older than what is remembered, which begins with it.
            known = file.steps(series)
            length = int(np.searchsorted(held.steps.rows(), known[-1], side="right")) if len(known) else 0
            before, values, measured = (g.rows(length) for g in (held.steps, held.values, held.measured))
            return Frame(before, names, values, measured, unit)
        after = 0 if held is None else held.last
        if held is None or last > after:
            block = frames.rank_block(Later(file, after), series, wanted, names, part)
            values = frames.derive(column, block.columns)
            if held is None:
                held = Column(
                    last, self._reading, names, Grown(block.steps), Grown(values), Grown(block.measured)
                )
            else:
                before = held.steps.rows()
                if len(block.steps) and len(before) and block.steps[0] <= before[-1]:
                    del self._memory.columns[key]
                    return None
                held.steps.add(block.steps)
                held.values.add(values)
                held.measured.add(block.measured)
                held.last, held.by = last, self._reading
        self._memory.keep(key, held)
        return Frame(held.steps.rows(), names, held.values.rows(), held.measured.rows(), unit)

    def _logged(
        self, file: RankFile, identifier: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]] | None:
        """Return steps and values of a scalar, None where they are not in the order of their steps."""
        place = self._place(file)
        held = self._memory.logged.get(place)
        last = file.last["scalar"]
        if held is None or self._replaced(held, last):
            held = self._memory.replace(place, Logged(0, self._reading, {}, {}, OrderedDict()))
        if last > held.last:
            for name, steps, values in Later(file, held.last).scalars():
                if name in held.steps:
                    held.steps[name].add(steps)
                    held.values[name].add(values)
                else:
                    held.steps[name], held.values[name] = Grown(steps), Grown(values)
            held.last, held.by = last, self._reading
            held.mark()
        if last and last not in held.marks:  # older than what is remembered, and not marked
            return None
        length = held.marks[last].get(identifier, 0) if last else 0
        if not length:
            return np.zeros(0, np.int64), np.zeros(0)
        steps = held.steps[identifier].rows(length)
        if len(steps) > 1 and not bool((np.diff(steps) > 0).all()):
            return None
        return steps, held.values[identifier].rows(length)


class Follower:
    """Opens one run again and again, each time as it stands then."""

    def __init__(self) -> None:
        self._memory = Memory()

    def __call__(self, path: Path) -> FollowedRun:
        """Open the run in ``path``; see :func:`backlight.store.read.run.open_run` for what it raises."""
        return FollowedRun(path, self._memory)
