"""What a loss is, and at how many steps it was recorded, is named wherever a run is shown."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import backlight
from backlight.analysis.compare import compare
from backlight.analysis.comparison_answer import answer
from backlight.report.live.follower import Stand, Standing
from backlight.report.live.terminal import frame
from backlight.report.markdown import render_markdown
from backlight.report.notebook import run_html
from backlight.report.source import Source
from backlight.report.terminal import summary_text
from backlight.report.verdict import coverage_text

pytestmark = pytest.mark.slow

STEPS = 60


def train(path: Path, microbatches: int, every: int = 50) -> backlight.Run:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with backlight.watch(model, optimizer, run=path, every=every, monitors="health"):
        for _ in range(STEPS):
            for _ in range(microbatches):
                model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return backlight.open_run(path)


@pytest.mark.parametrize(("microbatches", "label"), [(1, "loss"), (4, "sum of 4 losses")])
def test_label_and_coverage_are_shown_everywhere(
    microbatches: int, label: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", microbatches)
    closing = capsys.readouterr().err
    recorded = len(run.series_steps("gradient"))
    assert 1 < recorded < STEPS
    said = f"gradients at {recorded} of {STEPS} steps, {label} at every step"
    assert coverage_text(run) == said
    console = Console(file=io.StringIO(), width=100)
    console.print(frame("run", Stand(Standing.FINISHED, ""), Source(run), 100))
    live = console.file.getvalue()  # type: ignore[attr-defined]
    comparison = compare([run, run])
    assert f"Recorded: {said}. Next:" in closing
    assert f"{label} " in live
    assert f"recorded: {said}" in live
    assert answer(comparison).verdict.startswith(f"Final {label}: ")
    assert any(line.startswith("A ") and line.endswith(f"; {said}") for line in answer(comparison).facts)
    assert said in run_html(run, ())
    sentence = f"were measured at {recorded} of {STEPS} steps, the {label} at every step."
    for text in (summary_text(run.path, ()), render_markdown(run, ())):
        assert sentence in " ".join(text.split())


def test_nothing_is_added_where_every_step_has_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", 1, every=1)
    assert coverage_text(run) == f"gradients and loss at all {STEPS} steps"
    assert f"No findings in {STEPS} steps. Next:" in capsys.readouterr().err
    assert ";" not in answer(compare([run, run])).facts[0]


def test_losses_of_other_sums_are_not_compared(tmp_path: Path) -> None:
    runs = [train(tmp_path / f"run{count}", count) for count in (1, 4)]
    comparison = compare(runs)
    assert "Final loss: A " in answer(comparison).verdict
    assert "Final sum of 4 losses: B " in answer(comparison).verdict
    assert not [note for note in comparison.notes if note.startswith("Loss ")]
