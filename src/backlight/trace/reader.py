"""Reader of a trace file: in chunks on one core, or on several with decoding processes."""

from __future__ import annotations

import multiprocessing
import re
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from backlight.processes import available_cores
from backlight.trace import chunks
from backlight.trace.decoder import Columns, decode_in_worker, leniently, repaired
from backlight.trace.events import COLUMNS, MISSING, Column, EventBuilder, Trace, TraceError

MIN_PARALLEL_BYTES = 128 * 2**20
"""Smaller texts are decoded faster by one process."""

_GZIP_RATIO = 12
"""Typical compression of a trace by gzip."""


def read_trace(path: str | Path, *, workers: int = 1) -> Trace:
    """Read a trace of torch.profiler, gzipped or not, without dropping an event.

    ``workers`` is the number of processes that decode; 1 decodes in this one.

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
        most = chunks.max_events(path, file)
        read = _Read(path, head, most)
        if workers > 1 and len(text) >= chunks.CHUNK_BYTES:
            try:
                return read.in_processes(file, text, workers)
            except (msgspec.DecodeError, ValueError, OSError, BrokenProcessPool) as failure:
                # A cut was wrong or a chunk is unusual: one process finds out which, chunk by chunk.
                read = _Read(path, head, most)
                read.notes.append(f"read on one core: {failure}")
                file.seek(0)
                _, text = chunks.read_head(file, path)
        try:
            return read.in_this_process(file, text)
        except RecursionError:
            raise TraceError(f"{path}: nested too deeply for a trace of torch.profiler") from None


def default_workers(path: str | Path) -> int:
    """Return how many processes are worth their start for a file; 1 where it is small or missing."""
    path = Path(path)
    if not path.is_file():
        return 1
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    size = path.stat().st_size * (_GZIP_RATIO if packed else 1)
    cores = available_cores()
    # This process reads and joins: with two cores, another one gains less than its start costs.
    return min(4, cores) if cores > 2 and size >= MIN_PARALLEL_BYTES else 1


class _Read:
    """One reading of one file, with the notes on its repairs."""

    def __init__(self, path: Path, head: chunks.Head, max_events: int | None) -> None:
        self._left = max_events
        self.path = path
        self.head = head
        self.columns = Columns()
        self.notes: list[str] = []
        self._codes: dict[tuple[int, str], Column] = {}

    def in_this_process(self, file: IO[bytes], text: bytes) -> Trace:
        events = EventBuilder()
        buffer = text[self.head.start :]
        while True:
            more = chunks.read(file, self.path, chunks.CHUNK_BYTES)
            if not more:
                break
            # The end of the file is never cut off: the last slice holds the entries after the events.
            taken, part = self._slice(buffer)
            if part is not None:
                events.add(part)
            elif len(buffer) > 16 * chunks.CHUNK_BYTES:
                while rest := chunks.read(file, self.path, chunks.CHUNK_BYTES):
                    more += rest
                    if len(buffer) + len(more) > chunks.MAX_UNCUT_BYTES:
                        raise TraceError(f"{self.path}: has no border between two events in 128 MiB of text")
            buffer = buffer[taken:] + more
        return self._trace(events, buffer)

    def _slice(self, buffer: bytes) -> tuple[int, dict[str, Column] | None]:
        """Decode the events at the start of ``buffer``; None where no cut was right."""
        for end, start in chunks.cuts(buffer):
            text = b"[" + buffer[:end] + b"]"
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
        if self._left is not None:
            self._left -= len(part["kind"])
            if self._left < 0:
                raise TraceError(
                    f"{self.path}: holds more events than a gzip file of its size can; it is no trace of "
                    "torch.profiler"
                )
        return part

    def _leniently(self, text: bytes) -> dict[str, Column]:
        try:
            part = self._counted(self.columns.of_events(leniently(text)))
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

    def in_processes(self, file: IO[bytes], text: bytes, count: int) -> Trace:
        """Cut here, decode in ``count`` other processes, join here."""
        events = EventBuilder()
        buffer = text[self.head.start :]
        pending: deque[Future[tuple[int, dict[str, Column], dict[str, list[Any]]]]] = deque()
        # Not forked: this process may have threads.
        with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
            while more := chunks.read(file, self.path, chunks.CHUNK_BYTES):
                end, start = next(chunks.cuts(buffer), (0, 0))
                if start:
                    pending.append(pool.submit(decode_in_worker, b"[" + buffer[:end] + b"]"))
                if len(pending) > 2 * count:  # reading does not run far ahead
                    events.add(self._counted(self._recoded(*pending.popleft().result())))
                buffer = buffer[start:] + more
                if len(buffer) > 16 * chunks.CHUNK_BYTES:
                    raise TraceError("the text has no place to cut")
            for future in pending:
                events.add(self._counted(self._recoded(*future.result())))
        return self._trace(events, buffer)

    def _recoded(
        self, process: int, part: dict[str, Column], fresh: dict[str, list[Any]]
    ) -> dict[str, Column]:
        """Return a chunk in the codes of this process; ``fresh`` are words that are new in ``process``."""
        for name, words in fresh.items():
            known = self.columns.vocabularies[name]
            codes = self._codes.get((process, name), np.array([MISSING]))
            # The last code answers for MISSING, which indexes from the end.
            codes = np.concatenate((codes[:-1], [known[word] for word in words], [MISSING]))
            self._codes[process, name] = codes = codes.astype(COLUMNS[name].dtype)
            if name in part:
                part[name] = codes[part[name]]
        return part

    def _trace(self, events: EventBuilder, rest: bytes) -> Trace:
        last, metadata = self._last(rest)
        events.add(last)
        whole = events.events(self.columns.words())
        chunks.check(self.path, whole)
        about = metadata.get("distributedInfo")
        about = about if isinstance(about, dict) else {}
        return Trace(
            str(self.path),
            whole,
            metadata,
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
    found = re.search(r"rank[-_]?(\d+)", name, re.IGNORECASE)
    return int(found[1]) if found else None
