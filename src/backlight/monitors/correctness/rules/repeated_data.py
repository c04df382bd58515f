"""Rule ``repeated_data``: the same batches in every epoch, at every step, by every worker or on all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from backlight.findings import phrases
from backlight.findings.limits import Limits, limit
from backlight.monitors.correctness.model.facts import Fact, facts_of, finding_on
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.registry import rule
from backlight.store.read.run import Run
from backlight.text import listed


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
    for kind in _Repetition.__subclasses__():
        if facts := facts_of(run, kind):
            yield finding_on(facts)
    if not facts_of(run, SeededAgain):  # the cause
        yield from _order(facts_of(run, SameOrder), limits)


class _Repetition(Fact):
    """A repetition within one process, with the texts of its finding: fields of the first fact are filled in.

    ``cited`` is the field that the evidence gives.
    """

    severity: ClassVar[Severity] = Severity.WARNING
    cited: ClassVar[str]
    title: ClassVar[str]
    detail: ClassVar[str]
    fix: ClassVar[str]
    refuted_if: ClassVar[str]

    def _finding(self, facts: Sequence[Self]) -> Finding:
        values = {**vars(self), "steps": 1 + self.step}
        if "others" in values:
            values["others"] = listed([f"`{name}`" for name in values["others"]])
        line = values.get("line", "")
        values["where"] = phrases.at_line(line)
        return self.finding(
            self.title.format_map(values),
            self.detail.format_map(values),
            severity=self.severity,
            evidence=(str(values[self.cited]), self.kind),
            line=line,
            fix=self.fix.format_map(values),
            refuted_if=self.refuted_if,
        )


class SeededAgain(_Repetition, rule="repeated_data", kind="seeded"):
    """A line sets the global generator to the same seed, the second time between steps."""

    seed: int
    line: str

    cited = "seed"
    title = "The global seed is set to {seed} again and again during training"
    detail = (
        "By step {step} `torch.manual_seed({seed})`{where} had been called twice since the first step. It "
        "sets the generator of the whole process: after each call shuffling, noise and dropout draw the same "
        "numbers."
    )
    fix = (
        "Seed once, before the first step. For samples with a seed use a generator of their own, "
        "`torch.Generator().manual_seed({seed})`, or `with torch.random.fork_rng():`."
    )
    refuted_if = "training draws no random numbers after these calls, or is to repeat them."


class StaleBatch(_Repetition, rule="repeated_data", kind="stale"):
    """The model is given the first batch of a loader at every step, which gave ``batches`` by then."""

    data: str
    batches: int

    cited = "data"
    severity = Severity.ERROR
    title = "Every step trains on the first batch, while the loader moves on"
    detail = (
        "Up to step {step} the model was given the first batch of the loader of {data} at every step, "
        "although the loader gave {batches} batches by then."
    )
    fix = "Give the model the batch of the loop: a name from outside the loop holds the first one."
    refuted_if = "the inputs of two steps differ."


class FirstBatchOnly(_Repetition, rule="repeated_data", kind="first"):
    """A loader was started anew ``epochs`` times, and gave the same batch each time."""

    sampler: str
    data: str
    epochs: int

    cited = "sampler"
    title = "Every step trains on the first batch of the loader"
    detail = (
        "The loader of {data} was started anew at least {epochs} times, and each time gave the same batch, "
        "of which it has more than one."
    )
    fix = "Iterate over the loader, `for batch in loader`, instead of calling `next(iter(loader))`."
    refuted_if = "only one batch is to be learned, as in a test of the model."


class ConstantSamples(_Repetition, rule="repeated_data", kind="constant"):
    """The first batches of a loader hold one sample only."""

    data: str
    batches: int

    cited = "data"
    title = "All samples of the loader are the same"
    detail = "The first {batches} batches of {data} hold one sample, again and again."
    fix = "Let `__getitem__` of {data} use its index."
    refuted_if = "the data is a placeholder, as in a benchmark."


class EqualWorkers(_Repetition, rule="repeated_data", kind="workers"):
    """Each worker gives the same batches of a stream."""

    data: str
    batches: int
    workers: int

    cited = "data"
    title = "Each of the {workers} workers gives the same batches"
    detail = (
        "The first {batches} batches of {data} are two batches, each given {workers} times: once by each "
        "worker. An epoch then holds every sample {workers} times."
    )
    fix = (
        "Split the stream in `__iter__` by `torch.utils.data.get_worker_info()`, as with "
        "`itertools.islice(samples, info.id, None, info.num_workers)`."
    )
    refuted_if = "an epoch is to hold every sample that often."


class CopiedGenerator(_Repetition, rule="repeated_data", kind="generator"):
    """Each worker has a copy of the generator from which a data set draws."""

    data: str
    workers: int
    attribute: str

    cited = "data"
    title = "The {workers} workers draw the same random numbers"
    detail = (
        "The samples of {data} draw from `{attribute}`, a generator that it holds. Each of the {workers} "
        "workers has a copy in the same state, and a new one in every epoch if workers are not persistent."
    )
    fix = (
        "Seed it per worker in a `worker_init_fn`, or draw from the global generator of torch or NumPy, "
        "which the loader seeds."
    )
    refuted_if = "the numbers that two workers draw differ."


class WorkersSeededAgain(_Repetition, rule="repeated_data", kind="worker_seed"):
    """New workers are given the seeds of the epoch before, for the generators that samples draw from."""

    data: str
    others: tuple[str, ...]
    line: str

    cited = "data"
    title = "The workers of the loader draw the same random numbers in every epoch"
    detail = (
        "Each epoch begins with new workers, and their `worker_init_fn`{where} seeds {others} with the "
        "numbers of the epoch before. The samples of {data} draw from there: noise and augmentation repeat "
        "themselves."
    )
    fix = (
        "Seed with `torch.initial_seed() % 2**32`, which differs between workers and epochs, leave out the "
        "`worker_init_fn` (the loader seeds `random`, NumPy and torch), or set `persistent_workers=True`."
    )
    refuted_if = "the samples of two epochs are to have the same noise."


class ChangedByReading(_Repetition, rule="repeated_data", kind="changed"):
    """Reading a sample changes what is stored, by the same function in each epoch."""

    data: str
    attribute: str
    before: float
    now: float
    line: str

    cited = "attribute"
    title = "Reading {data} changes the samples that it stores"
    detail = (
        "At the start of three epochs `{attribute}` of {data}{where} had other values, each the same linear "
        "function of those before (their mean was {before:.3g} in the first epoch and is {now:.3g} at step "
        "{step}): what scales a sample in place scales it again in every epoch."
    )
    fix = (
        "Copy the sample before it is changed, `x = self.{attribute}[index].clone()`, or write `x = x / 255`."
    )
    refuted_if = "the stored samples are to change from epoch to epoch."


class SingleRow(_Repetition, rule="repeated_data", kind="row"):
    """A field of a batch has one row, and ``others`` as many as there are samples."""

    field: str
    samples: int
    others: tuple[str, ...]

    cited = "field"
    severity = Severity.INFO
    title = "`{field}` has one row for the {samples} samples of a batch"
    detail = (
        "In the batches of the loader {others} have {samples} rows, and `{field}` has one: an operation with "
        "both uses it for every sample."
    )
    fix = "Look at what makes a batch of the samples, a `collate_fn` or a processor, for `{field}`."
    refuted_if = "`{field}` is the same for all samples."


class SameBatch(_Repetition, rule="repeated_data", kind="same"):
    """The inputs and the targets of ``equal`` steps were the same, in tensors that were made anew."""

    samples: int
    equal: int

    cited = "samples"
    title = "Every step trains on the same batch"
    detail = (
        "At {equal} of the first {steps} steps the model was given the same values, {samples} samples, in "
        "tensors that were made anew, and the loss the same targets."
    )
    fix = "Let the code that makes a batch draw other indices at each step."
    refuted_if = "only one batch is to be learned, or it holds all of the data."


class SameInputs(_Repetition, rule="repeated_data", kind="perhaps_same"):
    """The inputs of ``equal`` steps were the same, in tensors that were made anew."""

    samples: int
    equal: int

    cited = "samples"
    severity = Severity.INFO
    title = "Every step gives the model the same values"
    detail = (
        "At {equal} of the first {steps} steps the model was given the same values, {samples} samples, in "
        "tensors that were made anew."
    )
    fix = "If there are more samples, let the code that makes a batch draw other indices at each step."
    refuted_if = "only one batch is to be learned, or it holds all of the data."


class HeldBatch(_Repetition, rule="repeated_data", kind="held"):
    """The first steps use one batch of a loader that has ``batches``."""

    data: str
    batches: int

    cited = "data"
    severity = Severity.INFO
    title = "The run trains on one batch"
    detail = "The first {steps} steps used one batch of the loader of {data}, which has {batches}."
    fix = "Iterate over the loader in the training loop."
    refuted_if = "only one batch is to be learned, as in a test of the model."


class SameOrder(Fact, rule="repeated_data", kind="order"):
    """The first ``batches`` of an epoch are those of the one before, and their order is to differ."""

    sampler: str
    data: str
    batches: int
    epochs: int


class Inputs(Fact, event="input"):
    """A digest of what the model was given, and the ranks that are to have other data; empty if unknown."""

    digest: str
    ranks: tuple[int, ...]


def _order(facts: Sequence[SameOrder], limits: RepeatedDataLimits) -> Iterator[Finding]:
    for sampler in dict.fromkeys(fact.sampler for fact in facts):
        equal = [fact for fact in facts if fact.sampler == sampler]
        longest: dict[int, int] = {}
        for fact in equal:
            longest[fact.epochs] = max(longest.get(fact.epochs, 0), fact.batches)
        if sum(longest.values()) >= limits.order_batches:
            yield equal[0].finding(
                "The batches of every epoch come in the same order",
                f"The first {max(longest.values())} batches of {equal[0].data} in epoch {max(longest)} are "
                f"those of the epoch before, although their order comes from a {sampler}.",
                evidence=(sampler, "sampler"),
                fix=(
                    "Call `sampler.set_epoch(epoch)` before each epoch."
                    if sampler == "DistributedSampler"
                    else "Seed the random numbers, or a generator of the loader, once: not in every epoch."
                ),
                refuted_if="the indices of two epochs differ.",
            )


def _ranks(run: Run, limits: RepeatedDataLimits) -> Iterator[Finding]:
    """Find ranks whose gradients are averaged, and whose inputs are equal at every recorded step."""
    inputs: dict[tuple[int, int], dict[int, str]] = defaultdict(dict)
    groups: dict[tuple[int, int], tuple[int, ...]] = {}
    for fact in facts_of(run, Inputs):
        inputs[fact.attempt, fact.rank][fact.step] = fact.digest
        groups[fact.attempt, fact.rank] = fact.ranks
    for attempt, rank in sorted(inputs):
        digests, same = inputs[attempt, rank], [rank]
        for other in groups[attempt, rank]:
            theirs = inputs.get((attempt, other), {})
            steps = sorted(digests.keys() & theirs.keys())
            if (
                other > rank
                and len(steps) >= limits.rank_steps
                and all(digests[step] == theirs[step] for step in steps)
                and len({digests[step] for step in steps}) > 1
            ):
                same.append(other)
        if len(same) > 1:
            every = len(same) == len(groups[attempt, rank])
            named = listed([str(member) for member in same], len(same))
            yield Finding(
                severity=Severity.WARNING,
                title=f"{'All' if every else len(same)} ranks train on the same batches",
                detail=(
                    f"At each of the first {len(digests)} steps the model was given equal inputs on ranks "
                    f"{named}. Their gradients are averaged: each of them computes what the others do."
                ),
                subject=Subject(step=min(digests), rank=rank),
                evidence=(Evidence(f"events/{Inputs.event}", min(digests), len(same), "ranks"),),
                fix=(
                    "Give the loader a `DistributedSampler`, or seed what draws the batches with the rank: "
                    "`torch.manual_seed(seed + rank)`."
                ),
                refuted_if="the inputs of the ranks differ where they were not sampled.",
            )
            return
