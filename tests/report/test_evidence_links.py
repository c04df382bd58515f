"""Evidence links to its panel, parameter and step."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from synthetic import finding

from backlight.records import Evidence
from backlight.report.evidence_links import Place, place_of
from backlight.report.panel import in_order

ROWS: Mapping[str, int] = {"a.weight": 4, "strange/name/with/slashes": 9, "head.weight": 0}


def link(path: str, step: int | None = 7, without: tuple[str, ...] = ()) -> Place | None:
    drawn = {panel.name for panel in in_order()} - set(without)
    return place_of(Evidence(path, step), finding("a.weight", 3), in_order(), drawn, ROWS)


@pytest.mark.parametrize(
    ("path", "panel", "row", "column"),
    [
        ("series/gradient/rms/a.weight", "parameters", 4, "rms"),
        ("series/gradient/norm/a.weight", "parameters", 4, "rms"),
        ("series/gradient/nan/a.weight", "parameters", 4, "non_finite"),
        ("series/gradient/zeros/a.weight", "parameters", 4, "zero_share"),
        ("series/gradient/max_abs/strange/name/with/slashes", "parameters", 9, "max_abs"),
        ("series/update/ratio/head.weight", "parameters", 0, "ratio"),
        ("parameters/group/a.weight", "parameters", 4, None),
        ("series/histogram/b00/a.weight", "exponents", 4, None),
        ("scalars/loss", "loss", 4, None),
        ("scalars/total_norm", "total_norm", 4, None),
        ("scalars/clip/factor", "total_norm", 4, None),
        ("scalars/scaler/skipped", "loss_scale", 4, None),
        ("scalars/lr/0/1", "learning_rates", 4, None),
        ("scalars/phase/backward", "phases", 4, None),
        ("scalars/test_accuracy", "user_scalars", 4, None),
        ("events/scaler_skip", "loss_scale", 4, None),
        ("events/warning", "events", 4, None),
        ("events/spectra", "spectra_layers", 4, None),
    ],
)
def test_path_links_to_its_panel(path: str, panel: str, row: int, column: str | None) -> None:
    assert link(path) == Place(panel, row, column, 7)


def test_subject_step_is_the_default() -> None:
    found = link("scalars/loss", step=None)
    assert found is not None
    assert found.step == 3


def test_evidence_file_of_any_attempt_is_linked() -> None:
    assert link("attempt-003/evidence/stall-rank-00000.txt") == link("evidence/dump.txt")
    found = link("evidence/dump.txt")
    assert found is not None
    assert found.panel == "evidence"


@pytest.mark.parametrize(
    ("path", "without"),
    [
        ("profile/dump.txt", ()),
        ("groups/host", ()),
        ("scalars/clip/factor", ("total_norm",)),
        ("series/gradient/rms/a.weight", ("parameters",)),
    ],
)
def test_path_without_a_drawn_panel_has_no_link(path: str, without: tuple[str, ...]) -> None:
    assert link(path, without=without) is None
