"""Decoded columns and scalars of one run, kept between uses and, for a growing run, between readings.

A run that is read as a whole keeps the frames that rules ask for again. A run that is read again while it
grows also keeps what it decoded: the rows of a file only grow, each with a higher id than those before. A
reading that knows the last decoded row of each column needs only the rows after it; where ranks or attempts
are joined, only the steps with new rows. Rows that do not fit this (a file that was replaced, a step that
was written twice) are read as a whole.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.store.format.schema import SERIES
from backlight.store.read import frames, join_ranks
from backlight.store.read.frames import Block, Frame
from backlight.store.read.rank_file import POSITION, Logged, RankFile

MAX_CACHE_BYTES = 512 * 1024 * 1024
"""Of frames and decoded columns; the least recently used one goes first."""

MAX_MARKS = 16
"""Readings whose number of scalars is kept: a page shows a slightly older reading than the newest."""

MAX_VERSIONS = 2
"""Readings whose joined rows are kept."""

_NO_STEP = 2**62

FileKey = tuple[Path, int, str, float]
"""A file, its attempt, the id and creation time of its run: another run may take its path."""

Mark = tuple[tuple[int, int], ...]
"""How far each file had come: its last rows of the series and of the scalars."""


class GrowingArray:
    """An array whose first axis grows in place; views that were returned stay as they were.

    Numbers are held in the narrowest type without loss, and returned in their own.
    """

    def __init__(self, rows: npt.NDArray[Any]) -> None:
        self._dtype = rows.dtype
        self._buffer = _narrowed(rows).copy()
        self._length = len(rows)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self._buffer.nbytes

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._length

    def rows(self, length: int | None = None) -> npt.NDArray[Any]:
        """Return the first ``length`` rows, or all, read-only."""
        view = self._buffer[: self._length if length is None else length]
        if view.dtype != self._dtype:
            view = view.astype(self._dtype)
        view.flags.writeable = False
        return view

    def add(self, rows: npt.NDArray[Any]) -> None:
        """Append ``rows``."""
        needed = self._length + len(rows)
        kind = np.promote_types(self._buffer.dtype, _narrowed(rows).dtype)
        if needed > len(self._buffer) or kind != self._buffer.dtype:
            length = max(needed, len(self._buffer), self._length * 3 // 2)
            buffer = np.empty((length, *self._buffer.shape[1:]), kind)
            buffer[: self._length] = self._buffer[: self._length]
            self._buffer = buffer
        self._buffer[self._length : needed] = rows
        self._length = needed


def _narrowed(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return ``rows`` in the smallest type of their kind that holds them without loss."""
    if rows.dtype == np.int64:
        low, high = (int(rows.min()), int(rows.max())) if rows.size else (0, 0)
        for kind in (np.int8, np.int16, np.int32):
            if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
                return rows.astype(kind)
    elif rows.dtype == np.float64:
        with np.errstate(over="ignore", invalid="ignore"):
            half = rows.astype(np.float32)
        return half if np.array_equal(half, rows, equal_nan=True) else rows
    return rows


@dataclass(slots=True)
class _Column:
    """A column of a file, decoded up to the row ``last`` by the reading ``reading``."""

    last: int
    reading: int
    names: tuple[str, ...]
    steps: GrowingArray
    values: GrowingArray
    measured: GrowingArray

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.measured.nbytes


@dataclass(slots=True)
class _ScalarLog:
    """The scalars of a file up to the row ``last``, by id.

    ``marks`` holds how many values each had at the last few readings, by the last row of those.
    """

    last: int = 0
    reading: int = 0
    steps: dict[int, GrowingArray] = field(default_factory=dict)
    values: dict[int, GrowingArray] = field(default_factory=dict)
    marks: OrderedDict[int, dict[int, int]] = field(default_factory=OrderedDict)


@dataclass(slots=True)
class _JoinedColumns:
    """Joined columns of one series of one attempt, by how far its files had come."""

    kind: tuple[object, ...]
    reading: int
    versions: OrderedDict[Mark, Block] = field(default_factory=OrderedDict)

    @property
    def nbytes(self) -> int:
        # Versions between which nothing came share their block.
        return sum(block.nbytes for block in {id(b): b for b in self.versions.values()}.values())

    def keep(self, mark: Mark, block: Block) -> Block:
        self.versions[mark] = block
        while len(self.versions) > MAX_VERSIONS:
            self.versions.popitem(last=False)
        return block


