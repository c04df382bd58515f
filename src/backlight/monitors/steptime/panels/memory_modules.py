"""What each module holds at the peak of memory."""

from __future__ import annotations

from backlight.report.memory_account import account_of
from backlight.report.panel import Drawn, NotMeasured, panel
from backlight.report.profile_tables import Figures, figures
from backlight.report.source import Source
from backlight.text import size

ROWS = 60
"""Modules that are listed."""


@panel(
    "memory_modules",
    title="Memory at the peak by module",
    order=106,
    series=("memory/modules",),
    note="Each storage once, under the innermost module whose forward or backward made it.",
    monitor="steptime",
)
def memory_modules(source: Source) -> Drawn | NotMeasured:
    """List the modules, the fullest first."""
    account = account_of(source)
    if isinstance(account, str):
        return NotMeasured(account)
    kinds = [kind for kind, nbytes in account.told["kinds"].items() if nbytes]
    modules = [module for module in account.told["modules"] if module["own"]]
    rows = [
        [
            str(module["name"]) or "(no module)",
            size(module["own"]),
            size(module["inclusive"]),
            *(size(module["kinds"][kind]) if module["kinds"].get(kind) else "" for kind in kinds),
        ]
        for module in modules[:ROWS]
    ]
    columns = ("Module", "Own", "Inclusive", *(kind.replace("_", " ").capitalize() for kind in kinds))
    table = Figures("", columns, rows, frozenset(range(1, len(columns))))
    remarks = [f"{len(modules) - ROWS:,} more modules hold less."] if len(modules) > ROWS else []
    return figures([table], remarks)
