"""Panels of the spectra: layers by signal, the explorer of one layer, signal and stable ranks over steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backlight.measure.spectra.shrinkage import muon, noise_stable_rank, noise_values, threshold
from backlight.monitors.spectra.charts import CHARTS, EXPECTED, FIELDS, LABELS, VALUES
from backlight.monitors.spectra.model.echo_records import (
    CHECKPOINT,
    LayerHistory,
    bounds,
    by_signal,
    joint_noise_scale,
    layer_histories,
    layer_table,
)
from backlight.monitors.spectra.model.kept import kept_of, kept_table
from backlight.report.charts import Axis, Line, chart
from backlight.report.panel import Drawn, Figures, MonitorSummary, NotMeasured, PanelFact, panel, tabular
from backlight.report.source import Source
from backlight.store.spectra import NUMBERS as STORED_NUMBERS
from backlight.store.spectra import Layer, SpectraTable, left_out
from backlight.store.spectra import tables as tables_of
from backlight.text import count, number, visible

Floats = NDArray[np.float64]

NUMBERS = 600_000
"""Numbers that all tables of the page hold together: below 4 MB of page."""

DIRECTIONS = 96
"""Directions of a layer that are shown: half of them the strongest, the rest ever further apart."""

LINES = 8
"""Layers that one chart can tell apart."""

LAYERS = 64
"""Layers that can be chosen."""


def spectra_of(source: Source) -> tuple[LayerHistory, ...]:
    """Return the layers by signal share at their last step, the largest first; read once, without tables."""
    return source.once(_read)


def _read(source: Source) -> tuple[LayerHistory, ...]:
    return by_signal(layer_histories(source.run))


def layer_tables(source: Source) -> list[tuple[SpectraTable, ...]]:
    """Return the tables by step of the layers that can be chosen, in that order; read once."""
    return source.once(_read_tables)


def _read_tables(source: Source) -> list[tuple[SpectraTable, ...]]:
    return [tables_of(source.run, history.name) for history in spectra_of(source)[:LAYERS]]


def steps_of(histories: Sequence[LayerHistory]) -> NDArray[np.int64]:
    """Return the steps at which any layer was measured."""
    return np.unique(np.concatenate([history.steps for history in histories]))


def shape_of(layer: Layer) -> str:
    """Return the shape of the matrix, rows first."""
    return f"{layer.rows}\N{NO-BREAK SPACE}\N{MULTIPLICATION SIGN}\N{NO-BREAK SPACE}{layer.columns}"


def frobenius(table: SpectraTable) -> float:
    """Return the root mean square Frobenius norm of a replicate; NaN where it is not known.

    ``T = sigma^2 p q / (1 - rho)`` by the definitions of noise level and signal share; without noise, from
    the singular values.
    """
    at, layer = table.measurement, table.layer
    share, sigma = at["signal_share"], at["noise_sigma"]
    if share < 1 and sigma > 0:
        return sigma * math.sqrt(layer.rows * layer.columns / (1 - share))
    values = table.singular_values
    return math.nan if np.isnan(values).any() else math.sqrt(float((values**2).sum(axis=1).mean()))


def thinned(amount: int, most: int) -> NDArray[np.int64]:
    """Return at most ``most`` of ``amount`` places: the first half of them all, then ever further apart."""
    if amount <= most:
        return np.arange(amount)
    head = most // 2
    tail = np.geomspace(head, amount - 1, most - head)
    return np.unique(np.concatenate([np.arange(head), np.rint(tail).astype(np.int64)]))


def explorer(source: Source) -> tuple[dict[str, Any], list[str]]:
    """Return the tables of the layers as the drawer ``spectra`` takes them, and what was left out of them."""
    remarks, histories = [], spectra_of(source)
    layers = [history.layer for history in histories[:LAYERS]]
    if len(layers) < len(histories):
        remarks.append(
            f"{len(histories)} layers were measured; the {LAYERS} with the largest share of signal can be "
            "chosen, and the export holds all."
        )
    width = max(min(layer.directions, DIRECTIONS) for layer in layers)
    each = max(2, NUMBERS // (len(layers) * width * (len(FIELDS) + len(VALUES))))
    tables = [(layer, of) for layer, of in zip(layers, layer_tables(source), strict=False) if of]
    packed = [_layer(layer, of, each) for layer, of in tables]
    if any(table["of"] > len(table["steps"]) for table in packed):
        most = max(table["of"] for table in packed)
        remarks.append(f"Of up to {most:,} measured steps {each:,} are shown, evenly spread.")
    if any(table["measured"] > len(table["directions"]) for table in packed):
        remarks.append(f"Of layers with more than {DIRECTIONS} directions the weaker ones are thinned out.")
    return {
        "fields": FIELDS,
        "values": VALUES,
        "numbers": (*STORED_NUMBERS, *EXPECTED),
        "labels": LABELS,
        "charts": [dataclasses.asdict(chart) for chart in CHARTS],
        "layers": packed,
    }, remarks


def _layer(layer: Layer, tables: tuple[SpectraTable, ...], most: int) -> dict[str, Any]:
    places = np.unique(np.linspace(0, len(tables) - 1, min(most, len(tables))).round().astype(np.int64))
    chosen = [tables[place] for place in places]
    K = max(1, *(_width(table["singular_value"]) for table in chosen))
    J = max(1, *(_width(table.singular_values) for table in chosen))
    directions, ranks = thinned(K, DIRECTIONS), thinned(J, DIRECTIONS)
    return {
        "name": visible(layer.parameter),
        "shape": shape_of(layer),
        "splitOf": visible(layer.split_of),
        "of": len(tables),
        "measured": K,
        "steps": np.array([table.measurement.step for table in chosen], np.int64),
        "directions": directions,
        "ranks": ranks,
        "figures": np.array(
            [[*(table.measurement[name] for name in STORED_NUMBERS), *_expected(table)] for table in chosen],
            np.float64,
        ),
        "table": np.stack([_fields(table)[:, directions] for table in chosen]).astype(np.float32),
        "spectrum": np.stack([_spectrum(table)[:, ranks] for table in chosen]).astype(np.float32),
    }


def _width(values: Floats) -> int:
    """Return the number of directions up to the last one of which anything is known."""
    seen = np.flatnonzero(~np.isnan(np.atleast_2d(values)).all(axis=0))
    return int(seen[-1]) + 1 if seen.size else 0


def _fields(table: SpectraTable) -> Floats:
    """Return ``[F, D]`` by the names of :data:`FIELDS`."""
    D = table.layer.directions
    value, strength = table["singular_value"], table["strength"]
    norm = frobenius(table)
    made = {
        "muon": muon(value, norm) if norm > 0 else np.full(D, np.nan),
        "gap": _gaps(value, table.measurement["noise_sigma"]),
        "strength_gap": _gaps(np.where(strength > 0, strength, np.nan), table.measurement["noise_sigma"]),
    }
    return np.stack([made[name] if name in made else table[name] for name in FIELDS])


def _gaps(values: Floats, sigma: float) -> Floats:
    """Return the distance of each value to the next smaller one in units of the noise level."""
    gaps = np.full(len(values), np.nan)
    if sigma > 0:
        gaps[:-1] = np.abs(values[:-1] - values[1:]) / sigma
    return gaps


def _expected(table: SpectraTable) -> tuple[float, float]:
    """Return the numbers of :data:`EXPECTED`: the threshold is NaN where the noise level is not known."""
    sigma, p, q = table.measurement["noise_sigma"], table.layer.rows, table.layer.columns
    return (threshold(sigma, p, q) if sigma > 0 else math.nan, noise_stable_rank(p, q))


def _spectrum(table: SpectraTable) -> Floats:
    values = table.singular_values
    sigma = table.measurement["noise_sigma"]
    out = np.full((len(VALUES), values.shape[1]), np.nan)
    seen = ~np.isnan(values).all(axis=0)
    if seen.any():
        some = values[:, seen]
        out[:3, seen] = [np.nanmedian(some, axis=0), np.nanmin(some, axis=0), np.nanmax(some, axis=0)]
    if sigma > 0:
        out[3] = noise_values(sigma, table.layer.rows, table.layer.columns)[: values.shape[1]]
    return out


def lines_over_steps(histories: Sequence[LayerHistory], name: str) -> tuple[list[Line], list[str]]:
    """Return a line for each of the layers with the largest signal share, and a remark on the others."""
    drawn = [(history, values) for history in histories if not np.isnan(values := history.values(name)).all()]
    lines = [Line(visible(history.name), history.steps, values, gaps=True) for history, values in drawn]
    remarks = []
    if len(drawn) > LINES:
        remarks.append(
            f"{len(drawn):,} layers were measured; those {LINES} with the largest share of signal at the "
            "last step are drawn."
        )
    return lines[:LINES], remarks


def summary(source: Source) -> MonitorSummary | None:
    """Return the summary of a run of which spectra were measured, and no gradients."""
    histories = spectra_of(source)
    if source.run.has("gradient") or not histories:
        return None
    layers, steps = count(len(histories), "layer"), count(len(steps_of(histories)), "step")
    detail = f"Spectra of {layers} over replicates were measured at {steps}."
    share = _median_of(histories, "signal_share")
    headline = f"Median signal share of {layers}: {share}" if share else ""
    return MonitorSummary(detail, _figures, headline=headline)


def _median_of(histories: Sequence[LayerHistory], name: str) -> str:
    """Return the median over layers of a number at their last steps, empty where none has it."""
    values = [history.last[name] for history in histories if not math.isnan(history.last[name])]
    return number(median(values), 3) if values else ""


def _figures(source: Source) -> Figures:
    histories = spectra_of(source)
    last, steps = [history.last for history in histories], steps_of(histories)
    fewest, most = min(m.replicates for m in last), max(measurement.replicates for measurement in last)
    first_step, last_step = (number(int(steps[at])) for at in (0, -1))
    none = "not measured"
    measured = [history for history in histories if not math.isnan(history.last["noise_scale"])]
    scale = joint_noise_scale(measured) if measured else None

    replicates = number(most) if fewest == most else f"{number(fewest)} to {number(most)}"
    return (
        ("layers", number(len(last)), ""),
        ("steps", number(len(steps)), f"{first_step} to {last_step}"),
        ("replicates", replicates, "at the last step of each layer"),
        ("signal share", _median_of(histories, "signal_share") or none, "median of the layers"),
        (
            "noise scale",
            number(scale.value, 3) if scale else none,
            f"samples, of the layers together; {bounds(*scale.interval)}" if scale else "",
        ),
    )


MAX_LAYERS = 300
"""Layers that are listed."""

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

FAR = 4.0
"""Factor by which the interval of the noise scale must exclude the batch for a claim about it.

