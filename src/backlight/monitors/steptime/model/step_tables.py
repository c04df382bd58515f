"""Tables of a profile and of memory, from the JSON types that a command prints and a run directory stores."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from backlight.answer import Column, Table, calls, ms, share, word
from backlight.text import count, duration, percent, scaled, size
from backlight.trace.classification import ENGINE, LAYOUTS

SMALL = 0.005
"""Share of a phase from which an operator is shown, and of a step from which a module of the tree is."""

Content = Mapping[str, Any]


def profile_tables(content: Content) -> dict[str, Table]:
    """Return the tables of a profile by name; those that have no rows are left out."""
    tables = {**_clocked(content), **_traced(content)}
    return {name: table for name, table in tables.items() if table.rows}


def _clocked(content: Content) -> dict[str, Table]:
    phases = [{"name": name.replace("_", " "), **row} for name, row in (content.get("phases") or {}).items()]
    phases += [
        {"name": f"optimizer {row['number']}: {row['type']}", **row}
        for row in content.get("optimizers") or ()
    ]
    sampling = content.get("sampling")
    sampled = sampling and (
        f"lines are from {count(sampling['samples'], 'sample')} of the training thread, which cost "
        f"{percent(sampling['cost'])} of a core; longest time without one "
        f"{duration(sampling['longest_gap_ms'] / 1e3)}"
    )
    of_host = "times of phases are of the host, which runs ahead of the device; --json has device_phases"
    basis, reached = content.get("mfu_basis"), content.get("mfu")
    of_host = of_host if content.get("device_phases") else ""
    mfu = f"MFU {'not measured' if reached is None else share(reached)}: {basis}" if basis else ""
    tree = [row for row in content.get("module_tree") or () if row["share"] >= SMALL]
    return {
        "phases": Table(
            (
                word("phase", "name"), Column("median ms", "median_ms", ms), Column("p95 ms", "p95_ms", ms),
                Column("MAD ms", "mad_ms", ms), Column("share", "share", share),
            ),
            phases, brief=20, notes=tuple(filter(None, (of_host, mfu))),
        ),
        "lines": Table(
            (
                word("line", _line), word("phase", lambda row: row["phase"].replace("_", " ")),
                Column("samples", "samples", calls), Column("ms", "ms", ms),
                Column("of phase", "share", share),
            ),
            content.get("lines") or (), notes=(sampled,) if sampled else (),
        ),
        "module_tree": Table(
            (
                word("module, clocked steps", lambda row: f"{'  ' * row['depth']}{row['name'] or '(model)'}"),
                Column("total ms", "total_ms", ms), Column("self ms", "self_ms", ms),
                Column("of step", "share", share),
            ),
            tree, brief=24,
        ),
    }  # fmt: skip


def _traced(content: Content) -> dict[str, Table]:
    rows = partial(_rows, content)
    device = content.get("device") or {}
    spent = Column("device ms" if device else "host ms", "device_ms" if device else "host_ms", ms, adds=True)
    called = Column("calls", "calls", calls)
    part = Column("share", "share", share, adds=True)
    overhead = content.get("tracing_overhead")
    slowed = overhead and (
        f"traced steps took {overhead:.2f} times as long as clocked ones; times of steps and phases are from "
        "the clocked ones"
    )
    unattributed = content.get("backward_unattributed_ms")
    of_none = f"{ms(unattributed or 0.0)} ms of backward belong to no module: the loss, sums of gradients"
    notes = (slowed, of_none if unattributed else "", *(content.get("trace_notes") or ()))
    causes = [
        (name.replace("_", " "), value) for name, value in (device.get("causes") or {}).items() if value
    ]
    return {
        "traced_optimizers": Table(
            (
                word(f"optimizer, {'device' if device else 'host'}, traced", "type"),
                Column("steps", "steps"), Column("median ms", "median_ms", ms),
                Column("p95 ms", "p95_ms", ms), Column("max ms", "max_ms", ms),
            ),
            rows("traced_optimizers"),
        ),
        "modules": Table(
            (
                word("module, traced", lambda row: row["name"] or "(model)"), called,
                Column("fwd ms", "forward_ms", ms), Column("self", "forward_exclusive_ms", ms),
                Column("bwd ms", "backward_ms", ms), Column("self", "backward_exclusive_ms", ms),
                Column("recomputed", "recomputed_ms", lambda value: ms(value) if value else ""),
            ),
            sorted(rows("modules"), key=lambda m: -(m["forward_exclusive_ms"] + m["backward_exclusive_ms"])),
            notes=tuple(filter(None, notes)),
        ),
        "operators": Table(
            (
                word("operator", lambda row: row["name"].removeprefix(ENGINE)), word("phase", "phase"),
                word("kind", "kind"), called, spent,
                Column("of phase", "share", share),
            ),
            sorted(
                (row for row in rows("operators") if row["share"] >= SMALL),
                key=lambda row: -(row["device_ms"] if device else row["host_ms"]),
            ),
            brief=20,
        ),
        "kinds": Table((word("kind of operation", "name"), called, spent, part), rows("kinds")),
        "idle": Table(
            (word("device idle because of", lambda row: row[0]), Column("share", lambda row: row[1], share)),
            sorted(causes, key=lambda row: -row[1]),
            notes=(device["statement"],) if device.get("statement") else (),
        ),
        "kernels": Table((word("kernel", "name"), called, spent, part), rows("kernels")),
        "joined": Table(
            (
                word("operator, with its calls", "forward"), word("its backward", "backward", "name"), called,
                Column("fwd ms", "forward_ms", ms), Column("bwd ms", "backward_ms", ms),
            ),
            rows("joined"), brief=8,
        ),
        "copies": Table(
            (
                word("copy", _types), word("layout", lambda row: LAYOUTS[row["contiguous"]]),
                called, Column("elements", "elements", lambda value: f"{value:,.0f}"), spent,
                Column("of step", "share", share, adds=True),
                word("line", lambda row: (row["line"] or "not recorded").replace(" (<module>)", "")),
            ),
            rows("copies"), brief=20, title="Copies (aten::copy_)",
        ),
        "optimizations": Table(
            (word("optimisation", "name"), word("state", "state"), word("observed", "detail", "text")),
            rows("optimizations"), brief=20,
        ),
    }  # fmt: skip


def _rows(content: Content, table: str) -> list[Content]:
    return [row for row in content.get(table) or () if isinstance(row, Mapping)]


def _line(row: Content) -> str:
    """Return ``train.py:41 (get_batch)``."""
    if not row["line"]:
        return "no line of the script"
    return str(row["line"] if row["function"] in {"", "<module>"} else f"{row['line']} ({row['function']})")


def _types(row: Content) -> str:
    return f"{row['source']} → {row['target']}" if row["source"] else "types not recorded"


def memory_tables(content: Content) -> dict[str, Table]:
    """Return the tables of a measured or predicted step by name; those that have no rows are left out."""
    peak = content["peak"] or 1
    kinds = sorted((item for item in content["kinds"].items() if item[1]), key=lambda item: -item[1])
    by_kind = (
        Column(name.removeprefix("optimizer_"), partial(_bytes_of, name), lambda n: size(n) if n else "")
        for name, _ in kinds
    )
    tables = {
        "kinds": Table(
            (
                word("kind", lambda row: row[0].replace("_", " ")),
                Column("at the peak", lambda row: row[1], size),
                Column("share", lambda row: row[1] / peak, share),
            ),
            kinds,
        ),
        "phases": Table(
            (word("phase", lambda row: row[0]), Column("highest", lambda row: row[1], size)),
            list((content.get("phases") or {}).items()), brief=20,
        ),
        "modules": Table(
            (
                word("module", lambda row: row["name"] or "(no module)"),
                Column("self", "exclusive", size, adds=True), Column("total", "inclusive", size), *by_kind,
            ),
            [row for row in content["modules"] if row["exclusive"]], brief=10, wide=max(0, len(kinds) - 4),
        ),
        "largest": Table(
            (
                word("live at the peak", _tensor), Column("bytes", "bytes", size),
                word("kind", lambda row: row["kind"].replace("_", " ")), word("of", _origin, "name"),
            ),
            content.get("largest") or (), brief=8,
        ),
        "checkpointing": Table(
            (
                word("checkpointing", checkpointed), Column("peak", "peak", size),
                Column("saves", "saved", size),
                Column("recomputes", "recomputed_flops", lambda amount: scaled(amount, "FLOP")),
                Column("of the step", "share_of_step", share),
            ),
            content.get("checkpointing") or (),
        ),
    }  # fmt: skip
    return {name: table for name, table in tables.items() if table.rows}


def checkpointed(row: Content) -> str:
    """Return the modules of one group that are checkpointed."""
    names = row["wrapped"]
    parent = row["parent"] or "the model"
    return str(names[0]) if len(names) == 1 else f"all {len(names)} {row['type']} of {parent}"


def _bytes_of(kind: str, row: Content) -> int:
    return int(row["kinds"].get(kind, 0))


def _tensor(row: Content) -> str:
    several = f"{row['count']} x " if row["count"] > 1 else ""
    return f"{several}{list(row['shape'])} {row['dtype']}"


def _origin(row: Content) -> str:
    parts: tuple[str, str] = row["module"], row["operation"].removeprefix("aten.")
    return " ".join(filter(None, parts))
