"""Rule ``repeated_data``: the same batches in every epoch, at every step, by every worker or on all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.contradictions import INPUT, contradictions, evidence_of
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Event, Run
from backlight.text import listed


class Repetition(NamedTuple):
    """How a repetition within one process is reported."""

    severity: Severity
    title: str
    detail: str
    fix: str
    refuted_if: str


REPETITIONS = {
    "stale": Repetition(
        Severity.ERROR,
        "Every step trains on the first batch, while the loader moves on",
        "Up to step {step} the model was given the first batch of the loader of {data} at every step, "
        "although the loader gave {batches} batches by then.",
        "Give the model the batch of the loop: a name from outside the loop holds the first one.",
        "the inputs of two steps differ.",
    ),
    "first": Repetition(
        Severity.WARNING,
        "Every step trains on the first batch of the loader",
        "The loader of {data} was started anew at least {epochs} times, and each time gave the same batch, "
        "of which it has more than one.",
        "Iterate over the loader, `for batch in loader`, instead of calling `next(iter(loader))`.",
        "only one batch is to be learned, as in a test of the model.",
    ),
    "constant": Repetition(
        Severity.WARNING,
        "All samples of the loader are the same",
        "The first {batches} batches of {data} hold one sample, again and again.",
        "Let `__getitem__` of {data} use its index.",
        "the data is a placeholder, as in a benchmark.",
    ),
    "workers": Repetition(
        Severity.WARNING,
        "Each of the {workers} workers gives the same batches",
        "The first {batches} batches of {data} are two batches, each given {workers} times: once by each "
        "worker. An epoch then holds every sample {workers} times.",
        "Split the stream in `__iter__` by `torch.utils.data.get_worker_info()`, as with "
        "`itertools.islice(samples, info.id, None, info.num_workers)`.",
        "an epoch is to hold every sample that often.",
    ),
    "generator": Repetition(
        Severity.WARNING,
        "The {workers} workers draw the same random numbers",
        "The samples of {data} draw from `{attribute}`, a generator that it holds. Each of the {workers} "
        "workers has a copy in the same state, and a new one in every epoch if workers are not persistent.",
        "Seed it per worker in a `worker_init_fn`, or draw from the global generator of torch or NumPy, "
        "which the loader seeds.",
        "the numbers that two workers draw differ.",
    ),
    "row": Repetition(
        Severity.INFO,
        "`{field}` has one row for the {samples} samples of a batch",
        "In the batches of the loader {others} have {samples} rows, and `{field}` has one: an operation with "
        "both uses it for every sample.",
        "Look at what makes a batch of the samples, a `collate_fn` or a processor, for `{field}`.",
        "`{field}` is the same for all samples.",
    ),
    "same": Repetition(
        Severity.WARNING,
        "Every step trains on the same batch",
        "At {equal} of the first {steps} steps the model was given the same values, {samples} samples, in "
        "tensors that were made anew, and the loss the same targets.",
        "Let the code that makes a batch draw other indices at each step.",
        "only one batch is to be learned, or it holds all of the data.",
    ),
    "perhaps_same": Repetition(
        Severity.INFO,
        "Every step gives the model the same values",
        "At {equal} of the first {steps} steps the model was given the same values, {samples} samples, in "
        "tensors that were made anew.",
        "If there are more samples, let the code that makes a batch draw other indices at each step.",
        "only one batch is to be learned, or it holds all of the data.",
    ),
    "held": Repetition(
        Severity.INFO,
        "The run trains on one batch",
        "The first {steps} steps used one batch of the loader of {data}, which has {batches}.",
        "Iterate over the loader in the training loop.",
        "only one batch is to be learned, as in a test of the model.",
    ),
}
"""Kinds of contradictions, as the instruments name them."""


@dataclass(frozen=True)
class RepeatedDataLimits(Limits, monitor="correctness"):
    """Limits of the rule ``repeated_data``."""

    order_batches: int = limit(
        4,
        "batches, over all epochs that repeat the one before, that must be equal: few may be chance",
        low=2,
    )
    rank_steps: int = limit(3, "steps at which ranks have equal inputs, of at least two kinds", low=2)


@rule("repeated_data", monitor="correctness", limits=RepeatedDataLimits)
def repeated_data(run: Run, limits: RepeatedDataLimits) -> Iterator[Finding]:
    """Find data that a run trains on more often than its author meant."""
    yield from _ranks(run, limits)
    found = contradictions(run, "repeated_data")
    for kind, words in REPETITIONS.items():
        of_kind = [event for event in found if event.payload["kind"] == kind]
        if of_kind:
            first = of_kind[0]
            facts = {**first.payload, "step": first.step, "steps": 1 + (first.step or 0)}
            if "others" in facts:
                facts["others"] = listed([f"`{name}`" for name in facts["others"]])
            value = next(
                str(facts[n]) for n in ("sampler", "data", "batches", "field", "samples") if n in facts
            )
            yield Finding(
                severity=words.severity,
                title=words.title.format_map(facts),
                detail=words.detail.format_map(facts),
                subject=Subject(step=first.step),
                evidence=(evidence_of(of_kind, value, kind),),
                fix=words.fix.format_map(facts),
                refuted_if=words.refuted_if,
            )
    yield from _order([event for event in found if event.payload["kind"] == "order"], limits)


def _order(found: Sequence[Event], limits: RepeatedDataLimits) -> Iterator[Finding]:
    for sampler in dict.fromkeys(event.payload["sampler"] for event in found):
        equal = [event for event in found if event.payload["sampler"] == sampler]
        longest: dict[int, int] = {}
        for event in equal:
            epoch = int(event.payload["epochs"])
            longest[epoch] = max(longest.get(epoch, 0), int(event.payload["batches"]))
        if sum(longest.values()) >= limits.order_batches:
            yield Finding(
                severity=Severity.WARNING,
                title="The batches of every epoch come in the same order",
                detail=(
                    f"The first {max(longest.values())} batches of {equal[0].payload['data']} in epoch "
                    f"{max(longest)} are those of the epoch before, although their order comes "
                    f"from a {sampler}."
                ),
                subject=Subject(step=equal[0].step),
                evidence=(evidence_of(equal, sampler, "sampler"),),
                fix=(
                    "Call `sampler.set_epoch(epoch)` before each epoch."
                    if sampler == "DistributedSampler"
                    else "Seed the random numbers once, before the first epoch, not in the loop."
                ),
                refuted_if="the indices of two epochs differ.",
            )


def _ranks(run: Run, limits: RepeatedDataLimits) -> Iterator[Finding]:
    """Find ranks whose gradients are averaged, and whose inputs are equal at every recorded step."""
    inputs: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
    groups: dict[tuple[int, int], list[int]] = {}
    for event in run.events(INPUT):
        key = (event.attempt, event.rank)
        inputs[key][event.step or 0] = str(event.payload["digest"])
        groups[key] = [int(rank) for rank in event.payload["ranks"]]
    for attempt, rank in sorted(inputs):
        own, same = inputs[attempt, rank], [rank]
        for other in groups[attempt, rank]:
            theirs = inputs.get((attempt, other), {})
            steps = sorted(own.keys() & theirs.keys())
            if (
                other > rank
                and len(steps) >= limits.rank_steps
                and all(own[step] == theirs[step] for step in steps)
                and len({own[step] for step in steps}) > 1
            ):
                same.append(other)
        if len(same) > 1:
            every = len(same) == len(groups[attempt, rank])
            named = listed([str(one) for one in same], len(same))
            yield Finding(
                severity=Severity.WARNING,
                title=f"{'All' if every else len(same)} ranks train on the same batches",
                detail=(
                    f"At each of the first {len(own)} steps the model was given equal inputs on ranks "
                    f"{named}. Their gradients are averaged: each of them computes what the others do."
                ),
                subject=Subject(step=min(own), rank=rank),
                evidence=(Evidence(f"events/{INPUT}", min(own), len(same), "ranks"),),
                fix=(
                    "Give the loader a `DistributedSampler`, or seed what draws the batches with the rank: "
                    "`torch.manual_seed(seed + rank)`."
                ),
                refuted_if="the inputs of the ranks differ where they were not sampled.",
            )
            return
