"""What a rank states of its own progress, so that a reader can tell a loss from a short run.

The first rank states it in ``manifest.json``, which no other rank writes; a further rank in its own
``rank-NNNNN.json``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backlight.records import Fingerprint
from backlight.store.format.manifest import HEARTBEAT
from backlight.store.format.schema import FORMAT_VERSION
from backlight.store.platform import atomic_json
from backlight.store.write.attempt import Entry, document_name

RANK_KIND = "backlight rank"

DUTY = 20.0
"""Stating may take one part in so many of the recording thread's time, whatever the disk."""


class Ledger:
    """Publishes the progress of one rank, not more often than it is worth.

    ``pause`` is the least number of seconds between two times: about a flush interval.
    """

    def __init__(self, path: Path, entry: Entry, rank: int, options: Mapping[str, Any] | None = None) -> None:
        self.progress = entry.progress
        self._path = path
        self._entry = entry
        self._options = dict(options or {})
        self._rank = rank
        self._first = rank == entry.attempt.first
        self._fingerprint = "null"
        self.pause = entry.attempt.flush_interval * 0.9
        self._published = 0.0
        self._cost = 0.0
        self._stale = True

    def set_fingerprint(self, fingerprint: Fingerprint) -> None:
        """Store the fingerprint of the rank; an OSError passes through."""
        self._fingerprint = atomic_json.dump(fingerprint)
        self.publish_document()

    def note(self, files: dict[str, dict[str, int]], step: int) -> None:
        """Take note of the last rows of each file and of the last attempt-local step."""
        self.progress.files = files
        self.progress.step = max(self.progress.step, step)
        self._stale = True

    def publish_if_due(self) -> None:
        """Publish what was noted, or a sign of life, where it is time; an OSError passes through."""
        waited = time.monotonic() - self._published
        pause = max(self.pause, DUTY * self._cost)
        if (self._stale and waited >= pause) or waited >= HEARTBEAT:
            self.publish()

    def publish(self) -> None:
        """Publish the progress now; an OSError passes through."""
        began = time.monotonic()
        self.progress.updated = time.time()
        if self._first:
            self._entry.manifest.write(self._path)
        else:
            self.publish_document()
        self._published = time.monotonic()
        self._cost = self._published - began
        self._stale = False

    def publish_document(self) -> None:
        """Write ``rank-NNNNN.json``; an OSError passes through."""
        head = {
            "kind": RANK_KIND,
            "format": FORMAT_VERSION,
            "run_id": self._entry.manifest.run_id,
            "attempt": self._entry.attempt.index,
            "rank": self._rank,
            "progress": None if self._first else self.progress,
            "options": self._options,
        }
        # The fingerprint may hold thousands of modules; it is turned into text once.
        text = f'{atomic_json.dump(head)[:-1]}, "fingerprint": {self._fingerprint}}}'
        atomic_json.write_atomically(self._entry.folder / document_name(self._rank), text.encode("ascii"))
