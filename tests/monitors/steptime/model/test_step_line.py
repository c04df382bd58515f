"""The line of facts about a step: activities with shares, lines of code, pauses, a busy machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backlight.monitors.steptime.model.step_line import SampledLine, main_line, step_line
from backlight.records import Phase
from backlight.store.read.run import Run
from run_builder import build_steptime_run

TIMES = {"data": 0.06, "forward": 0.01, "backward": 0.02, "optimizer": 0.006, "other": 0.004}


def run_of(path: Path, lines: list[list[Any]], **more: Any) -> Run:
    """Return a run with ``TIMES`` whose sampler has seen ``lines``."""
    payload = {"samples": sum(row[3] for row in lines), "lines": lines}
    return build_steptime_run(path / "run", TIMES, events=[(59, "sampled_lines", payload)], **more)


def text_of(run: Run) -> str:
    line = step_line(run)
    assert line is not None
    return line.text


def test_the_line_names_where_a_step_waits(tmp_path: Path) -> None:
    run = run_of(tmp_path, [["data", "/data/train.py:10", "Images.__getitem__", 9]])
    line = step_line(run)
    assert line is not None
    assert line.computing == pytest.approx(0.36, abs=0.005)
    assert line.text == (
        "step 100 ms: 60 % waiting for data at train.py:10 (Images.__getitem__), 36 % compute, "
        "4 % everything else"
    )


def test_a_forward_that_is_not_separated_is_not_called_computing(tmp_path: Path) -> None:
    times = {"backward": 0.03, "between": 0.07}
    assert text_of(build_steptime_run(tmp_path / "run", times)) == (
        "step 100 ms: 70 % forward and everything else, 30 % backward and optimizer"
    )


def test_pauses_have_their_share_of_the_run(tmp_path: Path) -> None:
    lines = [
        ["data", "train.py:10", "f", 60], ["checkpoint", "train.py:44", "<module>", 30],
        ["evaluation", "train.py:50", "validate", 6], ["evaluation", "train.py:51", "validate", 6],
    ]  # fmt: skip
    assert text_of(run_of(tmp_path, lines)).endswith(
        "; of the run 12 % evaluation, 29 % saving at train.py:44"
    )


def test_a_busy_machine_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, [], runtime_info={"core_wait": 0.3})
    assert text_of(run).endswith("; the thread that trains waited for a core 30 % of the time")


def test_too_few_steps_have_no_line(tmp_path: Path) -> None:
    assert step_line(run_of(tmp_path, [], steps=8)) is None


@pytest.mark.parametrize(
    ("samples", "phase"), [((2, 0), Phase.DATA), ((4, 4), Phase.DATA), ((9, 0), Phase.BACKWARD)]
)
def test_a_line_is_named_only_where_most_samples_are(samples: tuple[int, int], phase: Phase) -> None:
    lines = [SampledLine(phase, f"train.py:{n}", "f", amount) for n, amount in enumerate(samples)]
    assert main_line(lines, frozenset({phase})) is None


def test_without_a_separate_forward_the_remainder_holds_the_loss() -> None:
    lines = [SampledLine(Phase.LOSS, "train.py:7", "step", 5)]
    assert main_line(lines, frozenset({"between"})) == lines[0]
