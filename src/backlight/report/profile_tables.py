"""The profile that a run may hold, ``evidence/profile.json``, as tables of figures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backlight.report.panel import Drawn, NotMeasured
from backlight.report.source import Source
from backlight.text import visible

NAME = "profile.json"

ROWS = 60
"""Rows of a table that are shown; profile.json has them all."""

NONE = NotMeasured("No profile was taken: backlight profile --out RUN SCRIPT takes one.")


@dataclass(frozen=True, slots=True)
class Figures:
    """A table: titles of its columns, rows of text, and the columns that hold numbers."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int]


def profile_of(source: Source) -> dict[str, Any] | None:
    """Return the last profile of a run; None where there is none that can be read."""
    paths = [p for p in source.run.evidence() if p.endswith(f"/{NAME}")]
    if source.attempt is not None:
        paths = [p for p in paths if p.startswith(f"attempt-{source.attempt:03d}/")]
    for path in reversed(paths):
        try:
            found = json.loads(source.run.read_evidence(path))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return None


def rows_of(profile: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the rows of one table, those that are none left out; empty where it was not measured."""
    listed = profile.get(key)
    return [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []


def figures(tables: Sequence[Figures], remarks: Sequence[str] = ()) -> Drawn:
    """Return tables as the page's drawer ``figures`` takes them, cut to what can be read."""
    data, notes = [], list(remarks)
    for table in tables:
        data.append(
            {
                "title": table.title,
                "columns": list(table.columns),
                "numbers": sorted(table.numbers),
                "rows": [[visible(cell) for cell in row] for row in table.rows[:ROWS]],
            }
        )
        if len(table.rows) > ROWS:
            notes.append(f"{len(table.rows) - ROWS} more rows stand in evidence/{NAME}.")
    return Drawn("figures", {"tables": data}, (), tuple(notes))


def ms(value: Any) -> str:
    """Return milliseconds in print."""
    return f"{float(value):,.2f}" if isinstance(value, (int, float)) else "not measured"


def share(value: Any) -> str:
    """Return a share in print."""
    return f"{float(value):.1%}" if isinstance(value, (int, float)) else "not measured"


def count(value: Any) -> str:
    """Return a number of calls in print."""
    return f"{float(value):,.6g}" if isinstance(value, (int, float)) else ""
