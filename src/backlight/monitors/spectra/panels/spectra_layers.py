"""The layers ranked by the share of signal in their gradient."""

from __future__ import annotations

import math

from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.report.spectra import shape_of
from backlight.store.format.spectra import Measurement
from backlight.text import number, visible

MOST = 300
"""Layers that are listed."""

HEADS = (
    "Layer",
    "Matrix",
    "Step",
    "Signal share",
    "Noise scale",
    "Identifiable",
    "Rank (gradient)",
    "Rank (weight)",
    "Replicates",
)


@panel(
    "spectra_layers",
    title="Layers by signal",
    order=21,
    series=("events/spectra", "events/spectra_measured"),
    note="The last measurement of each layer. The signal share is that of one replicate's squared norm; "
    "noise scales are in samples, ranks stable ranks.",
    monitor="spectra",
)
def spectra_layers(source: Source) -> Drawn | NotMeasured:
    """List the layers, the one with the largest share of signal first."""
    found = source.spectra
    if not found.layers:
        return NotMeasured(source.reason("spectra", otherwise="No spectra were recorded."))
    rows = []
    for layer in found.layers[:MOST]:
        last = found.measured[layer.parameter][-1]
        rows.append(
            [
                visible(layer.parameter),
                shape_of(layer),
                number(last.step),
                *(_told(last, name) for name in ("signal_share", "noise_scale", "identifiable")),
                *(_told(last, name) for name in ("stable_rank_gradient", "stable_rank_weight", "replicates")),
            ]
        )
    remarks: tuple[str, ...] = ()
    if len(found.layers) > MOST:
        remarks = (f"{len(found.layers):,} layers were measured; the first {MOST} are listed.",)
    data = {"name": "Layers by signal", "heads": HEADS, "figures": list(range(2, len(HEADS))), "rows": rows}
    return Drawn("listing", data, (), remarks)


def _told(at: Measurement, name: str) -> str:
    value = at[name]
    return "not measured" if math.isnan(value) else number(value, 3)
