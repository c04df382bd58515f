"""Counts of the lines that the training thread is at: reports as they double, and from a watched run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import backlight
from backlight.monitors.stalls.instrument.line_counts import FIRST_REPORT, MAX_LINES, LineCounts
from backlight.monitors.steptime.model.step_line import main_line, sampled_lines
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
        "lines": [["data", "train.py:9", "load", 4 * FIRST_REPORT - 1]],
    }


def test_a_report_holds_the_most_frequent_lines() -> None:
    reports: list[dict[str, Any]] = []
    counts = LineCounts(reports.append)
    for line in range(2 * MAX_LINES):
        for _ in range(1 + line):
            counts.add("other", Frame("train.py", line, "f"))
    counts.report()
    assert [row[3] for row in reports[-1]["lines"]] == [*range(2 * MAX_LINES, MAX_LINES, -1)]


class Slow(IterableDataset[torch.Tensor]):
    """Waits in its loading, until the sampler thread has been there."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(4):
            time.sleep(0.6)
            yield torch.ones(3)


@pytest.mark.slow  # it starts the watchdog process
def test_the_line_that_a_watched_loop_waits_at_is_recorded(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, run=tmp_path / "run", monitors=["stalls"]):
        for x in DataLoader(Slow(), batch_size=None):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    line = main_line(sampled_lines(backlight.open_run(tmp_path / "run")), frozenset({"data"}))
    assert line is not None
    assert line.function == "Slow.__iter__"
    assert line.line.startswith(f"{__file__}:")
