"""Panels of the spectra: layers by signal, the explorer of one layer, signal and stable ranks over steps."""

from __future__ import annotations

import math

from backlight.monitors.spectra.panels.explorer import (
    explorer,
    lines_over_steps,
    shape_of,
    spectra_of,
    steps_of,
    summary,
)
from backlight.report.charts import Axis, chart
from backlight.report.panel import Drawn, Fact, NotMeasured, panel
from backlight.report.source import Source
from backlight.store.read.spectra import left_out
from backlight.text import count, number, visible

MAX_LAYERS = 300
"""Layers that are listed."""

COLUMNS = {
    "Signal share": "signal_share",
    "Noise scale": "noise_scale",
    "Identifiable": "identifiable",
    "Rank (gradient)": "stable_rank_gradient",
    "Rank (weight)": "stable_rank_weight",
    "Replicates": "replicates",
}
"""Numbers of a layer that are listed, by the head of their column."""

_COSINE = Axis("mean squared cosine", low=0.0)

SIGNAL_CHARTS = (
    ("signal_share", "Signal share", Axis("share of the squared norm")),
    ("noise_scale", "Noise scale", Axis("samples", log=True)),
    ("identifiable", "Identifiable directions", Axis("directions", low=0.0)),
    ("noise_sigma", "Noise level", Axis("noise of one entry", log=True)),
    ("drift_left", "Overlap of the leading left directions with those before", _COSINE),
    ("drift_right", "Overlap of the leading right directions with those before", _COSINE),
)

RANK_CHARTS = tuple(
    (f"stable_rank_{of}", title, Axis("stable rank", low=0.0))
    for of, title in (
        ("gradient", "Stable rank of the gradient (mean of the replicates)"),
        ("weight", "Stable rank of the weight"),
        ("update", "Stable rank of the update"),
        ("momentum", "Stable rank of the momentum"),
    )
)

FEW_REPLICATES = 8
"""Replicates below which single ones dominate the mean over their pairs."""


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
    found = spectra_of(source)
    if not found:
        return NotMeasured(source.reason("spectra", otherwise="No spectra were recorded."))
    rows, few = [], 0
    for history in found[:MAX_LAYERS]:
        last = history.last
        few += last.replicates < FEW_REPLICATES
        numbers = [last[name] for name in COLUMNS.values()]
        shown = ["not measured" if math.isnan(value) else number(value, 3) for value in numbers]
        rows.append([visible(history.name), shape_of(history.layer), number(last.step), *shown])
    remarks = []
    if len(found) > MAX_LAYERS:
        remarks.append(f"{len(found):,} layers were measured; the first {MAX_LAYERS} are listed.")
    if few:
        remarks.append(
            f"{count(few, 'layer')} with fewer than {FEW_REPLICATES} replicates: single ones dominate "
            "the echo; compare its interval."
        )
    heads = ("Layer", "Matrix", "Step", *COLUMNS)
    data = {"name": "Layers by signal", "heads": heads, "figures": list(range(2, len(heads))), "rows": rows}
    return Drawn("listing", data, (), tuple(remarks))


@panel(
    "spectra",
    title="Spectra over replicates",
    order=22,
    series=("scalars/spectra", "arrays/spectra"),
    note="Which directions of a layer's gradient are found again with other data. A band is an interval over "
    "replicates; the null is what chance shows.",
    monitor="spectra",
    summary=summary,
)
def spectra(source: Source) -> Drawn | NotMeasured:
    """Return the tables of the layers, by signal share."""
    found = spectra_of(source)
    if not found:
        otherwise = 'No spectra recorded: watch(..., monitors=("spectra",)), or backlight spectra.'
        return NotMeasured(source.reason("spectra", otherwise=otherwise))
    data, remarks = explorer(source)
    if not data["layers"]:
        return NotMeasured("The arrays of the spectra were lost; the numbers of the layers are below.")
    without = left_out(source.run)
    if without:
        reasons = sorted(set(without.values()))
        remarks.append(f"{count(len(without), 'parameter')} left out: {'; '.join(reasons[:3])}.")
    facts = (Fact("layers", number(len(found))), Fact("steps", number(len(steps_of(found)))))
    return Drawn("spectra", data, facts, tuple(remarks))


@panel(
    "spectra_signal",
    title="Signal, noise and stable ranks over steps",
    order=23,
    series=("spectra/signal", "spectra/stable_rank"),
    note="Where the noise scale is far above the batch, steps are mostly noise; where it is far below, "
    "samples are spent on what is known. A noise scale has a gap where no signal was found; a share below "
    "zero is zero within its error. A stable rank is the squared Frobenius norm over the squared largest "
    "singular value: how many directions share it.",
    monitor="spectra",
)
def spectra_signal(source: Source) -> Drawn | NotMeasured:
    """Draw each number of the layers in a chart, one line for each layer."""
    charts, remarks = [], []
    for name, title, axis in (*SIGNAL_CHARTS, *RANK_CHARTS):
        lines, remark = lines_over_steps(spectra_of(source), name)
        remarks += remark
        if lines:
            charts.append(chart(lines, axis, title=title))
    if not charts:
        return NotMeasured(source.reason("spectra", otherwise="No spectra were recorded."))
    return Drawn("lines", {"charts": charts, "small": True}, (), tuple(dict.fromkeys(remarks)))
