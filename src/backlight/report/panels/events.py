"""What happened around the training, as the session noted it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backlight.report.panel import Drawn, panel
from backlight.report.source import Source
from backlight.text import listed, number, visible

SHOWN = 200
"""Rows of the table; an event that repeats at every step is one row with a count."""

ELSEWHERE = {"unmeasured", "config", "spectra", "spectra_left_out", "spectra_measured"}
"""Kinds that other parts of the page show."""


@panel("events", title="Events", order=120, series=("events",))
def events(source: Source) -> Drawn:
    """List the events of the run; equal events in a row are one line with how often they came."""
    found = [
        event
        for event in source.run.events()
        if event.kind not in ELSEWHERE and source.attempt in {None, event.attempt}
    ]
    if not found:
        return Drawn("words", {"text": "None was noted: no warning, no exception, no change of parameters."})
    rows: list[dict[str, Any]] = []
    for event in found:
        text = _told(event.payload)
        if rows and (rows[-1]["kind"], rows[-1]["text"]) == (visible(event.kind), text):
            rows[-1]["times"] += 1
            rows[-1]["until"] = event.step
            continue
        rows.append(
            {"step": event.step, "until": event.step, "kind": visible(event.kind), "text": text, "times": 1}
        )
    remarks: tuple[str, ...] = ()
    if len(rows) > SHOWN:
        remarks = (f"{len(rows):,} different events were noted; the first {SHOWN} are listed.",)
    return Drawn("events", {"rows": rows[:SHOWN]}, (), remarks)


def _told(payload: Mapping[str, Any]) -> str:
    return "; ".join(f"{visible(key).replace('_', ' ')}: {_value(value)}" for key, value in payload.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + _told(value) + "}"
    if isinstance(value, (list, tuple)):
        return listed([_value(inner) for inner in value], 5)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    return visible(value)
