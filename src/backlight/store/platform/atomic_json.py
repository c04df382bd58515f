"""JSON documents and other small files of a run directory: written whole or not at all, read with checks."""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from pathlib import Path
from typing import Any

from backlight import atomic_files, strict_json, untrusted_files
from backlight.records import to_json
from backlight.store.errors import RunFormatError

MAX_DEPTH = 64
"""Documents that nest deeper are refused: what copies or compares them calls itself for each level."""

_SEAL = re.compile(rb', "crc": (\d{1,10})\}\s*\Z')
_TOO_DEEP = f"it nests deeper than {MAX_DEPTH}"
_PARTS = {dict, list}


def dump(document: Any) -> str:
    """Return the JSON of a row of a database, which keeps Python's ``NaN`` and ``Infinity``: they read back.

    Arrays become lists, and what JSON does not know becomes its text.
    """
    return _ENCODER.encode(to_json(document))


# Of their own: a watched script may replace functions of json.
_ENCODER, _DECODER = json.JSONEncoder(default=strict_json.plain), json.JSONDecoder()


def load(text: str) -> Any:
    """Return what a JSON text holds.

    Raises
    ------
    ValueError
        If it is no JSON, or nested deeper than :data:`MAX_DEPTH`.
    """
    try:
        document = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [document]
    for _ in range(MAX_DEPTH):
        parts = (part.values() if type(part) is dict else part for part in level if type(part) in _PARTS)
        level = [value for part in parts for value in part if type(value) in _PARTS]
        if not level:
            return document
    raise ValueError(_TOO_DEEP)


def seal(text: str) -> bytes:
    """Return a JSON object, not an empty one, with a last key ``crc``: the CRC-32 of all before it."""
    body = text[:-1].encode("ascii")
    return b'%s, "crc": %d}' % (body, zlib.crc32(body))


class _ChangedError(ValueError):
    """A document is not the one that was written."""


def _unsealed(content: bytes) -> Any:
    """Return what a document holds, less its checksum; a ValueError where that does not fit."""
    document = load(content.decode("utf-8"))
    if not isinstance(document, dict):
        return document
    stated = document.pop("crc", None)
    found = _SEAL.search(content)
    if stated is None and found is None:
        if "format" in document:  # others need none
            raise _ChangedError("it has no checksum")
    elif found is None or stated != int(found[1]) or stated != zlib.crc32(content[: found.start()]):
        raise _ChangedError("its checksum does not match")
    return document


def read_document(path: Path) -> dict[str, Any]:
    """Read a JSON object and compare it with its checksum, which is not part of what is returned.

    Raises
    ------
    RunFormatError
        If it cannot be read, or has been changed since it was written.
    """
    owners = untrusted_files.owners_beside(path)
    try:
        try:
            document = _unsealed(untrusted_files.read(path, owners=owners))
        except ValueError:  # on a full disk its writer may be overwriting it at this moment
            document = _unsealed(untrusted_files.read(path, owners=owners))
    except OSError as error:
        raise RunFormatError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        msg = f"{path}: is not valid JSON ({error}); it is damaged or was not written by backlight"
        if isinstance(error, _ChangedError):
            msg = f"{path}: {error}: it was changed after it was written; restore it from a copy of the run"
        raise RunFormatError(msg) from error
    if not isinstance(document, dict):
        raise RunFormatError(f"{path}: holds a JSON {type(document).__name__}, expected an object")
    return document


def write_document(path: Path, document: Any) -> None:
    """Replace ``path`` by ``document`` as JSON, sealed.

    On a full disk, where no new file fits, the document takes the place of the old one inside its blocks.

    Raises
    ------
    OSError
        If the file system refuses.
    """
    data = seal(strict_json.dump(document))
    try:
        atomic_files.write(path, data)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT} or not _overwrite(path, data):
            raise


def _overwrite(path: Path, data: bytes) -> bool:
    """Write ``data`` and spaces over a file if the blocks that it has are enough; return whether they are."""
    try:
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            held = os.fstat(file.fileno())
            if len(data) > held.st_blocks * 512:
                return False
            file.write(data.ljust(held.st_size))
            os.fsync(file.fileno())
    except OSError:
        return False
    return True
