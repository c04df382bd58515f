"""The text of a trace, cut between events without parsing it twice.

A cut is only a guess from the layout; it is proven by parsing. A slice that starts between two events
and is a valid JSON array once it stands in brackets must end between two events: a cut inside a
string or inside nested brackets leaves them open. So no event can be lost or invented at a border.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from backlight.trace.events import Events, TraceError

CHUNK = 4 * 2**20
"""Bytes of text that are decoded at once."""

_HEAD_LIMIT = 64 * 2**20
_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|name|cat|ts|pid)"\s*:)')
_ANY_BETWEEN = re.compile(rb"\}\s*,\s*(?=\{)")
_WINDOWS = (2**14, 2**17, 2**20, CHUNK)

_EXPECTED = "expected the JSON that torch.profiler's export_chrome_trace writes"
_OWN = frozenset({
    "cpu_op", "operator", "kernel", "gpu_memcpy", "memcpy", "gpu_memset", "memset", "cuda_runtime",
    "runtime", "cuda_driver", "user_annotation", "gpu_user_annotation", "python_function", "trace",
    "privateuse1_runtime",
    "xpu_runtime", "mtia_runtime", "hip_runtime", "overhead", "cuda_sync", "cpu_instant_event",
})  # fmt: skip
"""Categories of events that torch.profiler writes, in lower case."""


@dataclass(frozen=True, slots=True)
class Head:
    """Where the events begin, and what stands before them."""

    prefix: bytes
    start: int


def open_text(path: Path) -> IO[bytes]:
    """Open a trace for reading its text, gzipped or not; told by its first bytes, not by its name."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return cast("IO[bytes]", gzip.open(path, "rb")) if packed else path.open("rb")


