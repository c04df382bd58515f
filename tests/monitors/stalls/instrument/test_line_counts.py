"""Counts of the lines that the training thread is at: reports as they double, and from a watched run."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import backlight
from backlight.monitors.stalls.instrument.line_counts import (
    FIRST_REPORT,
    MAX_LINES,
    LineCounts,
    WaitNames,
)
from backlight.monitors.stalls.instrument.stack_sampler import called_name
from backlight.monitors.steptime.model.step_line import main_line, sampled_lines
from backlight.records import Phase
from backlight.watchdog.stacks import Frame


def test_counts_are_reported_each_time_that_they_have_doubled() -> None:
    reports: list[dict[str, Any]] = []
    counts = LineCounts(reports.append)
    counts.report()
    for _ in range(4 * FIRST_REPORT - 1):
        counts.add("data", Frame("train.py", 9, "load"))
    assert [report["samples"] for report in reports] == [FIRST_REPORT, 2 * FIRST_REPORT]
    counts.report()
    assert reports[-1] == {
        "samples": 4 * FIRST_REPORT - 1,
        "lines": [["data", "train.py:9", "load", 4 * FIRST_REPORT - 1, ""]],
    }


def test_a_report_holds_the_most_frequent_lines() -> None:
    reports: list[dict[str, Any]] = []
    counts = LineCounts(reports.append)
    for line in range(2 * MAX_LINES):
        for _ in range(1 + line):
            counts.add("other", Frame("train.py", line, "f"))
    counts.report()
    assert [row[3] for row in reports[-1]["lines"]] == [*range(2 * MAX_LINES, MAX_LINES, -1)]


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


class Batches:
    """An iterator that is no DataLoader; asks what is waited for while it makes a batch."""

    def __init__(self, names: WaitNames, phase: Phase = Phase.OTHER) -> None:
        self.names, self.phase, self.results = names, phase, []

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> int:
        # The frames of this file alone: pytest's own loops are no data.
        here = itertools.takewhile(
            lambda frame: frame.f_code.co_filename == __file__, outwards(sys._getframe())
        )
        self.results.append(self.names.name(here, self.phase, device=False))
        return len(self.results)

    def generate(self) -> Iterator[int]:
        yield next(self)


def drawn_by_a_loop(batches: Batches) -> None:
    for _ in batches:
        break


def drawn_by_next(batches: Batches) -> None:
    next(iter(batches))


def drawn_through_a_generator(batches: Batches) -> None:
    for _ in batches.generate():
        break


def called(batches: Batches) -> None:
    batches.__next__()


@pytest.mark.parametrize(
    ("draw", "waits"),
    [
        (drawn_by_a_loop, "batch"),
        (drawn_by_next, "batch"),
        (drawn_through_a_generator, "batch"),
        (called, ""),
    ],
)
def test_any_iterator_counts_as_data(draw: Callable[[Batches], None], waits: str) -> None:
    batches = Batches(WaitNames(called_name))
    draw(batches)
    assert batches.results == [waits]


@pytest.mark.parametrize("phase", [Phase.FORWARD, Phase.BACKWARD, Phase.EVALUATION, Phase.CHECKPOINT])
def test_an_iterator_inside_of_another_phase_is_no_data(phase: Phase) -> None:
    batches = Batches(WaitNames(called_name), phase)
    drawn_by_a_loop(batches)
    assert batches.results == [""]


def test_a_loop_over_a_generator_that_trains_is_no_data() -> None:
    """``for metrics in trainer.fit(): ...``: the loop waits for the training itself."""
    names, results = WaitNames(called_name), []

    def fit() -> Iterator[int]:
        for phase in (Phase.BACKWARD, Phase.OTHER):
            results.append(names.name(list(outwards(sys._getframe()))[:2], phase, device=False))
            yield 0

    for _ in fit():
        pass
    assert results == ["", ""]


@pytest.mark.parametrize(
    ("function", "device", "waits"),
    [("item", True, "item"), ("to", True, "to"), ("item", False, ""), ("matmul", True, "")],
)
def test_a_wait_for_the_device_is_named_by_its_function(function: str, device: bool, waits: str) -> None:
    asked: list[FrameType] = []

    def name_of(frame: FrameType) -> str:
        asked.append(frame)
        return function

    names = WaitNames(name_of)
    frame = sys._getframe()
    for _ in range(2):
        assert names.name([frame], Phase.LOSS, device=device) == waits
    assert len(asked) == device * len({frame.f_lasti}) or len(asked) <= 2


class Slow(IterableDataset[torch.Tensor]):
    """Waits in its loading, until the sampler thread has been there."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(4):
            time.sleep(0.6)
            yield torch.ones(3)


@pytest.mark.parametrize("wraps", [True, False], ids=["DataLoader", "iterator"])
@pytest.mark.slow  # it starts the watchdog process
def test_the_line_that_a_watched_loop_waits_at_is_recorded(tmp_path: Path, wraps: bool) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, run=tmp_path / "run", monitors=["stalls"]):
        for x in DataLoader(Slow(), batch_size=None) if wraps else Slow():
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    line = main_line(sampled_lines(backlight.open_run(tmp_path / "run")), frozenset({"data"}))
    assert line is not None
    assert line.function == "Slow.__iter__"
    assert line.line.startswith(f"{__file__}:")
