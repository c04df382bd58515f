"""Files next to a database: arrays in closed HDF5 pieces, read without trusting them, and evidence.

A piece holds one group per (name, shape, type, unit, dims, encoding), called ``a0``, ``a1``, …, with the
datasets ``steps`` ``[S]`` and ``values`` ``[S, …]`` and the attributes ``name`` (as a JSON string, because
HDF5 strings cannot hold every character), ``dims`` (JSON list), ``dtype``, ``unit`` (JSON string),
``encoding``, ``encoding_version`` and ``crc`` (CRC-32 of the two datasets).

Values are contiguous, or, in a piece that is not merged again, chunked along time and compressed:
neighbouring steps of one array have similar exponents, and their bytes are sorted by significance first.
``bench/tracking.py`` prints the gain: mantissas of gradients do not compress, signs and exponents do. Only
filters that are part of every HDF5 build of h5py are written and read: any other may load a plug-in.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight import atomic_files, untrusted_files
from backlight.extras import require
from backlight.store.connections import CALLS
from backlight.store.errors import RunFormatError
from backlight.store.format.names import EVIDENCE, piece_name, safe_name
from backlight.store.format.schema import ARRAY_ENCODINGS, COMPRESSIONS, FORMAT_VERSION

CHUNK_BYTES = 1024 * 1024
"""Size of a chunk; a step larger than this is split along its first axis."""

MAX_CHUNK_STEPS = 16
"""Steps in a chunk; reading one step back reads so many."""

MIN_COMPRESSED_BYTES = 4096
"""Smaller arrays stay plain: the index of their chunks would take more than it saves."""

MAX_PIECE_BYTES = 1024**4
"""Larger files are refused."""

_SHUFFLE, _DEFLATE, _LZF = 2, 1, 32000
_MAX_RATIO = 100
"""Values take at most so many times their bytes in the file; more is damage, or meant to exhaust memory.

