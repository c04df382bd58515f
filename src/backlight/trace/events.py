"""The complete events of a trace as columns: one table of the kept columns, and the arrays.

A gigabyte of JSON holds about four million events; as dictionaries they take ten times the file, as
columns a third of it. Strings are codes into vocabularies, times are whole nanoseconds as written. Flow
events, counters and names of tracks, a third of many files, are counted and not kept: what they join
carries the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]

MISSING = -1
"""Value of every column where the event has none: no id, code or duration of a trace is negative."""


class TraceError(ValueError):
    """A file is no trace of torch.profiler, is damaged, or does not fit the others given with it."""


@dataclass(frozen=True, slots=True)
class KeptColumn:
    """One column: its type, whether it holds codes into a vocabulary, and the key it is read from."""

    dtype: str
    coded: bool
    key: str
    unit: str = ""


COLUMNS: Mapping[str, KeptColumn] = {
    "category": KeptColumn("int16", True, "cat"),
    "name": KeptColumn("int32", True, "name"),
    "process": KeptColumn("int32", True, "pid"),
    "thread": KeptColumn("int32", True, "tid"),
    "start": KeptColumn("int64", False, "ts", "ns"),
    "duration": KeptColumn("int64", False, "dur", "ns"),
    "external": KeptColumn("int64", False, "args.External id"),
    "correlation": KeptColumn("int64", False, "args.correlation"),
    "sequence": KeptColumn("int64", False, "args.Sequence number"),
    "forward_thread": KeptColumn("int64", False, "args.Fwd thread id"),
    "stream": KeptColumn("int64", False, "args.stream"),
    "device": KeptColumn("int32", False, "args.device"),
    "bytes": KeptColumn("int64", False, "args.bytes", "B"),
    "elements": KeptColumn("int64", False, "args.In msg nelems"),
    "types": KeptColumn("int32", True, "args.Input type"),
    "shapes": KeptColumn("int32", True, "args.Input Dims"),
    "values": KeptColumn("int32", True, "args.Concrete Inputs"),
    "strides": KeptColumn("int32", True, "args.Input Strides"),
    "stack": KeptColumn("int32", True, "args.Call stack"),
    "collective": KeptColumn("int32", True, "args.Collective name"),
    "group": KeptColumn("int32", True, "args.Process Group Ranks"),
    "group_name": KeptColumn("int32", True, "args.Process Group Name"),
    "dtype": KeptColumn("int32", True, "args.dtype"),
    "counters": KeptColumn("int32", True, "args"),
}
"""The kept columns of an event; ``counters`` are all arguments of a range of CUPTI's profiler, as JSON."""

ITEM_BYTES = {
    "double": 8, "float": 4, "bfloat16": 2, "half": 2, "complexfloat": 8, "long": 8, "long int": 8, "int": 4,
    "short": 2, "bool": 1, "signed char": 1, "unsigned char": 1, "char": 1, "byte": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip
"""Bytes of an element by the name of its type, in lower case and without ``c10::``."""


@lru_cache(2**14)
def _listed(text: str) -> list[Any]:
    entries = json.loads(text or "[]")
    return entries if isinstance(entries, list) else []


@dataclass(frozen=True)
class Events:
    """Columns of equal length, in the order of the file, and the vocabularies of the coded ones."""

    columns: dict[str, Column]
    words: dict[str, list[str]]

    def __len__(self) -> int:
        return len(self.columns["start"])

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def word(self, name: str, row: int) -> str:
        """Return the string in a coded column, empty where the event has none."""
        code = int(self.columns[name][row])
        return self.words[name][code] if code >= 0 else ""

    def listed(self, name: str, row: int) -> list[Any]:
        """Return the list in a coded column, empty where the event has none; it may not be changed."""
        return _listed(self.word(name, row))

    def where(self, name: str, accept: Callable[[str], bool]) -> Mask:
        """Return the rows whose word in the coded column ``name`` is accepted, bool [events]."""
        # The last element answers for MISSING, which indexes from the end.
        accepted = np.array([*map(accept, self.words[name]), False], dtype=bool)
        chosen: Mask = accepted[self.columns[name]]
        return chosen

    def among(self, categories: frozenset[str]) -> Mask:
        """Return the events whose category, in lower case, is one of ``categories``."""
        return self.where("category", lambda word: word.lower() in categories)


class EventBuilder:
    """Columns that grow chunk by chunk; one that no chunk has is one number."""

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}
        self._count = 0

    def add(self, part: dict[str, Column]) -> None:
        """Append a chunk; a column that it lacks is MISSING there."""
        begin, self._count = self._count, self._count + len(part["start"])
        for name, kept in COLUMNS.items():
            if name not in part and name not in self._columns:
                continue
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = np.full(begin, MISSING, kept.dtype)
            # A large array grows by moving pages, not bytes, so that the events are never held twice.
            if len(column) < self._count:
                column.resize(self._count * 5 // 4, refcheck=False)
            column[begin : self._count] = part.get(name, MISSING)

    def events(self, words: Mapping[str, Sequence[str]]) -> Events:
        """Return the events; nothing can be added afterwards."""
        columns: dict[str, Column] = {}
        for name, kept in COLUMNS.items():
            column = self._columns.pop(name, None)
            if column is None:
                columns[name] = np.broadcast_to(np.array(MISSING, kept.dtype), self._count)
                continue
            column.resize(self._count, refcheck=False)
            columns[name] = column
        return Events(columns, {name: list(codes) for name, codes in words.items()})


@dataclass(frozen=True)
class Trace:
    """Events of one trace, and the top-level entries of the file besides them.

    ``count`` is the number of all events of the file, ``base`` are nanoseconds to add to ``start`` for time
    since 1970, 0 where starts already count from there; ``notes`` are repairs that were made while reading.
    """

    path: str
    events: Events
    metadata: Mapping[str, Any]
    count: int
    rank: int | None = None
    world_size: int | None = None
    base: int = 0
    notes: tuple[str, ...] = ()

    @property
    def device_names(self) -> dict[int, str]:
        """Names of the devices of the machine by number, as the file lists them."""
        listed = self.metadata.get("deviceProperties") or []
        return {
            int(device_entry.get("id", index)): str(device_entry.get("name", ""))
            for index, device_entry in enumerate(listed)
            if isinstance(device_entry, dict)
        }

    def device_name(self, number: int) -> str:
        """Return the name of a device; where the file does not list it, that of all others if they agree."""
        names = self.device_names
        alike = set(names.values())
        return names.get(number) or (alike.pop() if len(alike) == 1 else "")