@dataclass(slots=True)
class _KeptFrame:
    mark: object
    frame: Frame

    @property
    def nbytes(self) -> int:
        return self.frame.values.nbytes + self.frame.measured.nbytes


class DecodeCache:
    """Decoded numbers of one run: of one reading or, with ``incremental``, of all readings while it grows."""

    def __init__(self, *, incremental: bool = False) -> None:
        self.incremental = incremental
        self._entries: OrderedDict[tuple[Any, ...], _Column | _JoinedColumns | _KeptFrame] = OrderedDict()
        self._logs: dict[FileKey, _ScalarLog] = {}
        self._readings = 0
        self._lock = threading.RLock()

    def begin_reading(self) -> int:
        """Return the number of a new reading."""
        with self._lock:
            self._readings += 1
            return self._readings

    def frame(self, key: tuple[Any, ...], mark: object) -> Frame | None:
        """Return the kept frame of ``key``, None where there is none at ``mark``."""
        with self._lock:
            kept = self._entries.get(("frame", *key))
            if not isinstance(kept, _KeptFrame) or kept.mark != mark:
                return None
            self._entries.move_to_end(("frame", *key))
            return kept.frame

    def keep_frame(self, key: tuple[Any, ...], mark: object, frame: Frame) -> Frame:
        """Keep a frame, read-only from now on, and return it."""
        frame.values.flags.writeable = frame.measured.flags.writeable = False
        with self._lock:
            self._keep(("frame", *key), _KeptFrame(mark, frame))
        return frame

    def _keep(self, key: tuple[Any, ...], entry: _Column | _JoinedColumns | _KeptFrame) -> None:
        self._entries[key] = entry
        self._entries.move_to_end(key)
        while sum(one.nbytes for one in self._entries.values()) > MAX_CACHE_BYTES and len(self._entries) > 1:
            self._entries.popitem(last=False)

    def has_column(self, file_key: FileKey, series: str, column: str, part: int) -> bool:
        """Return whether a column of a file is kept."""
        return (*file_key, series, column, part) in self._entries

    def column(
        self,
        file: RankFile,
        file_key: FileKey,
        reading: int,
        names: tuple[str, ...],
        series: str,
        column: str,
        part: int,
    ) -> Frame | None:
        """Return a column, decoding only its new rows; None where they do not follow the kept ones."""
        schema = SERIES[series]
        unit = frames.unit(schema, column) or "1"
        key = (*file_key, series, column, part)
        last = file.last[f"series_{series}"]
        with self._lock:
            kept = self._entries.get(key)
            held = kept if isinstance(kept, _Column) else None
            if held is not None and (held.names != names or _is_replaced(held, last, reading)):
                held = None
            if held is not None and held.last > last:
                # This reading is older than what is kept, which begins with it.
                known = file.steps(series)
                length = int(np.searchsorted(held.steps.rows(), known[-1], side="right")) if len(known) else 0
                parts = (array.rows(length) for array in (held.steps, held.values, held.measured))
                steps, values, measured = parts
                return Frame(steps, names, values, measured, unit)
            after = 0 if held is None else held.last
            if held is None or last > after:
                needed = frames.needs(schema, column)
                block = frames.rank_block(file, series, needed, names, part, None, after)
                values = frames.derive(column, block.columns)
                if held is None:
                    arrays = (GrowingArray(rows) for rows in (block.steps, values, block.measured))
                    held = _Column(last, reading, names, *arrays)
                else:
                    before = held.steps.rows()
                    if len(block.steps) and len(before) and block.steps[0] <= before[-1]:
                        del self._entries[key]
                        return None
                    held.steps.add(block.steps)
                    held.values.add(values)
                    held.measured.add(block.measured)
                    held.last, held.reading = last, reading
            self._keep(key, held)
            return Frame(held.steps.rows(), names, held.values.rows(), held.measured.rows(), unit)

    def scalar(self, file_key: FileKey, reading: int, file: RankFile, identifier: int) -> Logged | None:
        """Return a scalar of a file, reading only new rows; None where its steps do not ascend."""
        last = file.last["scalar"]
        with self._lock:
            held = self._logs.get(file_key)
            if held is None or _is_replaced(held, last, reading):
                self._logs = {key: log for key, log in self._logs.items() if key[0] != file_key[0]}
                held = self._logs[file_key] = _ScalarLog(reading=reading)
            if last > held.last:
                for name, (steps, values) in file.scalars(after=held.last).items():
                    if name in held.steps:
                        held.steps[name].add(steps)
                        held.values[name].add(values)
                    else:
                        held.steps[name], held.values[name] = GrowingArray(steps), GrowingArray(values)
                held.last, held.reading = last, reading
                held.marks[last] = {name: len(steps) for name, steps in held.steps.items()}
                while len(held.marks) > MAX_MARKS:
                    held.marks.popitem(last=False)
            if last and last not in held.marks:
                return None  # older than what is kept, and not marked
            length = held.marks[last].get(identifier, 0) if last else 0
            if not length:
                return np.zeros(0, np.int64), np.zeros(0)
            steps = held.steps[identifier].rows(length)
            return (steps, held.values[identifier].rows(length)) if is_ascending(steps) else None

    def joined(
        self,
        files: Sequence[RankFile],
        file_keys: Sequence[FileKey],
        reading: int,
        names: tuple[str, ...],
        series: str,
        columns: Sequence[str],
        part: int,
    ) -> Block | None:
        """Return stored columns of one attempt, joining only the steps with new rows.

        A step is joined again when any rank recorded more of it: all steps from the first such one on.
        Earlier ones cannot change, as long as the files, their parameter tables and the names are the same.
        None where this reading is older than what is kept.
        """
        key = (*file_keys, series, tuple(columns), part)
        kind = names, tuple((file.path, file.rank, file.step_offset, tuple(file.tables)) for file in files)
        mark = tuple((file.last[f"series_{series}"], file.last["scalar"]) for file in files)
        with self._lock:
            held = self._entries.get(key)
            if not isinstance(held, _JoinedColumns) or held.kind != kind:
                held = _JoinedColumns(kind, reading)
            elif held.versions and reading > held.reading and _is_behind(mark, next(reversed(held.versions))):
                held = _JoinedColumns(kind, reading)  # a file is shorter than it was: it was replaced
            block = held.versions.get(mark)
            if block is None:
                block = _grown(held, files, series, columns, names, part, mark)
            if block is not None:
                held.reading = max(held.reading, reading)
                self._keep(key, held)
            return block


