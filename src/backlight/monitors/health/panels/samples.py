"""The samples of a spike: a table of those with the largest shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backlight.answer import Answer, Table, indexed
from backlight.monitors.health.model.spike_samples import SAMPLES, samples_of
from backlight.report.panel import Drawn, NotMeasured, panel, tabular
from backlight.report.source import Source
from backlight.store.read.run import Event, Run
from backlight.text import count, number, visible

ROWS = 24
"""Samples that are listed."""

HEAD = (
    "step", "rank", "forward pass", "sample", "dataset index", "copies", "share", "norm", "loss",
    "norm without",
)  # fmt: skip


@panel(
    "spike_samples",
    title="Samples of spikes",
    order=45,
    series=(f"events/{SAMPLES}",),
    note="Share of the squared gradient norm, and the norm without a sample and those above it.",
    monitor="health",
    place="details",
)
def spike_samples(source: Source) -> Drawn | NotMeasured:
    """List the samples with the largest shares of each step that was decomposed."""
    rows: list[list[str]] = []
    remarks = []
    events = source.run.events(SAMPLES)
    for event in events:
        rows += rows_of(event)
        if event.payload.get("reason"):
            remarks.append(f"Step {event.step}: {visible(str(event.payload['reason']))}.")
    if not rows and not remarks:
        if not source.run.has("gradient"):
            return NotMeasured(source.reason("gradient", otherwise="No gradient was recorded."))
        none = (
            "No step was decomposed: neither gradients nor loss leapt at a recorded step, and none was "
            "requested (backlight run --set health.decompose=STEP)."
        )
        return Drawn("words", {"text": none})
    if not rows:
        return NotMeasured(" ".join(remarks))
    if len(rows) > ROWS:
        remarks.append(f"{count(len(rows) - ROWS, 'more sample')} were decomposed.")
    return tabular(Table(indexed(HEAD, numbers=range(len(HEAD))), rows[:ROWS]), remarks=remarks)


def rows_of(event: Event) -> list[list[str]]:
    """Return the samples of an event as rows under ``HEAD``, those with the largest shares first."""
    rows = [_row(event, call, top) for call in event.payload.get("calls") or () for top in call["top"]]
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]


def _row(event: Any, call: Any, top: Any) -> tuple[float, list[str]]:
    shown = (top["index"], top["copies"], None, top["norm"], top["loss"], top["without"])
    index, copies, _, *numbers = ("" if figure is None else number(figure) for figure in shown)
    at = (event.step, event.rank, call["number"] + 1, top["sample"])
    share = f"{100 * top['share']:.0f} %"
    return top["share"], [*map(str, at), index, copies, share, *numbers]


@dataclass(frozen=True)
class StepSamples:
    """What is known of the samples of a step; ``decomposed`` are the payloads of its events by rank."""

    step: int
    text: str
    decomposed: Sequence[Mapping[str, Any]]


def answer(run: Run, step: int) -> Answer:
    """Return what is known of the samples of ``step``: sentences, then those with the largest shares."""
    text, events = samples_of(run, step), [e for e in run.events(SAMPLES) if e.step == step]
    record = StepSamples(step, text, [{"rank": event.rank, **event.payload} for event in events])
    rows = [row[1:] for event in events for row in rows_of(event)]
    table = Table(indexed(HEAD[1:], numbers=range(len(HEAD))), rows, brief=len(rows))
    verdict, *facts = text.splitlines()
    return Answer(verdict, record, tuple(facts), (table,) if rows else ())
