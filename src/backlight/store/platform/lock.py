"""One process at a time enters or tidies a run: by a lock of the kernel, on network storage also a file."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from backlight.records import to_json
from backlight.store.errors import RunExistsError, RunFormatError
from backlight.store.platform import atomic_json, filesystem
from backlight.store.platform.process import ProcessIdentity

if sys.platform != "win32":
    import fcntl

LOCK_TIMEOUT = 5.0
"""Seconds that a process waits for another one that is just entering the same folder."""

CLAIM = ".entering"
"""Name of the file that only one process, of whatever machine, can create."""

STALE = 600.0
"""Seconds after which the claim of a process on another machine is taken for left behind."""


@contextlib.contextmanager
def locked(path: Path, timeout: float = LOCK_TIMEOUT) -> Iterator[None]:
    """Keep other processes from entering or compacting the run meanwhile.

    The lock is the kernel's and on the folder itself: it leaves no file and ends with the process. Between
    machines such locks cannot be relied on: on network storage the process also creates :data:`CLAIM`.

    Raises
    ------
    RunExistsError
        If another process holds it for longer than ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    with _kernel_lock(path, deadline):
        if not filesystem.on_network(path):
            yield
            return
        claim = path / CLAIM
        _claim(path, claim, deadline)
        try:
            yield
        finally:
            claim.unlink(missing_ok=True)


@contextlib.contextmanager
def _kernel_lock(path: Path, deadline: float) -> Iterator[None]:
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    msg = f"{path}: another process is just opening or compacting this run; try again"
                    raise RunExistsError(msg) from None
                time.sleep(0.01)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def _claim(path: Path, claim: Path, deadline: float) -> None:
    text = json.dumps(to_json(ProcessIdentity.of_this_process())).encode("ascii")
    while True:
        try:
            # Creating a file that must not exist yet is one step on network storage, too.
            descriptor = os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            if _left_behind(claim):
                claim.unlink(missing_ok=True)
            elif time.monotonic() > deadline:
                raise RunExistsError(
                    f"{path}: another process is just opening or compacting this run; try again, or remove "
                    f"{claim} if no other process uses the folder"
                ) from None
            else:
                time.sleep(0.02)
            continue
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
        return


def _left_behind(claim: Path) -> bool:
    """Tell whether whoever created the claim is gone without removing it."""
    try:
        age = time.time() - claim.stat().st_mtime
        alive = ProcessIdentity.from_json(atomic_json.read_document(claim)).alive()
    except (OSError, RunFormatError):
        return False  # it has just gone, or is just being written
    return alive is False or (alive is None and age > STALE)
