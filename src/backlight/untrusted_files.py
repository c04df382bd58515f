"""Files that others may have made: opened only where they are regular and of bounded size.

A FIFO would block the reader for ever, a device or a link to one would never end, and a link may lead out of
the directory in which it lies.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from pathlib import Path

MAX_TEXT_BYTES = 16 * 1024 * 1024
"""Size of a document, plan or configuration: parsed, it takes many times the memory."""


class RefusedFileError(OSError):
    """A file that is not opened; ``strerror`` gives the reason."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


_TYPES = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISLNK, "a symbolic link"),
)
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_CLOEXEC", 0)
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


def check(path: Path, max_bytes: int, *, owners: Collection[int] = (), links: bool = False) -> int:
    """Return the bytes of a regular file without opening it; ``owners`` are user ids, all where empty.

    Raises
    ------
    OSError
        If there is no such file; RefusedFileError if it is not regular, of another owner or larger than
        ``max_bytes``. A symbolic link is followed only with ``links``.
    """
    return _checked(path, path.stat(follow_symlinks=links), max_bytes, owners)


def open_descriptor(path: Path, max_bytes: int, *, owners: Collection[int] = (), links: bool = False) -> int:
    """Return a descriptor for reading a file; never waits. Raises as :func:`check`."""
    check(path, max_bytes, owners=owners, links=links)  # opening a device may already act on it
    descriptor = os.open(path, _FLAGS | (0 if links else _NOFOLLOW))
    try:
        _checked(path, os.fstat(descriptor), max_bytes, owners)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read(
    path: Path, max_bytes: int = MAX_TEXT_BYTES, *, owners: Collection[int] = (), links: bool = False
) -> bytes:
    """Return the content of a file. Raises as :func:`check`."""
    with os.fdopen(open_descriptor(path, max_bytes, owners=owners, links=links), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise _too_large(path, len(content), max_bytes)
    return content


def read_text(path: Path) -> str:
    """Return the text of a file that the user has named, which may be a link; UnicodeDecodeError if none.

    Raises as :func:`check`.
    """
    return read(path, links=True).decode("utf-8")


def owners_beside(path: Path) -> set[int]:
    """Return the users whose files are taken in a directory: its owner, this one and root."""
    return {path.parent.stat().st_uid, os.geteuid(), 0} if hasattr(os, "geteuid") else set()


def _checked(path: Path, status: os.stat_result, max_bytes: int, owners: Collection[int]) -> int:
    if not stat.S_ISREG(status.st_mode):
        kind = next((words for is_kind, words in _TYPES if is_kind(status.st_mode)), "no file")
        raise RefusedFileError(errno.EINVAL, f"it is {kind}, expected a regular file", str(path))
    if owners and status.st_uid not in owners:
        raise RefusedFileError(errno.EPERM, f"it belongs to another user ({status.st_uid})", str(path))
    if owners and status.st_nlink > 1 and status.st_uid != path.parent.stat().st_uid:
        # Who owns the directory may have linked any file of this user into it.
        raise RefusedFileError(errno.EPERM, "it is a second name of a file of another user", str(path))
    if status.st_size > max_bytes:
        raise _too_large(path, status.st_size, max_bytes)
    return status.st_size


def _too_large(path: Path, size: int, max_bytes: int) -> RefusedFileError:
    words = f"{size} bytes, expected at most {max_bytes}; it is damaged or foreign"
    return RefusedFileError(errno.EFBIG, words, str(path))
