"""Arrays in closed HDF5 pieces: how one is laid out, written whole, and read without trusting it.

A piece holds one group per (name, shape, type, unit, dims, encoding), called ``a0``, ``a1``, …, with the
datasets ``steps`` ``[S]`` and ``values`` ``[S, …]``, contiguous and uncompressed or chunked along time and
compressed (a piece that is not going to be merged any more), and the attributes
``name`` (as a JSON string, because HDF5 strings cannot hold every character), ``dims`` (JSON list),
``dtype``, ``unit`` (JSON string), ``encoding``, ``encoding_version`` and ``crc`` (CRC-32 of the two).
"""

from __future__ import annotations

import json
import re
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backlight.store.errors import RunFormatError
from backlight.store.format.hdf5_filters import PLAIN, Filters, problem
from backlight.store.format.schema import ARRAY_ENCODINGS, FORMAT_VERSION
from backlight.store.platform import atomic_json

_NAME = re.compile(r"rank-(\d{5,9})-(\d{6})(?:-(\d{6}))?\.h5")
_KINDS = "biufc"

# Where each name stands in the pieces that were read last: of a thousand arrays only one's groups are opened.
_REMEMBERED = 64
_places: OrderedDict[tuple[str, int, int, int], dict[str, list[str]]] = OrderedDict()


@dataclass(frozen=True, slots=True)
class ArrayInfo:
    """What is known of a stored array apart from its values; ``dims`` names the axes of one step."""

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


def piece_name(rank: int, first: int, last: int | None = None) -> str:
    """Return the name of a piece, or of one that replaces the pieces ``first`` to ``last``."""
    span = f"{first:06d}" if last is None or last == first else f"{first:06d}-{last:06d}"
    return f"rank-{rank:05d}-{span}.h5"


