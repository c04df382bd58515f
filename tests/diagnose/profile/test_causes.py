"""Causes that a profile names: from its phases, operators and lines, each with a step that lacks it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backlight.diagnose.profile.answer import READ, find_causes, read_line

SOURCE = "for x in data:\n    total += loss.item()\n    torch.save(state, path)\n    y = layer(x)\n"
STEP_MS = 100.0


def profiled(folder: Path, **change: Any) -> Any:
    """Return what the causes read of a profile of a sound step."""
    path = folder / "train.py"
    path.write_text(SOURCE)
    lines = change.pop("lines", {4: 60.0})
    operators = change.pop("operators", {"aten::mm": (40, 50.0)})
    result = {
        "step": SimpleNamespace(median_ms=STEP_MS),
        "phases": {"data": SimpleNamespace(share=0.05), "forward": SimpleNamespace(share=0.6)},
        "optimizations": [SimpleNamespace(name="data-loader workers", state="off")],
        "operators": [
            SimpleNamespace(name=name, calls=calls, host_ms=ms) for name, (calls, ms) in operators.items()
        ],
        "traced_step_ms": STEP_MS,
        "device": None,
        "lines": [
            SimpleNamespace(line=f"{path}:{number}", ms=ms, phase="forward") for number, ms in lines.items()
        ],
    }
    return SimpleNamespace(**{**result, **change})


def test_sound_step_has_no_cause(tmp_path: Path) -> None:
    assert not find_causes(profiled(tmp_path))
    assert not read_line(profiled(tmp_path, operators={READ: (1, 0.1)}))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"phases": {"data": SimpleNamespace(share=0.4)}}, "num_workers=0"),
        ({"operators": {READ: (11, 1.0)}, "lines": {2: 30.0}}, "reads 11 values a step, at "),
        ({"operators": {"aten::add": (6000, 70.0)}}, "6,000 tiny operations a step, 11.7 "),
        ({"lines": {3: 60.0, 4: 20.0}}, "files are saved at every step, at "),
    ],
)
def test_each_cause_is_named(change: dict[str, Any], text: str, tmp_path: Path) -> None:
    (cause,) = find_causes(profiled(tmp_path, **change))
    assert text in cause.text


@pytest.mark.parametrize(
    "change",
    [
        {
            "phases": {"data": SimpleNamespace(share=0.4)},
            "optimizations": [SimpleNamespace(name="data-loader workers", state="on")],
        },
        {"operators": {READ: (1, 1.0)}, "lines": {2: 30.0}},  # of the loss alone
        {"operators": {"aten::mm": (2000, 900.0)}},  # many, and long
        {"operators": {"aten::add": (6000, 70.0)}, "device": SimpleNamespace(idle=0.5)},
        {"lines": {3: 4.0, 4: 60.0}},  # a checkpoint now and then
    ],
)
def test_what_is_usual_is_no_cause(change: dict[str, Any], tmp_path: Path) -> None:
    assert not find_causes(profiled(tmp_path, **change))


def test_causes_are_listed_by_their_share(tmp_path: Path) -> None:
    found = find_causes(profiled(tmp_path, phases={"data": SimpleNamespace(share=0.2)}, lines={3: 60.0}))
    assert [cause.share for cause in found] == [0.6, 0.2]
