"""The database of a rank on network storage: written on a local disk, published in closed segments.

SQLite's write-ahead log needs shared memory and dependable locks; network file systems promise neither. So
the open database is in a temporary folder of this machine. From time to time it is closed, copied into the
run directory under a hidden name and renamed to ``rank-NNNNN.000000.db``, ``…000001.db``: readers, on any
machine, only ever open files that no one changes.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from backlight import atomic_files, clock
from backlight.store.format.names import database_name, segment_name
from backlight.store.write.database import Batch, RankDatabase, Sizes

FIRST_SEGMENT_S = 10.0
"""Time until the first segment, so that a young run can be read."""

SEGMENT_INTERVAL_S = 30.0
"""Time between segments at first."""

_SCRATCH = "backlight-run-"

AGE_SHARE = 1 / 20
"""After that, the share of the age of the run between segments, so that they stay few."""


def is_scratch(folder: Path) -> bool:
    """Return whether a folder is one in which a run of this user keeps its open database."""
    found = folder.stat(follow_symlinks=False)
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    is_own = not hasattr(os, "geteuid") or found.st_uid == os.geteuid()
    return folder.name.startswith(_SCRATCH) and is_private and is_own


class SegmentedDatabase:
    """Counterpart of :class:`~backlight.store.write.database.RankDatabase` for network storage."""

    def __init__(self, folder: Path, rank: int, meta: Mapping[str, str]) -> None:
        self.local = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        self.published: dict[str, dict[str, int]] = {}
        self._folder = folder
        self._rank = rank
        self._meta = dict(meta)
        self._published_bytes = 0
        self._tables: list[tuple[int, str]] = []
        self._names: list[tuple[int, str, str]] = []
        self._began = self._segment_began = clock.monotonic()
        try:
            self._open = RankDatabase(self.path, self._meta)
        except BaseException:
            shutil.rmtree(self.local, ignore_errors=True)
            raise

    @property
    def path(self) -> Path:
        """Path of the open database, outside of the run directory."""
        return self.local / database_name(self._rank)

    def write(self, batch: Batch, sizes: Sizes) -> None:
        """Write a batch and publish a segment where one is due; errors pass through."""
        self._open.write(batch, sizes)
        self._tables += batch.tables
        self._names += batch.names
        now = clock.monotonic()
        due = max(SEGMENT_INTERVAL_S, (now - self._began) * AGE_SHARE) if self.published else FIRST_SEGMENT_S
        if now - self._segment_began >= due:
            try:
                self._publish()
                self._open = RankDatabase(self.path, self._meta)
                # Each segment can be read alone, so it repeats the tables that its rows refer to.
                self._open.write(Batch(tables=list(self._tables), names=list(self._names)), sizes)
            except sqlite3.Error as error:  # the batch is written, and must not be so twice
                raise OSError(f"{self._folder}: no segment was published: {error}") from error
            self._segment_began = clock.monotonic()

    def _publish(self) -> None:
        """Close the open database and copy it, complete, into the run directory."""
        last = dict(self._open.last)
        self._open.close()
        segment = self._folder / segment_name(self._rank, len(self.published))
        atomic_files.copy(self.path, segment)
        self.published[segment.name] = last
        self._published_bytes += segment.stat().st_size
        self.path.unlink()

    def reopen(self) -> None:
        """Open the database anew after a failed write; errors pass through."""
        self._open.reopen()

    def check_exists(self) -> None:
        """Raise an OSError unless the open database and the run directory still exist."""
        self._open.check_exists()
        self._folder.stat()

    def size(self) -> int:
        """Return the bytes of all segments and of the open database."""
        return self._published_bytes + self._open.size()

    def close(self) -> None:
        """Publish the open database, then remove the local folder; errors pass through."""
        self._publish()
        shutil.rmtree(self.local, ignore_errors=True)
