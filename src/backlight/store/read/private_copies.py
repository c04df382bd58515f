"""Temporary folders for copies of files of runs, removed also after a process that was killed.

All copies of a process lie in one folder, which it locks for as long as it lives. The next process that makes
a copy removes the folders that no process locks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

if sys.platform != "win32":
    import fcntl

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
