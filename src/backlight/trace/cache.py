"""Cache of a parsed trace: Parquet next to its file."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from backlight import atomic_files, untrusted_files
from backlight.trace.events import COLUMNS, Events, Trace
from backlight.trace.reader import read_trace

SUFFIX = ".backlight.parquet"
VERSION = 5
"""Version of the columns; a file of another version is ignored."""

MAX_CACHE_BYTES = 16 * 1024**3
"""Larger files are not read."""

MAX_RATIO = 100
"""Columns take at most so many times the bytes of the trace, as those of a gzip file."""

_MIN_BYTES = 1024 * 1024
_ROW_BYTES = sum(np.dtype(column.dtype).itemsize for column in COLUMNS.values())
_KEY = b"backlight.trace"
_KEPT = ("metadata", "count", "rank", "world_size", "base", "notes")
_HASHED_BYTES = 65536


def cache_path(path: Path) -> Path:
    """Return the path of the cache of ``path``."""
    return path.with_name(path.name + SUFFIX)


def open_trace(path: str | Path, *, cache: bool = False) -> Trace:
    """Read a trace, from its Parquet if there is one that is not stale; with ``cache``, write that otherwise.

    Errors are those of :func:`~backlight.trace.reader.read_trace`, and an OSError where the Parquet cannot be
    written.
    """
    path = Path(path)
    kept = cache_path(path)
    if kept.is_file() and path.is_file():
        cached = _load(path, kept)
        if cached is not None:
            return cached
    trace = read_trace(path)
    if cache:
        _save(trace, kept)
    return trace


def _identity(path: Path) -> dict[str, Any]:
    """Return size, time and a hash of both ends of a file, to recognise a changed one."""
    about = path.stat()
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_HASHED_BYTES))
        file.seek(max(about.st_size - _HASHED_BYTES, 0))
        digest.update(file.read(_HASHED_BYTES))
    return {"size": about.st_size, "mtime_ns": about.st_mtime_ns, "ends": digest.hexdigest()}


def _save(trace: Trace, kept: Path) -> None:
    """Write the columns of a trace; the file appears whole or not at all."""
    import pyarrow as pa  # noqa: PLC0415  # an extra
    import pyarrow.parquet as pq  # noqa: PLC0415  # an extra

    arrays = {name: pa.array(trace.events[name]) for name in COLUMNS}
    about = {
        "version": VERSION,
        "source": _identity(Path(trace.path)),
        "words": trace.events.words,
        **{name: getattr(trace, name) for name in _KEPT},
    }
    table = pa.table(arrays).replace_schema_metadata({_KEY: json.dumps(about).encode()})
    with atomic_files.replacing(kept) as temporary, temporary.open("xb") as file:
        pq.write_table(table, file, compression="zstd", compression_level=1, use_dictionary=False)


def _load(path: Path, kept: Path) -> Trace | None:
    """Return the trace from its Parquet; None if that is stale, foreign, damaged or cannot be read here."""
    try:
        import pyarrow as pa  # noqa: PLC0415  # an extra
        import pyarrow.parquet as pq  # noqa: PLC0415  # an extra
    except ModuleNotFoundError:
        return None
    try:
        owners = untrusted_files.owners_beside(kept)
        opened = untrusted_files.open_descriptor(kept, MAX_CACHE_BYTES, owners=owners)
        with os.fdopen(opened, "rb") as file, pq.ParquetFile(file) as parquet:
            about = json.loads((parquet.schema_arrow.metadata or {})[_KEY])
            if about["version"] != VERSION or about["source"] != _identity(path):
                return None
            # Bounded before it is decoded: a column of equal numbers takes a few bytes.
            most = max(MAX_RATIO * path.stat().st_size, _MIN_BYTES) // _ROW_BYTES
            if parquet.schema_arrow.names != list(COLUMNS) or not 0 <= parquet.metadata.num_rows <= most:
                return None
            table = parquet.read()
        columns = {name: np.asarray(table[name]).astype(kept_as.dtype) for name, kept_as in COLUMNS.items()}
        kept_fields = {name: about[name] for name in _KEPT} | {"notes": tuple(about["notes"])}
        return Trace(str(path), Events(columns, about["words"]), **kept_fields)
    except (OSError, KeyError, ValueError, TypeError, pa.ArrowException):
        return None
