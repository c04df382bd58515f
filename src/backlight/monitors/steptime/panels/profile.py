"""Panels of a stored profile: time by line and module; operators, their kinds, kernels, copies, idle time."""

from __future__ import annotations

from dataclasses import replace

from backlight.answer import share
from backlight.monitors.steptime.model.evidence import read_profile
from backlight.monitors.steptime.model.step_tables import profile_tables
from backlight.monitors.steptime.panels.flame_graph import bars
from backlight.report.panel import Drawn, NotMeasured, panel, tabular
from backlight.report.source import Source

NONE = NotMeasured("No profile was taken: backlight profile --out RUN SCRIPT takes one.")
NOT_TRACED = NotMeasured("No step was traced.")


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
    tables = profile_tables(profile.content)
    if "lines" not in tables:
        return NotMeasured("Too few samples of the stack were taken in steady steps.")
    shown, drawn = tabular(tables["lines"]), bars(profile.rows("stacks"))
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
    table = profile_tables(profile.content).get("modules")
    return NOT_TRACED if table is None else tabular(table)


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
    tables = profile_tables(profile.content)
    names = ("operators", "kinds", "idle", "kernels", "joined", "copies", "optimizations")
    shown = [tables[name] for name in names if name in tables]
    if not shown:
        return NOT_TRACED
    basis, reached = profile.content.get("mfu_basis"), profile.content.get("mfu")
    mfu = "not measured" if reached is None else share(reached)
    return tabular(*shown, remarks=[f"MFU {mfu}: {basis}."] if basis else ())
