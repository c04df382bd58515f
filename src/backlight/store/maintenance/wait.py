"""Whether the other ranks of a run have closed their files, asked of the files and of nobody else."""

from __future__ import annotations

import json
import time
from pathlib import Path

from backlight.records import RunStatus
from backlight.store.errors import RunFormatError
from backlight.store.format.manifest import Progress, attempt_folder, read_manifest
from backlight.store.write.attempt import document_name

_PAUSE = 0.05


def wait_for_ranks(path: str | Path, timeout: float) -> bool:
    """Wait until every rank above 0 of the newest attempt has ended; return whether that came to be.

    A rank that has left nothing in this folder, not watched or on a host that does not see it, is not waited
    for.

    Parameters
    ----------
    path:
        The run directory.
    timeout:
        Seconds after which this returns in any case.
    """
    deadline = time.monotonic() + timeout
    while not _ended(Path(path)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE)
    return True


def _ended(path: Path) -> bool:
    try:
        attempt = read_manifest(path).attempts[-1]
        for rank in range(1, attempt.world_size):
            document = path / attempt_folder(attempt.index) / document_name(rank)
            if not document.exists():
                continue
            progress = json.loads(document.read_text(encoding="utf-8")).get("progress") or {}
            if Progress.from_json(progress).status_now() is RunStatus.RUNNING:
                return False
    except (OSError, ValueError, IndexError, RunFormatError):
        return False
    return True
