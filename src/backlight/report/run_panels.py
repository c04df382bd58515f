"""Panels of every run: the user's scalars, events, fingerprint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backlight.findings.limits import declared
from backlight.report.charts import NUMBERS, Axis, Line, chart, spans_decades
from backlight.report.evidence_links import matching_segments
from backlight.report.panel import Drawn, NotMeasured, in_order, panel
from backlight.report.source import Source
from backlight.report.verdict import describe_cost
from backlight.store.format.schema import COST
from backlight.text import listed, number, visible

MAX_CHARTS = 40
"""Charts of user scalars on one page."""


@panel("user_scalars", title="Your scalars", order=60, series=("scalars", "user"))
def user_scalars(source: Source) -> Drawn | NotMeasured:
    """Draw each scalar that was given to ``watch.log``."""
    others = [entry for entry in in_order() if entry.monitor in source.run.monitors]
    names = [
        name
        for name in source.run.scalar_names(source="user")
        if not any(matching_segments(f"user/{name}", other) for other in others)
    ]
    charts = []
    for name in names[:MAX_CHARTS]:
        scalar = source.scalar(name, source="user")
        if not len(scalar.steps):
            continue
        line = Line(visible(name), scalar.steps, scalar.values, tone="first")
        axis = Axis("", log=spans_decades(scalar.values, factor=1000.0))
        numbers = max(1024, 2 * NUMBERS // len(names))
        charts.append(chart([line], axis, title=visible(name), numbers=numbers))
    if not charts:
        return NotMeasured("Nothing was logged with watch.log(name=value).")
    remarks = (
        (f"{len(names)} scalars were logged; the first {MAX_CHARTS} are drawn.",)
        if len(names) > MAX_CHARTS
        else ()
    )
    return Drawn("lines", {"charts": charts, "small": True}, (), remarks)


MAX_ROWS = 200
"""Rows of the table; an event that repeats at every step is one row with a count."""

ELSEWHERE = {COST, "unmeasured", "config"}
"""Kinds that other parts of the page show, next to those that a panel declares."""


@panel("events", title="Events", order=120, series=("events",), place="details")
def events(source: Source) -> Drawn:
    """List the events of the run; equal events in a row are one line with how often they came."""
    elsewhere = ELSEWHERE.union(*(entry.events for entry in in_order()))
    listed_events = [event for event in source.run.events() if event.kind not in elsewhere]
    if not listed_events:
        return Drawn("words", {"text": "None was noted: no warning, no exception, no change of parameters."})
    rows: list[dict[str, Any]] = []
    for event in listed_events:
        text = _told(event.payload)
        if rows and (rows[-1]["kind"], rows[-1]["text"]) == (event.kind, text):
            rows[-1]["times"] += 1
            rows[-1]["until"] = event.step
            continue
        rows.append({"step": event.step, "until": event.step, "kind": event.kind, "text": text, "times": 1})
    remarks: tuple[str, ...] = ()
    if len(rows) > MAX_ROWS:
        remarks = (f"{len(rows):,} different events were noted; the first {MAX_ROWS} are listed.",)
    cells = [_row(**row) for row in rows[:MAX_ROWS]]
    return Drawn(
        "listing", {"name": "Events", "heads": ("Step", "Event", "What"), "rows": cells}, (), remarks
    )


def _row(step: int | None, until: int | None, kind: str, text: str, times: int) -> tuple[str, str, str]:
    """Return one row of the table: an event that came several times in a row is one."""
    at = "" if step is None else number(step)
    if times > 1 and until is not None and until != step:
        at = f"{at} to {number(until)}"
    repeated = f" ({number(times)} times)" if times > 1 else ""
    return at, visible(kind).replace("_", " "), f"{text}{repeated}"


def _told(payload: Mapping[str, Any]) -> str:
    return "; ".join(f"{visible(key).replace('_', ' ')}: {_value(value)}" for key, value in payload.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + _told(value) + "}"
    if isinstance(value, (list, tuple)):
        return listed([_value(inner) for inner in value], 5)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    return visible(value)


@panel("hints", title="Hints", order=105, series=(), place="details", optional=True)
def hints(source: Source) -> Drawn | NotMeasured:
    """List the hints, advice that a sound run may get."""
    rows = [
        tuple(map(visible, (hint.rule.replace("_", " "), hint.title, hint.detail, hint.fix)))
        for hint in source.hints
    ]
    if not rows:
        return NotMeasured("The rules have no hints.")
    heads = ("Rule", "Hint", "Detail", "Fix")
    return Drawn("listing", {"name": "Hints", "heads": heads, "figures": (), "rows": rows})


@panel(
    "thresholds",
    title="Thresholds",
    order=110,
    series=("thresholds",),
    note="The limits of the rules of the monitors that watched; docs/findings has their reasons.",
    place="details",
)
def thresholds(source: Source) -> Drawn | NotMeasured:
    """List the limits by monitor, those that were overridden first."""
    rows = []
    for monitor in source.run.monitors:
        changed = source.run.overrides.get(monitor, {})
        for name, field in declared(monitor).items():
            default: Any = field.default
            value = f"{number(changed[name], 6)} (overridden)" if name in changed else number(default, 6)
            rows.append((name not in changed, visible(monitor), name, value, field.metadata["reason"]))
    if not rows:
        return NotMeasured("The monitors that watched have no rules with limits.")
    heads = ("Monitor", "Threshold", "Value", "Meaning")
    return Drawn(
        "listing",
        {"name": "Thresholds", "heads": heads, "figures": (2,), "rows": [r[1:] for r in sorted(rows)]},
    )


@panel(
    "fingerprint",
    title="Fingerprint",
    order=130,
    series=("fingerprint", "scalars/cost", "events/cost", "events/sampling"),
    note="What must agree before runs are compared, and the cost of watching.",
    place="details",
)
def fingerprint(source: Source) -> Drawn | NotMeasured:
    """List the fingerprint of the lowest rank of the newest attempt, and the tree of modules."""
    stored = source.run.fingerprint()
    if stored is None:
        return NotMeasured("No fingerprint was stored: the process ended before its first step.")
    rows: list[tuple[str, str]] = [
        ("script", stored.script),
        ("script content", stored.script_hash),
        ("arguments", " ".join(stored.arguments) or "none"),
        ("redacted", ", ".join(stored.redacted)),
        ("parameters", f"{stored.parameter_count:,} in {len(source.parameters):,} tensors"),
        ("types", _pairs({name: f"{amount:,}" for name, amount in stored.dtypes.items()})),
        ("optimizers", ", ".join(stored.optimizers)),
        ("hyperparameters", _pairs(stored.hyperparameters)),
        ("device", stored.device),
        ("host", stored.host),
        ("processes", str(stored.world_size)),
        ("versions", _pairs(stored.versions)),
        ("flags", _pairs(stored.flags)),
        ("module tree", stored.module_hash),
        ("run id", source.run.run_id),
        ("time in backlight", describe_cost(source)),
    ]
    tree = [(visible(name) or "(model)", visible(kind)) for name, kind in stored.modules]
    return Drawn("table", {"rows": [(key, visible(value)) for key, value in rows if value], "tree": tree})


def _pairs(pairs: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in pairs.items() if value)
