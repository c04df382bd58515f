"""Decoding of the text of some events into columns: typed, and slowly where types differ."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation
from functools import cache
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

from backlight.trace.events import COLUMNS, MISSING, Column, Integers, TraceError

Number = int | float | str
_NONE = msgspec.Raw(b"")


_IN_ARGS = {
    name: kept.key.removeprefix("args.")
    for name, kept in COLUMNS.items()
    if kept.key.startswith("args.") and name != "label"
}
_LISTS = frozenset({"types", "shapes", "strides", "group", "group_name", "dtype"})


def _field(name: str, key: str) -> tuple[str, Any, Any]:
    # Lists stay text, because few are ever read.
    kind: Any = (msgspec.Raw if name in _LISTS else str) if COLUMNS[name].coded else Number
    default: Any = (_NONE if name in _LISTS else "") if COLUMNS[name].coded else MISSING
    return name, kind, msgspec.field(default=default, name=key)


Args: Any = msgspec.defstruct(
    "Args", [*(_field(*item) for item in _IN_ARGS.items()), ("name", str, ""), ("labels", str, "")],
    frozen=True, gc=False,
)  # fmt: skip
"""The kept entries of ``args``; ``name`` and ``labels`` are those of metadata events."""

_NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One event; times stay text, because a float has lost the nanoseconds of a time since 1970."""

    kind: str = msgspec.field(default="", name="ph")
    category: str = msgspec.field(default="", name="cat")
    name: str = ""
    process: int | str = msgspec.field(default="", name="pid")
    thread: int | str = msgspec.field(default="", name="tid")
    start: msgspec.Raw = msgspec.field(default=_NONE, name="ts")
    duration: msgspec.Raw = msgspec.field(default=_NONE, name="dur")
    flow: Number = msgspec.field(default=MISSING, name="id")
    args: Args = _NO_ARGS


_events = msgspec.json.Decoder(list[Event])
_anything = msgspec.json.Decoder(list[Any], float_hook=Decimal)
_METADATA = ord("M")
_RARE = {
    b'"Input ': ("types", "shapes", "strides"),
    b'"Call stack"': ("stack",),
    b'"Module Hierarchy"': ("module",),
    b'"Collective name"': ("collective", "dtype"),
    b'"Process Group ': ("group", "group_name"),
}
"""Keys that many traces lack, as in the text, with their columns."""

_RANGE = b'"cuda_profiler_range"'

_NOT_NUMBERS = re.compile(rb'(":\s*)-?(?:inf(?:inity)?|nan)(?=\s*[,}\]])', re.IGNORECASE)


class Vocabulary(dict[Any, int]):
    """Codes of strings in the order of their first use; an empty one is MISSING, a number is its text."""

    def __init__(self) -> None:
        super().__init__({"": MISSING, None: MISSING, b"": MISSING})
        self.listed: list[str | bytes] = []

    def __missing__(self, word: Any) -> int:
        if isinstance(word, int):
            self[word] = code = self[str(word)]
            return code
        self[word] = code = len(self.listed)
        self.listed.append(word)
        return code

    def words(self) -> list[str]:
        """Return the strings in the order of their codes."""
        return [word.decode("utf-8", "replace") if isinstance(word, bytes) else word for word in self.listed]