At a quarter of the noise scale a fifth of the expected squared norm of a step is signal, at four times four
fifths (rho = 1 / (1 + B_simple / B)).
"""

FEW_REPLICATES = 8
"""Replicates below which single ones dominate the mean over their pairs."""


def batch_of(source: Source) -> str:
    """Return how the batch of the last step compares with the noise scale of its layers; empty if unknown.

    Only where the interval excludes the batch by a factor of :data:`FAR` is it said to be far from it.
    Replicates that were drawn at a checkpoint are no step's batch.
    """
    histories = spectra_of(source)
    if source.run.events(CHECKPOINT) or not histories:
        return ""
    step = max(history.last.step for history in histories)
    at = [h for h in histories if h.last.step == step and not math.isnan(h.last["noise_scale"])]
    if not at or math.isnan(at[0].last["batch"]):
        return ""
    batch, scale = at[0].last["batch"] * at[0].last.replicates, joint_noise_scale(at)
    layers = count(len(at), "measured layer")
    if math.isinf(scale.value):
        return f"The batch of {number(batch)} samples shows no signal in the gradient of {layers} together."
    comparison = f"the interval does not exclude a batch within a factor of {FAR:g}"
    if scale.interval.low > FAR * batch:
        comparison = "most of each step is noise"
    elif scale.interval.high * FAR < batch:
        comparison = "a smaller batch would give nearly the same steps"
    elif math.isnan(scale.interval.low):
        comparison = "without an interval they are not compared"
    elif scale.interval.low <= batch <= scale.interval.high:
        comparison = "within the interval"
    return (
        f"The batch of {number(batch)} samples, at a noise scale of {number(scale.value, 3)} "
        f"({bounds(*scale.interval)}) samples of the gradient of {layers} together: {comparison}."
    )


@panel(
    "spectra_layers",
    title="Layers by signal",
    order=74,
    series=("events/spectra", "events/spectra_measured"),
    events=("spectra", "spectra_left_out", "spectra_measured"),
    note="The last measurement of each layer. The signal share is that of one replicate's squared norm; "
    "noise scales are in samples, ranks stable ranks.",
    monitor="spectra",
)
def spectra_layers(source: Source) -> Drawn | NotMeasured:
    """List the layers, the one with the largest share of signal first."""
    histories = spectra_of(source)
    if not histories:
        return NotMeasured(source.reason("spectra", otherwise="No spectra were recorded."))
    shown = [history.last for history in histories[:MAX_LAYERS]]
    few = sum(last.replicates < FEW_REPLICATES for last in shown)
    noise = sum(last.identifiable == 0 for last in shown)
    remarks = []
    if len(histories) > MAX_LAYERS:
        remarks.append(f"{len(histories):,} layers were measured; the first {MAX_LAYERS} are listed.")
    if noise:
        remarks.append(
            f"In {noise} of {count(len(shown), 'layer')} no direction is found in one replicate: "
            "measure with more samples in each."
        )
    if few:
        remarks.append(
            f"{count(few, 'layer')} with fewer than {FEW_REPLICATES} replicates: single ones dominate "
            "the echo; compare its interval."
        )
    return tabular(layer_table(histories[:MAX_LAYERS], MAX_LAYERS), remarks=remarks)


@panel(
    "spectra_kept",
    title="From spectra to action",
    order=75,
    series=("spectra/kept",),
    note="Squared cosine between the gradient of a layer and what an optimizer makes of one replicate: the "
    "replicate as it is (its share of signal), its strongest direction, the rank that keeps most, and all "
    "directions with the same weight, as Muon and Shampoo take them. To first order a step of given length "
    "lowers the loss by the root of it. Next to it the batch at which noise equals signal.",
    monitor="spectra",
    optional=True,
)
def spectra_kept(source: Source) -> Drawn | NotMeasured:
    """List what is kept of the gradient of each layer."""
    rows = kept_of(spectra_of(source)[:LAYERS], layer_tables(source))
    if not rows:
        return NotMeasured(source.reason("spectra", otherwise="No layer shows signal in its replicates."))
    return tabular(kept_table(rows, LAYERS))


@panel(
    "spectra",
    title="Spectra over replicates",
    order=76,
    series=("scalars/spectra", "arrays/spectra"),
    layers=True,
    note="Which directions of a layer's gradient are found again with other data. A band is an interval over "
    "replicates; the null is what chance shows.",
    monitor="spectra",
    summary=summary,
)
def spectra(source: Source) -> Drawn | NotMeasured:
    """Return the tables of the layers, by signal share."""
    histories = spectra_of(source)
    if not histories:
        otherwise = 'No spectra recorded: watch(..., monitors=("spectra",)), or backlight spectra.'
        return NotMeasured(source.reason("spectra", otherwise=otherwise))
    data, remarks = explorer(source)
    if not data["layers"]:
        return NotMeasured("The arrays of the spectra were lost; the numbers of the layers are below.")
    without = left_out(source.run)
    if without:
        reasons = sorted(set(without.values()))
        remarks.append(f"{count(len(without), 'parameter')} left out: {'; '.join(reasons[:3])}.")
    facts = (
        PanelFact("layers", number(len(histories))),
        PanelFact("steps", number(len(steps_of(histories)))),
    )
    return Drawn("spectra", data, facts, tuple(remarks))


@panel(
    "spectra_signal",
    title="Signal, noise and stable ranks over steps",
    order=77,
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
    remarks.append(batch_of(source))
    return Drawn("lines", {"charts": charts, "small": True}, (), tuple(dict.fromkeys(filter(None, remarks))))


NOISE_SCALE = (
    ("noise_scale", "noise scale"),
    ("noise_scale_low", "95 %, low"),
    ("noise_scale_high", "95 %, high"),
)
"""Scalars of one measured step, with their labels; of a layer with its name behind a slash."""


@panel(
    "noise_scale",
    title="Noise scale from single microbatches",
    order=78,
    series=("scalars/noise_scale",),
    note="The batch, in samples, at which noise and signal of the gradient are equal, of the parameters that "
    "were measured; a sample is what lies along the first dimension of what the model is called with; that "
    "samples do not mix in the forward is not checked. A gap: the microbatch shows no signal, or the "
    "interval has no upper end.",
    monitor="spectra",
    optional=True,
)
def noise_scale_of_steps(source: Source) -> Drawn | NotMeasured:
    """Draw the noise scale of the model with its interval, and that of the layers with the largest shares."""
    events = source.run.events("noise_scale")
    if not events:
        why = "It was not requested: --set spectra.noise_scale=0, or spectra={'noise_scale': 0}."
        return NotMeasured(source.reason("noise scale", otherwise=why))
    last = events[-1].payload
    layers = sorted(last["shares"], key=lambda layer: -last["shares"][layer])[:NOISE_LAYERS]
    charts = []
    for title, metrics in (
        ("Noise scale of the model", NOISE_SCALE),
        ("Noise scale of the layers", tuple((f"noise_scale/{layer}", visible(layer)) for layer in layers)),
    ):
        scalars = [(label, source.scalar(name)) for name, label in metrics]
        lines = [
            Line(label, scalar.steps, np.where(np.isfinite(scalar.values), scalar.values, np.nan))
            for label, scalar in scalars
        ]
        charts.append(chart(lines, Axis("samples", log=True), title=title))
    remarks = [
        f"{visible(entry['parameter'])} is not measured ({100 * entry['share']:.0f} % of the squared norm): "
        f"{visible(entry['reason'])}."
        for entry in sorted(last["unmeasured"], key=lambda parameter: -parameter["share"])[:MAX_REMARKS]
    ]
    facts = (PanelFact("samples", number(last["samples"])), PanelFact("measured steps", number(len(events))))
    return Drawn("lines", {"charts": charts}, facts, tuple(remarks))


NOISE_LAYERS = 8
"""Layers with a line of their own: those with the largest shares of the squared norm at the last step."""

MAX_REMARKS = 6
"""Parameters that were not measured, and are listed."""