def _grown(
    held: _JoinedColumns,
    files: Sequence[RankFile],
    series: str,
    columns: Sequence[str],
    names: tuple[str, ...],
    part: int,
    mark: Mark,
) -> Block | None:
    if not held.versions:
        return held.keep(mark, join_ranks.block(files, series, columns, names, part, local=False))
    before, known = next(reversed(held.versions.items()))
    if _is_behind(mark, before):
        return None
    news = [
        step
        for file, (row, scalar) in zip(files, before, strict=True)
        for step in (file.first_after(f"series_{series}", row), _position_after(file, scalar))
        if step is not None
    ]
    if not news:
        return held.keep(mark, known)
    first = min(news)
    window = (first, _NO_STEP)
    tail = join_ranks.block(files, series, columns, names, part, local=False, window=window)
    return held.keep(mark, known.followed_by(tail, int(np.searchsorted(known.steps, first))))


def _is_replaced(held: _Column | _ScalarLog, last: int, reading: int) -> bool:
    """Return whether a file that ends at ``last`` is another one than the kept rows came from."""
    return held.last > last and reading > held.reading


def _is_behind(mark: Mark, other: Mark) -> bool:
    """Return whether any file had come less far than in another reading."""
    return any(now < then for pair in zip(mark, other, strict=True) for now, then in zip(*pair, strict=True))


def _position_after(file: RankFile, row: int) -> int | None:
    """Return the first step with a new position of the rank: ranks are aligned by positions."""
    known = file.scalar_ids("backlight", POSITION)
    found = [file.first_after("scalar", row, f" AND name = {identifier}") for identifier in known]
    return min((step for step in found if step is not None), default=None)


def is_ascending(steps: npt.NDArray[np.int64]) -> bool:
    """Return whether every step is above the one before."""
    return len(steps) < 2 or bool((np.diff(steps) > 0).all())
