"""Text of backlight on standard error, which may be closed, full, or replaced by the script. No torch."""

from __future__ import annotations

import io
from typing import TextIO

from backlight.interrupts import suppressed


def write_text(text: str, stream: TextIO | None) -> None:
    """Write ``text``; a stream that is missing, closed, full or no stream gets nothing.

    A file is written without Python's buffer: what a full device refuses would stay in it, and change the
    exit code of the interpreter, which flushes it again at its end.
    """
    if stream is None:  # a process without one, for which print would take standard output
        return
    with suppressed():  # the script may have put anything there
        raw = getattr(stream.buffer, "raw", None) if type(stream) is io.TextIOWrapper else None
        stream.flush()
        if not isinstance(raw, io.FileIO):
            stream.write(text)
            stream.flush()
            return
        left = text.encode(stream.encoding, "backslashreplace")
        while left:
            left = left[raw.write(left) :]