Values that a filter shrinks further, such as zeros, are written plain.
"""


_KINDS = "biufc"

# Groups by array name in the pieces that were read last: of a thousand arrays only one's groups are opened.
_MAX_INDEXED_PIECES = 64
_index: OrderedDict[tuple[str, int, int, int], dict[str, list[str]]] = OrderedDict()


@dataclass(frozen=True, slots=True)
class Filters:
    """Compression of stored arrays: ``gzip`` with a ``level`` of 0 to 9, ``lzf``, or ``none``."""

    compression: str = "gzip"
    level: int = 1

    def __post_init__(self) -> None:
        if self.compression not in COMPRESSIONS:
            names = ", ".join(COMPRESSIONS)
            raise ValueError(f"compression {self.compression!r}: expected one of {names}")
        if not 0 <= self.level <= 9:
            raise ValueError(f"compression level {self.level}: expected 0 to 9")

    def options(self, shape: tuple[int, ...], itemsize: int) -> dict[str, Any]:
        """Return the keywords of ``create_dataset`` for an array [S, ...]; empty where it stays plain."""
        if self.compression == "none" or math.prod(shape) * itemsize < MIN_COMPRESSED_BYTES or len(shape) < 2:
            return {}
        options: dict[str, Any] = {
            "chunks": _chunk_shape(shape, itemsize),
            "compression": self.compression,
            "shuffle": itemsize > 1,
        }
        if self.compression == "gzip":
            options["compression_opts"] = self.level
        return options


PLAIN = Filters("none")


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """Description of a stored array; ``dims`` names the axes of one step."""

    name: str
    dims: tuple[str, ...]
    dtype: str
    unit: str
    encoding: str
    encoding_version: int


@dataclass(frozen=True, slots=True)
class Stack:
    """Arrays of one kind: ``values[s]`` was recorded at attempt-local ``steps[s]``."""

    info: ArrayInfo
    steps: npt.NDArray[np.int64]
    values: npt.NDArray[Any]


def h5py_module() -> Any:
    """Return h5py; MissingPackageError names the extra that installs it."""
    require("h5py", what="arrays of a run")
    import h5py  # noqa: PLC0415 - an optional package, and 0.1 s that a run without arrays need not pay

    if not hasattr(h5py._objects, "_phil_before_fork"):
        CALLS.include(h5py._objects.phil)
    return h5py


def write_piece(path: Path, stacks: Iterable[Stack], filters: Filters = PLAIN) -> None:
    """Write a piece under a hidden name, sync it and publish it; an OSError passes through."""
    h5py = h5py_module()
    with (
        atomic_files.replacing(path) as temporary,
        h5py.File(temporary, "x", locking=False, libver=("v110", "v110")) as file,
    ):
        file.attrs["kind"] = "backlight arrays"
        file.attrs["format"] = FORMAT_VERSION
        for i, stack in enumerate(stacks):
            group = file.create_group(f"a{i}")
            steps = np.ascontiguousarray(stack.steps, dtype="<i8")
            values = np.ascontiguousarray(stack.values)
            group.create_dataset("steps", data=steps)
            options = filters.options(values.shape, values.dtype.itemsize)
            dataset = group.create_dataset("values", data=values, **options)
            if options:
                file.flush()  # until then chunks have no size
                if values.nbytes > _MAX_RATIO * dataset.id.get_storage_size():
                    del group["values"]
                    group.create_dataset("values", data=values)
            group.attrs["name"] = json.dumps(stack.info.name)
            group.attrs["dims"] = json.dumps(list(stack.info.dims))
            group.attrs["dtype"] = stack.info.dtype
            group.attrs["unit"] = json.dumps(stack.info.unit)
            group.attrs["encoding"] = stack.info.encoding
            group.attrs["encoding_version"] = stack.info.encoding_version
            group.attrs["crc"] = _checksum(steps, values)


def read_piece(path: Path, wanted: str | None = None, *, values: bool = True) -> Iterator[Stack]:
    """Yield what a piece holds under the name ``wanted``, or all; without ``values`` they stay empty."""
    h5py = h5py_module()
    try:
        untrusted_files.check(path, MAX_PIECE_BYTES, owners=untrusted_files.owners_beside(path))
        with h5py.File(path, "r", locking=False) as file:
            if file.attrs.get("kind") != "backlight arrays":
                raise RunFormatError(f"{path}: is HDF5, but not a piece of arrays that backlight wrote")
            stat = path.stat()
            identity = (str(path), stat.st_ino, stat.st_mtime_ns, stat.st_size)
            indexed = _index.get(identity) if wanted is not None else None
            groups: dict[str, list[str]] = {}
            keys = (
                sorted(file, key=lambda k: (len(k), k)) if indexed is None else indexed.get(str(wanted), [])
            )
            for key in keys:
                if not isinstance(file.get(key, getlink=True), h5py.HardLink):
                    raise RunFormatError(f"{path}: {key!r} is a link; backlight writes none")
                group = file[key]
                info = _info(path, group)
                groups.setdefault(info.name, []).append(key)
                if wanted is not None and info.name != wanted:
                    continue
                steps = _plain(path, group, "steps").astype(np.int64)
                stored = _plain(path, group, "values") if values else np.zeros((len(steps), 0))
                if steps.ndim != 1 or len(stored) != len(steps):
                    raise RunFormatError(f"{path}: {key!r} holds {stored.shape} for {steps.shape} steps")
                if values and _checksum(steps.astype("<i8"), stored) != int(group.attrs["crc"]):
                    raise RunFormatError(f"{path}: checksum of array {info.name!r} is wrong; it is damaged")
                yield Stack(info, steps, stored)
            if indexed is None:
                _index[identity] = groups
                while len(_index) > _MAX_INDEXED_PIECES:
                    _index.popitem(last=False)
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise RunFormatError(f"{path}: cannot be read as a piece of arrays: {error}") from error


def decoded(info: ArrayInfo, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return values in a type of numpy: bfloat16 becomes float32, exactly."""
    if ARRAY_ENCODINGS.get(info.encoding, 0) < info.encoding_version:
        msg = f"array {info.name!r} is encoded as {info.encoding!r} version {info.encoding_version}"
        raise RunFormatError(f"{msg}, which this release does not know. Upgrade backlight")
    if info.encoding == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def merged(stacks: Iterable[Stack]) -> list[Stack]:
    """Concatenate stacks of one kind and shape, keeping their order."""
    groups: dict[tuple[ArrayInfo, tuple[int, ...]], list[Stack]] = {}
    for stack in stacks:
        groups.setdefault((stack.info, stack.values.shape[1:]), []).append(stack)
    return [
        Stack(info, np.concatenate([s.steps for s in members]), np.concatenate([s.values for s in members]))
        for (info, _), members in groups.items()
    ]


