"""A sweep over sizes in print: what grows fastest, or tables of sizes and of exponents with intervals."""

from __future__ import annotations

from rich.console import Console

from backlight.cli.console import FACTS, Page, make_table
from backlight.diagnose.scaling.power_law import Exponent
from backlight.diagnose.scaling.sweep import DONE, Point, Scaling
from backlight.terminal import make_console
from backlight.text import count, percent, scaled, size

PHASES = 4
"""Phases that a table has next to the settings."""

UNITS = {"step_ms": "step", "memory": "memory", "flops": "operations", "parameters": "parameters"}


def show(found: Scaling, console: Console | None = None, *, full: bool = False) -> None:
    """Print what grows fastest, then at most ten lines, or all sizes with their phases."""
    console = console or make_console()
    page = Page()
    page.summary(verdict(found), () if full else facts(found))
    if not full:
        page.more()
        return
    swept = list(found.points[0].settings)
    phases = list(dict.fromkeys(phase for point in found.points for phase in point.phases))
    columns = ["parameters"]
    columns += ["memory", "operations"] if found.fake else ["step ms", "memory"]
    if not found.fake and not any(point.memory for point in found.points):
        columns.remove("memory")
    _print_points(found, swept, columns, phases, console)
    if phases:
        console.print("ms by phase:")
    for start in range(0, len(phases), PHASES):
        part = [phase.replace("_", " ") for phase in phases[start : start + PHASES]]
        _print_points(found, swept, part, phases, console)
    for point in found.points:
        if point.message:
            page.sentence(f"  {_where(point)}: {point.message}")
    _print_laws(found, console)
    for note in found.notes:
        page.sentence(f"  {note}")


def verdict(found: Scaling) -> str:
    """Return how the step, or its predicted memory, grows, in one line."""
    main = "memory" if found.fake else "step_ms"
    law = next((law for law in found.laws if law.quantity == main), None)
    if law is None:
        done = sum(point.status in DONE for point in found.points)
        why = next(iter(found.notes), "see --json")
        return f"no growth fitted: {count(done, 'size')} of {len(found.points)} ran; {why}"
    fastest = max(law.exponents, key=lambda one: one.value)
    if fastest.low <= 0:
        return (
            f"{_name(main)}: growth with {fastest.setting} is undecided: {_power(fastest)}; sweep more sizes"
        )
    pace = ", faster than linear" if fastest.faster_than_linear else ""
    how = "grows fastest with" if len(law.exponents) > 1 else "grows with"
    return f"{_name(main)} {how} {fastest.setting}: {_power(fastest)}{pace}"


def facts(found: Scaling) -> list[str]:
    """Return the lines behind the verdict."""
    shown = "memory" if found.fake else "step_ms"
    done = [point for point in found.points if point.status in DONE]
    ends = [done[0], done[-1]] if len(done) > 1 else done
    lines = ["; ".join(f"{_where(point)}: {_value(shown, getattr(point, shown))}" for point in ends)]
    lines += [
        f"{_where(point)}: {point.status}{': ' * bool(point.message)}{point.message}"
        for point in found.points
        if point.status not in DONE
    ][:2]
    lines += [f"expected {_name(name)}: {_value(name, value)}" for name, value in found.expected.items()][:3]
    main = sorted(found.laws, key=lambda law: law.quantity.startswith("phase"))
    lines += [
        f"{_name(law.quantity)}: {', '.join(f'{one.setting} {_power(one)}' for one in law.exponents)}; "
        f"misfit {percent(law.misfit)}"
        for law in main
    ][: FACTS - len(lines) - bool(found.notes)]
    lines += list(found.notes[:1])
    return [line for line in lines if line]


def _power(one: Exponent) -> str:
    return f"power {one.value:.2f} ({one.low:.2f} to {one.high:.2f})"


def _where(point: Point) -> str:
    return ", ".join(f"{name}={value}" for name, value in point.settings.items())


def _print_points(
    found: Scaling, swept: list[str], columns: list[str], phases: list[str], console: Console
) -> None:
    table = make_table(*swept, *columns)
    for point in found.points:
        cells = [str(point.settings[name]) for name in swept]
        if point.status in DONE:
            cells += [_cell(point, column, phases) for column in columns]
        else:
            cells += [point.status, *[""] * (len(columns) - 1)]
        table.add_row(*cells)
    console.print(table)


def _print_laws(found: Scaling, console: Console) -> None:
    if not found.laws:
        return
    powers = [f"power of {exponent.setting}" for exponent in found.laws[0].exponents]
    table = make_table("grows as", *powers, "misfit")
    for law in found.laws:
        powers = [f"{e.value:.2f} ({e.low:.2f} to {e.high:.2f})" for e in law.exponents]
        table.add_row(_name(law.quantity), *powers, percent(law.misfit))
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
