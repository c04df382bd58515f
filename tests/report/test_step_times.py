"""Report of a run that recorded step times only."""

from pathlib import Path

import numpy as np
import pytest

from backlight.report.page import model
from backlight.report.source import Source
from backlight.report.verdict import outcome
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter


@pytest.fixture
def source(tmp_path: Path) -> Source:
    writer = RunWriter.create(tmp_path / "run", name="run", monitors=("steptime",))
    for step in range(20):
        forward = 1.0 if step == 0 else 0.02
        writer.scalars(step, {"phase/forward": forward, "phase/backward": 0.03, "phase/other": 0.001})
    writer.close()
    return Source(open_run(tmp_path / "run"))


def test_headline_reports_step_times(source: Source) -> None:
    result = outcome(source)
    assert result.headline == "No findings"
    assert result.detail.startswith("The times of 20 steps were measured.")


def test_step_time_sums_all_phases(source: Source) -> None:
    assert np.allclose(source.step_times, [1.031, *[0.051] * 19])
    figures = {figure["label"]: figure["value"] for figure in model(source)["verdict"]["figures"]}
    assert figures == {
        "steps": "20",
        "median step": "51 ms",
        "95th percentile": "100 ms",
        "first step": "1.03 s",
    }


def test_run_of_other_monitors_keeps_its_headline(tmp_path: Path) -> None:
    writer = RunWriter.create(tmp_path / "run", name="run", monitors=("health", "steptime"))
    writer.scalars(0, {"phase/forward": 0.02})
    writer.close()
    assert outcome(Source(open_run(tmp_path / "run"))).headline == "Nothing was measured"