def parse_piece(name: str) -> tuple[int, int, int] | None:
    """Return rank, first and last number of a piece's name, None where it is none."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    rank, first, last = match.groups()
    return int(rank), int(first), int(last or first)


def write_piece(path: Path, stacks: Iterable[Stack], filters: Filters = PLAIN) -> None:
    """Write a piece under a hidden name, sync it and publish it; an OSError passes through."""
    import h5py  # noqa: PLC0415 - 0.1 s that a run without arrays need not pay

    temporary = atomic_json.temporary_name(path)
    try:
        with h5py.File(temporary, "w", locking=False, libver=("v110", "v110")) as file:
            file.attrs["kind"] = "backlight arrays"
            file.attrs["format"] = FORMAT_VERSION
            for i, stack in enumerate(stacks):
                group = file.create_group(f"a{i}")
                steps = np.ascontiguousarray(stack.steps, dtype="<i8")
                values = np.ascontiguousarray(stack.values)
                group.create_dataset("steps", data=steps)
                options = filters.options(values.shape, values.dtype.itemsize)
                group.create_dataset("values", data=values, **options)
                group.attrs["name"] = json.dumps(stack.info.name)
                group.attrs["dims"] = json.dumps(list(stack.info.dims))
                group.attrs["dtype"] = stack.info.dtype
                group.attrs["unit"] = json.dumps(stack.info.unit)
                group.attrs["encoding"] = stack.info.encoding
                group.attrs["encoding_version"] = stack.info.encoding_version
                group.attrs["crc"] = _checksum(steps, values)
        atomic_json.sync_file(temporary)
        atomic_json.publish(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_piece(path: Path, wanted: str | None = None, *, values: bool = True) -> Iterator[Stack]:
    """Yield what a piece holds under the name ``wanted``, or all; without ``values`` they stay empty.

    Only plain numbers are read: no filter but those of :mod:`backlight.store.format.hdf5_filters` (others
    may load
    plug-ins), no links, no external or virtual storage, and nothing whose stated size is not really in the
    file.

    Raises
    ------
    RunFormatError
        If the file is no piece of backlight, or damaged.
    """
    import h5py  # noqa: PLC0415 - 0.1 s that a run without arrays need not pay

    try:
        with h5py.File(path, "r", locking=False) as file:
            if file.attrs.get("kind") != "backlight arrays":
                raise RunFormatError(f"{path}: is HDF5, but not a piece of arrays that backlight wrote")
            which = path.stat()
            identity = (str(path), which.st_ino, which.st_mtime_ns, which.st_size)
            places = _places.get(identity) if wanted is not None else None
            seen: dict[str, list[str]] = {}
            keys = sorted(file, key=lambda k: (len(k), k)) if places is None else places.get(str(wanted), [])
            for key in keys:
                if not isinstance(file.get(key, getlink=True), h5py.HardLink):
                    raise RunFormatError(f"{path}: {key!r} is a link; backlight writes none")
                group = file[key]
                info = _info(path, group)
                seen.setdefault(info.name, []).append(key)
                if wanted is not None and info.name != wanted:
                    continue
                steps = _plain(path, group, "steps").astype(np.int64)
                found = _plain(path, group, "values") if values else np.zeros((len(steps), 0))
                if steps.ndim != 1 or len(found) != len(steps):
                    raise RunFormatError(f"{path}: {key!r} holds {found.shape} for {steps.shape} steps")
                if values and _checksum(steps.astype("<i8"), found) != int(group.attrs["crc"]):
                    raise RunFormatError(
                        f"{path}: the checksum of array {info.name!r} is wrong; it is damaged"
                    )
                yield Stack(info, steps, found)
            if places is None:
                _places[identity] = seen
                while len(_places) > _REMEMBERED:
                    _places.popitem(last=False)
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise RunFormatError(f"{path}: cannot be read as a piece of arrays: {error}") from error


def decoded(info: ArrayInfo, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return values as numpy can compute with them: bfloat16 becomes float32, exactly.

    Raises
    ------
    RunFormatError
        If the encoding is not known to this release.
    """
    if ARRAY_ENCODINGS.get(info.encoding, 0) < info.encoding_version:
        msg = f"array {info.name!r} is encoded as {info.encoding!r} version {info.encoding_version}"
        raise RunFormatError(f"{msg}, which this release does not know. Upgrade backlight")
    if info.encoding == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def stacked(items: Sequence[tuple[ArrayInfo, int, npt.NDArray[Any]]]) -> list[Stack]:
    """Put arrays of one kind and shape together, keeping their order."""
    groups: dict[tuple[ArrayInfo, tuple[int, ...]], list[tuple[int, npt.NDArray[Any]]]] = {}
    for info, step, values in items:
        groups.setdefault((info, values.shape), []).append((step, values))
    return [
        Stack(info, np.array([s for s, _ in found], dtype=np.int64), np.stack([v for _, v in found]))
        for (info, _), found in groups.items()
    ]


def merged(stacks: Iterable[Stack]) -> list[Stack]:
    """Concatenate stacks of one kind and shape, keeping their order."""
    groups: dict[tuple[ArrayInfo, tuple[int, ...]], list[Stack]] = {}
    for stack in stacks:
        groups.setdefault((stack.info, stack.values.shape[1:]), []).append(stack)
    return [
        Stack(info, np.concatenate([s.steps for s in found]), np.concatenate([s.values for s in found]))
        for (info, _), found in groups.items()
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
    import h5py  # noqa: PLC0415 - see read_piece

    dataset = group[key] if isinstance(group.get(key, getlink=True), h5py.HardLink) else None
    if not isinstance(dataset, h5py.Dataset) or dataset.dtype.kind not in _KINDS or dataset.shape is None:
        raise RunFormatError(f"{path}: {group.name}/{key} holds no plain numbers")
    if wrong := problem(dataset, path.stat().st_size):
        msg = f"{path}: {group.name}/{key} {wrong}; it is not stored plainly, or damaged"
        raise RunFormatError(f"{msg}: backlight did not write it so")
    return np.asarray(dataset[()])


def _checksum(steps: npt.NDArray[Any], values: npt.NDArray[Any]) -> int:
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return zlib.crc32(data, zlib.crc32(np.ascontiguousarray(steps)))  # type: ignore[arg-type]  # a buffer
