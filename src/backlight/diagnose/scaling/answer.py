"""Answer of ``sweep``: what grows fastest, and tables of sizes and of exponents with intervals."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from backlight.answer import Answer, Column, Table, ms, word
from backlight.diagnose.scaling.power_law import Exponent, PowerLaw
from backlight.diagnose.scaling.sweep import DONE, Scaling, ScalingPoint
from backlight.text import count, percent, scaled, size

PHASES = 4
"""Phases that a table has next to the settings."""

UNITS = {"step_ms": "step", "memory": "memory", "flops": "operations", "parameters": "parameters"}


def answer(scaling: Scaling) -> Answer:
    """Return the answer of a sweep."""
    tables = tuple(table for table in _tables(scaling) if table.rows)
    return Answer(_verdict(scaling), scaling, tuple(_facts(scaling)), tables, scaling.notes)


def _tables(scaling: Scaling) -> Iterator[Table]:
    swept = [Column(name, partial(_setting, name), str) for name in scaling.points[0].settings]
    steps = Column("step ms", _step, str)
    memory, flops = (
        Column(title, partial(_done, key), partial(_value, key))
        for title, key in (("memory", "memory"), ("operations", "flops"))
    )
    costs = (
        [memory, flops]
        if scaling.fake
        else [steps, *([memory] if any(p.memory for p in scaling.points) else [])]
    )
    parameters = Column("parameters", partial(_done, "parameters"), partial(_value, "parameters"))
    status = [] if all(point.status in DONE for point in scaling.points) else [word("status", "status")]
    yield Table((*swept, parameters, *costs, *status), scaling.points, brief=60)
    phases = list(dict.fromkeys(phase for point in scaling.points for phase in point.phases))
    for start in range(0, len(phases), PHASES):
        part = (
            Column(f"{phase.replace('_', ' ')} ms", partial(_phase, phase), ms)
            for phase in phases[start : start + PHASES]
        )
        yield Table((*swept, *part), scaling.points, brief=60)
    settings = [exponent.setting for exponent in scaling.laws[0].exponents] if scaling.laws else []
    powers = (Column(f"power of {name}", partial(_exponent, n), str) for n, name in enumerate(settings))
    faster = dict.fromkeys(f"{_name(e.quantity)} in {e.setting}" for e in scaling.faster)
    yield Table(
        (word("grows as", lambda law: _name(law.quantity)), *powers, Column("misfit", "misfit", percent)),
        scaling.laws, brief=60, notes=(f"faster than linear: {', '.join(faster)}",) if faster else (),
    )  # fmt: skip


def _setting(name: str, point: ScalingPoint) -> Any:
    return point.settings[name]


def _done(key: str, point: ScalingPoint) -> Any:
    return getattr(point, key) if point.status in DONE else None


def _phase(name: str, point: ScalingPoint) -> float | None:
    return point.phases.get(name)


def _exponent(number: int, law: PowerLaw) -> str:
    exponent = law.exponents[number]
    return f"{exponent.value:.2f} ({exponent.low:.2f} to {exponent.high:.2f})"


def _step(point: ScalingPoint) -> str | None:
    if point.status not in DONE or point.step_ms is None:
        return None
    return f"{point.step_ms:.2f} ± {((point.high_ms or 0.0) - (point.low_ms or 0.0)) / 2:.2f}"


def _verdict(scaling: Scaling) -> str:
    """Return how the step, or its predicted memory, grows, in one line."""
    main = "memory" if scaling.fake else "step_ms"
    law = next((law for law in scaling.laws if law.quantity == main), None)
    if law is None:
        done = sum(point.status in DONE for point in scaling.points)
        why = next(iter(scaling.notes), "see --json")
        return f"no growth fitted: {count(done, 'size')} of {len(scaling.points)} ran; {why}"
    fastest = max(law.exponents, key=lambda exponent: exponent.value)
    if fastest.low <= 0:
        return (
            f"{_name(main)}: growth with {fastest.setting} is undecided: {_power(fastest)}; sweep more sizes"
        )
    pace = ", faster than linear" if fastest.faster_than_linear else ""
    how = "grows fastest with" if len(law.exponents) > 1 else "grows with"
    return f"{_name(main)} {how} {fastest.setting}: {_power(fastest)}{pace}"


def _facts(scaling: Scaling) -> list[str]:
    """Return the lines behind the verdict."""
    shown = "memory" if scaling.fake else "step_ms"
    done = [point for point in scaling.points if point.status in DONE]
    ends = [done[0], done[-1]] if len(done) > 1 else done
    lines = ["; ".join(f"{_where(point)}: {_value(shown, getattr(point, shown))}" for point in ends)]
    lines += [
        f"{_where(point)}: {point.status}{': ' * bool(point.message)}{point.message}"
        for point in scaling.points
        if point.status not in DONE
    ]
    lines += [f"expected {_name(name)}: {_value(name, value)}" for name, value in scaling.expected.items()]
    main = sorted(scaling.laws, key=lambda law: law.quantity.startswith("phase"))
    lines += [
        f"{_name(law.quantity)}: {', '.join(f'{e.setting} {_power(e)}' for e in law.exponents)}; "
        f"misfit {percent(law.misfit)}"
        for law in main
    ]
    return [line for line in lines if line]


def _power(exponent: Exponent) -> str:
    return f"power {exponent.value:.2f} ({exponent.low:.2f} to {exponent.high:.2f})"


def _where(point: ScalingPoint) -> str:
    return ", ".join(f"{name}={value}" for name, value in point.settings.items())


def _name(quantity: str) -> str:
    return UNITS.get(quantity, quantity).replace("_", " ")


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
