"""Which measures go with the test accuracy, with what lead, and whether the control's do as well."""

from __future__ import annotations

from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import number, visible


@panel(
    "correlations",
    title="What goes with the test accuracy",
    order=4,
    series=("correlations",),
    note="Rank correlation of each measure with the test accuracy after memorisation, at the lead (+) or lag "
    "(-) where it is strongest. Any long fall goes with any long rise: only what the control does not show "
    "can be said to signal generalisation. The lead is in steps; the ends are medians of the last tenth.",
    monitor="grokking",
)
def correlations(source: Source) -> Drawn | NotMeasured:
    """List the measures, the strongest first, with the control's numbers beside them."""
    learning = source.learning
    if learning is None or not learning.following:
        return NotMeasured("No measure was recorded at the steps at which the test accuracy was logged.")
    rows = [
        [
            visible(row.measure.removeprefix("gram/model/").removeprefix("progress/")),
            _signed(row.correlation),
            f"{row.lead:+,}" if row.lead else "0",
            _signed(row.control),
            *("" if level is None else number(level, 3) for level in row.levels),
            visible(row.says),
        ]
        for row in learning.following
    ]
    heads = ("measure", "correlation", "lead", "control", "end", "control ends", "")
    data = {"name": "Correlations", "heads": heads, "figures": (1, 2, 3, 4, 5), "rows": rows}
    remarks = () if learning.control is not None else ("Without a matched control no conclusion is drawn.",)
    return Drawn("listing", data, (), remarks)


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}"
