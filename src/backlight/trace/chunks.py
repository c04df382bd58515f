"""The text of a trace: cut between events without parsing it twice, and refused where it is no trace.

A cut is only a guess from the layout; parsing proves it. A slice that starts between two events and is a
valid JSON array inside brackets must end between two events: a cut inside a string or inside nested brackets
leaves them open. So no event can be lost or invented at a border.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from backlight import untrusted_files
from backlight.trace.events import Events, TraceError

CHUNK_BYTES = 2 * 2**20
"""Text that is decoded at once."""

MAX_FILE_BYTES = 1024**4
"""Larger files are refused."""

MAX_GZIP_RATIO = 100
"""Traces shrink by 10 to 40."""

MIN_PACKED_BYTES = 512 * 1024
"""Size that a smaller gzip file counts as."""

MIN_EVENT_BYTES = 4
"""Bytes that an event takes in a gzip file at least: its time alone takes about as many."""

MAX_UNCUT_BYTES = 128 * 2**20
"""Text without a border between two events that is read at most."""

_MAX_HEAD_BYTES = 64 * 2**20
_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|ts|pid)"\s*:)')
_ANY_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_SEARCH_BYTES = (2**14, 2**17, 2**20, CHUNK_BYTES)

_EXPECTED = "expected the JSON that torch.profiler's export_chrome_trace writes"
_PROFILER_CATEGORIES = frozenset({
    "cpu_op", "operator", "kernel", "gpu_memcpy", "memcpy", "gpu_memset", "memset", "cuda_runtime",
    "runtime", "cuda_driver", "user_annotation", "gpu_user_annotation", "python_function", "trace",
    "privateuse1_runtime",
    "xpu_runtime", "mtia_runtime", "hip_runtime", "overhead", "cuda_sync", "cpu_instant_event",
})  # fmt: skip
"""Categories of events that torch.profiler writes, in lower case."""


@dataclass(frozen=True, slots=True)
class Head:
    """The text before the events, and the offset of the first one."""

    prefix: bytes
    start: int


def open_text(path: Path) -> IO[bytes]:
    """Open a trace for reading its text; its first bytes, not its name, decide whether it is gzipped."""
    file = os.fdopen(untrusted_files.open_descriptor(path, MAX_FILE_BYTES, links=True), "rb")
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    return cast("IO[bytes]", _GzipText(file, path)) if packed else file


class _GzipText(gzip.GzipFile):
    """The text of a gzip file, as long as it is not meant to exhaust memory."""

    def __init__(self, packed: IO[bytes], path: Path) -> None:
        super().__init__(fileobj=packed, mode="rb")
        self._packed, self._path = packed, path
        self._most = MAX_GZIP_RATIO * max(path.stat().st_size, MIN_PACKED_BYTES)

    def read(self, size: int | None = -1) -> bytes:
        text = super().read(size)
        if self.tell() > self._most:
            raise TraceError(
                f"{self._path}: unpacks to more than {self._most} bytes, {MAX_GZIP_RATIO} times its size, "
                f"which no trace does; {_EXPECTED}"
            )
        return text

    def close(self) -> None:
        super().close()
        self._packed.close()


def max_events(path: Path, file: object) -> int | None:
    """Return how many events a gzip file can hold, None for plain text, which is as long as its events."""
    if not isinstance(file, _GzipText):
        return None
    return max(path.stat().st_size // MIN_EVENT_BYTES, MIN_PACKED_BYTES)


def read(file: IO[bytes], path: Path, size: int) -> bytes:
    """Read up to ``size`` bytes; a :class:`TraceError` is raised for a truncated or damaged gzip stream."""
    try:
        return file.read(size)
    except EOFError:
        raise TraceError(
            f"{path}: the gzip stream ends before its end mark: the file is truncated, most likely "
            "because the run ended while it was written. Copy it again, or take the trace again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: damaged gzip stream ({error}). Copy the file again") from None


def find_head(text: bytes) -> Head | None:
    """Return the start of the array of events, or None where it is not in ``text``."""
    if text.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
        return Head(b"[", text.index(b"[") + 1)
    for key in _KEY.finditer(text):
        # The key may be inside a string or deeper down; the text before it decides.
        try:
            whole = msgspec.json.decode(text[: key.end()].lstrip(b"\xef\xbb\xbf") + b"]}")
        except msgspec.DecodeError:
            continue
        if isinstance(whole, dict) and whole.get("traceEvents") == []:
            return Head(text[: key.end()], key.end())
    return None


def read_head(file: IO[bytes], path: Path) -> tuple[Head | None, bytes]:
    """Read until the events begin; return the head and all text read so far."""
    text = b""
    while len(text) < _MAX_HEAD_BYTES:
        more = read(file, path, CHUNK_BYTES)
        text += more
        head = find_head(text)
        if head is not None or not more:
            return head, text
    return None, text


def cuts(text: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Guess borders between two events, the last first: end of the one, start of the next."""
    for pattern in (_BETWEEN, _ANY_BETWEEN):
        stop = len(text)
        tried = 0
        for window in _SEARCH_BYTES:
            start = max(len(text) - window, 0)
            for cut in reversed(list(pattern.finditer(text, start, stop))):
                yield cut.start() + 1, cut.end()
                tried += 1
                if tried >= 6:
                    break
            if tried or start == 0:
                break
            stop = min(start + 256, len(text))


