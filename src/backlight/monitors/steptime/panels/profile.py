"""Panels of a stored profile: time by module; operators, their kinds, kernels, copies and idle time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from backlight.monitors.steptime.model.evidence import StoredProfile, read_profile
from backlight.monitors.steptime.panels.flame_graph import bars
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import visible

ROWS = 60
"""Rows of a table that are shown; the stored file has them all."""

SMALL = 0.005
"""Share of a phase from which an operator is shown."""

NONE = NotMeasured("No profile was taken: backlight profile --out RUN SCRIPT takes one.")
NOT_TRACED = NotMeasured("No step was traced.")

Row = Mapping[str, Any]
Column = tuple[str, str, Callable[[Any], str]]
"""Title, key of the rows, and how a value is printed."""


def ms(value: Any) -> str:
    """Return milliseconds in print."""
    return f"{float(value):,.2f}" if isinstance(value, (int, float)) else "not measured"


def share(value: Any) -> str:
    """Return a share in print."""
    return f"{float(value):.1%}" if isinstance(value, (int, float)) else "not measured"


def count(value: Any) -> str:
    """Return a number of calls in print."""
    return f"{float(value):,.6g}" if value and isinstance(value, (int, float)) else ""


def text(value: Any) -> str:
    """Return a name in print, empty for none."""
    return str(value or "")


def table(title: str, rows: Sequence[Row], *columns: Column) -> dict[str, Any]:
    """Return a table as the page's drawer ``figures`` takes it, cut to what can be read."""
    return {
        "title": title,
        "columns": [name for name, _, _ in columns],
        "numbers": [at for at, column in enumerate(columns) if column[2] is not text],
        "rows": [[visible(shown(row.get(key))) for _, key, shown in columns] for row in rows[:ROWS]],
        "more": max(0, len(rows) - ROWS),
    }


def figures(tables: Sequence[dict[str, Any]], remarks: Sequence[str] = ()) -> Drawn:
    """Draw tables; rows that were cut off become remarks."""
    cut = [f"{more} more rows are in evidence/profile.json." for one in tables if (more := one.pop("more"))]
    return Drawn("figures", {"tables": list(tables)}, (), (*remarks, *cut))


@panel(
    "lines",
    title="Time by line",
    order=52,
    series=("profile/lines", "profile/stacks"),
    note=(
        "Host milliseconds of a clocked step by line, calls into libraries included, from samples of the "
        "training thread. In the flame graph each function lies on its caller, phases at the bottom; "
        "evidence/lines.speedscope.json opens in speedscope.app."
    ),
    monitor="steptime",
)
def lines(source: Source) -> Drawn | NotMeasured:
    """Draw the stacks, and list the lines, those with the most time first."""
    profile = read_profile(source.run)
    if profile is None:
        return NONE
    rows = [{**row, "line": row.get("line") or "no line of the script"} for row in profile.rows("lines")]
    if not rows:
        return NotMeasured("Too few samples of the stack were taken in steady steps.")
    listed = table(
        "", rows, ("Line", "line", text), ("Function", "function", text), ("Phase", "phase", text),
        ("Samples", "samples", count), ("Time", "ms", ms), ("Of phase", "share", share),
    )  # fmt: skip
    shown, drawn = figures([listed]), bars(profile.rows("stacks"))
    return replace(shown, kind="flame", data={"bars": drawn, **shown.data}) if drawn else shown


@panel(
    "modules",
    title="Time by module",
    order=53,
    series=("profile/modules",),
    note="Host milliseconds of a traced step, forward and backward; self time is without the modules inside.",
    monitor="steptime",
)
def modules(source: Source) -> Drawn | NotMeasured:
    """List the modules, those with the most self time first."""
    profile = read_profile(source.run)
    if profile is None:
        return NONE
    rows = [{**row, "name": row.get("name") or "(model)"} for row in profile.rows("modules")]
    if not rows:
        return NOT_TRACED
    rows.sort(key=lambda r: -(r.get("forward_exclusive_ms", 0) + r.get("backward_exclusive_ms", 0)))
    listed = table(
        "", rows, ("Module", "name", text), ("Calls", "calls", count), ("Forward", "forward_ms", ms),
        ("self", "forward_exclusive_ms", ms), ("Backward", "backward_ms", ms),
        ("self", "backward_exclusive_ms", ms), ("Recomputed", "recomputed_ms", ms),
    )  # fmt: skip
    missing = profile.content.get("backward_unattributed_ms")
    remark = f"{ms(missing)} ms of backward belong to no module: the loss, sums of gradients."
    return figures([listed], [remark] if missing else [])


@panel(
    "operators",
    title="Operators of a step",
    order=54,
    series=(
        *(
            f"profile/{key}"
            for key in ("operators", "kernels", "joined", "kinds", "device", "optimizations", "copies")
        ),
        "evidence/profile.json",
    ),
    note="Milliseconds of a traced step, what is called inside left out; of a device where there is one.",
    monitor="steptime",
)
def operators(source: Source) -> Drawn | NotMeasured:
    """List operators and their kinds, kernels and idle time of a device, copies, and optimisations."""
    profile = read_profile(source.run)
    if profile is None:
        return NONE
    device = profile.content.get("device") or {}
    tables = [one for one in _tables(profile, device) if one["rows"]]
    if not tables:
        return NOT_TRACED
    remarks = [f"{device['statement']}."] if device.get("statement") else []
    basis, reached = profile.content.get("mfu_basis"), profile.content.get("mfu")
    if basis:
        remarks.append(f"MFU {share(reached)}: {basis}.")
    return figures(tables, remarks)


def _tables(profile: StoredProfile, device: Mapping[str, Any]) -> list[dict[str, Any]]:
    spent = ("Time", "device_ms" if device else "host_ms", ms)
    part = ("Share", "share", share)
    calls = ("Calls", "calls", count)
    causes = [
        {"cause": name.replace("_", " "), "share": value}
        for name, value in (device.get("causes") or {}).items()
        if value
    ]
    layouts = {None: "not recorded", True: "same", False: "differs"}
    copies = [
        {
            **row,
            "types": f"{row['source']} → {row.get('target')}" if row.get("source") else "not recorded",
            "layout": layouts[row.get("contiguous")],
            "line": row.get("line") or "not recorded",
        }
        for row in profile.rows("copies")
    ]
    return [
        table(
            "Operators", [row for row in profile.rows("operators") if row.get("share", 0) >= SMALL],
            ("Operator", "name", text), ("Phase", "phase", text), ("Kind", "kind", text), calls, spent,
            ("Of phase", "share", share),
        ),
        table("Kinds", profile.rows("kinds"), ("Kind", "name", text), calls, spent, part),
        table("Idle time of the device by cause", causes, ("Cause", "cause", text), part),
        table(
            "Kernels of the device", profile.rows("kernels"), ("Kernel", "name", text), calls, spent, part
        ),
        table(
            "Operators and their backward, what they call included", profile.rows("joined"),
            ("Operator", "forward", text), ("Its backward", "backward", text), calls,
            ("Forward", "forward_ms", ms), ("Backward", "backward_ms", ms),
        ),
        table(
            "Copies (aten::copy_)", copies, ("Types", "types", text), ("Layout", "layout", text), calls,
            ("Elements", "elements", count), spent, ("Of step", "share", share), ("Line", "line", text),
        ),
        table(
            "Optimisations", profile.rows("optimizations"), ("Optimisation", "name", text),
            ("State", "state", text), ("Seen", "detail", text),
        ),
    ]  # fmt: skip
