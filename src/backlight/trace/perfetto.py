"""A trace with the critical path and counters drawn in, for Perfetto and chrome://tracing."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from backlight import atomic_files, codec
from backlight.trace import chunks
from backlight.trace.analysis import chosen_steps
from backlight.trace.classification import MEMCPY, MEMSET
from backlight.trace.critical_path import Paths
from backlight.trace.device_queues import by_stream, queue_length
from backlight.trace.events import Integers, TraceError
from backlight.trace.timeline import Timeline

TRACK = "critical path (backlight)"
"""Name of the process whose track holds the path."""

_COPIED_BYTES = 2**20


def save_overlay(timeline: Timeline, path: Path, number: int | None = None) -> int:
    """Write the trace again with the critical path of its steps, queue lengths and copy bandwidths added.

    The events of the original are copied as they are. Returns the number of events added.

    Raises
    ------
    TraceError
        If ``path`` is the trace itself, or the trace has no such step.
    """
    source = Path(timeline.trace.path)
    if path.resolve() == source.resolve():
        raise TraceError(f"{path}: is the trace itself; expected another file to write")
    added = [*_path(timeline, number), *_queues(timeline), *_bandwidths(timeline)]
    with (
        chunks.open_text(source) as text,
        atomic_files.replacing(path) as temporary,
        temporary.open("xb") as raw,
    ):
        head, begin = chunks.read_head(text, source)
        if head is None:
            raise TraceError(f"{source}: is no trace any more: it was changed while it was read")
        out: IO[bytes] = raw
        if path.suffix == ".gz":
            # A fixed time keeps the file the same for the same trace.
            out = cast("IO[bytes]", gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=5, mtime=0))
        out.write(begin[: head.start])
        out.write(b"".join(codec.encode(event).encode() + b",\n" for event in added))
        out.write(begin[head.start :])
        while more := chunks.read(text, source, _COPIED_BYTES):
            out.write(more)
        out.close()
    return len(added)


def _shown(nanoseconds: int) -> int:
    """Return a time as it can be drawn: since 1970 in whole microseconds, which alone fit into a float.

    Perfetto reads other times as floats, and drops a slice that then begins inside the one before.
    """
    return nanoseconds if nanoseconds < 2**53 else nanoseconds // 1000 * 1000


def _micro(nanoseconds: int) -> float:
    return nanoseconds / 1000 if nanoseconds % 1000 else nanoseconds // 1000


def _path(timeline: Timeline, number: int | None) -> Iterator[dict[str, Any]]:
    for kind, row in (("process_name", TRACK), ("thread_name", "path")):
        yield {"ph": "M", "name": kind, "pid": TRACK, "tid": 0, "args": {"name": row}}
    paths = Paths(timeline)
    for step in chosen_steps(timeline, number):
        for part in paths.parts(step):
            start, end = _shown(part.start), _shown(part.end)
            yield {
                "ph": "X", "cat": "critical_path", "name": part.name, "pid": TRACK, "tid": 0,
                "ts": _micro(start), "dur": _micro(end - start),
                "args": {"where": part.where, "step": step.number, "ns": part.end - part.start},
            }  # fmt: skip


def _queues(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for device, stream, rows in by_stream(timeline, np.arange(len(timeline.device.rows))):
        name = f"queue of stream {stream} on device {device}"
        yield from _counter(name, "launches", *queue_length(timeline, rows))


def _bandwidths(timeline: Timeline) -> Iterator[dict[str, Any]]:
    device, events = timeline.device, timeline.events
    copies = events.among(MEMCPY | MEMSET)[device.rows] & (events["bytes"][device.rows] > 0)
    for code in np.unique(events["name"][device.rows[copies]]):
        rows = np.flatnonzero(copies & (events["name"][device.rows] == code))
        start, end = device.start[rows], np.maximum(device.end[rows], device.start[rows] + 1)
        rate = events["bytes"][device.rows[rows]] / (end - start)
        times = np.concatenate((start, end))
        order = np.argsort(times, kind="stable")
        level = np.cumsum(np.concatenate((rate, -rate))[order])
        yield from _counter(f"bandwidth of {events.words['name'][int(code)]}", "GB/s", times[order], level)


def _counter(name: str, unit: str, times: Integers, values: Any) -> Iterator[dict[str, Any]]:
    for at, value in zip(times.tolist(), np.round(values, 3).tolist(), strict=True):
        yield {"ph": "C", "name": name, "pid": TRACK, "ts": _micro(_shown(at)), "args": {unit: max(value, 0)}}
