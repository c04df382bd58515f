"""What ``backlight spectra`` prints of a stored run: intervals, and the noise scale of all layers."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from backlight.diagnose.spectra.run import _together
from backlight.monitors.spectra.model.echo_records import LayerHistory, layer_histories, layer_table
from spectra_runs import STRENGTHS, Injected, write_spectra_run


def intervals(histories: tuple[LayerHistory, ...]) -> list[str]:
    table = layer_table(histories, 20)
    column = next(column for column in table.columns if column.title == "95 %")
    return [column.cell(row) for row in table.rows]


def test_table_and_total_have_intervals(tmp_path: Path) -> None:
    run = write_spectra_run(tmp_path / "run", Injected(steps=(0,), strengths={next(iter(STRENGTHS)): (8.0,)}))
    histories = layer_histories(run)
    shown = intervals(histories)
    assert len(shown) == len(histories)
    assert all(text.startswith("> ") or "-" in text[1:] for text in shown), shown
    together = _together(histories)
    assert together is not None
    assert together.interval.low <= together.value <= together.interval.high
    for low, high, text in ((1.5, math.inf, "> 1.5"), (math.nan, math.nan, "-")):
        numbers = {**histories[0].last.numbers, "noise_scale_low": low, "noise_scale_high": high}
        last = dataclasses.replace(histories[0].last, numbers=numbers)
        assert intervals((dataclasses.replace(histories[0], measured=(last,)),)) == [text]
