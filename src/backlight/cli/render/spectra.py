"""Spectra in print: a table of layers, or one JSON object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from backlight.cli.console import Page, make_table
from backlight.monitors.spectra.model.echo_records import bounds, joint_noise_scale, layer_histories
from backlight.terminal import make_console

if TYPE_CHECKING:
    from rich.table import Table

    from backlight.diagnose.spectra.run import SpectraResult
    from backlight.measure.noise_scale import NoiseScale
    from backlight.store.format.spectra import Layer, Measurement
    from backlight.store.read.run import Run

SHOWN = 20
"""Layers that are printed; --json has them all."""


def show(outcome: SpectraResult, run: Run) -> None:
    """Print what was measured: the layers of the last step, the largest share of signal first."""
    from backlight.store.read.spectra import layers, measurements

    known = {layer.parameter: layer for layer in layers(run)}
    measured = measurements(run)
    steps = sorted({one.step for one in measured})
    last = [one for one in measured if one.step == steps[-1]] if steps else []
    many = f", {len(steps)} steps, here the last: {steps[-1]}" if len(steps) > 1 else ""
    page = Page()
    page.say((f"{len(last)} layers, {_count(last)} replicates of {_batch(outcome.batch)}{many}", "bold"))
    make_console().print(_table(known, last))
    together = _together(run)
    if together is not None:
        value, within = _number(together.value), bounds(*together.interval)
        page.say(f"noise scale of the layers together: {value} samples (95 %: {within})")
    if len(last) > SHOWN:
        page.note(f"{len(last) - SHOWN} more layers in --json")
    for text in notes(outcome):
        page.note(text)
    page.note(f"backlight report {outcome.path}", "next")


def as_object(outcome: SpectraResult, run: Run) -> dict[str, Any]:
    """Return what was measured as JSON types; what was not measured is null."""
    from backlight.store.read.spectra import layers, measurements

    known = {layer.parameter: layer for layer in layers(run)}
    return {
        "run": str(outcome.path),
        "world_size": outcome.world_size,
        "checkpoints": [
            {"step": one.step, "path": None if one.path is None else str(one.path)}
            for one in outcome.checkpoints
        ],
        "measured": outcome.measured,
        "measured_before": outcome.resumed,
        "sweeps": outcome.sweeps,
        "samples_per_replicate": _measured(outcome.batch),
        "left_out": dict(outcome.left_out),
        "noise_scale": None
        if (together := _together(run)) is None
        else {
            "value": _measured(together.value),
            "low": _measured(together.interval.low),
            "high": _measured(together.interval.high),
        },
        "layers": [
            {
                "parameter": one.parameter,
                "step": one.step,
                "shape": list(known[one.parameter].shape),
                "split_of": known[one.parameter].split_of or None,
                "method": one.method,
                **{name: _measured(value) for name, value in one.numbers.items()},
            }
            for one in measurements(run)
            if one.parameter in known
        ],
    }


def _together(run: Run) -> NoiseScale | None:
    """Return the noise scale of the layers that were measured last; None where batches have no known size."""
    last = [one for one in layer_histories(run) if not math.isnan(one.last["noise_scale"])]
    step = max((one.last.step for one in last), default=0)
    return joint_noise_scale([one for one in last if one.last.step == step]) if last else None


def notes(outcome: SpectraResult) -> list[str]:
    """Return the notes below the table."""
    notes = []
    if outcome.resumed:
        notes.append(f"{outcome.resumed} layers were there already, {outcome.measured} were measured now")
    if outcome.left_out:
        by_reason: dict[str, list[str]] = {}
        for name, reason in outcome.left_out.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            notes.append(f"left out, {reason}: {', '.join(names[:3])}{more}")
    if outcome.sweeps > 1:
        notes.append(
            f"every backward ran {outcome.sweeps} times, because replicates of all layers at once do not fit "
            "into --budget"
        )
    if math.isnan(outcome.batch):
        notes.append("the batches hold no tensor: their size is not known, and with it no noise scale")
    return notes


def _table(known: dict[str, Layer], measured: Sequence[Measurement]) -> Table:
    table = make_table("layer", "shape", "found", "signal", "noise scale", "95 %", "rank")
    table.columns[0].min_width = 20
    chosen = sorted(measured, key=lambda one: -one["signal_share"])
    for one in chosen[:SHOWN]:
        layer = known[one.parameter]
        table.add_row(
            one.parameter,
            "x".join(map(str, layer.shape)),
            f"{one.identifiable} of {layer.directions}",
            f"{one['signal_share']:.3f}",
            _number(one["noise_scale"]),
            _bounds(one["noise_scale_low"], one["noise_scale_high"]),
            _number(one["stable_rank_gradient"]),
        )
    return table


def _count(measured: Sequence[Measurement]) -> str:
    return str(measured[0].replicates) if measured else "0"


def _batch(batch: float) -> str:
    return "batches" if math.isnan(batch) else f"{batch:g} samples"


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return "no signal" if math.isinf(value) else f"{value:.3g}"


def _bounds(low: float, high: float) -> str:
    if math.isnan(low):
        return "-"
    return f"> {low:.2g}" if math.isinf(high) else f"{low:.2g}-{high:.2g}"


def _measured(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
