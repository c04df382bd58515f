"""The database of a rank on network storage: written on a local disk, published in closed segments.

SQLite's write-ahead log needs shared memory and dependable locks; network file systems promise
neither. So the open database lives in a temporary folder of this machine. From time to time it is closed,
copied into the run directory under a hidden name and renamed to ``rank-NNNNN.000000.db``, ``…000001.db``:
readers, on any machine, only ever see files that nobody changes.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from backlight.store.platform import atomic_json
from backlight.store.write.batch import Batch
from backlight.store.write.database import RankDatabase

FIRST_SEGMENT = 10.0
"""Seconds until the first segment, so that a young run can be looked at."""

SEGMENT_INTERVAL = 30.0
"""Seconds between segments at first."""

AGE_SHARE = 1 / 20
"""Later, the share of the age of the run between segments, so that they stay few."""

_NAME = re.compile(r"rank-(\d{5,9})(?:\.(\d{6})(?:-(\d{6}))?)?\.db")


class SegmentedDatabase:
    """Counterpart of :class:`~backlight.store.write.database.RankDatabase` for network storage."""

    def __init__(self, folder: Path, rank: int, meta: Mapping[str, str]) -> None:
        self.local = Path(tempfile.mkdtemp(prefix="backlight-run-"))
        self.published: dict[str, dict[str, int]] = {}
        self._folder = folder
        self._rank = rank
        self._meta = dict(meta)
        self._sealed = 0
        self._count = 0
        self._tables: list[tuple[int, str]] = []
        self._names: list[tuple[int, str, str]] = []
        self._began = self._cut = time.monotonic()
        try:
            self._open = RankDatabase(self.path, self._meta)
        except BaseException:
            shutil.rmtree(self.local, ignore_errors=True)
            raise

    @property
    def path(self) -> Path:
        """Return where the open database is: outside the run directory."""
        return self.local / f"rank-{self._rank:05d}.db"

    @property
    def last(self) -> dict[str, int]:
        """Return the last rows of the open database."""
        return self._open.last

    def write(self, batch: Batch, sizes: Mapping[int, npt.NDArray[np.int64]]) -> None:
        """Write a batch and publish a segment where one is due; errors pass through."""
        self._tables += batch.tables
        self._names += batch.names
        self._open.write(batch, sizes)
        now = time.monotonic()
        wait = FIRST_SEGMENT if self._count == 0 else max(SEGMENT_INTERVAL, (now - self._began) * AGE_SHARE)
        if now - self._cut >= wait:
            self.publish()
            self._open = RankDatabase(self.path, self._meta)
            # Each segment can be read alone, so it repeats what its rows refer to.
            self._open.write(Batch(tables=list(self._tables), names=list(self._names)), sizes)
            self._cut = time.monotonic()

    def publish(self) -> None:
        """Close the open database and give it, complete, to the run directory; errors pass through."""
        last = dict(self._open.last)
        self._open.close()
        name = segment_name(self._rank, self._count)
        bring(self.path, self._folder / name)
        self.published[name] = last
        self._sealed += (self._folder / name).stat().st_size
        self._count += 1
        self.path.unlink()

    def check_there(self) -> None:
        """Look whether the open database and the run directory are still there; an OSError passes through."""
        self._open.check_there()
        self._folder.stat()

    def size(self) -> int:
        """Return the bytes of all segments and of the open database."""
        return self._sealed + self._open.size()

    def close(self) -> None:
        """Publish what is open, and remove the local folder once that has worked; errors pass through."""
        self.publish()
        shutil.rmtree(self.local, ignore_errors=True)

    def abandon(self) -> None:
        """In a forked child: leave the parent's files alone."""
        self._open.abandon()


def segment_name(rank: int, first: int, last: int | None = None) -> str:
    """Return the name of a segment, or of one that replaces the segments ``first`` to ``last``."""
    span = f"{first:06d}" if last is None or last == first else f"{first:06d}-{last:06d}"
    return f"rank-{rank:05d}.{span}.db"


def parse_name(name: str) -> tuple[int, int, int] | None:
    """Return rank, first and last segment of a database's name; -1, -1 for an unsegmented one."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    rank, first, last = match.groups()
    if first is None:
        return int(rank), -1, -1
    return int(rank), int(first), int(last or first)


def current(spans: Iterable[tuple[str, int, int, int]]) -> list[str]:
    """Return, of files given as name, owner, first and last, those that no wider one of the owner replaces.

    A merge publishes the wide file first and removes the narrow ones after it: whoever is killed in
    between leaves both, and readers must count neither twice.
    """
    kept: list[tuple[str, int, int, int]] = []
    for name, owner, first, last in sorted(spans, key=lambda s: (s[1], s[2], -s[3], s[0])):
        if kept and kept[-1][1] == owner and last <= kept[-1][3] and kept[-1][2] <= first:
            continue
        kept.append((name, owner, first, last))
    return [name for name, *_ in kept]


def bring(source: Path, target: Path) -> None:
    """Copy a closed file to another file system, where it appears complete; an OSError passes through."""
    temporary = atomic_json.temporary_name(target)
    try:
        shutil.copyfile(source, temporary)
        atomic_json.sync_file(temporary)
        atomic_json.publish(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
