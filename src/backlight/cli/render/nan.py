"""Prints the origin of the first non-finite value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backlight.cli.console import Page, line_json, source_line

if TYPE_CHECKING:
    from backlight.diagnose.nan.tracer import NanOrigin, NanTracer

SHOWN = 8
"""Names of a list that are printed; --json has them all."""


def print_origin(page: Page, tracer: NanTracer, code: int) -> None:
    """Print the origin, how it spread, and notes."""
    found = tracer.found
    looked = f"{tracer.operations} operations, {tracer.backwards} backwards, {tracer.steps + 1} steps"
    if found is None:
        page.say("no loss, gradient or parameter was other than finite", f" ({looked})")
    else:
        where = f" of {found.module}" if found.module else ""
        page.say(
            (f"{found.value} at step {found.step}, in {found.record.phase}: ", "bold red"),
            _origin(found),
            where,
        )
        if found.record.operation:
            page.say(
                "  line: ", (source_line(found.record.line) or "not known (no frame of the script)", "bold")
            )
        if found.record.own_line is not None:
            page.say("  in backward: ", source_line(found.record.own_line))
        if found.constant is not None:
            page.say("  made of the infinity put in at: ", source_line(found.constant))
        page.say("  noticed in: ", found.symptom)
        if found.modules:
            page.say("  then spread over: ", _some(found.modules))
        if found.parameters:
            page.say("  parameters, in this order: ", _some(found.parameters))
        for note in found.notes:
            page.say("  ", note)
    if tracer.skipped_steps:
        page.say(
            ("note: ", "dim"), f"{tracer.skipped_steps} steps skipped by the gradient scaler are left out"
        )
    if found is None:
        for spot, count in list(tracer.vanished.items())[:SHOWN]:
            page.say(
                ("note: ", "dim"), f"{count} times an infinity or NaN that reached none of these: {spot}"
            )
    for note in tracer.notes:
        page.say(("note: ", "dim"), note)
    if code:
        page.say(("note: ", "dim"), f"the script ended with exit code {code}")


def _origin(found: NanOrigin) -> str:
    shape = "x".join(map(str, found.record.shape)) or "scalar"
    if not found.record.operation:
        return "no operation of this process made the gradients so: they came from another rank"
    if found.is_input:
        what = (
            f"the parameter {found.parameter}"
            if found.parameter
            else f"a tensor [{shape}] {found.record.dtype}"
        )
        return f"{what} was not finite before; {found.record.operation} used it first"
    node = f" in {found.record.node}" if found.record.node else ""
    return f"produced by {found.record.operation}{node}, output [{shape}] {found.record.dtype}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def origin_as_json(tracer: NanTracer, script: str, code: int) -> dict[str, Any]:
    """Return the result as JSON types."""
    found = tracer.found
    return {
        "script": script,
        "exit_code": code,
        "steps": tracer.steps + 1,
        "backwards": tracer.backwards,
        "operations": tracer.operations,
        "skipped_by_scaler": tracer.skipped_steps,
        "found": None
        if found is None
        else {
            "step": found.step,
            "phase": found.record.phase,
            "value": found.value,
            "is_input": found.is_input,
            "operation": found.record.operation,
            "node": found.record.node,
            "module": found.module,
            "parameter": found.parameter,
            "shape": list(found.record.shape),
            "dtype": found.record.dtype,
            "place": line_json(found.record.line),
            "backward": line_json(found.record.own_line),
            "constant": line_json(found.constant),
            "symptom": found.symptom,
            "modules": found.modules,
            "parameters": found.parameters,
            "notes": found.notes,
        },
        "vanished": dict(tracer.vanished),
        "notes": tracer.notes,
    }
