"""Names inside a run directory: made safe where they come from outside, and parsed back.

Run, parameter, scalar and evidence names are untrusted input: line breaks, NUL, ``../``, quotes, lone
surrogates, any length. They never become a path unless :func:`safe_name` made them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path

MANIFEST = "manifest.json"
ARRAYS = "arrays"
EVIDENCE = "evidence"

MAX_NAME_BYTES = 80
"""Bytes of a sanitised name; file systems commonly allow 255 and callers append to it."""

RANK_DOCUMENT = re.compile(r"rank-(\d{5,9})\.json")
WATCHDOG_DATABASE = re.compile(r"watchdog-.+\.db")

_ATTEMPT = re.compile(r"attempt-\d{3,}")
_PIECE = re.compile(r"rank-(\d{5,9})-(\d{6})(?:-(\d{6}))?\.h5")
_DATABASE = re.compile(r"rank-(\d{5,9})(?:\.(\d{6})(?:-(\d{6}))?)?\.db")
_COLUMNS = re.compile(r"columns-(\d{6})")
_RESERVED = {"con", "prn", "aux", "nul", *(f"{d}{i}" for d in ("com", "lpt") for i in range(1, 10))}

Span = tuple[int, int, int]
"""Rank, first and last number of a file that is one of a sequence."""


def safe_name(text: str, fallback: str = "run") -> str:
    """Return a name of at most 80 bytes that is safe as one component of a path on any file system."""
    text = unicodedata.normalize("NFC", text[: 4 * MAX_NAME_BYTES])
    kept = "".join(c if (c.isalnum() or c in "._-") and c.isprintable() else "-" for c in text)
    while "--" in kept:
        kept = kept.replace("--", "-")
    kept = kept.strip("-. ")
    kept = kept.encode("utf-8")[:MAX_NAME_BYTES].decode("utf-8", "ignore").strip("-. ")
    if kept.split(".", maxsplit=1)[0].lower() in _RESERVED:
        kept = f"_{kept}"
    return kept or fallback


def storable(text: object) -> str:
    """Return ``text`` so that it can be stored as UTF-8: lone surrogates become escapes."""
    return str(text).encode("utf-8", "backslashreplace").decode("utf-8")


def attempt_folder(index: int) -> str:
    """Return the name of the folder of an attempt."""
    return f"attempt-{index:03d}"


def written_attempts(run: Path) -> list[str]:
    """Return, sorted, the folders of attempts in which any rank has a database, or that hold a dataset."""
    if not run.is_dir():
        return []
    folders = [p for p in run.iterdir() if _ATTEMPT.fullmatch(p.name) and p.is_dir()]
    return sorted(
        p.name
        for p in folders
        if any(parse_database(c.name) or parse_columns(c.name) is not None for c in p.iterdir())
    )


def database_name(rank: int) -> str:
    """Return the name of the database of a rank."""
    return f"rank-{rank:05d}.db"


def document_name(rank: int) -> str:
    """Return the name of the JSON document of a rank."""
    return f"rank-{rank:05d}.json"


def segment_name(rank: int, first: int, last: int | None = None) -> str:
    """Return the name of a database segment, or of one that replaces the segments ``first`` to ``last``."""
    return f"rank-{rank:05d}.{_numbers(first, last)}.db"


def piece_name(rank: int, first: int, last: int | None = None) -> str:
    """Return the name of a piece of arrays, or of one that replaces the pieces ``first`` to ``last``."""
    return f"rank-{rank:05d}-{_numbers(first, last)}.h5"


def parse_database(name: str) -> Span | None:
    """Return rank, first and last segment of a database's name; -1, -1 if it is not segmented."""
    match = _DATABASE.fullmatch(name)
    if match is not None and match[2] is None:
        return int(match[1]), -1, -1
    return _span(match)


def parse_piece(name: str) -> Span | None:
    """Return rank, first and last number of the name of a piece of arrays, None for any other name."""
    return _span(_PIECE.fullmatch(name))


def unmerged(spans: Iterable[tuple[str, Span]]) -> list[str]:
    """Return, in order, the files that no wider one of the same rank replaces: a kill may leave both."""
    kept: list[tuple[str, Span]] = []
    for name, (rank, first, last) in sorted(spans, key=lambda s: (s[1][0], s[1][1], -s[1][2], s[0])):
        if kept:
            owner, begin, end = kept[-1][1]
            if owner == rank and begin <= first and last <= end:
                continue
        kept.append((name, (rank, first, last)))
    return [name for name, _ in kept]


def pieces(arrays: Path) -> list[tuple[int, Path]]:
    """Return rank and path of the pieces in a folder of arrays that no merged one replaces, in order."""
    if not arrays.is_dir():
        return []
    spans = {p.name: span for p in arrays.iterdir() if (span := parse_piece(p.name)) is not None}
    return [(spans[name][0], arrays / name) for name in unmerged(spans.items())]


def watchdog_files(attempt: Path) -> list[Path]:
    """Return the databases of the watchdogs in an attempt's folder, sorted."""
    return sorted(p for p in attempt.iterdir() if WATCHDOG_DATABASE.fullmatch(p.name))


def columns_name(number: int) -> str:
    """Return the name of the folder of a columnar dataset; a higher number replaces the lower ones."""
    return f"columns-{number:06d}"


def parse_columns(name: str) -> int | None:
    """Return the number of a columnar dataset's name, None for any other name."""
    match = _COLUMNS.fullmatch(name)
    return None if match is None else int(match[1])


def columns_folders(attempt: Path) -> list[Path]:
    """Return the columnar datasets in an attempt's folder, the one that counts last."""
    return sorted(p for p in attempt.iterdir() if parse_columns(p.name) is not None and p.is_dir())


def _numbers(first: int, last: int | None) -> str:
    return f"{first:06d}" if last is None or last == first else f"{first:06d}-{last:06d}"


def _span(match: re.Match[str] | None) -> Span | None:
    return None if match is None else (int(match[1]), int(match[2]), int(match[3] or match[2]))
