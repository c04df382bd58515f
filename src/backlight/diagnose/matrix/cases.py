"""From a plan to cases: what each one starts, and the one factor in which it differs from its control."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backlight.diagnose.matrix.launch_spec import Launch, launch_of
from backlight.diagnose.matrix.plan import CaseTable, Change, Plan
from backlight.diagnose.matrix.plan_errors import PlanError, near
from backlight.records import to_json

BASE = "base"
"""Name of the case in which every factor stands at its first level."""

_SINGLE = ("interpreter", "directory", "branch", "ranks", "script", "module", "command")


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to start. ``factor`` is what tells it from ``control``; both are empty without one."""

    name: str
    launch: Launch
    control: str = ""
    factor: str = ""
    levels: Mapping[str, str] = field(default_factory=dict)
    shows: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Names what is started: a stored result counts for a case only where this agrees."""
        return hashlib.sha256(json.dumps(to_json(self.launch), sort_keys=True).encode()).hexdigest()[:16]


def cases_of(plan: Plan, path: Path) -> tuple[Case, ...]:
    """Return the cases of a plan in the order in which they run; controls of a design come first.

    Parameters
    ----------
    plan:
        What the file says.
    path:
        The file, for messages and because directories are relative to its folder.

    Raises
    ------
    PlanError
        If a control is unknown or equal to its case, if the two differ in more than one factor, or
        if a case cannot be put together.
    """
    tables = dict(_designed(plan))
    for name, table in plan.cases.items():
        if name in tables:
            raise PlanError(f"{path}: [cases.{name}]: the design makes a case of that name; choose another")
        tables[name] = table
    resolved = {name: _resolve(plan, name, table, path) for name, table in tables.items()}
    distributed = any((merged["ranks"] or 1) > 1 for merged in resolved.values())
    cases: dict[str, Case] = {}
    for name, table in tables.items():
        merged = resolved[name]
        limit = table.time_limit if table.time_limit is not None else plan.time_limit
        try:
            launch = launch_of(plan.base, merged, path.parent, limit, distributed=distributed)
        except ValueError as error:
            raise PlanError(f"{path}: case {name!r}: {error}") from None
        cases[name] = Case(name, launch, levels=_levels(plan, table), shows=merged["shows"])
    return tuple(_controlled(case, tables, cases, path) for case in cases.values())


def _designed(plan: Plan) -> Iterator[tuple[str, CaseTable]]:
    if plan.design == "listed":
        return
    names = list(plan.factors)
    every = [list(levels) for levels in plan.factors.values()]
    for chosen in itertools.product(*every):
        moved = {f: level for f, level, of in zip(names, chosen, every, strict=True) if level != of[0]}
        if plan.design == "one-at-a-time" and len(moved) > 1:
            continue
        # The control takes the last moved factor back, so that each step of the product is one knob.
        control = _product_name(dict(list(moved.items())[:-1])) if moved else None
        yield _product_name(moved), CaseTable.model_validate({"control": control, "levels": moved})


def _product_name(moved: Mapping[str, str]) -> str:
    return ",".join(f"{factor}={level}" for factor, level in moved.items()) or BASE


def _levels(plan: Plan, table: CaseTable) -> dict[str, str]:
    return {factor: table.levels.get(factor, next(iter(levels))) for factor, levels in plan.factors.items()}


def _resolve(plan: Plan, name: str, table: CaseTable, path: Path) -> dict[str, Any]:
    for factor, level in table.levels.items():
        where = f"{path}: [cases.{name}]: levels"
        if factor not in plan.factors:
            raise PlanError(f"{where}: no factor is called {factor!r}{near(factor, plan.factors)}")
        if level not in plan.factors[factor]:
            raise PlanError(f"{where}: {factor} has no level {level!r}{near(level, plan.factors[factor])}")
    parts: list[tuple[str, Change]] = [("base", plan.base)]
    parts += [(f"factors.{f}.{level}", plan.factors[f][level]) for f, level in _levels(plan, table).items()]
    parts.append((f"cases.{name}", table))
    _refuse_conflicts(parts[1:-1], path)
    merged: dict[str, Any] = dict.fromkeys(_SINGLE)
    merged |= {"arguments": (), "environment": {}, "unset": (), "edits": (), "shows": ()}
    for _, change in parts:
        _apply(merged, change)
    return merged


def _apply(merged: dict[str, Any], change: Change) -> None:
    if change.script or change.module or change.command:
        merged.update(script=None, module=None, command=None)
    for key in _SINGLE:
        value = getattr(change, key)
        if value is not None:
            merged[key] = value
    merged["arguments"] += change.arguments
    merged["edits"] += change.edits
    merged["environment"] = {k: v for k, v in merged["environment"].items() if k not in change.unset}
    merged["environment"].update(change.environment)
    merged["unset"] = tuple(n for n in (*merged["unset"], *change.unset) if n not in merged["environment"])
    merged["shows"] += (change.shows,) if change.shows else ()


def _refuse_conflicts(parts: list[tuple[str, Change]], path: Path) -> None:
    # Two factors that set the same thing are not two factors: the later one would win unseen.
    setters: dict[str, str] = {}
    for name, change in parts:
        keys = [key for key in _SINGLE if getattr(change, key) is not None]
        keys += [f"environment {n}" for n in (*change.environment, *change.unset)]
        for key in keys:
            if key in setters:
                raise PlanError(f"{path}: {setters[key]} and {name} both set {key}; only one factor may")
            setters[key] = name


def _controlled(case: Case, tables: Mapping[str, CaseTable], cases: Mapping[str, Case], path: Path) -> Case:
    control = tables[case.name].control
    if control is None:
        return case
    where = f"{path}: case {case.name!r}"
    if control not in cases:
        raise PlanError(f"{where}: unknown control {control!r}{near(control, cases)}")
    other = cases[control]
    if control == case.name:
        raise PlanError(f"{where} is its own control; name the case that it differs from in one factor")
    moved = [f"factor {f}" for f in case.levels if case.levels[f] != other.levels[f]]
    mine, its = _atoms(tables[case.name]), _atoms(tables[control])
    moved += sorted(key for key in mine.keys() | its.keys() if mine.get(key) != its.get(key))
    if case.launch.time_limit != other.launch.time_limit:
        raise PlanError(
            f"{where} has {case.launch.time_limit:g} s, its control {control!r} has "
            f"{other.launch.time_limit:g} s; "
            "with unlike limits a verdict says nothing of the factor: give both the same time_limit"
        )
    if not moved or case.digest == other.digest:
        by = f" ({moved[0]} changes nothing of what is started)" if moved else ""
        raise PlanError(
            f"{where} is equal to its control {control!r}{by}; change one factor or drop the control"
        )
    if len(moved) > 1:
        raise PlanError(
            f"{where} differs from its control {control!r} in {len(moved)} factors: {', '.join(moved)}; "
            "expected one. Take a nearer control, or, where they only make sense together, "
            "declare them as one level: [factors.NAME.LEVEL]"
        )
    return Case(case.name, case.launch, control, moved[0].removeprefix("factor "), case.levels, case.shows)


def _atoms(change: Change) -> dict[str, object]:
    """Split what a case itself changes into single knobs, by name."""
    atoms: dict[str, object] = {}
    for key in _SINGLE:
        value = getattr(change, key)
        if value is not None:
            atoms["command" if key in {"script", "module"} else key] = (key, value)
    atoms |= {f"environment {name}": value for name, value in change.environment.items()}
    atoms |= {f"environment {name}": None for name in change.unset if name not in change.environment}
    for edit in change.edits:
        atoms[f"edit {edit.file}: {edit.key or edit.find}"] = edit.value if edit.key else edit.replace
    for option, values in options(change.arguments):
        atoms[f"argument {option}"] = values
    return atoms


def options(arguments: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
    """Split arguments into options with their values; what stands before the first is ``positional``.

    ``--a 1 --b=2 -3`` is ``--a`` with ``1`` and ``--b`` with ``2`` and ``-3``.
    """
    found: list[tuple[str, tuple[str, ...]]] = []
    for token in arguments:
        if token.startswith("-") and not token[1:2].isdigit() and token != "-":
            name, equals, value = token.partition("=")
            found.append((name, (value,) if equals else ()))
        elif found:
            found[-1] = (found[-1][0], (*found[-1][1], token))
        else:
            found.append(("positional", (token,)))
    return found
