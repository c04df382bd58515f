"""Where the evidence of a finding is on the page, and the files that were collected during a stall."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from backlight.records import Evidence, Finding
from backlight.report.panel import Panel
from backlight.report.source import COLUMNS, Source
from backlight.text import visible


@dataclass(frozen=True, slots=True)
class Place:
    """A panel, and inside it a parameter (its row), a column of the heat map, a step, a layer, if known."""

    panel: str
    row: int | None = None
    column: str | None = None
    step: int | None = None
    layer: str | None = None


_ATTEMPT = re.compile(r"^attempt-\d+/(?=evidence/)")

_NEAREST = {"nan": "non_finite", "inf": "non_finite", "zeros": "zero_share"}
"""Columns of the heat map for stored columns that it does not show as they are."""


def place_of(
    evidence: Evidence,
    finding: Finding,
    panels: Sequence[Panel],
    drawn: Collection[str],
    rows: Mapping[str, int],
) -> Place | None:
    """Return where ``evidence`` is shown, None where the page shows nothing of it.

    ``drawn`` are the names of those of ``panels`` that have data. ``rows`` maps names of parameters, and
    their aliases, to rows.
    """
    has_map = "parameters" in drawn
    step = evidence.step if evidence.step is not None else finding.subject.step
    path = _ATTEMPT.sub("", evidence.path.strip("/"))
    series, column, parameter = _series(path)
    row = rows.get(parameter or finding.subject.parameter or "")
    if row is not None and has_map and series in {"gradient", "update"}:
        # One parameter of a series is a row of the heat map, whichever panel shows the series as a whole.
        shown = next((c.name for c in COLUMNS if (c.series, c.column) == (series, column)), None)
        shown = shown or ("ratio" if series == "update" else _NEAREST.get(column or "", "rms"))
        return Place("parameters", row, shown, step)
    if has_map and path.startswith("parameters/"):
        named = rows.get(path.split("/", 2)[-1], row)
        return Place("parameters", named, None, step)
    matches = [(matching_segments(path, panel), panel.name, panel) for panel in panels]
    length, name, panel = max(matches, default=(0, "", None))
    if panel is None or not length or name not in drawn:
        return None
    return Place(name, row, None, step, _layer(path, length) if panel.layers else None)


_KINDS = {"scalars": "", "events": "", "user": "logged ", "profile": "profile: ", "parameters": ""}
"""First words of what evidence is called, by the beginning of its path."""

_OF_PARAMETER = {"group": "optimizer of", "requires_grad": "requires_grad of"}


def label_of(path: str) -> str:
    """Return what evidence is called on the page: ``gradient rms of head.weight`` for its path in the run."""
    series, column, parameter = _series(path)
    if series is not None:
        shown = next((c.label for c in COLUMNS if (c.series, c.column) == (series, column)), column or "")
        of = f" of {parameter}" if parameter else ""
        return f"{series} {shown.replace('_', ' ')}{of}".replace("update update", "update")
    kind, _, name = path.partition("/")
    if kind == "parameters":
        field, _, parameter = name.partition("/")
        return f"{_OF_PARAMETER.get(field, field.replace('_', ' '))} {parameter}"
    if kind not in _KINDS or not name:
        return path
    words = (
        name if kind == "user" else name.replace("_", " ").replace("/", " ").replace("lr ", "learning rate ")
    )
    return f"{_KINDS[kind]}{words}"


def _series(path: str) -> tuple[str | None, str | None, str | None]:
    """Split ``series/<series>/<column>/<parameter>``; a parameter's name may hold slashes itself."""
    parts = path.split("/", 3)
    if parts[0] != "series":
        return None, None, None
    parts += [""] * (4 - len(parts))
    return parts[1] or None, parts[2] or None, parts[3] or None


def _layer(path: str, beginning: int) -> str | None:
    """Return the layer behind ``beginning`` segments of a number or an array; its name may hold slashes."""
    behind = 2 if path.startswith("arrays/") else 1  # step and name of an array, name of a number
    layer = path.split("/")[beginning:-behind]
    return visible("/".join(layer)) if layer else None


def matching_segments(path: str, panel: Panel) -> int:
    """Return how many segments of ``path`` the closest series of ``panel`` names, 0 for none."""
    segments = path.split("/")
    lengths = [0]
    for series in panel.series:
        wanted = series.split("/")
        if segments[: len(wanted)] == wanted:
            lengths.append(len(wanted))
    return max(lengths)


LONGEST = 60_000
"""Characters of one file that are shown."""

MOST = 24
"""Files that are shown."""


@dataclass(frozen=True, slots=True)
class CollectedEvidence:
    """Files below ``evidence/`` as text, and by rank what could not be collected.

    ``more`` counts files beyond those that are shown.
    """

    files: tuple[tuple[str, str], ...]
    missing: tuple[tuple[str, str], ...]
    more: int = 0


def collected(source: Source) -> CollectedEvidence:
    """Read the text evidence of a run; a file that is not text is left out."""
    paths = source.evidence(".txt")
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
        if not isinstance(reasons, dict):
            continue
        for rank, why in reasons.items():
            for reason in why if isinstance(why, list) else [why]:
                missing[visible(rank), visible(reason)] = None
    return CollectedEvidence(tuple(files), tuple(missing), max(len(paths) - MOST, 0))
