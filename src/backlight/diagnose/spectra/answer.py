"""Answer of ``spectra``: the layers of the last step, and the noise scale of all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from backlight.answer import Answer, Column, Table, word
from backlight.diagnose.spectra.run import SpectraResult
from backlight.measure.noise_scale import NoiseScale
from backlight.monitors.spectra.model.echo_records import bounds, joint_noise_scale, layer_histories
from backlight.store.read.run import Run
from backlight.store.spectra import Layer, Measurement, layers, measurements
from backlight.text import listed

SHOWN = 20
"""Layers that are printed; --json has them all."""


@dataclass(frozen=True)
class SpectraRecord:
    """What was measured now and before; ``noise_scale`` is that of the layers of the last step together."""

    run: SpectraResult
    layers: tuple[Layer, ...]
    measurements: tuple[Measurement, ...]
    noise_scale: NoiseScale | None


def answer(outcome: SpectraResult, run: Run) -> Answer:
    """Return the answer: the layers of the last step, the largest share of signal first."""
    by_name = {layer.parameter: layer for layer in layers(run)}
    measured = [one for one in measurements(run) if one.parameter in by_name]
    together = _together(run)
    steps = sorted({one.step for one in measured})
    last = [one for one in measured if one.step == steps[-1]] if steps else []
    many = f", {len(steps)} steps, here the last: {steps[-1]}" if len(steps) > 1 else ""
    replicates = last[0].replicates if last else 0
    facts = []
    if together is not None:
        within = bounds(*together.interval)
        facts.append(
            f"noise scale of the layers together: {_number(together.value)} samples (95 %: {within})"
        )
    return Answer(
        f"{len(last)} layers, {replicates} replicates of {_batch(outcome.batch)}{many}",
        SpectraRecord(outcome, tuple(by_name.values()), tuple(measured), together),
        tuple(facts),
        (_table(by_name, last),) if last else (),
        (*_notes(outcome), f"next: backlight report {outcome.path}"),
    )


def _table(by_name: dict[str, Layer], measured: list[Measurement]) -> Table:
    def found(one: Measurement) -> str:
        return f"{one.identifiable} of {by_name[one.parameter].directions}"

    return Table(
        (
            word("layer", "parameter"),
            Column("shape", lambda one: "x".join(map(str, by_name[one.parameter].shape)), str),
            Column("found", found, str),
            Column("signal", lambda one: one["signal_share"], lambda value: f"{value:.3f}"),
            Column("noise scale", lambda one: one["noise_scale"], _number),
            Column("95 %", lambda one: _bounds(one["noise_scale_low"], one["noise_scale_high"]), str),
            Column("rank", lambda one: one["stable_rank_gradient"], _number),
        ),
        sorted(measured, key=lambda one: -one["signal_share"]), brief=SHOWN,
    )  # fmt: skip


def _together(run: Run) -> NoiseScale | None:
    """Return the noise scale of the layers that were measured last; None where batches have no known size."""
    last = [one for one in layer_histories(run) if not math.isnan(one.last["noise_scale"])]
    step = max((one.last.step for one in last), default=0)
    return joint_noise_scale([one for one in last if one.last.step == step]) if last else None


def _notes(outcome: SpectraResult) -> list[str]:
    """Return the notes below the table."""
    notes = []
    if outcome.resumed:
        notes.append(f"{outcome.resumed} layers were there already, {outcome.measured} were measured now")
    if outcome.left_out:
        by_reason: dict[str, list[str]] = {}
        for name, reason in outcome.left_out.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            notes.append(f"left out, {reason}: {listed(names)}")
    if outcome.sweeps > 1:
        notes.append(
            f"every backward ran {outcome.sweeps} times, because replicates of all layers at once do not fit "
            "into --budget"
        )
    if math.isnan(outcome.batch):
        notes.append("the batches hold no tensor: their size is not known, and with it no noise scale")
    return notes


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
