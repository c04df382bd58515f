"""Runtime directory of the ranks of one machine and their watchdog, in shared memory. No torch.

It holds the shared state of each rank and small JSON documents. Nothing in it outlives the watchdog process,
and reading a run needs nothing of it. It lies in a directory that no other user can enter: what others put
next to that is never looked at.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from backlight import clock, codec, processes, untrusted_files
from backlight.watchdog.shared_state import read_state

MIN_AGE_S = 60.0
"""Age up to which a directory without a living process is left alone: it may be in the making."""

MAX_DOCUMENT_BYTES = 64 * 1024 * 1024
"""Larger documents are left out."""

WATCHDOG = "watchdog.json"
"""Document that holds the pid of the watchdog process."""

T = TypeVar("T")

_STATE = re.compile(r"rank-(\d{5,9})\.state")


def candidates() -> Iterator[Path]:
    """Yield the directories of this user that may hold runtime directories, the preferred one first.

    Names in ``/dev/shm`` and the temporary directory are open to every user of the machine, who may take
    them first; the home is not.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and _is_own(Path(runtime)):
        yield Path(runtime) / "backlight"
    for shared in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        yield shared / f"backlight-{os.geteuid()}"
    with contextlib.suppress(RuntimeError):
        yield Path.home() / ".cache" / "backlight" / "runtime"


def base() -> Path:
    """Return the directory in which this process creates runtime directories; it is created where missing.

    Raises
    ------
    PermissionError
        If each candidate belongs to another user, or cannot be created.
    """
    tried = []
    for path in candidates():
        with contextlib.suppress(OSError):
            path.mkdir(mode=0o700, parents=path.name == "runtime", exist_ok=True)
        if _is_own(path):
            return path
        tried.append(str(path))
    raise PermissionError(
        f"no directory for shared memory: {', '.join(tried)} belong to others, are open to them or cannot "
        "be created; set XDG_RUNTIME_DIR to a directory of your own with mode 0700"
    )


def _is_own(path: Path) -> bool:
    """Return whether ``path`` is a directory, no link, of this user and closed to all others."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077


def runtime_directory(run: Path, attempt: int, launch: str = "") -> Path:
    """Return the directory for one attempt of a run on this machine; it need not exist.

    It lies in :func:`base`, which raises PermissionError where there is none.
    """
    key = hashlib.sha256(f"{run.resolve()}\0{attempt}\0{launch}".encode()).hexdigest()[:16]
    return base() / key


def runtime_directories() -> Iterator[Path]:
    """Yield the runtime directories of this user on this machine."""
    for path in filter(_is_own, candidates()):
        with contextlib.suppress(OSError):
            yield from sorted(filter(_is_own, path.iterdir()))


def create(directory: Path) -> None:
    """Create the directory, for its owner alone; raise PermissionError where others can enter it."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    if not _is_own(directory):
        raise PermissionError(f"{directory}: belongs to another user, or is open to others")


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
            is_old = clock.system_time() - directory.stat().st_mtime > MIN_AGE_S
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
    temporary.write_text(codec.encode(content), encoding="utf-8")
    temporary.replace(path)


def read_document(path: Path, parse: Callable[[Any], T]) -> T | None:
    """Return a document as ``parse`` turns it into a record, None where there is none or it is malformed."""
    try:
        content = untrusted_files.read(path, MAX_DOCUMENT_BYTES, owners={os.geteuid()})
        return parse(codec.decode(content.decode()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