def _info(path: Path, group: Any) -> ArrayInfo:
    attributes = group.attrs
    name, dims, unit = (json.loads(attributes[key]) for key in ("name", "dims", "unit"))
    if not isinstance(name, str) or not isinstance(unit, str) or not isinstance(dims, list):
        raise RunFormatError(f"{path}: {group.name!r} has a damaged description")
    return ArrayInfo(
        name=name,
        dims=tuple(str(d) for d in dims),
        dtype=str(attributes["dtype"]),
        unit=unit,
        encoding=str(attributes["encoding"]),
        encoding_version=int(attributes["encoding_version"]),
    )


def _plain(path: Path, group: Any, key: str) -> npt.NDArray[Any]:
    h5py = h5py_module()
    dataset = group[key] if isinstance(group.get(key, getlink=True), h5py.HardLink) else None
    if not isinstance(dataset, h5py.Dataset) or dataset.dtype.kind not in _KINDS or dataset.shape is None:
        raise RunFormatError(f"{path}: {group.name}/{key} holds no plain numbers")
    if wrong := _problem(dataset, path.stat().st_size):
        msg = f"{path}: {group.name}/{key} {wrong}; it is not stored plainly, or damaged"
        raise RunFormatError(f"{msg}: backlight did not write it so")
    return np.asarray(dataset[()])


def _checksum(steps: npt.NDArray[Any], values: npt.NDArray[Any]) -> int:
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return zlib.crc32(data, zlib.crc32(np.ascontiguousarray(steps)))  # type: ignore[arg-type]  # a buffer


