"""The operators of the profiled steps by phase, and the backward that belongs to each."""

from __future__ import annotations

from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.profile_tables import NONE, Figures, count, figures, ms, profile_of, rows_of, share
from backlight.report.source import Source

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
