"""Panels of a stored profile: modules, operators, kinds of operation, copies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.source import Source
from backlight.text import visible

NAME = "profile.json"

ROWS = 60
"""Rows of a table that are shown; profile.json has them all."""

NONE = NotMeasured("No profile was taken: backlight profile --out RUN SCRIPT takes one.")


@dataclass(frozen=True, slots=True)
class Figures:
    """A table: titles of its columns, rows of text, and the columns that hold numbers."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    numbers: frozenset[int]


def profile_of(source: Source) -> dict[str, Any] | None:
    """Return the last profile of a run; None where there is none that can be read."""
    paths = source.evidence(f"/{NAME}")
    for path in reversed(paths):
        try:
            found = json.loads(source.run.read_evidence(path))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return None


def rows_of(profile: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the rows of one table, those that are none left out; empty where it was not measured."""
    listed = profile.get(key)
    return [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []


def figures(tables: Sequence[Figures], remarks: Sequence[str] = ()) -> Drawn:
    """Return tables as the page's drawer ``figures`` takes them, cut to what can be read."""
    data, notes = [], list(remarks)
    for table in tables:
        data.append(
            {
                "title": table.title,
                "columns": list(table.columns),
                "numbers": sorted(table.numbers),
                "rows": [[visible(cell) for cell in row] for row in table.rows[:ROWS]],
            }
        )
        if len(table.rows) > ROWS:
            notes.append(f"{len(table.rows) - ROWS} more rows are in evidence/{NAME}.")
    return Drawn("figures", {"tables": data}, (), tuple(notes))


def ms(value: Any) -> str:
    """Return milliseconds in print."""
    return f"{float(value):,.2f}" if isinstance(value, (int, float)) else "not measured"


def share(value: Any) -> str:
    """Return a share in print."""
    return f"{float(value):.1%}" if isinstance(value, (int, float)) else "not measured"


def count(value: Any) -> str:
    """Return a number of calls in print."""
    return f"{float(value):,.6g}" if isinstance(value, (int, float)) else ""


@panel(
    "modules",
    title="Time by module",
    order=101,
    series=("profile/modules",),
    note="Host milliseconds of a traced step, forward and backward; own time is without the modules inside.",
    monitor="steptime",
)
def modules(source: Source) -> Drawn | NotMeasured:
    """List the modules, those with the most time of their own first."""
    profile = profile_of(source)
    if profile is None:
        return NONE
    rows = rows_of(profile, "modules")
    if not rows:
        return NotMeasured("No step was traced.")
    keys = ("forward_ms", "forward_exclusive_ms", "backward_ms", "backward_exclusive_ms", "recomputed_ms")
    rows.sort(key=lambda r: -(r.get("forward_exclusive_ms", 0) + r.get("backward_exclusive_ms", 0)))
    table = Figures(
        "",
        ("Module", "Calls", "Forward", "own", "Backward", "own", "Recomputed"),
        [
            [row.get("name") or "(model)", count(row.get("calls")), *(ms(row.get(k)) for k in keys)]
            for row in rows
        ],
        frozenset(range(1, 7)),
    )
    missing = profile.get("backward_unattributed_ms")
    remark = (
        f"{ms(missing)} ms of backward belong to no module: the loss, sums of gradients." if missing else ""
    )
    return figures([table], [remark] if remark else [])


SMALL = 0.005
"""Share of a phase from which an operator is shown."""


@panel(
    "operators",
    title="Operators by phase",
    order=102,
    series=("profile/operators", "profile/kernels", "profile/joined", "evidence/profile.json"),
    note="Milliseconds of a traced step, what is called inside left out; of a device where there is one.",
    monitor="steptime",
)
def operators(source: Source) -> Drawn | NotMeasured:
    """List operators by phase, kernels of a device, and operators joined with their backward."""
    profile = profile_of(source)
    if profile is None:
        return NONE
    rows = [r for r in rows_of(profile, "operators") if r.get("share", 0) >= SMALL]
    if not rows:
        return NotMeasured("No step was traced.")
    on_device = profile.get("device") is not None
    key = "device_ms" if on_device else "host_ms"
    tables = [
        Figures(
            "Operators",
            ("Operator", "Phase", "Kind", "Calls", "Time", "Of phase"),
            [
                [*(str(r.get(k) or "") for k in ("name", "phase", "kind")), count(r.get("calls") or None),
                 ms(r.get(key)), share(r.get("share"))]
                for r in rows
            ],
            frozenset({3, 4, 5}),
        )
    ]  # fmt: skip
    kernels = rows_of(profile, "kernels")
    if kernels:
        tables.append(
            Figures(
                "Kernels of the device",
                ("Kernel", "Calls", "Time", "Share"),
                [[str(r.get("name")), count(r.get("calls")), ms(r.get("device_ms")), share(r.get("share"))]
                 for r in kernels],
                frozenset({1, 2, 3}),
            )
        )  # fmt: skip
    joined = rows_of(profile, "joined")
    if joined:
        tables.append(
            Figures(
                "Operators and their backward, what they call included",
                ("Operator", "Backward", "Calls", "Forward", "Backward"),
                [[str(r.get("forward")), str(r.get("backward")), count(r.get("calls")),
                  ms(r.get("forward_ms")), ms(r.get("backward_ms"))]
                 for r in joined],
                frozenset({2, 3, 4}),
            )
        )  # fmt: skip
    return figures(tables)


@panel(
    "kinds",
    title="Kinds of operation",
    order=103,
    series=("profile/kinds", "profile/device", "profile/optimizations"),
    note="What the operators of a traced step do, why a device was idle, and which optimisations are on.",
    monitor="steptime",
)
def kinds(source: Source) -> Drawn | NotMeasured:
    """List kinds, causes of idle time, and optimisations."""
    profile = profile_of(source)
    if profile is None:
        return NONE
    tables = []
    device = profile.get("device")
    rows = rows_of(profile, "kinds")
    if rows:
        key = "device_ms" if device else "host_ms"
        cells = [
            [str(r.get("name")), count(r.get("calls")), ms(r.get(key)), share(r.get("share"))] for r in rows
        ]
        tables.append(Figures("Kinds", ("Kind", "Calls", "Time", "Share"), cells, frozenset({1, 2, 3})))
    if isinstance(device, dict):
        tables.append(_idle(device))
    active = rows_of(profile, "optimizations")
    if active:
        cells = [[str(r.get(k, "")) for k in ("name", "state", "detail")] for r in active]
        tables.append(Figures("Optimisations", ("Optimisation", "State", "Seen"), cells, frozenset()))
    if not tables:
        return NotMeasured("No step was traced.")
    remarks = [f"{line}." for line in (device or {}).get("statement", "").split("\n") if line]
    basis = profile.get("mfu_basis")
    if basis:
        reached = profile.get("mfu")
        remarks.append(
            f"MFU {share(reached)}: {basis}." if reached is not None else f"MFU not measured: {basis}."
        )
    return figures(tables, remarks)


def _idle(device: dict[str, Any]) -> Figures:
    causes = device.get("causes")
    parts = causes.items() if isinstance(causes, dict) else ()
    cells = [[str(name).replace("_", " "), share(part)] for name, part in parts if part]
    return Figures("Idle time of the device by cause", ("Cause", "Share"), cells, frozenset({1}))


@panel(
    "copies",
    title="Copies",
    order=104,
    series=("profile/copies",),
    note="Calls of aten::copy_ in a traced step by type, layout and line of Python.",
    monitor="steptime",
)
def copies(source: Source) -> Drawn | NotMeasured:
    """List copies, the most expensive first."""
    profile = profile_of(source)
    if profile is None:
        return NONE
    if profile.get("copies") is None:
        return NotMeasured("No step was traced.")
    rows = rows_of(profile, "copies")
    if not rows:
        return NotMeasured("The traced step copied nothing.")
    key = "device_ms" if profile.get("device") else "host_ms"
    cells = [
        [_types(r), _layout(r.get("contiguous")), count(r.get("calls")), count(r.get("elements")),
         ms(r.get(key)), share(r.get("share")), str(r.get("line") or "not recorded")]
        for r in rows
    ]  # fmt: skip
    titles = ("Types", "Layout", "Calls", "Elements", "Time", "Of step", "Line")
    return figures([Figures("", titles, cells, frozenset({2, 3, 4, 5}))])


def _types(row: dict[str, Any]) -> str:
    return f"{row['source']} → {row.get('target')}" if row.get("source") else "not recorded"


def _layout(contiguous: Any) -> str:
    return "not recorded" if contiguous is None else "same" if contiguous else "differs"
