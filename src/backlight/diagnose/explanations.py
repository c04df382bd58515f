"""Answers of ``check``, ``check --recompute``, ``nan`` and ``why-no-grad``."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from backlight.answer import Answer, ended
from backlight.diagnose.checkpointing.observer import CheckpointObserver, Region
from backlight.diagnose.missing_gradients.reasons import (
    FailedBackward,
    MissingCause,
    MissingGradients,
    ParameterState,
)
from backlight.diagnose.nan.tracer import NanOrigin, NanTracer
from backlight.diagnose.probes.hints import HintOutcome, HintResult, hint_lines
from backlight.diagnose.probes.observer import ProbeObserver
from backlight.diagnose.probes.result import ProbeResult
from backlight.records import Finding
from backlight.text import count, listed
from backlight.user_code import SourceLine

SHOWN = 8
"""Names of a list that are printed; --json has them all."""


@dataclass(frozen=True, kw_only=True)
class ObservedScript:
    """What was observed of a script."""

    script: str
    exit_code: int
    notes: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Regions(ObservedScript):
    """The checkpointed regions of the first steps."""

    steps: int
    backwards: int
    regions: Sequence[Region]


@dataclass(frozen=True, kw_only=True)
class Probes(ObservedScript):
    """Probes of the first step; ``line`` is that of its backward. ``hints`` were read in the files before."""

    line: SourceLine | None
    loss: float | None
    probes: Sequence[ProbeResult]
    hints: Sequence[HintResult]
    contradicted: Sequence[str] | None  # facts of good runs; None without --against


@dataclass(frozen=True, kw_only=True)
class Untrained:
    """A parameter that is not trained; ``when`` is the moment at which its reason was found."""

    parameter: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    cause: MissingCause
    text: str
    line: SourceLine | None
    when: str


@dataclass(frozen=True, kw_only=True)
class Missing(ObservedScript):
    """Parameters that are not trained, of all ``parameters``; ``nodes`` of graphs were followed."""

    steps: int
    backwards: int
    parameters: int
    nodes: int
    not_trained: Sequence[Untrained]
    failure: FailedBackward | None


@dataclass(frozen=True, kw_only=True)
class OriginRecord:
    """Origin of a value that is not finite: the operation, and what the value passed through then."""

    step: int
    value: str
    phase: str
    operation: str
    node: str
    shape: tuple[int, ...]
    dtype: str
    is_input: bool
    module: str
    parameter: str
    symptom: str
    modules: Sequence[str]
    parameters: Sequence[str]
    notes: Sequence[str]
    line: SourceLine | None
    own_line: SourceLine | None
    constant: SourceLine | None
    library_line: SourceLine | None
    is_zero_gradient: bool
    replaced_by: str
    replaced_at: SourceLine | None

    @classmethod
    def of(cls, origin: NanOrigin) -> OriginRecord:
        """Return the record of an origin."""
        names = (field.name for field in fields(cls))
        return cls(
            **{name: getattr(origin if hasattr(origin, name) else origin.record, name) for name in names}
        )


@dataclass(frozen=True, kw_only=True)
class NonFinite(ObservedScript):
    """The first value that is not finite and matters; ``vanished`` counts those that reached nothing."""

    steps: int
    backwards: int
    operations: int
    skipped_by_scaler: int
    origin: OriginRecord | None
    vanished: Mapping[str, int]


def _at(text: str, line: SourceLine | None) -> str:
    """Return a text with a line of the script and its source behind it."""
    return text if line is None else "  ".join(filter(None, (text, str(line), line.text)))


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def regions_answer(observer: CheckpointObserver, script: str, code: int) -> Answer:
    """Return each checkpointed region with its remarks."""
    record = Regions(
        script=script, exit_code=code, notes=observer.notes, steps=observer.steps,
        backwards=observer.backwards, regions=observer.regions,
    )  # fmt: skip
    facts = []
    for region in record.regions:
        calls = f"{region.mode}, {region.calls} calls, {region.recomputations} recomputations"
        facts.append(_at(f"{region.function}  {calls}", region.line))
        for remark in region.remarks:
            line = remark.line if remark.line != region.line else None
            facts.append(_at(f"  {remark.kind}: {remark.text}", line))
    amount = count(len(record.regions), "checkpointed region") if record.regions else "no checkpointed region"
    observed = f"({count(record.steps, 'step')}, {count(record.backwards, 'backward')})"
    return Answer(f"{amount} {observed}", record, tuple(facts), notes=(*record.notes, *ended(code)))


def probes_answer(
    observer: ProbeObserver,
    script: str,
    code: int,
    findings: Sequence[Finding] | None,
    hints: Sequence[HintResult] = (),
    contradicted: Sequence[str] | None = None,
) -> Answer:
    """Return the outcome of each probe; ``findings`` are those of watched steps, printed by their own.

    ``hints`` are those of the static reading with the answer of the run: what it withdraws is in no answer.
    """
    record = Probes(
        script=script, exit_code=code, notes=observer.notes, line=observer.line, loss=observer.loss,
        probes=observer.results, hints=[each for each in hints if each.is_shown],
        contradicted=contradicted,
    )  # fmt: skip
    loss = "" if record.loss is None else f", loss {record.loss:.4g}"
    outcomes = Counter(result.outcome.value for result in record.probes)
    failed = [result.probe.value for result in record.probes if result.fails]
    verdict = f"{count(len(record.probes), 'probe')}: " + ", ".join(f"{n} {o}" for o, n in outcomes.items())
    facts = []
    for result in record.probes:
        accepted = f"accepted ({result.accepted}): " if result.accepted else ""
        facts.append(f"{result.probe.value:<14} {result.outcome.value:<12} {accepted}{result.text}")
    verdict = f"{verdict} ({', '.join(failed)} failed)" if failed else verdict
    if record.hints:
        confirmed = sum(each.outcome is HintOutcome.CONFIRMED for each in record.hints)
        verdict += f"; {count(len(record.hints), 'hint')}, {confirmed} confirmed"
    facts += hint_lines(record.hints)
    return Answer(
        verdict,
        record,
        (_at(f"first step{loss}", record.line), *facts),
        notes=(*record.notes, *map(_how_to_accept, failed[:1]), *ended(code)),
        findings=None if findings is None else tuple(findings),
    )


def _how_to_accept(probe: str) -> str:
    return f'where it is meant to fail: backlight findings --accept check {probe} --reason "..."'


def nan_answer(tracer: NanTracer, script: str, code: int) -> Answer:
    """Return the origin of the first non-finite value, and how it spread."""
    origin = None if tracer.origin is None else OriginRecord.of(tracer.origin)
    record = NonFinite(
        script=script, exit_code=code, notes=tracer.notes, steps=tracer.observed_steps,
        backwards=tracer.backwards, operations=tracer.operations, skipped_by_scaler=tracer.skipped_steps,
        origin=origin, vanished=dict(tracer.vanished),
    )  # fmt: skip
    notes = list(record.notes)
    facts: tuple[str, ...] = ()
    if origin is None:
        parts = ((record.operations, "operation"), (record.backwards, "backward"), (record.steps, "step"))
        observed = ", ".join(count(*part) for part in parts)
        verdict = f"no loss, gradient or parameter was other than finite ({observed})"
        vanished = itertools.islice(record.vanished.items(), SHOWN)
        notes[:0] = [f"{n} times an infinity or NaN that reached none of these: {at}" for at, n in vanished]
    else:
        where = f" of {origin.module}" if origin.module else ""
        verdict = f"{origin.value} at step {origin.step}, in {origin.phase}: {_produced(origin)}{where}"
        facts = tuple(_spread(origin))
    if record.skipped_by_scaler:
        notes.append(f"{record.skipped_by_scaler} steps skipped by the gradient scaler are left out")
    return Answer(verdict, record, facts, notes=(*notes, *ended(code)))


def _spread(origin: OriginRecord) -> Iterable[str]:
    if origin.operation and origin.line is None:
        yield "line: not known (no frame of the script)"
    for label, line in (
        ("line:", origin.line), ("in the library:", origin.library_line), ("in backward:", origin.own_line),
        ("made of the infinity put in at:", origin.constant),
    ):  # fmt: skip
        if line is not None:
            yield _at(label, line)
    if origin.is_zero_gradient:
        by = f"`{origin.replaced_by}` leaves it out" if origin.replaced_by else "its gradient is 0"
        text = f"the value has no part in the loss: {by}; backward computes 0 times infinity for it"
        yield _at(text, None if origin.replaced_at == origin.line else origin.replaced_at)
        yield "fix: replace the input instead, as in sqrt(where(mask, x, 1)), so that the branch is finite"
    for label, text in (
        ("noticed in", origin.symptom), ("then spread over", listed(origin.modules, SHOWN)),
        ("parameters, in this order", listed(origin.parameters, SHOWN)),
    ):  # fmt: skip
        if text:
            yield f"{label}: {text}"
    yield from origin.notes


def _produced(origin: OriginRecord) -> str:
    if not origin.operation:
        return "no operation of this process made the gradients so: they came from another rank"
    tensor = f"[{_shape(origin.shape)}] {origin.dtype}"
    if origin.is_input:
        what = f"the parameter {origin.parameter}" if origin.parameter else f"a tensor {tensor}"
        return f"{what} was not finite before; {origin.operation} used it first"
    node = f" in {origin.node}" if origin.node else ""
    return f"produced by {origin.operation}{node}, output {tensor}"


def parameter_lines(rows: Iterable[ParameterState]) -> list[str]:
    """Return lines on parameters without a gradient; those that have one reason, with the reason once."""
    lines = []
    for reason, alike in itertools.groupby(rows, key=lambda row: row.reason):
        names = [f"{row.name} [{_shape(row.shape)}]" for row in alike]
        if reason is not None:
            many = len(names) > 1
            head = count(len(names), "parameter") if many else names[0]
            lines.append(_at(f"{head}  {reason.text}", reason.line))
            lines += [f"  {listed(names, SHOWN)}"] if many else []
    return lines


def missing_answer(missing: MissingGradients, script: str, code: int, printed: Mapping[str, str]) -> Answer:
    """Return the parameters that are not trained; the facts leave out the reasons ``printed`` already."""
    record = Missing(
        script=script, exit_code=code, notes=missing.notes, steps=missing.steps, backwards=missing.backwards,
        parameters=missing.watched, nodes=missing.nodes, failure=missing.failure,
        not_trained=[
            Untrained(
                parameter=row.name, aliases=row.aliases, shape=row.shape, cause=row.reason.cause,
                text=row.reason.text, line=row.reason.line, when=row.when,
            )
            for row in missing.rows if row.reason is not None
        ],
    )  # fmt: skip
    fresh = [row for row in missing.rows if row.reason and printed.get(row.name) != row.reason.text]
    facts = [*(["since then:"] if printed and fresh else []), *parameter_lines(fresh)]
    facts += [
        f"{name}  got a gradient later" for name in sorted(set(printed) - {r.name for r in missing.rows})
    ]
    if record.failure is not None:
        facts.append(_at(f"backward failed: {record.failure.text}", record.failure.line))
    parts = ((missing.watched, "parameter"), (missing.steps, "step"), (missing.backwards, "backward"))
    total = count(len(missing.rows), "parameter is", "parameters are")
    verdict = f"{total} not trained"
    if not missing.rows:
        sound = "every parameter gets a gradient and is in an optimizer"
        verdict = sound if record.failure is None else "backward failed"
    observed = ", ".join(count(*part) for part in parts)
    return Answer(f"{verdict} ({observed})", record, tuple(facts), notes=(*missing.notes, *ended(code)))
