"""Sweep of a recipe over sizes: measurements, out of memory, time limits, refusals."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest

from backlight import clock, codec
from backlight.cli.console import Page
from backlight.diagnose.scaling import sweep as sweeps
from backlight.diagnose.scaling.sweep import ScalingError, ScalingPoint, _ask, _laws, parse_axes, sweep
from backlight.diagnose.scaling.sweep import answer as sweep_answer
from backlight.diagnose.scaling.worker import answer, measure
from backlight.launch.recipe import RecipeError, read_recipe

RECIPE = """
import time
import torch
from torch import nn

def build_model(dim=8):
    if dim == 512:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
    return nn.Sequential(nn.Linear(8, dim), nn.ReLU(), nn.Linear(dim, 1))

def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)

def batches(rank, world_size, dim=8):
    while True:
        time.sleep(1e-4 * dim)
        yield torch.randn(4, 8)

def loss(model, batch):
    return model(batch).square().mean()
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def request(recipe: Path, **settings: int) -> dict[str, object]:
    return {"recipe": str(recipe), "settings": settings, "fake": False, "steps": 16, "max_memory": None}


def test_axes_are_read_and_refused() -> None:
    axes = parse_axes(["dim=512,768", "amp=true", "name=a"])
    assert axes == {"dim": [512, 768], "amp": [True], "name": ["a"]}
    for pair in ("dim", "dim=1,,2", "=3"):
        with pytest.raises(RecipeError, match=f"--set .*{pair}.*: expected name=value,value"):
            parse_axes([pair])
    with pytest.raises(RecipeError, match="dim is given twice"):
        parse_axes(["dim=1", "dim=2"])


@pytest.fixture
def manual_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the clock by one that advances by sleeps and readings only."""
    now = itertools.count(0)
    slept = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(clock, "perf_counter", lambda: next(now) * 1e-5 + slept)
    monkeypatch.setattr(clock, "monotonic_ns", lambda: next(now) * 10_000 + round(slept * 1e9))


@pytest.mark.usefixtures("manual_clock")
def test_phases_of_a_recipe_are_measured(recipe: Path) -> None:
    found = measure(read_recipe(recipe, {"dim": 50}), 16)
    assert found["parameters"] == 50 * 9 + 51
    assert found["phases"]["data"] == pytest.approx(5, rel=0.01)
    assert {"data", "forward", "loss", "backward", "optimizer"} <= set(found["phases"])
    assert sum(found["phases"].values()) == pytest.approx(found["step_ms"], rel=0.1)


@pytest.mark.full
def test_sweep_measures_sizes_and_records_out_of_memory(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress: list[tuple[int, int]] = []
    found = sweep(
        recipe, {"dim": [50, 100, 200, 512]}, steps=16, at={"dim": 300},
        on_point=lambda done, of: progress.append((done, of)),
    )  # fmt: skip
    assert [point.status for point in found.points] == ["measured"] * 3 + ["out of memory"]
    assert progress[-1] == (4, 4)
    laws = {law.quantity: law.exponents[0] for law in found.laws}
    assert 0.8 <= laws["phase data"].value <= 1.1  # sleeps that are proportional to it
    assert found.expected["phase data"] == pytest.approx(30, rel=0.25)
    assert json.loads(json.dumps(codec.plain(found)))["points"][3]["status"] == "out of memory"
    Page().answer(sweep_answer(found))
    brief = capsys.readouterr().out
    assert brief.startswith("step grows with dim: power ")
    assert "dim=512: out of memory: OutOfMemoryError" in brief
    Page().answer(sweep_answer(found), full=True)
    printed = capsys.readouterr().out
    assert "out of memory" in printed
    assert "power of dim" in printed
    assert "dim=512: OutOfMemoryError: CUDA out of memory" in printed


def test_point_over_the_time_limit_is_ended(recipe: Path) -> None:
    assert _ask(request(recipe, dim=8), 0.5) == {
        "status": "did not finish",
        "message": "not within 0.5 s (--limit)",
    }


def test_errors_of_a_recipe_are_statuses(recipe: Path) -> None:
    found = answer(request(recipe, width=8))
    assert found["status"] == "failed"
    assert "takes the setting 'width'" in found["message"]
    text = recipe.read_text()
    recipe.write_text(f"{text}\n\ndef loss(model, batch):\n    raise RuntimeError('view size')\n")
    failed = answer(request(recipe, dim=8))
    last = text.count("\n") + 4
    assert failed["message"].startswith("RuntimeError: view size (")
    assert failed["message"].endswith(f"{recipe.name}:{last})")


def test_invalid_sweep_is_refused(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="nothing is swept"):
        sweep(recipe, {"dim": [8]})
    with pytest.raises(RecipeError, match="no such recipe"):
        sweep(tmp_path / "none.py", {"dim": [8, 16]})


def test_sizes_beyond_reach_are_refused_before_a_measurement(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def measured(request: dict[str, dict[str, float]], _limit: float) -> dict[str, object]:
        asked.append(request)
        size = request["settings"]["dim"]
        status = "measured" if size < 200 else "out of memory"
        return {"status": status, "step_ms": size if status == "measured" else None, "message": ""}

    monkeypatch.setattr(sweeps, "_ask", measured)
    axes = {"dim": [50, 100, 150, 200]}
    with pytest.raises(ScalingError, match=r"dim=401 lies beyond twice .*50 to 200"):
        sweep(recipe, axes, at={"dim": 401})
    with pytest.raises(ScalingError, match="no value of dim"):
        sweep(recipe, axes, at={"heads": 4})
    assert not asked
    assert sweep(recipe, axes, at={"dim": 300}).expected["step_ms"] == pytest.approx(300)
    assert sweep_answer(sweep(recipe, {"dim": [50, 100, 150]})).verdict.startswith(
        "step grows with dim: power 1.00"
    )
    noisy = iter([7.0, 9.0, 7.5])
    monkeypatch.setattr(
        sweeps, "_ask", lambda *_: {"status": "measured", "step_ms": next(noisy), "message": ""}
    )
    assert sweep_answer(sweep(recipe, {"dim": [50, 100, 150]})).verdict.startswith(
        "step: growth with dim is undecided"
    )
    monkeypatch.setattr(sweeps, "_ask", measured)
    lost = sweep(recipe, axes, at={"dim": 400})  # 200 did not fit
    assert (lost.expected, len(lost.laws)) == ({}, 1)
    assert "dim=400 lies beyond twice the range that was measured (50 to 150)" in lost.notes[0]


def test_settings_without_sizes_are_not_fitted() -> None:
    names = ("relu", "gelu", "silu")
    laws, notes = _laws([ScalingPoint({"act": n}, "measured", parameters=5, step_ms=1.0) for n in names])
    assert laws == []
    assert "no setting with two or more sizes" in notes[0]


@pytest.mark.full
def test_sweep_predicts_a_billion_parameters() -> None:
    example = Path(__file__).resolve().parents[3] / "examples" / "gpt_recipe.py"
    axes = {"dim": [1024, 1536, 2304], "n_blocks": [16], "seq": [512], "heads": [16]}
    found = sweep(example, axes, fake=True)
    assert [point.status for point in found.points] == ["predicted"] * 3
    assert (found.points[-1].parameters or 0) > 1e9
    # AdamW: parameters, gradients and two moments of four bytes each are the least.
    assert all((point.memory or 0) > 16 * (point.parameters or 0) for point in found.points)
    laws = {law.quantity: law.exponents[0].value for law in found.laws}
    assert laws["parameters"] == pytest.approx(2.0, abs=0.02)
    assert 1.0 < laws["memory"] < 2.0
