"""Two profiles by kind of operation: averages, intervals from traces, and reasons for missing intervals."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backlight.analysis import compare
from backlight.analysis.compare import compare_kinds
from backlight.store.read.run import Run
from run_builder import build_run


def profiled(path: Path, steps: int, trace: bytes | None = None, **milliseconds: float) -> Run:
    kinds = [{"name": name, "host_ms": value, "device_ms": 0.0} for name, value in milliseconds.items()]
    files = {"profile.json": {"traced_steps": steps, "kinds": kinds}}
    files |= {} if trace is None else {"trace.json.gz": trace}
    return build_run(path, monitors=("steptime",), evidence=files)


def test_few_steps_give_averages_without_interval(tmp_path: Path) -> None:
    found = compare_kinds(
        profiled(tmp_path / "a", 3, matmul=4.0), profiled(tmp_path / "b", 3, matmul=8.0, copy=1.0)
    )
    assert [(row.name, row.first_ms, row.second_ms, row.is_significant) for row in found.rows] == [
        ("matmul", 4.0, 8.0, False), ("copy", 0.0, 1.0, False)
    ]  # fmt: skip
    assert found.trouble[0].startswith("no intervals: 3 traced steps")


def test_missing_profile_or_trace_is_reported(tmp_path: Path) -> None:
    one = profiled(tmp_path / "a", 6, matmul=4.0)
    assert compare_kinds(one, build_run(tmp_path / "b", monitors=("steptime",))) is None
    found = compare_kinds(one, profiled(tmp_path / "c", 6, matmul=4.0))
    assert "a trace is not there" in found.trouble[0]


def test_slower_kind_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)

    def by_step(run: Run, steps: int) -> dict[str, Any]:
        slower = 1.5 if run.path.name == "b" else 1.0
        noise = np.exp(random.normal(0, 0.01, (2, steps)))
        times = {"matmul": 4.0 * slower * noise[0], "elementwise": 2.0 * noise[1]}
        return times | {"other": np.full(steps, 1e-6)}

    monkeypatch.setattr(compare, "_by_step", by_step)
    each = {"matmul": 4.0, "elementwise": 2.0, "other": 1e-6}
    found = compare_kinds(profiled(tmp_path / "a", 8, **each), profiled(tmp_path / "b", 8, **each))
    rows = {row.name: row for row in found.rows}
    assert rows["matmul"].is_significant
    assert rows["matmul"].low <= 1.5 <= rows["matmul"].high
    assert not rows["elementwise"].is_significant
    assert rows["other"].ratio is None


def test_kinds_of_each_step_are_read_from_stored_trace(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": 100 * step + at, "dur": length}
        for step in range(5)
        for category, name, at, length in (
            ("user_annotation", f"ProfilerStep#{step}", 0, 90),
            ("cpu_op", "aten::mm", 10, 20 + step),
            ("cpu_op", "aten::tanh", 50, 10),
        )
    ]
    trace = gzip.compress(json.dumps({"traceEvents": events}).encode())
    found = compare._by_step(profiled(tmp_path / "run", 5, trace, matmul=1.0), 5)
    np.testing.assert_allclose(found["matmul"], 1e-6 * np.arange(20, 25))
    np.testing.assert_allclose(found["elementwise"], np.full(5, 1e-5))
