"""The line that a watch prints when it ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import backlight
from backlight.session import script_end
from cases import STEPS, build_with_sgd, loop


def break_gradient(model: torch.nn.Module) -> None:
    model.last.weight.grad[0, 0] = float("nan")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "change", "text"),
    [
        (True, lambda _model: None, f"No findings in {STEPS} steps."),
        (True, break_gradient, f"1 error in {STEPS} steps: "),
        (
            False,
            break_gradient,
            "Nothing was measured. Neither a backward pass nor an optimizer step was seen.",
        ),
    ],
)
def test_line_names_result_and_directory(
    trained: bool,
    change: Callable[[torch.nn.Module], None],
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, optimizer = build_with_sgd()
    with backlight.watch(model, optimizer, run=tmp_path / "a run", every=1, monitors="health"):
        if trained:
            loop(model, optimizer, change)
    output = capsys.readouterr()
    *_, line = output.err.splitlines()
    assert line.startswith(f"backlight: {text}")
    assert line.endswith(f" Next: backlight report '{tmp_path}/a run'")
    assert output.out == ""


def test_line_names_the_exception(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = build_with_sgd()
    with pytest.raises(ValueError, match="injected"):
        with backlight.watch(model, optimizer, run=tmp_path / "run", every=1, monitors="health"):
            loop(model, optimizer)
            raise ValueError("injected")
    printed = capsys.readouterr().err
    assert re.match(
        rf"backlight: Failed with ValueError at step {STEPS} \(.*test_closing_line.py:\d+\)\. ", printed
    )
    assert printed.endswith(f" No findings in {STEPS} steps. Next: backlight report {tmp_path}/run\n")


@pytest.mark.slow
@pytest.mark.parametrize("switch", [{"summary": False}, {"quiet": True}])
def test_line_is_switched_off(
    switch: dict[str, bool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = build_with_sgd()
    with backlight.watch(model, optimizer, run=tmp_path / "run", monitors="health", **switch):
        loop(model, optimizer)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_prints_for_all_ranks(
    rank: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build_with_sgd()
    with backlight.watch(model, optimizer, run=tmp_path / "run", summary=False, monitors="health") as watch:
        loop(model, optimizer)
    monkeypatch.setattr(script_end, "rank_and_size", lambda: (rank, 2))
    monkeypatch.setattr(script_end, "wait_for_ranks", lambda *_: False)
    script_end.print_result(watch.path, [], watch.step, watch.progress)
    printed = capsys.readouterr().err
    assert printed == "" if rank else "steps. Other ranks have not ended. Next: " in printed