class Columns:
    """Turns events into columns; the vocabularies grow from call to call."""

    def __init__(self) -> None:
        self.vocabularies = {name: Vocabulary() for name, kept in COLUMNS.items() if kept.coded}

    def words(self) -> dict[str, list[str]]:
        """Return the vocabularies as lists in the order of the codes."""
        return {name: known.words() for name, known in self.vocabularies.items()}

    def of_text(self, text: bytes) -> dict[str, Column]:
        """Decode a JSON array of events; a :class:`msgspec.DecodeError` passes through."""
        columns = self.of_events(_events.decode(text), self._absent(text))
        if _RANGE in text:
            columns["counters"] = self._counters(text)
        return columns

    def _counters(self, text: bytes) -> Column:
        """Return the codes of the arguments of ranges with counters, whose names no field can list."""
        known, is_range = self.vocabularies["counters"], _RANGE.decode().strip('"')
        return np.array(
            [
                known[json.dumps(event.get("args", {}))] if event.get("cat") == is_range else MISSING
                for event in msgspec.json.decode(text)
            ],
            dtype=np.int32,
        )

    def _absent(self, text: bytes) -> frozenset[str]:
        """Return columns whose key does not occur in the text."""
        # An escape might hide a key. Searching for a single letter is much faster than for two.
        if b"\\" in text and b"\\u" in text:
            return frozenset()
        return frozenset(name for key, names in _RARE.items() if key not in text for name in names)

    def of_events(self, events: list[Event], absent: frozenset[str] = frozenset()) -> dict[str, Column]:
        """Return an array for each of :data:`COLUMNS`, without those that are ``absent``."""
        count = len(events)
        columns: dict[str, Column] = {
            # The code of the first character, 0 for none.
            "kind": np.array(list(map(attrgetter("kind"), events)), "U1").view(np.uint32) & 127,
            "start": nanoseconds(list(map(bytes, map(attrgetter("start"), events))), 0),
            "duration": nanoseconds(list(map(bytes, map(attrgetter("duration"), events))), MISSING),
            "flow": _integers(events, "flow"),
        }
        for name in ("category", "name", "process", "thread"):
            columns[name] = self._codes(name, map(attrgetter(name), events), count)
        # Flow events have no args: their rows stay MISSING.
        all_args = list(map(attrgetter("args"), events))
        rows = np.flatnonzero(np.fromiter((one is not _NO_ARGS for one in all_args), bool, count))
        args = [one for one in all_args if one is not _NO_ARGS]
        for name in _IN_ARGS:
            if name in absent:
                continue
            column = columns[name] = np.full(count, MISSING, COLUMNS[name].dtype)
            if not COLUMNS[name].coded:
                column[rows] = _integers(args, name)
                continue
            self._fill(column, name, rows, args)
        columns["label"] = np.full(count, MISSING, np.int32)
        for row in np.flatnonzero(columns["kind"] == _METADATA):
            one = all_args[row]
            columns["label"][row] = self.vocabularies["label"][one.name or one.labels]
        return {name: column.astype(COLUMNS[name].dtype, copy=False) for name, column in columns.items()}

    def _codes(self, name: str, words: Iterable[Any], count: int) -> Column:
        return np.fromiter(map(self.vocabularies[name].__getitem__, words), np.int32, count)

    def _fill(self, column: Column, name: str, rows: Integers, args: list[Any]) -> None:
        """Set the codes of what ``args`` state; most events state none of these."""
        nothing, known = getattr(_NO_ARGS, name), self.vocabularies[name]
        stated = [(at, value) for at, value in enumerate(map(attrgetter(name), args)) if value is not nothing]
        words = (bytes(value) if name in _LISTS else value for _, value in stated)
        column[rows[[at for at, _ in stated]]] = [known[word] for word in words]


@cache
def _columns_of_this_process() -> Columns:
    return Columns()


def decode_in_worker(text: bytes) -> tuple[int, dict[str, Column], dict[str, list[Any]]]:
    """Decode a chunk; return this process, the columns, and the words that are new to this process."""
    columns = _columns_of_this_process()
    known = {name: len(words.listed) for name, words in columns.vocabularies.items()}
    part = columns.of_text(text)
    fresh = {name: columns.vocabularies[name].listed[start:] for name, start in known.items()}
    return os.getpid(), part, fresh


def _integers(objects: list[Any], name: str) -> Integers:
    values = attrgetter(name)
    try:
        return np.fromiter(map(values, objects), np.int64, len(objects))
    except (ValueError, TypeError, OverflowError):
        return np.fromiter((_integer(values(one)) for one in objects), np.int64, len(objects))


def _integer(value: Any) -> int:
    """Return a whole number, also from ``"17"`` and ``"0x1f"``; MISSING for any other value."""
    try:
        found = int(value, 0) if isinstance(value, str) else int(value)
    except (ValueError, TypeError, OverflowError):
        return MISSING
    return found if -(2**63) <= found < 2**63 else MISSING


_MAX_LETTERS = 40
"""Longer numbers are rare and converted one by one."""


