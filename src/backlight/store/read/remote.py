"""A run in object storage: files are copied, but Parquet files are read where they are, through fsspec."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from backlight.store.errors import RunFormatError
from backlight.store.format.names import safe_name
from backlight.store.read import private_copies

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
        parent = private_copies.new_folder()
        weakref.finalize(self, private_copies.remove, parent, os.getpid())
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
