"""Intervals of one thread that cross: every moment counts once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from made_traces import Maker

from backlight.trace.reader import read_trace
from backlight.trace.timeline import tree


def inner(path: Path, spans: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Return each span's own microseconds."""
    maker = Maker()
    for name, (start, end) in spans.items():
        maker.add("user_annotation", name, start, end - start)
    events = read_trace(maker.write(path)).events
    found = tree(events)
    return {
        events.word("name", int(row)): own / 1e3 for row, own in zip(found.rows, found.inner, strict=True)
    }


def test_the_overlap_of_crossing_ranges_belongs_to_the_later_one(tmp_path: Path) -> None:
    spans = {"step": (0.0, 100.0), "optimizer": (80.0, 110.0), "inside": (85.0, 90.0)}
    assert inner(tmp_path / "t.json", spans) == {"step": 80.0, "optimizer": 25.0, "inside": 5.0}


def test_a_range_around_both_loses_the_shared_part_once(tmp_path: Path) -> None:
    spans = {"all": (0.0, 200.0), "a": (10.0, 100.0), "b": (20.0, 95.0), "c": (90.0, 120.0)}
    own = inner(tmp_path / "t.json", spans)
    assert own == {"all": 90.0, "a": 10.0, "b": 70.0, "c": 30.0}
    assert np.isclose(sum(own.values()), 200.0)
