"""JSON documents and other small files of a run directory: written whole or not at all, read with checks."""

from __future__ import annotations

import errno
import os
import re
import zlib
from pathlib import Path
from typing import Any

from backlight import atomic_files, codec, untrusted_files
from backlight.store.errors import RunFormatError

_SEAL = re.compile(rb', "crc": (\d{1,10})\}\s*\Z')


def seal(text: str) -> bytes:
    """Return a JSON object, not an empty one, with a last key ``crc``: the CRC-32 of all before it."""
    body = text[:-1].encode("ascii")
    return b'%s, "crc": %d}' % (body, zlib.crc32(body))


class _ChangedError(ValueError):
    """A document is not the one that was written."""


def _unsealed(content: bytes) -> Any:
    """Return what a document holds, less its checksum; a ValueError where that does not fit."""
    document = codec.decode(content.decode("utf-8"))
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
    data = seal(codec.encode(document))
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
