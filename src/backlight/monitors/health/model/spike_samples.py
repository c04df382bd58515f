"""What a run holds about the samples of a spike, in words and as evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backlight.findings import phrases
from backlight.records import Evidence
from backlight.store.read.run import Event, Run
from backlight.text import listed, visible

SAMPLES = "spike_samples"
"""Kind of the events that hold the samples of a step."""

REQUESTED = "requested"
"""Cause of an event about a step that did not leap, and was decomposed on request."""

NEAR_NORM = 2.5
"""Times the usual norm up to which a norm is an ordinary one: half of the least spike."""

NEAR_LOSS = 1.2
"""Times the usual loss up to which a loss is an ordinary one."""

MOST = 8
"""One of so many samples may belong to those that stand out; more are the batch."""

NAMED = 4
"""Samples that a sentence names."""


@dataclass(frozen=True)
class Samples:
    """The samples of a step: sentences, evidence, and whether any stands out; None where not known."""

    text: str
    evidence: tuple[Evidence, ...] = ()
    stand_out: bool | None = None
    step: int | None = None

    def sentences(self, step: int) -> str:
        """Return the sentences for a finding about ``step``."""
        return self.text if self.step in {None, step} else f"At step {self.step}: {self.text}"


NOTHING = Samples("")


def samples_of(run: Run, step: int) -> str:
    """Return what is known of the samples of ``step`` as sentences, or how to record it."""
    if text := samples_at(run, step, step).text:
        return text
    recorded = sorted({e.step for e in run.events(SAMPLES) if e.step is not None})
    others = f"; those of {listed([str(step) for step in recorded], 8)} were" if recorded else ""
    return (
        f"The samples of step {step} were not decomposed{others}. Run the script again with "
        f"`backlight run --set health.decompose={step}`."
    )


def samples_at(run: Run, first: int, last: int) -> Samples:
    """Return what is known of the samples of the steps ``first`` to ``last``."""
    events = [e for e in run.events(SAMPLES) if e.step is not None and first <= e.step <= last]
    if not events:
        return NOTHING
    step = min(e.step for e in events if e.step is not None)
    return replace(_at(step, [e for e in events if e.step == step]), step=step)


def _at(step: int, events: Sequence[Event]) -> Samples:
    passes = [(e, call) for e in events for call in e.payload.get("calls") or ()]
    if not passes:
        reason = next((str(e.payload["reason"]) for e in events if e.payload.get("reason")), "")
        return Samples(f"Its samples were not decomposed: {visible(reason)}.") if reason else NOTHING
    if not any(call.get("top") or call.get("non_finite_count") for _, call in passes):
        return _indices_only(step, passes)
    causes = {str(e.payload.get("cause")) for e in events}
    requested = causes == {REQUESTED}
    if "non_finite" in causes or (requested and any(c.get("non_finite_count") for _, c in passes)):
        return _not_finite(step, passes)
    shares = _added(events, passes)
    if shares is not None and abs(shares - 1) > 0.05:
        text = f"The shares of its samples add up to {phrases.number(shares)}, not 1, so that none is named."
        return Samples(text)
    return _largest(step, passes) if requested else _standing_out(step, passes)


def _added(events: Sequence[Event], passes: Sequence[tuple[Event, Mapping[str, Any]]]) -> float | None:
    """Return the sum of all shares; None where a rank is missing."""
    if len({e.rank for e in events}) < int(events[0].payload.get("ranks") or 1):
        return None
    return sum(float(call["share"]) for _, call in passes if call.get("share") is not None)


def _standing_out(step: int, passes: Sequence[tuple[Event, Mapping[str, Any]]]) -> Samples:
    best: tuple[int, Event, Mapping[str, Any], bool] | None = None
    for event, call in passes:
        for by_loss in (False, True):
            if amount := _amount(event.payload, call, by_loss=by_loss):
                if best is None or amount < best[0]:
                    best = amount, event, call, by_loss
                break
    if best is None:
        return _largest(step, passes, leaps=True)
    amount, event, call, by_loss = best
    where = _where(event, call, passes)
    if by_loss:
        top = call["highest"][:amount]
        has, it = ("has", "it") if amount == 1 else ("have", "them")
        text = (
            f"{_names(top, call, where)} {has} the loss {phrases.number(top[0]['loss'])}: without {it} the "
            f"mean loss would be {phrases.number(top[-1]['without'])}."
        )
        path, unit = "loss of sample", "loss"
        shown = [(sample, sample["loss"]) for sample in top]
    else:
        top = call["top"][:amount]
        share = sum(sample["share"] for sample in top)
        verb = "carries" if amount == 1 and top[0]["copies"] == 1 else "carry"
        text = (
            f"{_names(top, call, where)} {verb} {100 * share:.0f} % of the squared gradient norm: without "
            f"{'it' if verb == 'carries' else 'them'} the norm would be {phrases.number(top[-1]['without'])}."
            f"{_loss_of(top[0], call)}{_window(top[0])}{_uncovered(event.payload)}"
        )
        path, unit = "share of sample", "of the squared gradient norm"
        shown = [(sample, sample["share"]) for sample in top]
    evidence = tuple(
        Evidence(f"events/{SAMPLES}, {path} {sample['sample']}{where}", step, round(float(value), 6), unit)
        for sample, value in shown[:NAMED]
    )
    return Samples(text, evidence, stand_out=True)


def _amount(payload: Mapping[str, Any], call: Mapping[str, Any], *, by_loss: bool) -> int:
    """Return the least number of samples without which the step would be an ordinary one; 0 if too many."""
    usual = payload.get("usual_loss" if by_loss else "usual_norm")
    listed = call.get("highest" if by_loss else "top") or ()
    if usual is None:
        return 0
    most = max(1, int(call["samples"] if by_loss else call["distinct"]) // MOST)
    limit = usual * (NEAR_LOSS if by_loss else NEAR_NORM)
    return next((k for k, sample in enumerate(listed[:most], 1) if sample["without"] <= limit), 0)


def _largest(step: int, passes: Sequence[tuple[Event, Mapping[str, Any]]], *, leaps: bool = False) -> Samples:
    """Name the sample with the largest share; where the step ``leaps``, it does not stand out."""
    tops = [(event, call, call["top"][0]) for event, call in passes if call.get("top")]
    if not tops:
        return NOTHING
    event, call, top = max(tops, key=lambda entry: entry[2]["share"])
    where, share = _where(event, call, passes), f"{100 * top['share']:.0f} %"
    if leaps:
        text = (
            f"No sample stands out: the largest share of the squared gradient norm is {share}, and without "
            f"that sample the norm would still be {phrases.number(top['without'])}.{_copies(call)}"
        )
    else:
        verb = "has" if top["copies"] == 1 else "have"
        text = (
            f"{_names([top], call, where)} {verb} the largest share of the squared gradient norm, {share}: "
            f"without it the norm would be {phrases.number(top['without'])}, "
            f"not {phrases.number(event.payload['total'])}."
            f"{_loss_of(top, call)}{_window(top)}{_copies(call)}"
        )
    path = f"events/{SAMPLES}, share of sample {top['sample']}{where}"
    evidence = Evidence(path, step, round(float(top["share"]), 6), "of the squared gradient norm")
    return Samples(f"{text}{_uncovered(event.payload)}", (evidence,), stand_out=False if leaps else None)


def _not_finite(step: int, passes: Sequence[tuple[Event, Mapping[str, Any]]]) -> Samples:
    ill = [(event, call) for event, call in passes if call.get("non_finite_count")]
    if not ill:
        return NOTHING
    event, call = min(ill, key=lambda entry: entry[1]["non_finite_count"] / entry[1]["samples"])
    count, samples = int(call["non_finite_count"]), int(call["samples"])
    where = _where(event, call, passes)
    evidence = Evidence(f"events/{SAMPLES}, samples not finite{where}", step, count, f"of {samples}")
    bad = [n for n in call.get("bad_inputs") or ()]
    if count == samples and not 0 < len(bad) < samples:
        text = f"The gradients of all {samples} samples{where} are not finite: none stands out."
        return Samples(text, (evidence,), stand_out=False)
    shown = bad if count == samples else list(call["non_finite"])
    listed = [{"sample": n, "index": _index(call, n), "copies": 1} for n in shown]
    names, sole = _names(listed, call, where), len(shown) == 1
    if count == samples:
        text = f"{names} {'holds' if sole else 'hold'} NaN or Inf among {'its' if sole else 'their'} inputs."
    else:
        note = " Its input holds NaN or Inf." if sole and shown[0] in bad else ""
        text = (
            f"The gradient{'' if count == 1 else 's'} of {names[0].lower()}{names[1:]} "
            f"{'is' if count == 1 else 'are'} not finite, those of the other {samples - count} are.{note}"
        )
    return Samples(text, (evidence,), stand_out=True)


def _indices_only(step: int, passes: Sequence[tuple[Event, Mapping[str, Any]]]) -> Samples:
    indexed = [(event, call) for event, call in passes if call.get("indices")]
    reason = next((str(e.payload["reason"]) for e, _ in passes if e.payload.get("reason")), "")
    text = f"Its samples were not decomposed: {visible(reason)}." if reason else ""
    if not indexed:
        return Samples(text)
    event, call = indexed[0]
    first = ", ".join(f"{int(i):,}" for i in call["indices"][:NAMED])
    text += f" The batch{_where(event, call, passes)} holds the dataset indices {first}, …"
    return Samples(text.strip())


def _names(top: Sequence[Mapping[str, Any]], call: Mapping[str, Any], where: str) -> str:
    """Write ``Sample 17 of 64 (dataset index 40,213)``, or more of them."""
    word = "row" if call.get("is_row") else "sample"
    of = f" of {int(call['samples'])}{where}"
    if len(top) == 1 and top[0].get("copies", 1) > 1:
        index = _dataset([top[0]])
        return f"{top[0]['copies']} copies of one {word}{of}{index}"
    shown = ", ".join(str(int(sample["sample"])) for sample in top[:NAMED])
    more = f" and {len(top) - NAMED} more" if len(top) > NAMED else ""
    plural = "" if len(top) == 1 else "s"
    return f"{word.capitalize()}{plural} {shown}{more}{of}{_dataset(top[:NAMED])}"


def _dataset(top: Sequence[Mapping[str, Any]]) -> str:
    indices = [f"{int(sample['index']):,}" for sample in top if sample.get("index") is not None]
    if not indices:
        return ""
    return f" (dataset {'index' if len(indices) == 1 else 'indices'} {', '.join(indices)})"


def _index(call: Mapping[str, Any], sample: int) -> int | None:
    indices = call.get("indices")
    return int(indices[sample]) if indices else None


def _where(event: Event, call: Mapping[str, Any], passes: Sequence[tuple[Event, Mapping[str, Any]]]) -> str:
    """Write of which rank and forward pass a sample is, where there are several."""
    of_rank = [c for e, c in passes if e.rank == event.rank]
    part = f" of forward pass {int(call['number']) + 1}" if len(of_rank) > 1 else ""
    return part + (f" on rank {event.rank}" if int(event.payload.get("ranks") or 1) > 1 else "")


def _loss_of(top: Mapping[str, Any], call: Mapping[str, Any]) -> str:
    loss, median = top.get("loss"), call.get("median_loss")
    if loss is None or median is None or not math.isfinite(loss):
        return ""
    return f" Its loss is {phrases.number(loss)}, the median {phrases.number(median)}."


def _window(top: Mapping[str, Any]) -> str:
    if "first" not in top or top["last"] - top["first"] + 1 > top["positions"] // 2:
        return ""
    first, last = top["first"], top["last"]
    which = f"Position {first}" if first == last else f"Positions {first} to {last}"
    return (
        f" {which} of {top['positions']} hold{'s' if first == last else ''} {100 * top['held']:.0f} % of it."
    )


def _copies(call: Mapping[str, Any]) -> str:
    distinct, samples = int(call["distinct"]), int(call["samples"])
    return f" Only {distinct} of its {samples} samples differ." if distinct < samples else ""


def _uncovered(payload: Mapping[str, Any]) -> str:
    covered = payload.get("covered")
    if covered is None or covered > 0.995:
        return ""
    return f" Parameters without a kernel, {100 * (1 - covered):.0f} % of it, are left out."