def top_level(prefix: bytes, rest: bytes) -> tuple[bytes, dict[str, Any]]:
    """Split ``rest``, the text from the start of an event to the end of the file.

    Return the array of the last events as text, and the parsed other entries of the file.
    """
    if prefix == b"[":
        return bytes(msgspec.json.decode(b"[" + rest, type=msgspec.Raw)), {}
    document = prefix.lstrip(b"\xef\xbb\xbf") + rest
    raw = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
    events = bytes(raw.pop("traceEvents"))
    return events, {key: msgspec.json.decode(value) for key, value in raw.items()}


def without_trailing_comma(text: bytes, error: msgspec.DecodeError) -> bytes | None:
    """Return the text without the comma of a trailing-comma error, None for any other error."""
    message = re.search(r"trailing comma in array \(byte (\d+)\)", str(error))
    if message is None:
        return None
    comma = text.rfind(b",", 0, int(message[1]) + 1)
    return text[:comma] + text[comma + 1 :] if comma >= 0 else None


def refusal(path: Path, text: bytes, *, whole: bool) -> TraceError:
    """Return the error for a file without an array of events; ``whole`` if ``text`` is all of it."""
    start = text.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start:
        return TraceError(f"{path}: the file is empty; {_EXPECTED}")
    head = text[:65536]
    if start.startswith(b"SQLite format 3") or b'"CudaEvent"' in head or b'"TraceProcessEvent"' in head:
        return TraceError(
            f"{path}: an export of Nsight Systems, not of torch.profiler; {_EXPECTED}. "
            "Record with torch.profiler.profile(...) and prof.export_chrome_trace(path)"
        )
    if start[:1] != b"{":
        return TraceError(f"{path}: is not JSON (it starts with {start[:24]!r}); {_EXPECTED}")
    if not whole:
        return TraceError(f"{path}: no array traceEvents in the first {len(text) // 2**20} MiB; {_EXPECTED}")
    try:
        content = msgspec.json.decode(start)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return broken(path, error, b"")
    keys = ", ".join(map(repr, list(content)[:6])) or "none"
    return TraceError(f"{path}: JSON without an array traceEvents at its top (keys: {keys}); {_EXPECTED}")


def broken(path: Path, error: Exception, prefix: bytes) -> TraceError:
    """Return the error for text that does not parse to its end."""
    if "truncated" in str(error):
        after = "inside traceEvents" if prefix else "before traceEvents"
        return TraceError(
            f"{path}: the JSON ends {after}: the file is truncated, most likely because the run ended "
            "while it was written. Copy it again, or take the trace again"
        )
    return TraceError(f"{path}: is not valid JSON ({error}); {_EXPECTED}")


def check(path: Path, events: Events, count: int) -> None:
    """Refuse, with a :class:`TraceError`, a Chrome trace without any category of torch.profiler."""
    if bool(events.among(_PROFILER_CATEGORIES).any()):
        return
    categories = [word for word in events.words["category"] if word]
    is_chrome = any("devtools" in word or "v8" in word or word == "__metadata" for word in categories)
    tool = "of Chrome's developer tools, " if is_chrome else ""
    if not count:
        raise TraceError(f"{path}: traceEvents is empty: the profiler recorded no step; {_EXPECTED}")
    shown = ", ".join(map(repr, categories[:5])) or "none"
    raise TraceError(
        f"{path}: a Chrome trace {tool}not of torch.profiler: none of its {count:,} events "
        f"has a category such as cpu_op or kernel (categories: {shown}); {_EXPECTED}"
    )
