"""A sweep over sizes in print: a table of sizes, exponents with intervals."""

from __future__ import annotations

from rich.console import Console

from backlight.cli.console import make_table
from backlight.diagnose.scaling.sweep import DONE, Point, Scaling
from backlight.terminal import make_console
from backlight.text import scaled, size

UNITS = {"step_ms": "step", "memory": "memory", "flops": "operations", "parameters": "parameters"}


def show(found: Scaling, console: Console | None = None) -> None:
    """Print a sweep."""
    console = console or make_console()
    swept = list(found.points[0].settings)
    phases = list(dict.fromkeys(phase for point in found.points for phase in point.phases))
    columns = ["parameters"]
    columns += ["memory", "operations"] if found.fake else ["step ms", *(p.replace("_", " ") for p in phases)]
    if not found.fake and any(point.memory for point in found.points):
        columns.append("memory")
    table = make_table(*swept, *columns)
    for point in found.points:
        cells = [str(point.settings[name]) for name in swept]
        if point.status in DONE:
            cells += [_cell(point, column, phases) for column in columns]
        else:
            cells += [point.status, *[""] * (len(columns) - 1)]
        table.add_row(*cells)
    console.print(table)
    for point in found.points:
        if point.message:
            where = ", ".join(f"{name}={value}" for name, value in point.settings.items())
            console.print(f"  {where}: {point.message}")
    _print_laws(found, console)
    for note in found.notes:
        console.print(f"  {note}")


def _print_laws(found: Scaling, console: Console) -> None:
    if not found.laws:
        return
    powers = [f"power of {exponent.setting}" for exponent in found.laws[0].exponents]
    table = make_table("grows as", *powers, "misfit")
    for law in found.laws:
        powers = [f"{e.value:.2f} ({e.low:.2f} to {e.high:.2f})" for e in law.exponents]
        table.add_row(_name(law.quantity), *powers, f"{law.misfit:.1%}")
    console.print(table)
    faster = dict.fromkeys(f"{_name(e.quantity)} in {e.setting}" for e in found.faster)
    if faster:
        console.print(f"faster than linear: {', '.join(faster)}")
    for quantity, value in found.expected.items():
        console.print(f"expected {_name(quantity)}: {_value(quantity, value)}")


def _name(quantity: str) -> str:
    return UNITS.get(quantity, quantity).replace("_", " ")


def _cell(point: Point, column: str, phases: list[str]) -> str:
    if column == "parameters":
        return _value("parameters", point.parameters)
    if column == "step ms":
        half = ((point.high_ms or 0.0) - (point.low_ms or 0.0)) / 2
        return f"{point.step_ms:.2f} ± {half:.2f}"
    if column in {"memory", "operations"}:
        name = "flops" if column == "operations" else column
        return _value(name, getattr(point, name))
    named = {phase.replace("_", " "): value for phase, value in point.phases.items()}
    return f"{named[column]:.2f}" if column in named else ""


def _value(quantity: str, value: float | None) -> str:
    if value is None:
        return "not measured"
    if quantity == "memory":
        return size(value)
    if quantity == "flops":
        return scaled(value, "FLOP")
    if quantity == "parameters":
        return f"{value / 1e6:.1f} M" if value >= 1e6 else f"{value:,.0f}"
    return f"{value:.2f} ms"
