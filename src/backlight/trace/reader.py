"""Reader of a trace file, in chunks, so that its text is never held as a whole."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from functools import reduce
from operator import or_
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from backlight.threads import executor
from backlight.trace import chunks
from backlight.trace.classification import PROFILER_RANGE
from backlight.trace.events import COLUMNS, MISSING, Column, EventBuilder, Integers, Trace, TraceError

_NONE = msgspec.Raw(b"")
_NO_TIME = MISSING / 1000

_IN_ARGS = {
    name: kept.key.removeprefix("args.") for name, kept in COLUMNS.items() if kept.key.startswith("args.")
}
_NUMBERS = tuple(name for name in _IN_ARGS if not COLUMNS[name].coded)
_LISTS = frozenset({"types", "shapes", "values", "strides", "group", "group_name", "dtype"})
"""Words that stay JSON text, because few are ever read."""


def _field(name: str, key: str) -> tuple[str, Any, Any]:
    kind: Any = int | float | str if name in _NUMBERS else msgspec.Raw if name in _LISTS else str
    default: Any = MISSING if name in _NUMBERS else _NONE if name in _LISTS else ""
    return name, kind, msgspec.field(default=default, name=key)


Args: Any = msgspec.defstruct("Args", [_field(*item) for item in _IN_ARGS.items()], frozen=True, gc=False)
"""The kept entries of ``args``."""

_NO_ARGS = Args()

_LISTED: dict[str, Callable[[list[Any]], list[Any]]] = {
    "start": lambda objects: [event.start for event in objects],
    "duration": lambda objects: [event.duration for event in objects],
    "category": lambda objects: [event.category for event in objects],
    "name": lambda objects: [event.name for event in objects],
    "process": lambda objects: [event.process for event in objects],
    "thread": lambda objects: [event.thread for event in objects],
    "external": lambda objects: [event.external for event in objects],
    "correlation": lambda objects: [event.correlation for event in objects],
    "sequence": lambda objects: [event.sequence for event in objects],
    "forward_thread": lambda objects: [event.forward_thread for event in objects],
    "stream": lambda objects: [event.stream for event in objects],
    "device": lambda objects: [event.device for event in objects],
    "bytes": lambda objects: [event.bytes for event in objects],
    "elements": lambda objects: [event.elements for event in objects],
    "types": lambda objects: [event.types for event in objects],
    "shapes": lambda objects: [event.shapes for event in objects],
    "values": lambda objects: [event.values for event in objects],
    "strides": lambda objects: [event.strides for event in objects],
    "stack": lambda objects: [event.stack for event in objects],
    "collective": lambda objects: [event.collective for event in objects],
    "group": lambda objects: [event.group for event in objects],
    "group_name": lambda objects: [event.group_name for event in objects],
    "dtype": lambda objects: [event.dtype for event in objects],
}
"""Function that lists one attribute of many objects: a comprehension reads it twice as fast as attrgetter."""


class TraceEvent(msgspec.Struct, gc=False, tag_field="ph", tag="X"):
    """One complete event; its start stays text: a float has lost the nanoseconds of a time since 1970."""

    category: str = msgspec.field(default="", name="cat")
    name: str = ""
    process: int | str = msgspec.field(default="", name="pid")
    thread: int | str = msgspec.field(default="", name="tid")
    start: msgspec.Raw = msgspec.field(default=_NONE, name="ts")
    duration: float = msgspec.field(default=_NO_TIME, name="dur")
    args: Args = _NO_ARGS


_OTHERS: list[Any] = [
    msgspec.defstruct("Other", [], gc=False, tag_field="ph", tag=kind)
    for kind in "BEIiCbnesTpFtfPNODMVvRc(),="
]
"""Events of the other kinds of the Chrome format, of which nothing is read."""

ANY_EVENT: Any = reduce(or_, _OTHERS, TraceEvent)
"""Type of an event of any kind."""

_events = msgspec.json.Decoder(list[ANY_EVENT])
_anything = msgspec.json.Decoder(list[Any], float_hook=Decimal)

_NOT_NUMBERS = re.compile(rb'(":\s*)-?(?:inf(?:inity)?|nan)(?=\s*[,}\]])', re.IGNORECASE)


class Vocabulary(dict[Any, int]):
    """Codes of strings in the order of their first use; an empty one is MISSING, a number is its text."""

    def __init__(self) -> None:
        super().__init__({"": MISSING, b"": MISSING})
        self.listed: list[str | bytes] = []

    def __missing__(self, word: Any) -> int:
        if isinstance(word, int):
            self[word] = code = self[str(word)]
            return code
        self[word] = code = len(self.listed)
        self.listed.append(word)
        return code

    def codes(self, words: list[Any]) -> Column:
        """Return the code of each word, int32 [words]."""
        if isinstance(words[0] if words else "", msgspec.Raw):  # which has no hash
            words = [b"" if word is _NONE else bytes(word) for word in words]
        return np.fromiter(map(self.__getitem__, words), np.int32, len(words))

    def words(self) -> list[str]:
        """Return the strings in the order of their codes."""
        return [word.decode("utf-8", "replace") if isinstance(word, bytes) else word for word in self.listed]


class Columns:
    """Turns events into columns; the vocabularies, and ``count`` of all events, grow from call to call."""

    def __init__(self) -> None:
        self.count = 0
        self._vocabularies = {name: Vocabulary() for name, kept in COLUMNS.items() if kept.coded}

    def words(self) -> dict[str, list[str]]:
        """Return the vocabularies as lists in the order of the codes."""
        return {name: vocabulary.words() for name, vocabulary in self._vocabularies.items()}

    def of_text(self, text: bytes) -> dict[str, Column]:
        """Decode a JSON array of events; a :class:`msgspec.DecodeError` passes through."""
        events = _events.decode(text)
        self.count += len(events)
        columns = self._of_events([event for event in events if type(event) is TraceEvent])
        ranges = {self._vocabularies["category"].get(word, MISSING - 1) for word in PROFILER_RANGE}
        if not ranges.isdisjoint(columns["category"].tolist()):
            self._add_counters(columns, msgspec.json.decode(text))
        return columns

    def leniently(self, text: bytes) -> dict[str, Column]:
        """Decode an array of events whose fields have unexpected types; what fits no type is left out."""
        plain = _anything.decode(text)
        for index, event in enumerate(plain):
            if not isinstance(event, dict):
                raise TraceError(
                    f"event {index} of a chunk is {_string(event)[:60]}, expected an object with "
                    "name, ph and ts: not a trace of torch.profiler"
                )
        self.count += len(plain)
        columns = self._of_events([_event(event) for event in plain if event.get("ph") == "X"])
        self._add_counters(columns, plain)
        return columns

    def _of_events(self, events: list[TraceEvent]) -> dict[str, Column]:
        """Return arrays for :data:`COLUMNS`, without those that no event states."""
        columns = {
            "start": nanoseconds(_LISTED["start"](events)),
            "duration": _durations(_LISTED["duration"](events)),
        }
        for name in ("category", "name", "process", "thread"):
            columns[name] = self._vocabularies[name].codes(_LISTED[name](events))
        args = [event.args for event in events]
        for name in _IN_ARGS:
            values = _LISTED[name](args)
            if values.count(getattr(_NO_ARGS, name)) < len(values):
                vocabulary = self._vocabularies.get(name)
                columns[name] = _integers(values) if vocabulary is None else vocabulary.codes(values)
        return {name: column.astype(COLUMNS[name].dtype, copy=False) for name, column in columns.items()}

    def _add_counters(self, columns: dict[str, Column], plain: list[dict[str, Any]]) -> None:
        """Add the arguments of ranges with counters, whose names no field can list."""
        texts = [
            json.dumps(event.get("args", {}), default=str) if str(event.get("cat")) in PROFILER_RANGE else ""
            for event in plain
            if event.get("ph") == "X"
        ]
        columns["counters"] = self._vocabularies["counters"].codes(texts)


def _integers(values: list[Any]) -> Integers:
    try:
        return np.fromiter(values, np.int64, len(values))
    except (ValueError, TypeError, OverflowError):
        return np.fromiter(map(_integer, values), np.int64, len(values))


def _integer(value: Any) -> int:
    """Return a whole number, also from ``"17"`` and ``"0x1f"``; MISSING for any other value."""
    try:
        number = int(value, 0) if isinstance(value, str) else int(value)
    except (ValueError, TypeError, OverflowError):
        return MISSING
    return number if -(2**63) <= number < 2**63 else MISSING


def nanoseconds(texts: list[msgspec.Raw]) -> Integers:
    """Turn microseconds as written, ``1712195495519689.047``, into nanoseconds, int64 [texts].

    They are exact, or rounded to a nanosecond; what is no number becomes 0.
    """
    if not texts:
        return np.empty(0, np.int64)
    joined = b" ".join(texts) + b" "
    letters = np.frombuffer(joined, np.uint8)
    marks = np.flatnonzero(letters < ord("0"))
    is_end, is_dot = (letters[marks] == ord(mark) for mark in " .")
    ends, dots, at = marks[is_end], marks[is_dot], np.cumsum(is_end)[is_dot]
    decimals = np.zeros(len(ends), np.int64)
    decimals[at] = ends[at] - dots - 1
    figures = np.diff(ends, prepend=-1) - 1 - (decimals > 0)
    # Up to 18 figures of nanoseconds fit into 63 bits, and 19 where the first is at most 8.
    most = 15 + decimals + (letters[np.append(0, ends[:-1] + 1)] < ord("9"))
    if (
        letters.max() > ord("9")
        or len(ends) + len(dots) != len(marks)
        or len(ends) != len(texts)
        or (np.diff(at) == 0).any()
        or (decimals > 3).any()
        or ((figures < 1) | (figures > most)).any()
    ):
        return np.array([_exactly(bytes(text), 0) for text in texts], dtype=np.int64)
    value = np.fromstring(joined.translate(None, b"."), np.int64, sep=" ")
    result: Integers = value * 10 ** (3 - decimals)
    return result


def _durations(microseconds: list[float]) -> Integers:
    """Turn microseconds into nanoseconds; of up to three decimals they are exact below 26 days."""
    nanoseconds = np.array(microseconds, dtype=np.float64) * 1000
    if (np.abs(nanoseconds) < 2**51).all():
        return np.rint(nanoseconds).astype(np.int64)
    return np.array([_exactly(b"%r" % duration, MISSING) for duration in microseconds], dtype=np.int64)


def _exactly(text: bytes, missing: int) -> int:
    plain = text.strip().strip(b'"')
    if not plain:
        return missing
    try:
        nanoseconds = int((Decimal(plain.decode()) * 1000).to_integral_value())
    except (InvalidOperation, ValueError, OverflowError):
        return missing
    return nanoseconds if -(2**63) <= nanoseconds < 2**63 else missing


def repaired(text: bytes) -> bytes:
    """Return the text without what some profilers write and JSON forbids: inf, nan, broken UTF-8."""
    return _NOT_NUMBERS.sub(rb"\1null", text).decode("utf-8", "replace").encode()


def _event(plain: dict[str, Any]) -> TraceEvent:
    inner = plain.get("args")
    inner = inner if isinstance(inner, dict) else {}
    fields: dict[str, Any] = {}
    for name, key in _IN_ARGS.items():
        value = inner.get(key)
        if value is None:
            continue
        if name in _LISTS:
            fields[name] = msgspec.Raw(msgspec.json.encode(value))
        else:
            fields[name] = _integer(value) if name in _NUMBERS else _string(value)
    return TraceEvent(
        category=_string(plain.get("cat")),
        name=_string(plain.get("name")),
        process=_string(plain.get("pid")),
        thread=_string(plain.get("tid")),
        start=_number_text(plain.get("ts")),
        duration=_microseconds(plain.get("dur")),
        args=Args(**fields),
    )


def _string(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _number_text(value: Any) -> msgspec.Raw:
    number = isinstance(value, (int, Decimal, str)) and not isinstance(value, bool)
    return msgspec.Raw(str(value).encode()) if number else _NONE


def _microseconds(value: Any) -> float:
    try:
        return _NO_TIME if isinstance(value, bool) else float(value)
    except (ValueError, TypeError, OverflowError):
        return _NO_TIME


def read_trace(path: str | Path) -> Trace:
    """Read the complete events of a trace of torch.profiler, gzipped or not.

    Raises
    ------
    TraceError
        If the file is not JSON, is truncated, or is no trace of torch.profiler.
    """
    path = Path(path)
    if path.is_dir():
        raise TraceError(f"{path}: is a folder, expected a trace file (.json or .json.gz)")
    with chunks.open_text(path) as file:
        head, text = chunks.read_head(file, path)
        if head is None:
            error = chunks.refusal(path, text, whole=not chunks.read(file, path, 1))
            raise error
        try:
            return _Read(path, head, chunks.max_events(path, file)).of(file, text)
        except RecursionError:
            raise TraceError(f"{path}: nested too deeply for a trace of torch.profiler") from None


class _Read:
    """One reading of one file, with the notes on its repairs."""

    def __init__(self, path: Path, head: chunks.Head, max_events: int | None) -> None:
        self._max_events = max_events
        self.path = path
        self.head = head
        self.columns = Columns()
        self.notes: list[str] = []

    def of(self, file: IO[bytes], text: bytes) -> Trace:
        """Read to the end; ``text`` is what was read already."""
        events = EventBuilder()
        buffer, enough = bytearray(text[self.head.start :]), 0
        with executor(1) as thread:  # the next chunk is unpacked while this one is decoded
            ahead = thread.submit(chunks.read, file, self.path, chunks.CHUNK_BYTES)
            while more := ahead.result():
                ahead = thread.submit(chunks.read, file, self.path, chunks.CHUNK_BYTES)
                # The end of the file is never cut off: the last slice holds the entries after the events.
                taken, part = self._slice(buffer) if len(buffer) >= enough else (0, None)
                if part is not None:
                    events.add(part)
                elif len(buffer) > chunks.MAX_UNCUT_BYTES:
                    raise TraceError(f"{self.path}: has no border between two events in 128 MiB of text")
                elif len(buffer) >= enough:
                    enough = 2 * len(buffer)
                del buffer[:taken]
                buffer += more
        return self._trace(events, bytes(buffer))

    def _slice(self, buffer: bytearray) -> tuple[int, dict[str, Column] | None]:
        """Decode the events at the start of ``buffer``; None where no cut was right."""
        for end, start in chunks.cuts(buffer):
            text = b"".join((b"[", memoryview(buffer)[:end], b"]"))
            try:
                return start, self._decode(text)
            except msgspec.DecodeError as error:
                # Open brackets mean a wrong cut; any other error is not about the cut.
                if "truncated" not in str(error):
                    return 0, None
        return 0, None

    def _decode(self, text: bytes) -> dict[str, Column]:
        try:
            return self._counted(self.columns.of_text(text))
        except msgspec.ValidationError:
            return self._leniently(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if _is_about_ends(error):
                raise
            fixed = repaired(text)
            if fixed == text:
                raise
            part = self._leniently(fixed)
            self._note("inf, nan or broken UTF-8 in the text were read as missing")
            return part

    def _counted(self, part: dict[str, Column]) -> dict[str, Column]:
        """Return a part, as long as the file may hold so many events."""
        if self._max_events is not None and self.columns.count > self._max_events:
            raise TraceError(
                f"{self.path}: holds more events than a gzip file of its size can; it is no trace of "
                "torch.profiler"
            )
        return part

    def _leniently(self, text: bytes) -> dict[str, Column]:
        try:
            part = self._counted(self.columns.leniently(text))
        except TraceError as error:
            raise TraceError(f"{self.path}: {error}") from None
        self._note("some events have fields of other types than torch.profiler writes; read one by one")
        return part

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _last(self, rest: bytes) -> tuple[dict[str, Column], dict[str, Any]]:
        """Decode the last events and the entries after them."""
        for _ in range(3):
            try:
                events, metadata = chunks.top_level(self.head.prefix, rest)
                return self._decode(events), metadata
            except msgspec.DecodeError as error:
                prefix = len(self.head.prefix)
                without = chunks.without_trailing_comma(self.head.prefix + rest, error)
                fixed = without[prefix:] if without is not None else repaired(rest)
                if fixed == rest:
                    refused = chunks.broken(self.path, error, self.head.prefix)
                    raise refused from None
                self._note("the text was repaired: a trailing comma, inf, nan or broken UTF-8")
                rest = fixed
        raise TraceError(f"{self.path}: is not JSON to its end")

    def _trace(self, events: EventBuilder, rest: bytes) -> Trace:
        last, metadata = self._last(rest)
        events.add(last)
        whole = events.events(self.columns.words())
        chunks.check(self.path, whole, self.columns.count)
        about = metadata.get("distributedInfo")
        about = about if isinstance(about, dict) else {}
        return Trace(
            str(self.path),
            whole,
            metadata,
            self.columns.count,
            rank=_whole(about.get("rank"), rank_in_name(self.path.name)),
            world_size=_whole(about.get("world_size"), None),
            base=_whole(metadata.get("baseTimeNanoseconds"), 0) or 0,
            notes=tuple(self.notes),
        )


def _is_about_ends(error: Exception) -> bool:
    return any(words in str(error) for words in ("truncated", "trailing characters", "trailing comma"))


def _whole(value: Any, default: int | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def rank_in_name(name: str) -> int | None:
    """Return the rank that a file name such as ``trace_rank-3.json`` states, None if it states none."""
    match = re.search(r"rank[-_]?(\d+)", name, re.IGNORECASE)
    return int(match[1]) if match else None
