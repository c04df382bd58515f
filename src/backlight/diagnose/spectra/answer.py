"""Answer of ``spectra``: the layers of the last step, and the noise scale of all of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backlight.answer import Answer, Table
from backlight.diagnose.spectra.run import SpectraResult
from backlight.measure.noise_scale import NoiseScale
from backlight.monitors.spectra.model.echo_records import (
    LayerHistory,
    bounds,
    by_signal,
    joint_noise_scale,
    layer_histories,
    layer_table,
)
from backlight.monitors.spectra.model.kept import kept_of, kept_table
from backlight.store.read.run import Run
from backlight.store.spectra import Layer, Measurement, tables
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
    histories = layer_histories(run)
    together = _together(histories)
    steps = sorted({entry.step for history in histories for entry in history.measured})
    last = [history for history in histories if history.last.step == steps[-1]]
    many = f", {len(steps)} steps, here the last: {steps[-1]}" if len(steps) > 1 else ""
    replicates = last[0].last.replicates if last else 0
    facts = []
    if together is not None:
        within = bounds(*together.interval)
        value = "no signal" if math.isinf(together.value) else f"{together.value:.3g}"
        facts.append(f"noise scale of the layers together: {value} samples (95 %: {within})")
    return Answer(
        f"{len(last)} layers, {replicates} replicates of {_batch(outcome.batch)}{many}",
        SpectraRecord(
            outcome,
            tuple(history.layer for history in histories),
            tuple(entry for history in histories for entry in history.measured),
            together,
        ),
        tuple(facts),
        tuple(_tables(run, by_signal(last))),
        (*_notes(outcome), f"next: backlight report {outcome.path}"),
    )


def _tables(run: Run, last: Sequence[LayerHistory]) -> Iterator[Table]:
    if last:
        yield layer_table(last, SHOWN)
    if rows := kept_of(last, (tables(run, history.name) for history in last)):
        yield kept_table(rows, SHOWN)


def _together(histories: Sequence[LayerHistory]) -> NoiseScale | None:
    """Return the noise scale of the layers that were measured last; None where batches have no known size."""
    last = [history for history in histories if not math.isnan(history.last["noise_scale"])]
    step = max((history.last.step for history in last), default=0)
    return joint_noise_scale([history for history in last if history.last.step == step]) if last else None


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
