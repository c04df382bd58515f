"""The panel of activations over depth, as data."""

from __future__ import annotations

from pathlib import Path

from backlight.analysis.report import source_of
from backlight.monitors.activations.panels import activations, layers_of, summary
from backlight.report.panel import Drawn, NotMeasured
from injected_faults import FAULTS
from run_builder import build_run


def test_layers_are_drawn_in_the_order_of_their_calls(tmp_path: Path) -> None:
    source = source_of(FAULTS["activations"](tmp_path / "run"))
    drawn = activations(source)
    assert isinstance(drawn, Drawn)
    sizes, shares = drawn.data["charts"]
    assert sizes["names"] == ["fc1", "relu", "fc2"]
    assert [line["label"] for line in sizes["lines"]] == ["output, first step", "output, last step"]
    assert all(line["values"].tolist() == [0.5] * 3 for line in sizes["lines"])
    (dead,) = shares["lines"]
    assert (dead["label"], shares["steps"].tolist(), dead["values"].tolist()) == (
        "dead units",
        [1],
        [0.984375],
    )
    assert [(fact.label, fact.value) for fact in drawn.facts] == [("most dead units", "98.4 % of relu")]
    assert len(layers_of(source)) == 3
    made = summary(source)
    assert made is not None
    assert made.figures(source)[1][:2] == ("steps measured", "7")


def test_a_run_without_measured_layers_states_why(tmp_path: Path) -> None:
    source = source_of(build_run(tmp_path / "run", monitors=("activations",)))
    assert isinstance(activations(source), NotMeasured)
    assert summary(source) is None
