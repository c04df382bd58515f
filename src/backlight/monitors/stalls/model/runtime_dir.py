"""Where the ranks of one machine and their sidecar meet: a folder in shared memory. No torch.

It holds a board per rank and small documents that belong to it. Nothing in it outlives the sidecar, and
nothing of it is needed to read a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from backlight.monitors.stalls.model.shared_state import read_state

YOUNG = 60.0
"""Seconds in which a place without a living process is left alone."""

_BOARD = re.compile(r"rank-(\d{5,9})\.board")


def runtime_directory(run: Path, attempt: int, launch: str = "") -> Path:
    """Return the folder for one attempt of a run on this machine; it need not exist."""
    key = hashlib.sha256(f"{run.resolve()}\0{attempt}\0{launch}".encode()).hexdigest()[:16]
    return base() / f"backlight-{os.getuid()}-{key}"


def base() -> Path:
    """Return the shared memory of this machine, or its temporary folder."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def prepare(place: Path) -> None:
    """Make the folder, for its owner alone.

    An OSError passes through.

    Raises
    ------
    PermissionError
        If somebody else has made it.
    """
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=0o700)
    if place.is_symlink() or place.stat().st_uid != os.getuid():
        raise PermissionError(f"{place}: belongs to somebody else")


def state_path(place: Path, rank: int) -> Path:
    """Return the path of the board of a rank."""
    return place / f"rank-{rank:05d}.board"


def document_path(place: Path, rank: int, kind: str) -> Path:
    """Return the path of a document of a rank: ``names``, ``stacks``, ``making``, ``groups``."""
    return place / f"rank-{rank:05d}.{kind}.json"


def dump_path(place: Path, rank: int) -> Path:
    """Return the file into which a rank's C handler writes its stacks."""
    return place / f"rank-{rank:05d}.dump"


def ranks_at(place: Path) -> list[int]:
    """Return the ranks that have a board here."""
    with contextlib.suppress(OSError):
        return sorted(int(m[1]) for p in place.iterdir() if (m := _BOARD.fullmatch(p.name)))
    return []


def runtime_directories() -> Iterator[Path]:
    """Yield the meeting places of this user on this machine."""
    with contextlib.suppress(OSError):
        yield from sorted(base().glob(f"backlight-{os.getuid()}-*"))


def write_document(path: Path, content: Any) -> None:
    """Replace a document whole; an OSError passes through."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)


def read_document(path: Path) -> Any:
    """Return a document, None where there is none or it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def sweep(alive: Callable[[int], bool]) -> None:
    """Remove the places of launches that were killed before a sidecar could tidy up.

    ``alive`` tells whether a process lives. A place that is younger than a minute may be in the making.
    """
    for place in runtime_directories():
        with contextlib.suppress(OSError):
            snapshots = [read_state(state_path(place, rank)) for rank in ranks_at(place)]
            pids = [board.pid for board in snapshots if board is not None]
            pids.append(int((read_document(place / "sidecar.json") or {}).get("pid", 0)))
            if time.time() - place.stat().st_mtime > YOUNG and not any(map(alive, filter(None, pids))):
                leave(place)


def leave(place: Path) -> None:
    """Remove the folder and what is in it, as far as the system lets us."""
    shutil.rmtree(place, ignore_errors=True)