def read(file: IO[bytes], path: Path, size: int) -> bytes:
    """Read up to ``size`` bytes.

    Raises
    ------
    TraceError
        If the gzip stream is truncated or damaged.
    """
    try:
        return file.read(size)
    except EOFError:
        raise TraceError(
            f"{path}: the gzip stream ends before its end mark: the file is truncated, most likely "
            "because the training ended while it was written. Copy it again, or take the trace again"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: damaged gzip stream ({error}). Copy the file again") from None


def find_head(text: bytes) -> Head | None:
    """Return where the array of events begins, or None where ``text`` does not hold its begin."""
    if text.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
        return Head(b"[", text.index(b"[") + 1)
    for found in _KEY.finditer(text):
        # The words may stand in a string or deeper down; the text before them decides.
        try:
            whole = msgspec.json.decode(text[: found.end()].lstrip(b"\xef\xbb\xbf") + b"]}")
        except msgspec.DecodeError:
            continue
        if isinstance(whole, dict) and whole.get("traceEvents") == []:
            return Head(text[: found.end()], found.end())
    return None


def read_head(file: IO[bytes], path: Path) -> tuple[Head | None, bytes]:
    """Read until the events begin; return the head and all text read so far."""
    text = b""
    while len(text) < _HEAD_LIMIT:
        more = read(file, path, CHUNK)
        text += more
        head = find_head(text)
        if head is not None or not more:
            return head, text
    return None, text


def cuts(text: bytes) -> Iterator[tuple[int, int]]:
    """Guess, from the last one back, where two events part: end of the one, start of the next."""
    for pattern in (_BETWEEN, _ANY_BETWEEN):
        stop = len(text)
        tried = 0
        for window in _WINDOWS:
            start = max(len(text) - window, 0)
            for found in reversed(list(pattern.finditer(text, start, stop))):
                yield found.start() + 1, found.end()
                tried += 1
                if tried >= 6:
                    break
            if tried or start == 0:
                break
            stop = min(start + 256, len(text))


def top_level(prefix: bytes, rest: bytes) -> tuple[bytes, dict[str, Any]]:
    """Parse the last of the events together with what follows them.

    Parameters
    ----------
    prefix:
        The text before the events, as in :class:`Head`.
    rest:
        The text from the start of an event, or from the closing bracket, to the end of the file.

    Returns
    -------
    tuple
        The array of the last events as text, and the other entries of the file.

    Raises
    ------
    msgspec.DecodeError
        If this is not JSON to its end.
    """
    if prefix == b"[":
        return bytes(msgspec.json.decode(b"[" + rest, type=msgspec.Raw)), {}
    document = prefix.lstrip(b"\xef\xbb\xbf") + rest
    raw = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
    events = bytes(raw.pop("traceEvents"))
    return events, {key: msgspec.json.decode(value) for key, value in raw.items()}


def without_trailing_comma(text: bytes, error: msgspec.DecodeError) -> bytes | None:
    """Return the text without the comma that ``error`` is about, None if it is about something else."""
    found = re.search(r"trailing comma in array \(byte (\d+)\)", str(error))
    if found is None:
        return None
    comma = text.rfind(b",", 0, int(found[1]) + 1)
    return text[:comma] + text[comma + 1 :] if comma >= 0 else None


def refusal(path: Path, text: bytes, *, whole: bool) -> TraceError:
    """Return why a file without an array of events is refused; ``whole`` if ``text`` is all of it."""
    start = text.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start:
        return TraceError(f"{path}: the file is empty; {_EXPECTED}")
    if start.startswith(b"SQLite format 3"):
        return TraceError(
            f"{path}: an SQLite file, as Nsight Systems exports it; {_EXPECTED}. "
            "Record with torch.profiler.profile(...) and prof.export_chrome_trace(path)"
        )
    if start[:1] != b"{":
        return TraceError(f"{path}: is not JSON (it starts with {start[:24]!r}); {_EXPECTED}")
    first = start.split(b"\n", 1)[0]
    if b'"CudaEvent"' in text[:65536] or b'"TraceProcessEvent"' in text[:65536] or b'"StringTable"' in first:
        return TraceError(
            f"{path}: JSON of Nsight Systems (nsys export), not of torch.profiler; {_EXPECTED}. "
            "Record with torch.profiler.profile(...) and prof.export_chrome_trace(path)"
        )
    if not whole:
        return TraceError(f"{path}: no array traceEvents in the first {len(text) // 2**20} MiB; {_EXPECTED}")
    try:
        found = msgspec.json.decode(start)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return broken(path, error, b"")
    keys = ", ".join(map(repr, list(found)[:6])) or "none"
    return TraceError(f"{path}: JSON without an array traceEvents at its top (keys: {keys}); {_EXPECTED}")


def broken(path: Path, error: Exception, prefix: bytes) -> TraceError:
    """Return why text that does not parse to its end is refused."""
    if "truncated" in str(error):
        after = "inside traceEvents" if prefix else "before traceEvents"
        return TraceError(
            f"{path}: the JSON ends {after}: the file is truncated, most likely because the training ended "
            "while it was written. Copy it again, or take the trace again"
        )
    return TraceError(f"{path}: is not valid JSON ({error}); {_EXPECTED}")


def check(path: Path, events: Events, metadata: Mapping[str, Any]) -> None:
    """Refuse a Chrome trace that another tool wrote.

    Raises
    ------
    TraceError
        If no event has a category of torch.profiler.
    """
    if bool(events.complete(_OWN).any()):
        return
    categories = [word for word in events.words["category"] if word]
    tool = ""
    if any("devtools" in word or "v8" in word or word == "__metadata" for word in categories):
        tool = "of Chrome's developer tools, "
    elif "viztracer_metadata" in metadata:
        tool = "of VizTracer, "
    elif any("jax" in str(key) or "xla" in word.lower() for key in metadata for word in categories):
        tool = "of JAX or XLA, "
    if not len(events):
        raise TraceError(f"{path}: traceEvents is empty: the profiler recorded no step; {_EXPECTED}")
    shown = ", ".join(map(repr, categories[:5])) or "none"
    raise TraceError(
        f"{path}: a Chrome trace {tool}not of torch.profiler: none of its {len(events):,} events "
        f"has a category such as cpu_op or kernel (categories: {shown}); {_EXPECTED}"
    )
