"""Rules on a stored profile: injected faults and their controls."""

from __future__ import annotations

from typing import Any

import pytest

from injected_faults import LOGITS, STEP
from run_builder import build_run

TRACED = STEP | {"traced_steps": 10}
MEMORY = {"memory": {"peak": 2**30, "capacity": 16 * 2**30}}


def module(name: str, forward: float, backward: float = 0.0, recomputed: float = 0.0) -> dict[str, Any]:
    times = {"forward_ms": forward, "backward_ms": backward, "recomputed_ms": recomputed}
    return {"name": name, "calls": 1.0} | times


def copy(line: str, share: float, **more: Any) -> dict[str, Any]:
    row = {"source": "float", "target": "c10::BFloat16", "contiguous": True, "line": line, "calls": 4.0}
    return row | {"host_ms": 50 * share, "device_ms": 0.0, "share": share} | more


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ({"idle": 0.44, "causes": {"host_bound": 0.7, "data": 0.3}}, 1),
        ({"idle": 0.44, "causes": {"data": 0.8, "host_bound": 0.2}}, 0),
        ({"idle": 0.05, "causes": {"host_bound": 1.0}}, 0),
        (None, 0),
    ],
)
def test_launch_bound(stored: Any, evaluated: Any, device: Any, expected: int) -> None:
    device = device and device | {"idle_by_step": [device["idle"]] * 10}
    found = evaluated(stored(profile=TRACED | {"device": device}), "bottleneck")
    assert len(found) == expected
    for finding in found:
        assert [evidence.value for evidence in finding.evidence] == [0.44, 0.7]


@pytest.mark.parametrize(
    ("steps", "above", "expected"),
    [(9, 9, 0), (10, 10, 1), (10, 9, 1), (10, 8, 0), (20, 15, 1), (20, 14, 0)],
)
def test_claims_from_traces_need_steps_and_a_sign_test(
    stored: Any, evaluated: Any, steps: int, above: int, expected: int
) -> None:
    by_step = [0.5] * above + [0.1] * (steps - above)
    device = {"idle": 0.5, "idle_by_step": by_step, "causes": {"host_bound": 1.0}}
    communication = {"exposed_communication": 0.3, "exposed_by_step": by_step}
    for traced in ({"device": device}, communication):
        profile = STEP | {"traced_steps": steps} | traced
        assert len(evaluated(stored(profile=profile), "bottleneck")) == expected


def test_launch_bound_fix_for_a_compiled_model(stored: Any, evaluated: Any) -> None:
    compiled = [{"name": "compiled regions", "state": "on", "detail": "(model)"}]
    device = {"idle": 0.5, "idle_by_step": [0.5] * 10, "causes": {"launch_gap": 1.0}}
    profile = TRACED | {"optimizations": compiled, "device": device}
    (found,) = evaluated(stored(profile=profile), "bottleneck")
    assert found.fix.startswith("The model is compiled already")


@pytest.mark.slow
def test_copies_are_summed_by_line(stored: Any, evaluated: Any) -> None:
    copies = [
        copy("train.py:12 (step)", 0.04),
        copy("train.py:12 (step)", 0.03, source="double"),
        copy("a.py:1 (f)", 0.02),
    ]
    (found,) = evaluated(stored(profile=TRACED | {"copies": copies}), "bottleneck")
    assert found.subject.line == "train.py:12 (step)"
    assert [evidence.value for evidence in found.evidence] == pytest.approx([0.07, 3.5])
    layout = [copy("/home/me/b.py:2 (g)", 0.2, target="float", contiguous=False)]
    (other,) = evaluated(stored(profile=TRACED | {"copies": layout}), "bottleneck")
    assert other.subject.line == "/home/me/b.py:2 (g)"
    assert other.title == "Copies at b.py:2 (g) take 20 % of a step"
    assert not evaluated(stored(profile=TRACED | {"copies": copies[2:]}), "bottleneck")


@pytest.mark.slow
def test_logits_are_compared_with_the_peak(stored: Any, evaluated: Any) -> None:
    large = {"memory": {"peak": 8 * 2**30, "capacity": 16 * 2**30}, "logits": LOGITS}
    (found,) = evaluated(stored(profile=STEP | large), "memory")
    assert found.evidence[0].value == 16 * 1024 * 32000 * (4 + 4)
    chunked = large | {"optimizations": [{"name": "chunked loss", "state": "on", "detail": ""}]}
    assert not evaluated(stored(profile={"step": None} | chunked), "memory")
    small = large | {"logits": LOGITS | {"shape": [16, 10]}}
    assert not evaluated(stored(profile=STEP | small), "memory")
    much_else = large | {"memory": {"peak": 60 * 2**30}}
    assert not evaluated(stored(profile=STEP | much_else), "memory")


@pytest.mark.slow
def test_recomputation_sums_outermost_modules(stored: Any, evaluated: Any) -> None:
    modules = [module(f"blocks.{i}", 5, 10, 2.0) for i in range(3)] + [module("blocks.0.up", 2, 4, 1.0)]
    (found,) = evaluated(stored(profile=STEP | MEMORY | {"modules": modules}), "memory")
    assert found.subject.module == "blocks.0"
    assert found.evidence[0].value == 2.0
    full = {"memory": {"peak": 15 * 2**30, "capacity": 16 * 2**30}}
    assert not evaluated(stored(profile=STEP | full | {"modules": modules}), "memory")
    assert not evaluated(stored(profile=STEP | {"modules": modules}), "memory")
    none = [module(f"blocks.{i}", 5, 10) for i in range(3)]
    assert not evaluated(stored(profile=STEP | MEMORY | {"modules": none}), "memory")


@pytest.mark.slow
def test_exposed_communication(stored: Any, evaluated: Any) -> None:
    def profile(share: float | None) -> dict[str, Any]:
        return TRACED | {"exposed_communication": share, "exposed_by_step": [share or 0.0] * 10}

    (found,) = evaluated(stored(profile=profile(0.23)), "bottleneck")
    assert found.evidence[0].value == 0.23
    for share in (0.02, None):
        assert not evaluated(stored(profile=profile(share)), "bottleneck")


def test_damaged_profile_is_ignored(stored: Any, evaluated: Any, tmp_path: Any) -> None:
    files = {"profile.json": "{ not json"}
    assert evaluated(build_run(tmp_path / "damaged", monitors=("steptime",), evidence=files)) == []
