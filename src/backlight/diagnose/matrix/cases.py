"""The cases of a plan: what each one starts, and the one factor in which it differs from its control."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backlight.diagnose.matrix.plan import CaseTable, Change, Edit, Plan, PlanError
from backlight.text import did_you_mean

FORMAT = 3
"""Version of what is stored; a result of another version does not count."""

PLACEHOLDERS = ("python", "run", "case", "ranks")
"""Allowed in braces in a command: the interpreter, the run directory, the case's directory, the ranks."""

_BRACES = re.compile(r"\{([a-z_]+)\}")
_SINGLE = ("interpreter", "directory", "branch", "ranks", "script", "module", "command")
_NOT_STARTED = {"name", "shows", "levels", "control", "factor"}


@dataclass(frozen=True, slots=True)
class Case:
    """One case: a command that can be started, and how it differs from its control.

    ``argv`` still holds ``{run}`` and ``{case}``. ``script`` is relative to ``directory``, empty where not
    known. ``inputs`` are digests of the script and of the files that arguments name: a stored result is stale
    where they changed. ``factor`` is the difference from ``control``; both are empty without a control.
    """

    name: str
    argv: tuple[str, ...]
    directory: str
    time_limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    edits: tuple[Edit, ...] = ()
    interpreter: str = ""
    branch: str = ""
    script: str = ""
    watched: bool = False
    progress: str = ""
    success: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    shows: tuple[str, ...] = ()
    levels: Mapping[str, str] = field(default_factory=dict)
    control: str = ""
    factor: str = ""

    @property
    def digest(self) -> str:
        """Identity of what is started: a stored result counts only where it agrees."""
        parts = [(name, getattr(self, name)) for name in self.__slots__ if name not in _NOT_STARTED]
        return hashlib.sha256(json.dumps([FORMAT, *parts], default=repr).encode()).hexdigest()[:16]

    def variables(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the case."""
        return {k: v for k, v in {**inherited, **self.environment}.items() if k not in self.unset}


def fill(part: str, values: Mapping[str, str]) -> str:
    """Replace ``{name}`` by its value where it has one."""
    return _BRACES.sub(lambda match: values.get(match[1], match[0]), part)


def cases_of(plan: Plan, path: Path) -> tuple[Case, ...]:
    """Return the cases of the plan in the file ``path``, in the order in which they run.

    Raises
    ------
    PlanError
        If a control is unknown or equal to its case, if the two differ in more than one factor, or
        if a command is not valid.
    """
    tables = dict(_design(plan))
    for name, table in plan.cases.items():
        if name in tables:
            raise PlanError(f"{path}: [cases.{name}]: the design makes a case of that name; choose another")
        tables[name] = table
    merged = {name: _merge(plan, name, table, path) for name, table in tables.items()}
    # One rank is started by the same launcher as several: the launcher would be a second factor.
    distributed = any((change["ranks"] or 1) > 1 for change in merged.values())
    cases = {}
    for name, table in tables.items():
        try:
            case = _case(plan, name, merged[name], path.parent, distributed=distributed)
        except ValueError as error:
            raise PlanError(f"{path}: case {name!r}: {error}") from None
        limit = table.time_limit or plan.time_limit
        cases[name] = replace(case, time_limit=limit, levels=_levels(plan, table))
    return tuple(_with_control(case, tables, cases, path) for case in cases.values())


def _design(plan: Plan) -> Iterator[tuple[str, CaseTable]]:
    levels = [list(factor) for factor in plan.factors.values()]
    for chosen in itertools.product(*levels) if plan.design != "listed" else ():
        moved = {f: c for f, c, of in zip(plan.factors, chosen, levels, strict=True) if c != of[0]}
        if plan.design == "one-at-a-time" and len(moved) > 1:
            continue
        # The control resets the last factor, so that each step of the product changes one.
        control = _product_name(dict(list(moved.items())[:-1])) if moved else None
        yield _product_name(moved), CaseTable(control=control, levels=moved)


def _product_name(moved: Mapping[str, str]) -> str:
    return ",".join(f"{factor}={level}" for factor, level in moved.items()) or "base"


def _levels(plan: Plan, table: CaseTable) -> dict[str, str]:
    return {factor: table.levels.get(factor, next(iter(levels))) for factor, levels in plan.factors.items()}


def _merge(plan: Plan, name: str, table: CaseTable, path: Path) -> dict[str, Any]:
    where = f"{path}: [cases.{name}]: levels"
    for factor, level in table.levels.items():
        if factor not in plan.factors:
            raise PlanError(f"{where}: no factor is called {factor!r}{did_you_mean(factor, plan.factors)}")
        if level not in plan.factors[factor]:
            hint = did_you_mean(level, plan.factors[factor])
            raise PlanError(f"{where}: {factor} has no level {level!r}{hint}")
    levels = {f"factors.{f}.{level}": plan.factors[f][level] for f, level in _levels(plan, table).items()}
    # Two factors that set the same thing are not two factors: the later one would win silently.
    setters: dict[str, str] = {}
    for level, change in levels.items():
        keys = [key for key in _SINGLE if getattr(change, key) is not None]
        for key in (*keys, *(f"environment {n}" for n in (*change.environment, *change.unset))):
            if key in setters:
                raise PlanError(f"{path}: {setters[key]} and {level} both set {key}; only one factor may")
            setters[key] = level
    merged: dict[str, Any] = dict.fromkeys(_SINGLE)
    merged |= {"arguments": [], "environment": {}, "unset": [], "edits": [], "shows": []}
    for change in (plan.base, *levels.values(), table):
        if change.script or change.module or change.command:
            merged.update(script=None, module=None, command=None)
        merged |= {key: getattr(change, key) for key in _SINGLE if getattr(change, key) is not None}
        kept = {k: v for k, v in merged["environment"].items() if k not in change.unset}
        merged["environment"] = kept | change.environment
        merged["unset"] = [n for n in (*merged["unset"], *change.unset) if n not in merged["environment"]]
        merged["arguments"] += change.arguments
        merged["edits"] += change.edits
        merged["shows"] += [change.shows] if change.shows else []
    return merged


def _case(plan: Plan, name: str, merged: Mapping[str, Any], folder: Path, *, distributed: bool) -> Case:
    base, ranks, command = plan.base, merged["ranks"] or 1, merged["command"]
    interpreter = _interpreter(merged["interpreter"], folder)
    for word in _BRACES.findall(" ".join(command or ())):
        if word not in PLACEHOLDERS:
            raise ValueError(f"command: unknown placeholder {{{word}}}{did_you_mean(word, PLACEHOLDERS)}")
    if command is not None:
        if merged["ranks"] is not None and not any("{ranks}" in part for part in command):
            raise ValueError("ranks is given, but command has no {ranks} where it would go")
        argv = command
    else:
        target = ("-m", merged["module"]) if merged["module"] else (merged["script"],)
        watch = ("-m", "backlight", "run", "--out", "{run}", *base.run_options) if base.watch else ()
        torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        argv = (interpreter, *(torchrun if distributed else ()), *watch, *target)
    values = {"python": interpreter, "ranks": str(ranks)}
    return Case(
        name=name,
        argv=tuple(fill(part, values) for part in (*argv, *merged["arguments"])),
        directory=str((folder / (merged["directory"] or ".")).resolve()),
        time_limit=plan.time_limit,
        environment=dict(sorted(merged["environment"].items())),
        unset=tuple(sorted(set(merged["unset"]))),
        edits=tuple(merged["edits"]),
        interpreter=interpreter,
        branch=merged["branch"] or "",
        script=merged["script"] or "",
        watched=base.watch if command is None else any("{run}" in part for part in command),
        progress=base.progress or "",
        success=base.success or "",
        shows=tuple(merged["shows"]),
    )


def _interpreter(given: str | None, folder: Path) -> str:
    path = folder / Path(given or sys.executable).expanduser()
    if given is None or not ("/" in given or path.is_dir()):
        return given or sys.executable
    # A virtual environment may be given by its directory. Links are kept: they are what makes it one.
    return str((path / "bin" / "python" if path.is_dir() else path).absolute())


def _with_control(case: Case, tables: Mapping[str, CaseTable], cases: Mapping[str, Case], path: Path) -> Case:
    control = tables[case.name].control
    if control is None:
        return case
    where = f"{path}: case {case.name!r}"
    if control not in cases:
        raise PlanError(f"{where}: unknown control {control!r}{did_you_mean(control, cases)}")
    if control == case.name:
        raise PlanError(f"{where} is its own control; name the case that it differs from in one factor")
    other = cases[control]
    if case.time_limit != other.time_limit:
        raise PlanError(
            f"{where} has {case.time_limit:g} s, its control {control!r} has {other.time_limit:g} s; "
            "a verdict is only comparable under the same limit: give both the same time_limit"
        )
    moved = [f"factor {f}" for f in case.levels if case.levels[f] != other.levels[f]]
    one, two = _settings(tables[case.name]), _settings(tables[control])
    moved += sorted(key for key in one.keys() | two.keys() if one.get(key) != two.get(key))
    if not moved or case.digest == other.digest:
        by = f" ({moved[0]} changes nothing of what is started)" if moved else ""
        raise PlanError(
            f"{where} is equal to its control {control!r}{by}; change one factor or drop the control"
        )
    if len(moved) > 1:
        raise PlanError(
            f"{where} differs from its control {control!r} in {len(moved)} factors: {', '.join(moved)}; "
            "expected one. Take a nearer control, or declare them as one level: [factors.NAME.LEVEL]"
        )
    return replace(case, control=control, factor=moved[0].removeprefix("factor "))


def _settings(change: Change) -> dict[str, object]:
    """Split what a case itself changes into single settings, by name."""
    found: dict[str, object] = {}
    for key in _SINGLE:
        if (value := getattr(change, key)) is not None:
            found["command" if key in {"script", "module"} else key] = (key, value)
    found |= {f"environment {name}": None for name in change.unset}
    found |= {f"environment {name}": value for name, value in change.environment.items()}
    for edit in change.edits:
        found[f"edit {edit.file}: {edit.key or edit.find}"] = edit.value if edit.key else edit.replace
    return found | {f"argument {name}": values for name, values in split_options(change.arguments)}


def split_options(arguments: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Split ``--a 1 --b=2 -3`` into options with their values; the first words are ``positional``."""
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
