"""What ``backlight spectra`` prints of a stored run: intervals, and the noise scale of all layers."""

from __future__ import annotations

import math
from pathlib import Path

from backlight.diagnose.spectra.answer import _bounds, _table, _together
from backlight.monitors.spectra.model.echo_records import layer_histories
from backlight.store.spectra import layers, measurements
from spectra_runs import STRENGTHS, Injected, write_spectra_run


def test_table_and_total_have_intervals(tmp_path: Path) -> None:
    run = write_spectra_run(tmp_path / "run", Injected(steps=(0,), strengths={next(iter(STRENGTHS)): (8.0,)}))
    table = _table({layer.parameter: layer for layer in layers(run)}, measurements(run))
    column = next(column for column in table.columns if column.title == "95 %")
    shown = [column.cell(row) for row in table.rows]
    assert len(shown) == len(layer_histories(run))
    assert all(one.startswith("> ") or "-" in one[1:] for one in shown), shown
    together = _together(run)
    assert together.interval.low <= together.value <= together.interval.high
    assert _bounds(1.5, math.inf) == "> 1.5"
    assert _bounds(math.nan, math.nan) == "-"
