"""Modules as a tree, on the scale of the clocked steps."""

from __future__ import annotations

import pytest

from backlight.diagnose.profile.step_summary import StepTime, module_tree, summarize_steps
from backlight.trace.module_times import ModuleTime

MODULES = (
    ModuleTime("", 1, 40, 4, 0, 80, 8),
    ModuleTime("head", 1, 6, 6, 0, 12, 12),
    ModuleTime("blocks.0.mlp", 1, 10, 10, 0, 20, 20),
    ModuleTime("blocks.0", 1, 30, 20, 0, 60, 40),
)


def test_modules_are_nested_and_scaled_to_the_clocked_phases() -> None:
    """Traced, forward takes twice and backward four times as long as clocked."""
    profile = summarize_steps([StepTime.of({"forward": 0.02, "backward": 0.02}, 0.1, True)] * 20)
    rows = module_tree(MODULES, profile, {"forward": 40.0, "backward": 80.0})
    assert rows is not None
    assert [(row.name, row.depth) for row in rows] == [
        ("", 0),
        ("blocks.0", 1),
        ("blocks.0.mlp", 2),
        ("head", 1),
    ]
    for row, total, own in zip(rows, (40, 30, 10, 6), (4, 20, 10, 6), strict=True):
        assert row.total_ms == pytest.approx(total / 2 + 2 * total / 4)
        assert row.self_ms == pytest.approx(own / 2 + 2 * own / 4)
        assert row.share == pytest.approx(row.total_ms / 100)
    assert sum(row.self_ms for row in rows) == pytest.approx(rows[0].total_ms)


def test_phases_that_the_clock_does_not_separate_give_no_tree() -> None:
    profile = summarize_steps([StepTime.of({"backward": 0.02}, 0.1, True)] * 20)
    assert module_tree(MODULES, profile, {"forward": 40.0, "backward": 80.0}) is None
