"""Where a run lands when nobody says where."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

from backlight.store.format.names import safe_name
from backlight.store.write.attempt import job_of


def default_path(script: str = "", launch: str | None = None) -> Path:
    """Return ``runs/<script>-<time>``, with a number where that exists.

    Ranks of one launch need the same folder without asking each other, and their clocks differ: given
    ``launch``, which they have in common, the folder is ``runs/<script>-<its hash>``; a restart of the same
    job has the same one.
    """
    stem = safe_name(Path(script or (sys.argv[0] if sys.argv else "")).stem or "training")
    if launch is not None:
        return Path("runs") / f"{stem}-{hashlib.sha256(job_of(launch).encode()).hexdigest()[:8]}"
    base = Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path
