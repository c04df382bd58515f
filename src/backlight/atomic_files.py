"""Files written whole or not at all, into directories that others may write to as well.

A name that can be guessed may be a link by the time a file of that name is opened. So every file begins under
a random name that must not exist yet (mode ``x``), and a rename replaces a link instead of following it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from backlight import untrusted_files

MAX_COPIED_BYTES = 1024**4
"""Larger files are not copied."""

_MAX_NAME_BYTES = 200
_BLOCK_BYTES = 1024 * 1024
_CLOSED_BY_EXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CLOSED_BY_EXEC
_APPENDED = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | _CLOSED_BY_EXEC


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the name of a new file, to be created with mode ``x``; at the end it takes the place of ``path``.

    After an error ``path`` is what it was. An OSError passes through.
    """
    temporary = temporary_name(path)
    try:
        yield temporary
        sync_file(temporary)
        publish(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Replace ``path`` by ``data``, synced: readers get the old or the new content, never a part.

    ``mode`` are the permissions of the new file, less those that the umask takes.
    """
    with replacing(path) as temporary:
        descriptor = os.open(temporary, _NEW, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)


def open_log(path: Path) -> BinaryIO:
    """Open a file to which a process appends; an OSError also where it is a link."""
    return os.fdopen(os.open(path, _APPENDED, 0o666), "ab")


def copy(source: Path, target: Path) -> None:
    """Copy a closed file; the copy appears complete, on any file system.

    Raises
    ------
    OSError
        Also where ``source`` is a link, no regular file, or not of the owner of its directory, this user or
        root.
    """
    with replacing(target) as temporary, temporary.open("xb") as file:
        copy_into(source, file)


def copy_into(source: Path, file: BinaryIO) -> None:
    """Copy a file into an open one. Raises as :func:`copy`."""
    owners = untrusted_files.owners_beside(source)
    descriptor = untrusted_files.open_descriptor(source, MAX_COPIED_BYTES, owners=owners)
    with os.fdopen(descriptor, "rb") as opened:
        shutil.copyfileobj(opened, file, _BLOCK_BYTES)


def temporary_name(path: Path) -> Path:
    """Return a hidden name next to ``path`` that cannot be guessed."""
    stem = os.fsencode(path.name)[:_MAX_NAME_BYTES].decode("utf-8", "ignore")
    return path.with_name(f".{stem}.{os.urandom(8).hex()}.tmp")


def is_temporary(name: str) -> bool:
    """Return whether a name is one of :func:`temporary_name`, left behind by a kill."""
    return name.startswith(".") and name.endswith(".tmp")


def publish(temporary: Path, path: Path) -> None:
    """Give a complete, synced file its name, so that the name survives a power cut."""
    temporary.replace(path)
    with contextlib.suppress(OSError):  # not every file system syncs a folder
        _sync(path.parent, getattr(os, "O_DIRECTORY", 0))


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk; an OSError passes through."""
    _sync(path, getattr(os, "O_NOFOLLOW", 0))


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
