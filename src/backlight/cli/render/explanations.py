"""Prints what ``check``, ``checkpointing``, ``nan`` and ``why-no-grad`` found, as text or JSON."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from backlight import codec
from backlight.cli.console import Page, line_json
from backlight.records import Finding
from backlight.text import count, listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from backlight.diagnose.checkpointing.observer import CheckpointObserver
    from backlight.diagnose.missing_gradients.reasons import MissingGradients, Row
    from backlight.diagnose.nan.tracer import NanOrigin, NanTracer
    from backlight.diagnose.probes.observer import ProbeObserver

SHOWN = 8
"""Names of a list that are printed; --json has them all."""


def _print_notes(page: Page, notes: Iterable[str], code: int) -> None:
    for note in notes:
        page.note(note)
    if code:
        page.note(f"the script ended with exit code {code}")


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def print_regions(page: Page, observer: CheckpointObserver, code: int) -> None:
    """Print each checkpointed region with its remarks."""
    regions = observer.regions
    found = f"{len(regions) or 'no'} checkpointed region{'s' if len(regions) > 1 else ''}"
    page.say((found, "bold"), f" ({count(observer.steps, 'step')}, {count(observer.backwards, 'backward')})")
    for region in regions:
        calls = f"  {region.mode}, {region.calls} calls, {region.recomputations} recomputations"
        page.sourced((region.function, "bold"), calls, line=region.line, indent=2)
        for remark in region.remarks:
            line = remark.line if remark.line != region.line else None
            page.sourced("  ", (f"{remark.kind}: ", "yellow"), remark.text, line=line)
    _print_notes(page, observer.notes, code)


def regions_as_json(observer: CheckpointObserver, script: str, code: int) -> dict[str, Any]:
    """Return the regions as JSON types."""
    return {
        "script": script,
        "exit_code": code,
        "steps": observer.steps,
        "backwards": observer.backwards,
        "regions": [
            {
                "function": region.function,
                "reentrant": region.reentrant is not False,
                "mode": region.mode,
                "preserve_rng_state": region.preserves,
                "place": line_json(region.line),
                "calls": region.calls,
                "recomputations": region.recomputations,
                "remarks": [
                    {"kind": r.kind, "text": r.text, "place": line_json(r.line)} for r in region.remarks
                ],
            }
            for region in observer.regions
        ],
        "notes": observer.notes,
    }


def print_origin(page: Page, tracer: NanTracer, code: int) -> None:
    """Print the origin of the first non-finite value, how it spread, and notes."""
    found, notes = tracer.found, list(tracer.notes)
    if found is None:
        steps = count(tracer.observed_steps, "step")
        observed = f"{count(tracer.operations, 'operation')}, {count(tracer.backwards, 'backward')}, {steps}"
        page.sentence("no loss, gradient or parameter was other than finite", f" ({observed})")
        vanished = list(tracer.vanished.items())[:SHOWN]
        notes = [
            f"{n} times an infinity or NaN that reached none of these: {at}" for at, n in vanished
        ] + notes
    else:
        where = f" of {found.module}" if found.module else ""
        record = found.record
        head = f"{found.value} at step {found.step}, in {record.phase}: "
        page.sentence((head, "bold red"), _origin(found), where)
        if record.operation and record.line is None:
            page.say("  line: not known (no frame of the script)")
        for label, line in (
            ("line:", record.line),
            ("in backward:", record.own_line),
            ("made of the infinity put in at:", found.constant),
        ):
            if line is not None:
                page.sourced(f"  {label}", line=line)
        for label, text in (
            ("noticed in", found.symptom),
            ("then spread over", listed(found.modules, SHOWN)),
            ("parameters, in this order", listed(found.parameters, SHOWN)),
        ):
            if text:
                page.sentence(f"  {label}: {text}", indent=4)
        for note in found.notes:
            page.sentence(f"  {note}", indent=4)
    if tracer.skipped_steps:
        page.note(f"{tracer.skipped_steps} steps skipped by the gradient scaler are left out")
    _print_notes(page, notes, code)


def _origin(found: NanOrigin) -> str:
    record = found.record
    if not record.operation:
        return "no operation of this process made the gradients so: they came from another rank"
    tensor = f"[{_shape(record.shape)}] {record.dtype}"
    if found.is_input:
        what = f"the parameter {found.parameter}" if found.parameter else f"a tensor {tensor}"
        return f"{what} was not finite before; {record.operation} used it first"
    node = f" in {record.node}" if record.node else ""
    return f"produced by {record.operation}{node}, output {tensor}"


_COLOURS = {"passed": "green", "failed": "bold red", "undecided": "yellow", "not probed": "dim"}


def print_probes(page: Page, observer: ProbeObserver, code: int) -> None:
    """Print the outcome of each probe."""
    loss = "" if observer.loss is None else f", loss {observer.loss:.4g}"
    page.sourced(("first step", "bold"), loss, line=observer.line)
    for result in observer.results:
        outcome = result.outcome.value
        head = f"  {result.probe.value:<14} ", (f"{outcome:<12}", _COLOURS[outcome])
        page.sentence(*head, result.text, indent=29)
    _print_notes(page, observer.notes, code)


def probes_as_json(
    observer: ProbeObserver, script: str, code: int, findings: Sequence[Finding] | None = None
) -> dict[str, Any]:
    """Return the outcome of each probe as JSON types, and the findings of watched steps."""
    return {
        "script": script,
        "exit_code": code,
        "place": line_json(observer.line),
        "loss": observer.loss,
        "probes": [
            {"probe": r.probe.value, "outcome": r.outcome.value, "text": r.text} for r in observer.results
        ],
        **({} if findings is None else {"findings": codec.plain(findings)}),
        "notes": observer.notes,
    }


_ORIGIN = ("step", "value", "is_input", "module", "parameter", "symptom", "modules", "parameters", "notes")
_RECORD = ("phase", "operation", "node", "dtype")


def origin_as_json(tracer: NanTracer, script: str, code: int) -> dict[str, Any]:
    """Return the origin as JSON types."""
    found = tracer.found
    return {
        "script": script,
        "exit_code": code,
        "steps": tracer.observed_steps,
        "backwards": tracer.backwards,
        "operations": tracer.operations,
        "skipped_by_scaler": tracer.skipped_steps,
        "found": found and {
            **{name: getattr(found, name) for name in _ORIGIN},
            **{name: getattr(found.record, name) for name in _RECORD},
            "shape": list(found.record.shape),
            "place": line_json(found.record.line),
            "backward": line_json(found.record.own_line),
            "constant": line_json(found.constant),
        },
        "vanished": dict(tracer.vanished),
        "notes": tracer.notes,
    }  # fmt: skip


def print_parameters(page: Page, rows: Iterable[Row]) -> None:
    """Print parameters without a gradient; those that have one reason, with the reason once."""
    for reason, alike in itertools.groupby(rows, key=lambda row: row.reason):
        names = [f"{row.name} [{_shape(row.shape)}]" for row in alike]
        if reason is not None:
            many = len(names) > 1
            head = count(len(names), "parameter") if many else names[0]
            page.sourced("  ", (head, "bold"), "  ", (reason.text, "yellow"), line=reason.line)
            if many:
                page.sentence(f"    {listed(names, SHOWN)}", indent=4)


def print_missing(page: Page, answer: MissingGradients, code: int, printed: dict[str, str]) -> None:
    """Print what is new since the rows ``printed`` before the first backward, and the total."""
    parts = ((answer.watched, "parameter"), (answer.steps, "step"), (answer.backwards, "backward"))
    watched = f" ({', '.join(count(*part) for part in parts)})"
    fresh = [row for row in answer.rows if row.reason and printed.get(row.name) != row.reason.text]
    if fresh:
        page.say(("since then:" if printed else "found:", "bold"))
        print_parameters(page, fresh)
    for name in sorted(set(printed) - {row.name for row in answer.rows}):
        page.say("  ", (name, "bold"), "  got a gradient later")
    if answer.failure is not None:
        page.sourced(("backward failed: ", "red"), answer.failure.text, line=answer.failure.line)
    if answer.rows:
        total = count(len(answer.rows), "parameter is", "parameters are")
        page.sentence((f"{total} not trained", "bold"), watched)
    elif answer.failure is None:
        page.sentence("every parameter gets a gradient and is in an optimizer", watched)
    _print_notes(page, answer.notes, code)


def missing_as_json(answer: MissingGradients, script: str, code: int) -> dict[str, Any]:
    """Return the parameters without a gradient as JSON types."""
    failure = answer.failure
    return {
        "script": script,
        "exit_code": code,
        "parameters": answer.watched,
        "steps": answer.steps,
        "backwards": answer.backwards,
        "nodes": answer.nodes,
        "not_trained": [
            {
                "parameter": row.name,
                "aliases": list(row.aliases),
                "shape": list(row.shape),
                "cause": row.reason.cause.value,
                "text": row.reason.text,
                "place": line_json(row.reason.line),
                "found": row.when,
            }
            for row in answer.rows
            if row.reason is not None
        ],
        "failure": failure and {
            "text": failure.text, "place": line_json(failure.line), "saved": line_json(failure.saved),
        },
        "notes": answer.notes,
    }  # fmt: skip
