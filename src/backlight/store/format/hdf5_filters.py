"""How arrays are laid out and compressed inside a piece, and which layouts are read back.

Values are chunked along time, because neighbouring steps of one array have like exponents, and their
bytes are sorted by significance before they are compressed. ``bench/tracking.py`` prints what that
gives: mantissas of gradients do not compress, signs and exponents do. Only filters that
are part of every HDF5 build of h5py are used, and only those are read: anything else may load a plug-in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

COMPRESSIONS = ("gzip", "lzf", "none")

CHUNK_BYTES = 1024 * 1024
"""Bytes of a chunk, as far as one step allows: a step larger than this is split along its first axis."""

CHUNK_STEPS = 16
"""Steps in a chunk at most; one step is read back by reading so many."""

SMALLEST = 4096
"""Bytes below which an array stays plain: the index of its chunks would take more than it saves."""

_SHUFFLE, _DEFLATE, _LZF = 2, 1, 32000
_LARGEST_RATIO = 1100
"""Deflate shrinks by 1032 at most; what claims more than this is damaged or made to fill a memory."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Compression of stored arrays: ``gzip`` with a ``level`` of 0 to 9, ``lzf``, or ``none``.

    Raises
    ------
    ValueError
        If there is no such compression or level.
    """

    compression: str = "gzip"
    level: int = 1

    def __post_init__(self) -> None:
        if self.compression not in COMPRESSIONS:
            known = ", ".join(COMPRESSIONS)
            raise ValueError(f"compression {self.compression!r}: expected one of {known}")
        if not 0 <= self.level <= 9:
            raise ValueError(f"compression level {self.level}: expected 0 to 9")

    def options(self, shape: tuple[int, ...], itemsize: int) -> dict[str, Any]:
        """Return the keywords of ``create_dataset`` for an array [S, ...]; none where it stays plain."""
        if self.compression == "none" or math.prod(shape) * itemsize < SMALLEST or len(shape) < 2:
            return {}
        options: dict[str, Any] = {
            "chunks": chunk_shape(shape, itemsize),
            "compression": self.compression,
            "shuffle": itemsize > 1,
        }
        if self.compression == "gzip":
            options["compression_opts"] = self.level
        return options


PLAIN = Filters("none")


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the shape of a chunk for an array [S, ...]: even shares of its steps, no padding to speak of."""
    steps, row = shape[0], math.prod(shape[1:]) * itemsize
    most = max(1, min(CHUNK_STEPS, CHUNK_BYTES // max(row, 1)))
    chunk = -(-steps // -(-steps // most))
    if row <= CHUNK_BYTES or len(shape) < 2:
        return (chunk, *shape[1:])
    parts = min(shape[1], -(-row // CHUNK_BYTES))
    return (chunk, -(-shape[1] // parts), *shape[2:])


def problem(dataset: Any, file_size: int) -> str:
    """Say why ``dataset`` is not stored as backlight stores arrays; empty where it is."""
    import h5py  # noqa: PLC0415 - 0.1 s that a run without arrays need not pay

    layout = dataset.id.get_create_plist()
    size = math.prod(dataset.shape) * dataset.dtype.itemsize
    stored = dataset.id.get_storage_size()
    if layout.get_external_count() or stored > file_size:
        return "lies outside of the file"
    if layout.get_layout() == h5py.h5d.CONTIGUOUS:
        return "" if stored == size and not layout.get_nfilters() else "has less in the file than it states"
    if layout.get_layout() != h5py.h5d.CHUNKED:
        return "is not stored plainly"
    filters = {layout.get_filter(i)[0] for i in range(layout.get_nfilters())}
    if not filters <= {_SHUFFLE, _DEFLATE, _LZF}:
        return f"uses filters {sorted(filters)}, of which backlight writes only shuffle, gzip and lzf"
    if size > _LARGEST_RATIO * stored:
        return f"states {size} bytes for {stored} in the file"
    expected = math.prod(-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True))
    if dataset.id.get_num_chunks() != expected:
        return f"has {dataset.id.get_num_chunks()} of {expected} chunks"
    return ""
