"""Private copies of files of runs, and runs in object storage.

All copies of a process lie in one temporary folder, which it locks for as long as it lives. The next process
that makes a copy removes the folders that no process locks, also after a kill. Of a run in object storage
files are copied, but Parquet files are read where they are, through fsspec.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from backlight.store.errors import RunFormatError
from backlight.store.format.names import safe_name

if sys.platform != "win32":
    import fcntl


MAX_FILES = 1_000_000
"""Files of a run that are listed."""

MAX_COPIED_BYTES = 16 * 1024**3
"""Bytes of the files that are copied: a run that is not compacted is copied whole."""

_mirrors: weakref.WeakValueDictionary[Path, Mirror] = weakref.WeakValueDictionary()


_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(path: str | Path) -> bool:
    """Return whether a path is a URL, as ``s3://bucket/run``."""
    return _URL.match(str(path)) is not None


class Mirror:
    """The files of a run behind a URL; ``folder`` has all but the Parquet files, while this object lives.

    ``is_needed``: which of the other files are copied, by their path below the URL; default: all.
    """

    def __init__(self, url: str, is_needed: Callable[[PurePosixPath], bool] = lambda _: True) -> None:
        try:
            import fsspec  # noqa: PLC0415 - an optional library
        except ImportError:
            raise RunFormatError(
                f"{url}: reading it needs fsspec, which is not installed: pip install 'backlight[remote]'"
            ) from None
        self.url = url
        parent = new_folder()
        weakref.finalize(self, remove, parent, os.getpid())
        self.folder = parent / safe_name(url.rstrip("/").rpartition("/")[2], "run")
        self.folder.mkdir()
        self._names: dict[Path, str] = {}
        self.sizes: dict[Path, int] = {}
        try:
            self._files: Any
            self._files, root = fsspec.core.url_to_fs(url)
            self._list(root.rstrip("/"), is_needed)
        except (OSError, ValueError, ImportError) as error:
            reason = str(error).partition("\n")[0]
            raise RunFormatError(f"{url}: cannot be read: {type(error).__name__}: {reason}") from error
        _mirrors[self.folder] = self

    def _list(self, root: str, is_needed: Callable[[PurePosixPath], bool]) -> None:
        copied = 0
        for name, info in self._files.find(root, detail=True).items():
            below = PurePosixPath(name.removeprefix(root).lstrip("/"))
            if ".." in below.parts or below.is_absolute() or len(self._names) >= MAX_FILES:
                raise ValueError(f"it lists {name!r}, expected at most {MAX_FILES} files below {root}")
            path = self.folder / below
            self._names[path], self.sizes[path] = name, int(info["size"])
            if path.suffix != ".parquet" and is_needed(below):
                copied += self.sizes[path]
                if copied > MAX_COPIED_BYTES:
                    raise ValueError(f"it has more than {MAX_COPIED_BYTES} bytes that are not Parquet")
                path.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(name, str(path))
        for path in self.sizes:  # folders of which every file stays there
            path.parent.mkdir(parents=True, exist_ok=True)

    def open(self, path: Path) -> Any:
        """Return a file that stays where it is, open for reading."""
        return self._files.open(self._names[path], "rb")


def shown(text: str) -> str:
    """Return a text with the URL of a run in the place of its copy."""
    for folder, mirror in list(_mirrors.items()):
        text = text.replace(str(folder), mirror.url)
    return text


def mirror_of(path: Path) -> Mirror | None:
    """Return the mirror in whose folder a path is, None where it is a file of this machine."""
    return next((_mirrors[parent] for parent in (path, *path.parents) if parent in _mirrors), None)


_PREFIX = "backlight-read-"

_folders: dict[Path, Path] = {}  # of this process, by the folder of the system for temporary files


def new_folder() -> Path:
    """Return a new private folder, which is removed at the end of this process at the latest."""
    parent = Path(tempfile.gettempdir())
    folder = _folders.get(parent)
    if folder is None or not folder.exists():
        _remove_abandoned(parent)
        folder = _folders[parent] = _locked_folder()
        atexit.register(remove, folder, os.getpid())
    return Path(tempfile.mkdtemp(dir=folder))


def remove(folder: Path, owner: int) -> None:
    """Remove a folder, unless this process is a fork of ``owner``, which may still use it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _locked_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="backlight-"))
    if sys.platform == "win32":
        return folder
    with contextlib.suppress(OSError):  # some file systems have no locks: there, no process removes it either
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
    # It gets the name by which others find it once it is locked.
    return folder.rename(folder.with_name(_PREFIX + folder.name.removeprefix("backlight-")))


def _remove_abandoned(parent: Path) -> None:
    if sys.platform == "win32":
        return
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.geteuid():
                    shutil.rmtree(folder)
            finally:
                os.close(descriptor)