def nanoseconds(texts: list[bytes], missing: int) -> Integers:
    """Turn microseconds as written, ``b'1712195495519689.047'``, into nanoseconds, int64 [texts].

    They are exact, or rounded to a nanosecond; an empty text becomes ``missing``.
    """
    packed = np.array(texts, dtype=np.bytes_)
    width = packed.dtype.itemsize
    if not texts or width > _MAX_LETTERS:
        return np.array([_exactly(text, missing) for text in texts], dtype=np.int64)
    letters_WN = np.ascontiguousarray(packed.view(np.uint8).reshape(len(texts), width).T)
    value = np.zeros(len(texts), np.int64)
    decimals = np.zeros(len(texts), np.int8)
    digits = np.zeros(len(texts), np.int8)
    dotted = np.zeros(len(texts), bool)
    odd = np.zeros(len(texts), bool)
    for letter in letters_WN:
        figure = letter - 48  # below "0" wraps round to a large number
        digit = figure <= 9
        value = np.where(digit, value * 10 + figure, value)
        digits += digit
        decimals += digit & dotted
        dot = letter == 46
        odd |= ~(digit | dot | (letter == 0)) | (dot & dotted)
        dotted |= dot
    # 19 figures of nanoseconds fit into 63 bits where the first is at most 8.
    figures = digits - decimals + 3
    fits = (figures < 19) | ((figures == 19) & (letters_WN[0] != 57))
    # More than three decimals are below a nanosecond: such rows are rounded one by one.
    odd |= ~fits | (decimals > 3) | (digits == 0)
    odd &= letters_WN[0] != 0
    result: Integers = value * 10 ** np.clip(3 - decimals.astype(np.int64), 0, 3)
    result[letters_WN[0] == 0] = missing
    for row in np.flatnonzero(odd):
        result[row] = _exactly(texts[row], missing)
    return result


def _exactly(text: bytes, missing: int) -> int:
    plain = text.strip().strip(b'"')
    if not plain:
        return missing
    try:
        found = int((Decimal(plain.decode()) * 1000).to_integral_value())
    except (InvalidOperation, ValueError, OverflowError):
        return missing
    return found if -(2**63) <= found < 2**63 else missing


def repaired(text: bytes) -> bytes:
    """Return the text without what some profilers write and JSON forbids: inf, nan, broken UTF-8."""
    return _NOT_NUMBERS.sub(rb"\1null", text).decode("utf-8", "replace").encode()


def leniently(text: bytes) -> list[Event]:
    """Parse an array of events whose fields have unexpected types; values that fit no type are left out."""
    events = []
    for index, plain in enumerate(_anything.decode(text)):
        if not isinstance(plain, dict):
            raise TraceError(
                f"event {index} of a chunk is {_string(plain)[:60]}, expected an object with "
                "name, ph and ts: not a trace of torch.profiler"
            )
        events.append(_event(plain))
    return events


def _event(plain: dict[str, Any]) -> Event:
    inner = plain.get("args")
    inner = inner if isinstance(inner, dict) else {}
    found: dict[str, Any] = {}
    for name, key in _IN_ARGS.items():
        value = inner.get(key)
        if value is None:
            continue
        if name in _LISTS:
            found[name] = msgspec.Raw(msgspec.json.encode(value))
        elif COLUMNS[name].coded:
            found[name] = value if isinstance(value, str) else _string(value)
        else:
            found[name] = _integer(value)
    for name in ("name", "labels"):
        if isinstance(inner.get(name), str):
            found[name] = inner[name]
    return Event(
        kind=_string(plain.get("ph")),
        category=_string(plain.get("cat")),
        name=_string(plain.get("name")),
        process=_string(plain.get("pid")),
        thread=_string(plain.get("tid")),
        start=_number_text(plain.get("ts")),
        duration=_number_text(plain.get("dur")),
        flow=_integer(plain.get("id", MISSING)),
        args=Args(**found),
    )


def _string(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _number_text(value: Any) -> msgspec.Raw:
    number = isinstance(value, (int, Decimal, str)) and not isinstance(value, bool)
    return msgspec.Raw(str(value).encode()) if number else _NONE
