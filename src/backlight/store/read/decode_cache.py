"""Decoded columns and scalars of one run, kept between uses and, for a growing run, between readings.

The rows of a file only grow, each with a higher id than those before. A reading that knows how far the files
had come when a column was decoded decodes only the steps with newer rows, and joins ranks only there.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from backlight.store.read.frames import Frame
from backlight.store.read.rank_file import POSITION, Logged, RankFile, Window

MAX_CACHE_BYTES = 512 * 1024 * 1024
"""Of decoded columns of a growing run; the least recently used one goes first."""

MAX_READING_BYTES = 128 * 1024 * 1024
"""The same of a run that is read once: what uses a column uses it several times in a row."""

MAX_VERSIONS = 2
"""Readings whose columns are kept: a page shows a slightly older reading than the newest."""

_NO_STEP = 2**62

Mark = tuple[tuple[int, int], ...]
"""How far each file had come: its last rows of the series and of the scalars."""

Read = Callable[[Window | None, Mapping[RankFile, int]], Frame]
"""Decodes a column in a window of steps; of each file the rows up to a given one lie before it."""


@dataclass(slots=True)
class _Column:
    """A column by how far its files had come, newest last; ``kind`` is what all versions share."""

    kind: tuple[object, ...]
    versions: dict[Mark, Frame] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        # Versions between which nothing came are one frame.
        frames = {id(frame): frame for frame in self.versions.values()}.values()
        return sum(frame.values.nbytes + frame.measured.nbytes for frame in frames)


class DecodeCache:
    """Decoded numbers of one run, of one reading or of all readings while it grows."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = MAX_CACHE_BYTES if most_bytes is None else most_bytes
        self._columns: OrderedDict[tuple[Any, ...], _Column] = OrderedDict()
        self._scalars: dict[Path, tuple[object, int, dict[int, Logged]]] = {}
        self._lock = threading.RLock()

    def frame(
        self, key: tuple[Any, ...], files: Sequence[RankFile], names: tuple[str, ...], series: str, read: Read
    ) -> Frame:
        """Return a column, decoding only what came since a reading that the cache knows.

        Steps before the first one with a new row cannot change, as long as the files, their parameter tables
        and the names are the same.
        """
        kind = names, tuple((f.path, f.inode, f.step_offset, tuple(f.table_names)) for f in files)
        mark = tuple((f.last[f"series_{series}"], f.last["scalar"]) for f in files)
        with self._lock:
            cached = self._columns.get(key)
            if cached is None or cached.kind != kind:
                cached = self._columns[key] = _Column(kind)
            self._columns.move_to_end(key)
            if mark not in cached.versions:
                newest = next(reversed(cached.versions), None)
                if newest is not None and _is_behind(mark, newest):
                    return read(None, {})  # older than all that is kept
                decoded = (
                    read(None, {})
                    if newest is None
                    else _grown(cached.versions[newest], newest, files, series, read)
                )
                decoded.values.flags.writeable = decoded.measured.flags.writeable = False
                cached.versions[mark] = decoded
                if len(cached.versions) > MAX_VERSIONS:
                    del cached.versions[next(iter(cached.versions))]
                while (
                    sum(c.nbytes for c in self._columns.values()) > self._most_bytes
                    and len(self._columns) > 1
                ):
                    self._columns.popitem(last=False)
            return cached.versions[mark]

    def scalars(self, owner: object, file: RankFile) -> dict[int, Logged]:
        """Return all scalars of a file by id, reading only new rows."""
        last = file.last["scalar"]
        with self._lock:
            source, row, logs = self._scalars.get(file.path, (None, 0, {}))
            if source != (owner, file.inode):
                row, logs = 0, {}
            elif row > last:
                return file.scalars()  # an older reading
            if last > row:
                news = file.scalars(after=row)
                if row and file.is_thinned_after(row):  # asked last: a living writer may thin at any time
                    logs, news = {}, file.scalars()
                # New arrays: those that older readings hold stay as they are.
                logs = logs | {i: _appended(logs[i], new) if i in logs else new for i, new in news.items()}
            self._scalars[file.path] = (owner, file.inode), last, logs
            return logs


def _appended(logged: Logged, new: Logged) -> Logged:
    return np.concatenate([logged[0], new[0]]), np.concatenate([logged[1], new[1]])


def _grown(frame: Frame, mark: Mark, files: Sequence[RankFile], series: str, read: Read) -> Frame:
    """Return a column that was decoded up to ``mark`` with what came since."""
    news = [
        step
        for file, (row, scalar) in zip(files, mark, strict=True)
        for step in (*file.steps(series, after=row)[:1].tolist(), _position_after(file, scalar))
        if step is not None
    ]
    if not news:
        return frame
    first = min(news)
    # Where all new steps lie behind the known ones, no older row can belong to them.
    is_behind_all = not len(frame.steps) or first > frame.steps[-1]
    after = {file: row for file, (row, _) in zip(files, mark, strict=True)} if is_behind_all else {}
    return frame.followed_by(read((first, _NO_STEP), after), first)


def _is_behind(mark: Mark, other: Mark) -> bool:
    """Return whether any file had come less far than in another reading."""
    return any(now < then for pair in zip(mark, other, strict=True) for now, then in zip(*pair, strict=True))


def _position_after(file: RankFile, row: int) -> int | None:
    """Return the first step with a new position of the rank: ranks are aligned by positions."""
    position_ids = file.scalar_ids("backlight", POSITION)
    if file.last["scalar"] <= row or not position_ids:
        return None
    news = file.scalars(after=row)
    return min(
        (int(news[identifier][0].min()) for identifier in position_ids if identifier in news), default=None
    )