def _chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the shape of a chunk for an array [S, ...]: even shares of its steps, hardly any padding."""
    steps, row = shape[0], math.prod(shape[1:]) * itemsize
    most = max(1, min(MAX_CHUNK_STEPS, CHUNK_BYTES // max(row, 1)))
    chunk = -(-steps // -(-steps // most))
    if row <= CHUNK_BYTES or len(shape) < 2:
        return (chunk, *shape[1:])
    parts = min(shape[1], -(-row // CHUNK_BYTES))
    return (chunk, -(-shape[1] // parts), *shape[2:])


def _problem(dataset: Any, file_size: int) -> str:
    """Return why ``dataset`` is not stored as backlight stores arrays; empty where it is."""
    h5py = h5py_module()
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
    if size > _MAX_RATIO * stored:
        return f"states {size} bytes for {stored} in the file"
    expected = math.prod(-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True))
    if dataset.id.get_num_chunks() != expected:
        return f"has {dataset.id.get_num_chunks()} of {expected} chunks"
    return ""


MAX_MERGED_BYTES = 64 * 1024 * 1024
"""Pieces are not merged beyond this size."""


@dataclass(slots=True)
class _Piece:
    first: int
    last: int
    size: int
    compressed: bool = False


class ArrayWriter:
    """Buffers arrays and writes each flush as one piece; a small piece is merged with its predecessor.

    Merging goes by size as in a binary counter: every array is rewritten a logarithmic number of times.
    Pieces that will be merged again are stored plain; a piece is compressed once, when it is so large
    that it stays, or at the end.
    """

    def __init__(self, folder: Path, rank: int, filters: Filters = Filters()) -> None:
        self.folder = folder
        self.pending_bytes = 0
        self._filters = filters
        self._finishing = False
        self._rank = rank
        self._pending: list[Stack] = []
        self._pieces: list[_Piece] = []

    def add(
        self, name: str, step: int, values: npt.ArrayLike, dims: Sequence[str], unit: str, encoding: str
    ) -> None:
        """Buffer a copy of one array."""
        array = np.array(values, copy=True)
        if array.dtype.kind not in "biufc" or array.dtype.itemsize > 16:
            msg = f"array {name!r} has type {array.dtype}, expected booleans, integers, floats or complex"
            raise ValueError(msg)
        if dims and len(dims) != array.ndim:
            raise ValueError(f"array {name!r} has {array.ndim} axes, but {len(dims)} dims: {tuple(dims)}")
        if encoding not in ARRAY_ENCODINGS:
            encodings = ", ".join(ARRAY_ENCODINGS)
            raise ValueError(f"array {name!r}: there is no encoding {encoding!r}; there are {encodings}")
        if encoding == "bf16" and array.dtype != np.uint16:
            msg = f"array {name!r}: encoding 'bf16' stores 16 bits as uint16, got {array.dtype}"
            raise ValueError(msg)
        kind = "bfloat16" if encoding == "bf16" else array.dtype.name
        info = ArrayInfo(name, tuple(dims), kind, unit, encoding, ARRAY_ENCODINGS[encoding])
        self._pending.append(Stack(info, np.array([step], dtype=np.int64), array[None]))
        self.pending_bytes += array.nbytes

    def flush(self) -> bool:
        """Write the buffered arrays as a piece; return whether there were any. An OSError passes through."""
        if not self._pending:
            return False
        self.folder.mkdir(exist_ok=True)
        number = self._pieces[-1].last + 1 if self._pieces else 0
        self._pieces.append(self._write(number, number, merged(self._pending)))
        self._pending, self.pending_bytes = [], 0  # only now: where that failed, they wait
        while len(self._pieces) > 1:
            older, newer = self._pieces[-2:]
            if older.size > 2 * newer.size or older.size + newer.size > MAX_MERGED_BYTES:
                break
            self._pieces[-2:] = [self._merge(older, newer)]
        return True

    def begin_finish(self) -> bool:
        """Return whether a piece is still plain; from now on its size is stated as not known."""
        self._finishing = True
        return any(not piece.compressed for piece in self._pieces)

    def finish(self) -> None:
        """Compress the plain pieces; an OSError passes through, with every piece still whole."""
        for i, piece in enumerate(self._pieces):
            if not piece.compressed:
                stacks = list(read_piece(self._path(piece)))
                self._pieces[i] = self._write(piece.first, piece.last, stacks, compress=True)

    def size(self) -> int:
        """Return the bytes of all pieces."""
        return sum(piece.size for piece in self._pieces)

    def files(self) -> dict[str, dict[str, int]]:
        """Return the pieces by name with their size, as the manifest states them."""
        return {
            piece_name(self._rank, p.first, p.last): {
                "bytes": 0 if self._finishing and not p.compressed else p.size
            }
            for p in self._pieces
        }

    def _path(self, piece: _Piece) -> Path:
        return self.folder / piece_name(self._rank, piece.first, piece.last)

    def _write(self, first: int, last: int, stacks: Sequence[Stack], *, compress: bool = False) -> _Piece:
        path = self.folder / piece_name(self._rank, first, last)
        compress = compress or sum(stack.values.nbytes for stack in stacks) > MAX_MERGED_BYTES // 2
        write_piece(path, stacks, self._filters if compress else PLAIN)
        return _Piece(first, last, path.stat().st_size, compress)

    def _merge(self, older: _Piece, newer: _Piece) -> _Piece:
        old, new = self._path(older), self._path(newer)
        piece = self._write(older.first, newer.last, merged([*read_piece(old), *read_piece(new)]))
        old.unlink()
        new.unlink()
        return piece


def write_evidence(attempt: Path, name: str, data: bytes | str) -> Path:
    """Write a file below ``evidence/`` under a safe, unique name; an OSError passes through."""
    raw = data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data
    folder = attempt / EVIDENCE
    folder.mkdir(exist_ok=True)
    safe = safe_name(name, "evidence")
    stem, dot, suffix = safe.rpartition(".")
    number = 0
    while True:
        candidate = safe if number == 0 else f"{stem or suffix}-{number}{dot + suffix if stem else ''}"
        try:
            descriptor = os.open(folder / candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            break
        except FileExistsError:
            number += 1
    with os.fdopen(descriptor, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(descriptor)
    return folder / candidate
