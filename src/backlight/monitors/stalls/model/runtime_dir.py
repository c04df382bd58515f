"""Runtime directory of the ranks of one machine and their watchdog, in shared memory. No torch.

It holds the shared state of each rank and small JSON documents. Nothing in it outlives the watchdog process,
and reading a run needs nothing of it.
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
from typing import Any, TypeVar

from backlight import processes
from backlight.monitors.stalls.model.shared_state import read_state

MIN_AGE_S = 60.0
"""Age up to which a directory without a living process is left alone: it may be in the making."""

WATCHDOG = "watchdog.json"
"""Document that holds the pid of the watchdog process."""

T = TypeVar("T")

_STATE = re.compile(r"rank-(\d{5,9})\.state")


def base() -> Path:
    """Return the shared memory of this machine, or its temporary directory."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def runtime_directory(run: Path, attempt: int, launch: str = "") -> Path:
    """Return the directory for one attempt of a run on this machine; it need not exist."""
    key = hashlib.sha256(f"{run.resolve()}\0{attempt}\0{launch}".encode()).hexdigest()[:16]
    return base() / f"backlight-{os.getuid()}-{key}"


def runtime_directories() -> Iterator[Path]:
    """Yield the runtime directories of this user on this machine."""
    with contextlib.suppress(OSError):
        yield from sorted(base().glob(f"backlight-{os.getuid()}-*"))


def create(directory: Path) -> None:
    """Create the directory, for its owner alone; raise PermissionError where it belongs to another user."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    if directory.is_symlink() or directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory}: belongs to another user")


def remove(directory: Path) -> None:
    """Remove the directory with its content, as far as the system permits."""
    shutil.rmtree(directory, ignore_errors=True)


def remove_abandoned() -> None:
    """Remove the directories of launches that were killed before their watchdog could."""
    for directory in runtime_directories():
        with contextlib.suppress(OSError):
            states = [read_state(state_path(directory, rank)) for rank in ranks_in(directory)]
            pids = [state.pid for state in states if state is not None]
            pids.append(watchdog_pid(directory))
            is_old = time.time() - directory.stat().st_mtime > MIN_AGE_S
            if is_old and not any(map(processes.is_alive, filter(None, pids))):
                remove(directory)


def state_path(directory: Path, rank: int) -> Path:
    """Return the path of the shared state of a rank."""
    return directory / f"rank-{rank:05d}.state"


def document_path(directory: Path, rank: int, kind: str) -> Path:
    """Return the path of a JSON document of a rank, such as ``names`` or ``stacks``."""
    return directory / f"rank-{rank:05d}.{kind}.json"


def dump_path(directory: Path, rank: int) -> Path:
    """Return the file into which faulthandler dumps the stacks of a rank."""
    return directory / f"rank-{rank:05d}.dump"


def ranks_in(directory: Path) -> list[int]:
    """Return the ranks that have a shared state in a directory."""
    with contextlib.suppress(OSError):
        return sorted(int(m[1]) for p in directory.iterdir() if (m := _STATE.fullmatch(p.name)))
    return []


def watchdog_pid(directory: Path) -> int:
    """Return the pid of the watchdog process, 0 where none has started."""
    return read_document(directory / WATCHDOG, lambda data: int(data["pid"])) or 0


def write_document(path: Path, content: Any) -> None:
    """Replace a document atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content), encoding="utf-8")
    temporary.replace(path)


def read_document(path: Path, parse: Callable[[Any], T]) -> T | None:
    """Return a document as ``parse`` turns it into a record, None where there is none or it is malformed."""
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
