"""The disk is watched while a run is written; tiers go down one at a time, and the run says so."""

from __future__ import annotations

from pathlib import Path

from backlight.monitors.grokking.model.disk_guard import DiskWatch, free_bytes
from backlight.monitors.grokking.model.measures import Measures, at_tier
from backlight.session.writer_thread import ResultQueue


def test_each_look_at_a_full_disk_takes_one_tier(tmp_path: Path) -> None:
    free, sink = [5000], ResultQueue()
    watch = DiskWatch(tmp_path, 1000, sink, spacing=2, free=lambda _path: free[0])
    measures = Measures(every=1)
    assert watch.look(0, measures) is measures
    assert watch.look(1, measures) is measures
    free[0] = 900
    first = watch.look(2, measures)
    assert first == at_tier(measures, "top-k")
    assert watch.look(3, first) is first
    assert watch.look(4, first) == at_tier(measures, "Gram")
    for step in range(5, 20):
        first = watch.look(step, first)
    assert watch.tier == "scalars"
    events = [arguments for _, arguments, _ in sink.held]
    told = [(step, kind, payload) for step, kind, payload in events if kind == "degradation"]
    assert [(step, p["from"], p["to"]) for step, _, p in told] == [
        (2, "full factors", "top-k"),
        (4, "top-k", "Gram"),
        (6, "Gram", "scalars"),
    ]
    assert told[0][2]["left_out"] == ["gradient", "mean_gradient"]
    warnings = [p for _, kind, p in events if kind == "disk_warning"]
    assert (warnings[0]["free"], warnings[0]["threshold"]) == (900, 1000)
    assert warnings[0]["action"] == "from here on top-k instead of full factors"


def test_the_space_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert abs(free_bytes(tmp_path / "a" / "b") - free_bytes(tmp_path)) < 10**9
