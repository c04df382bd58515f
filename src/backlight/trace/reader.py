"""Reader of a trace file, in chunks, so that its text is never held as a whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import IO, Any

import msgspec

from backlight.threads import executor
from backlight.trace import chunks
from backlight.trace.decoder import Columns, repaired
from backlight.trace.events import Column, EventBuilder, Trace, TraceError


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
    found = re.search(r"rank[-_]?(\d+)", name, re.IGNORECASE)
    return int(found[1]) if found else None
