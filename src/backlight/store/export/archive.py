"""Archives of several files, written whole or not at all."""

from __future__ import annotations

import io
import tarfile
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

from backlight import atomic_files

ENDINGS = (".tar.gz", ".tgz", ".zip")

Member = tuple[str, Path | bytes]
"""A path inside the archive, with the file or its content."""


def check_archive(target: Path, what: str = "--bundle") -> None:
    """Check the name of an archive before its content is made; ``what`` is the option that named it."""
    if not target.name.endswith(ENDINGS):
        raise ValueError(f"{what} {target}: expected a name that ends in {', '.join(ENDINGS)}")
    if not target.absolute().parent.is_dir():
        raise ValueError(f"{what} {target}: no such folder: {target.absolute().parent}")
    if target.is_dir():
        raise ValueError(f"{what} {target}: is a folder; expected the name of a file")


def write_archive(target: Path, members: Iterable[Member]) -> Path:
    """Write ``members`` below one folder into ``target``, whole or not at all; an OSError passes through."""
    check_archive(target)
    root = target.name.removesuffix(next(e for e in ENDINGS if target.name.endswith(e))) or "bundle"
    with atomic_files.replacing(target) as temporary:
        if target.name.endswith(".zip"):
            with zipfile.ZipFile(temporary, "x", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
                for name, content in members:
                    if isinstance(content, Path):
                        archive.write(content, f"{root}/{name}")
                    else:
                        archive.writestr(f"{root}/{name}", content)
        else:
            with tarfile.open(temporary, "x:gz") as tar:
                for name, content in members:
                    if isinstance(content, Path):
                        tar.add(content, f"{root}/{name}", recursive=False)
                    else:
                        entry = tarfile.TarInfo(f"{root}/{name}")
                        entry.size, entry.mtime = len(content), int(time.time())
                        tar.addfile(entry, io.BytesIO(content))
    return target
