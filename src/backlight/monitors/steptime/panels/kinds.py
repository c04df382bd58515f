"""Kinds of operation, how a device was used, and what is optimised already."""

from __future__ import annotations

from typing import Any

from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.profile_tables import NONE, Figures, count, figures, ms, profile_of, rows_of, share
from backlight.report.source import Source


@panel(
    "kinds",
    title="Kinds of operation",
    order=103,
    series=("profile/kinds", "profile/device", "profile/optimizations"),
    note="What the operators of a traced step do, why a device stood still, and which optimisations are on.",
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
    remarks = [f"{said}." for said in (device or {}).get("statement", "").split("\n") if said]
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
