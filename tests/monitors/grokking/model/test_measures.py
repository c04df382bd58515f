"""A full disk lowers the tier one step at a time, and the run records it."""

from __future__ import annotations

from pathlib import Path

from backlight.monitors.grokking.model.measures import DiskGuard, at_tier, free_bytes
from backlight.monitors.grokking.settings import Measures
from backlight.session.writer_thread import ResultQueue


def test_each_check_of_full_disk_lowers_tier_once(tmp_path: Path) -> None:
    free, sink = [5000], ResultQueue()
    warnings: list[str] = []
    guard = DiskGuard(tmp_path, 1000, sink, warnings.append, spacing=2, free=lambda _path: free[0])
    measures = Measures(every=1)
    assert guard.cheaper_if_full(0, measures) is measures
    assert guard.cheaper_if_full(1, measures) is measures
    free[0] = 900
    first = guard.cheaper_if_full(2, measures)
    assert first == at_tier(measures, "top-k")
    assert guard.cheaper_if_full(3, first) is first
    assert guard.cheaper_if_full(4, first) == at_tier(measures, "Gram")
    for step in range(5, 20):
        first = guard.cheaper_if_full(step, first)
    assert guard.tier == "scalars"
    events = [arguments for _, arguments, _ in sink.calls]
    degradations = [(step, kind, payload) for step, kind, payload in events if kind == "degradation"]
    assert [(step, p["from"], p["to"]) for step, _, p in degradations] == [
        (2, "full factors", "top-k"),
        (4, "top-k", "Gram"),
        (6, "Gram", "scalars"),
    ]
    assert degradations[0][2]["left_out"] == ["gradient", "mean_gradient"]
    assert warnings == [
        "900 B of disk are free, and 1 kB must stay free; from step 2 on the run stores top-k instead of "
        "full factors (left out: gradient, mean_gradient)"
    ]
    noted = [p for _, kind, p in events if kind == "disk_warning"]
    assert (noted[0]["free"], noted[0]["threshold"]) == (900, 1000)
    assert noted[0]["action"] == "from here on top-k instead of full factors"


def test_free_space_of_missing_directory(tmp_path: Path) -> None:
    assert abs(free_bytes(tmp_path / "a" / "b") - free_bytes(tmp_path)) < 10**9
