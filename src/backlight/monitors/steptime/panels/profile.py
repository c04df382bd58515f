"""Panels of a stored profile: time by module; operators, their kinds, kernels, copies and idle time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
    title="Operators of a step",
    order=102,
    series=(
        "profile/operators",
        "profile/kernels",
        "profile/joined",
        "profile/kinds",
        "profile/device",
        "profile/optimizations",
        "profile/copies",
        "evidence/profile.json",
    ),
    note="Milliseconds of a traced step, what is called inside left out; of a device where there is one.",
    monitor="steptime",
)
def operators(source: Source) -> Drawn | NotMeasured:
    """List operators and their kinds, kernels and idle time of a device, copies, and optimisations."""
    profile = profile_of(source)
    if profile is None:
        return NONE
    device = profile.get("device")
    time = "host_ms" if device is None else "device_ms"
    tables = [_table(profile, spec, time) for spec in TABLES]
    if isinstance(device, dict) and isinstance(device.get("causes"), dict):
        cells = [
            [str(name).replace("_", " "), share(part)] for name, part in device["causes"].items() if part
        ]
        tables.insert(
            2, Figures("Idle time of the device by cause", ("Cause", "Share"), cells, frozenset({1}))
        )
    if not any(table.rows for table in tables):
        return NotMeasured("No step was traced.")
    remarks = [f"{line}." for line in (device or {}).get("statement", "").split("\n") if line]
    basis = profile.get("mfu_basis")
    if basis:
        reached = profile.get("mfu")
        remarks.append(
            f"MFU {share(reached)}: {basis}." if reached is not None else f"MFU not measured: {basis}."
        )
    return figures([table for table in tables if table.rows], remarks)


Cell = Callable[[dict[str, Any], str], str]
"""A row of the profile, and the key of its time, to a cell."""


def _text(key: str) -> Cell:
    return lambda row, _: str(row.get(key) or "")


def _count(key: str) -> Cell:
    return lambda row, _: count(row.get(key) or None)


def _ms(key: str) -> Cell:
    return lambda row, _: ms(row.get(key))


def _time(row: dict[str, Any], time: str) -> str:
    return ms(row.get(time))


def _share(row: dict[str, Any], _: str) -> str:
    return share(row.get("share"))


def _types(row: dict[str, Any], _: str) -> str:
    return f"{row['source']} → {row.get('target')}" if row.get("source") else "not recorded"


def _layout(row: dict[str, Any], _: str) -> str:
    contiguous = row.get("contiguous")
    return "not recorded" if contiguous is None else "same" if contiguous else "differs"


def _line(row: dict[str, Any], _: str) -> str:
    return str(row.get("line") or "not recorded")


TABLES: tuple[tuple[str, str, dict[str, Cell], frozenset[int]], ...] = (
    (
        "Operators",
        "operators",
        {"Operator": _text("name"), "Phase": _text("phase"), "Kind": _text("kind"), "Calls": _count("calls"),
         "Time": _time, "Of phase": _share},
        frozenset({3, 4, 5}),
    ),
    (
        "Kinds",
        "kinds",
        {"Kind": _text("name"), "Calls": _count("calls"), "Time": _time, "Share": _share},
        frozenset({1, 2, 3}),
    ),
    (
        "Kernels of the device",
        "kernels",
        {"Kernel": _text("name"), "Calls": _count("calls"), "Time": _time, "Share": _share},
        frozenset({1, 2, 3}),
    ),
    (
        "Operators and their backward, what they call included",
        "joined",
        {"Operator": _text("forward"), "Its backward": _text("backward"), "Calls": _count("calls"),
         "Forward": _ms("forward_ms"), "Backward": _ms("backward_ms")},
        frozenset({2, 3, 4}),
    ),
    (
        "Copies (aten::copy_)",
        "copies",
        {"Types": _types, "Layout": _layout, "Calls": _count("calls"), "Elements": _count("elements"),
         "Time": _time, "Of step": _share, "Line": _line},
        frozenset({2, 3, 4, 5}),
    ),
    (
        "Optimisations",
        "optimizations",
        {"Optimisation": _text("name"), "State": _text("state"), "Seen": _text("detail")},
        frozenset(),
    ),
)  # fmt: skip
"""Title, key in the profile, cells by the title of their column, and the columns that hold numbers."""


def _table(
    profile: dict[str, Any], spec: tuple[str, str, dict[str, Cell], frozenset[int]], time: str
) -> Figures:
    title, key, columns, numbers = spec
    rows = [r for r in rows_of(profile, key) if key != "operators" or r.get("share", 0) >= SMALL]
    cells = [[cell(row, time) for cell in columns.values()] for row in rows]
    return Figures(title, tuple(columns), cells, numbers)
