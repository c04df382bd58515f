"""Small JSON documents of a run folder: written whole or not at all, read with care."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from backlight.records import to_json
from backlight.store.errors import RunFormatError

LARGEST = 256 * 1024 * 1024
"""Bytes beyond which a document is taken for damaged instead of being loaded into memory."""


def dump(document: Any) -> str:
    """Return JSON in plain ASCII, so that no name, however hostile, breaks an encoding."""
    return json.dumps(to_json(document), ensure_ascii=True, default=str)


def write_atomically(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Replace ``path`` by ``data``: a reader sees the old or the new, never a part.

    Raises
    ------
    OSError
        If the file system does not let us; the old content is then still there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names inside a folder survive a power cut, where the system can do that."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        return
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
