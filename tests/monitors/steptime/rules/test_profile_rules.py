"""Rules on a stored profile: injected faults and their controls."""

from __future__ import annotations

from typing import Any

import pytest

STEP = {"step": {"median_ms": 50.0}, "optimizations": []}
MEMORY = {"memory": {"peak": 2**30, "capacity": 16 * 2**30}}


def module(name: str, forward: float, backward: float = 0.0, recomputed: float = 0.0) -> dict[str, Any]:
    return {
        "name": name,
        "calls": 1.0,
        "forward_ms": forward,
        "backward_ms": backward,
        "recomputed_ms": recomputed,
    }


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
def test_launch_bound(stored: Any, judged: Any, device: Any, expected: int) -> None:
    found = judged(stored(profile=STEP | {"device": device}), "launch_bound")
    assert len(found) == expected
    for finding in found:
        assert "stands still in 44 % of a step, and 70 % of that is waiting for the host" in finding.detail
        assert "torch.compile" in finding.fix


def test_what_is_compiled_is_not_told_to_compile(stored: Any, judged: Any) -> None:
    profile = {
        "step": {"median_ms": 50.0},
        "optimizations": [{"name": "compiled regions", "state": "on", "detail": "(model)"}],
        "device": {"idle": 0.5, "causes": {"launch_gap": 1.0}},
    }
    (found,) = judged(stored(profile=profile), "launch_bound")
    assert found.fix.startswith("The model is compiled already")


def test_copies_are_summed_by_line(stored: Any, judged: Any) -> None:
    copies = [
        copy("train.py:12 (step)", 0.04),
        copy("train.py:12 (step)", 0.03, source="double"),
        copy("a.py:1 (f)", 0.02),
    ]
    (found,) = judged(stored(profile=STEP | {"copies": copies}), "copy_heavy")
    assert found.subject.line == "train.py:12 (step)"
    assert "take 7 % of a step (3.5 ms, 8 calls)" in found.detail
    layout = [copy("b.py:2 (g)", 0.2, target="float", contiguous=False)]
    (other,) = judged(stored(profile=STEP | {"copies": layout}), "copy_heavy")
    assert other.detail.startswith("Copies that change the layout from float to float")
    assert not judged(stored(profile=STEP | {"copies": copies[2:]}), "copy_heavy")


def test_logits_are_weighed_against_the_peak(stored: Any, judged: Any) -> None:
    logits = {"shape": [16, 1024, 32000], "dtype": "float32", "itemsize": 4}
    large = {"memory": {"peak": 8 * 2**30, "capacity": 16 * 2**30}, "logits": logits}
    (found,) = judged(stored(profile=STEP | large), "logits_materialised")
    assert "16 x 1024 x 32000 in float32 with their fp32 copy take 3.9 GiB, 49 % of the peak" in found.detail
    chunked = large | {"optimizations": [{"name": "chunked loss", "state": "on", "detail": ""}]}
    assert not judged(stored(profile={"step": None} | chunked), "logits_materialised")
    small = large | {"logits": logits | {"shape": [16, 10]}}
    assert not judged(stored(profile=STEP | small), "logits_materialised")
    much_else = large | {"memory": {"peak": 60 * 2**30}}
    assert not judged(stored(profile=STEP | much_else), "logits_materialised")


def test_recomputation_counts_outermost_modules_where_memory_is_free(stored: Any, judged: Any) -> None:
    modules = [module(f"blocks.{i}", 5, 10, 2.0) for i in range(3)] + [module("blocks.0.up", 2, 4, 1.0)]
    (found,) = judged(stored(profile=STEP | MEMORY | {"modules": modules}), "recompute_without_need")
    assert "take 6 ms, 12 % of a step, in 3 modules" in found.detail
    full = {"memory": {"peak": 15 * 2**30, "capacity": 16 * 2**30}}
    assert not judged(stored(profile=STEP | full | {"modules": modules}), "recompute_without_need")
    assert not judged(stored(profile=STEP | {"modules": modules}), "recompute_without_need")
    none = [module(f"blocks.{i}", 5, 10) for i in range(3)]
    assert not judged(stored(profile=STEP | MEMORY | {"modules": none}), "recompute_without_need")


def test_exposed_communication(stored: Any, judged: Any) -> None:
    (found,) = judged(stored(profile=STEP | {"exposed_communication": 0.23}), "exposed_communication")
    assert "In 23 % of a step the device communicates and computes nothing" in found.detail
    for share in (0.02, None):
        assert not judged(stored(profile=STEP | {"exposed_communication": share}), "exposed_communication")


def test_a_damaged_profile_is_passed_over(stored: Any, judged: Any, tmp_path: Any) -> None:
    from backlight.store.read.run import open_run
    from backlight.store.write.writer import RunWriter

    writer = RunWriter.create(tmp_path / "damaged", monitors=("steptime",))
    writer.evidence("profile.json", "{ not json")
    writer.close()
    assert judged(open_run(tmp_path / "damaged")) == []
