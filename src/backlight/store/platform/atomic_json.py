"""Small JSON documents of a run directory: written whole or not at all, read with care."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from backlight.records import to_json
from backlight.store.errors import RunFormatError

LARGEST = 256 * 1024 * 1024
"""Bytes beyond which a document is taken for damaged instead of being loaded into memory."""


def dump(document: Any) -> str:
    """Return JSON in plain ASCII, so that no name, however hostile, breaks an encoding.

    Numbers of numpy become numbers, arrays become lists, and what JSON does not know becomes its text.
    """
    return json.dumps(to_json(document), ensure_ascii=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(to_json(list(value)), key=str)
    return str(value)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``, synced: a reader sees the old or the new, never a part.

    An OSError passes through; the old content is then still there.
    """
    temporary = temporary_name(path)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def temporary_name(path: Path) -> Path:
    """Return the hidden name beside ``path`` under which this process prepares it."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def is_temporary(name: str) -> bool:
    """Tell whether a name is one of :func:`temporary_name`, left behind by a kill."""
    return name.startswith(".") and name.endswith(".tmp")


def publish(temporary: Path, path: Path) -> None:
    """Give a file that is complete and synced its name, so that the name survives a power cut."""
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names inside a folder survive a power cut, where the system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk; an OSError passes through."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_document(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises
    ------
    RunFormatError
        If it is not there, not readable, not JSON, or not an object.
    """
    try:
        size = path.stat().st_size
        if size > LARGEST:
            msg = f"{path}: {size} bytes, expected a document below {LARGEST}; it is damaged or foreign"
            raise RunFormatError(msg)
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise RunFormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        msg = f"{path}: is not valid JSON ({error}); it is damaged or was not written by backlight"
        raise RunFormatError(msg) from error
    if not isinstance(document, dict):
        msg = f"{path}: holds a JSON {type(document).__name__}, expected an object"
        raise RunFormatError(msg)
    return document
