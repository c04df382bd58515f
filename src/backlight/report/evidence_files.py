"""What was collected while a training stood still: the files, and what could not be had, with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from backlight.report.source import Source
from backlight.text import visible

LONGEST = 60_000
"""Characters of one file that are shown."""

MOST = 24
"""Files that are shown."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Files below ``evidence/`` as text, and by rank what could not be collected.

    ``more`` counts files beyond those that are shown.
    """

    files: tuple[tuple[str, str], ...]
    missing: tuple[tuple[str, str], ...]
    more: int = 0


def collected(source: Source) -> Collected:
    """Read the text evidence of a run; a file that is not text is left out."""
    paths = [p for p in source.run.evidence() if p.endswith(".txt")]
    if source.attempt is not None:
        paths = [p for p in paths if p.startswith(f"attempt-{source.attempt:03d}/")]
    files = []
    for path in paths[:MOST]:
        try:
            text = source.run.read_evidence(path).decode("utf-8", "replace")
        except OSError as error:
            text = f"cannot be read: {error.strerror}"
        shown = "\n".join(visible(line) for line in text[:LONGEST].splitlines())
        files.append((path, shown + ("\n..." if len(text) > LONGEST else "")))
    missing: dict[tuple[str, str], None] = {}
    for event in source.run.events("stall"):
        reasons = event.payload.get("not_collected")
        if source.attempt not in {None, event.attempt} or not isinstance(reasons, dict):
            continue
        for rank, why in reasons.items():
            for reason in why if isinstance(why, list) else [why]:
                missing[visible(rank), visible(reason)] = None
    return Collected(tuple(files), tuple(missing), max(len(paths) - MOST, 0))
