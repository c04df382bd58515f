"""Plans of test matrices: what a TOML file may hold, its cases, and the plan that ``--init`` writes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from backlight import atomic_files, codec
from backlight.records import DiagnosisKind
from backlight.text import did_you_mean
from backlight.untrusted_files import read_text

FORMAT = 4
"""Version of what is stored; a result of another version does not count."""

T = TypeVar("T")

MIN_LEVELS = 2
MAX_DIGEST_BYTES = 10 * 1024 * 1024
UNDECIDED = (DiagnosisKind.DID_NOT_FINISH, DiagnosisKind.UNKNOWN)
"""Verdicts that answer no question: the evidence did not suffice."""

VERDICTS = [kind.value for kind in DiagnosisKind if kind not in UNDECIDED]
OUTCOMES = ["causes", "cures", "changes", "none"]
"""Answers of a case against its control; see :func:`backlight.diagnose.test_matrix.evaluation.compare`."""

PLACEHOLDERS = ("python", "run", "ranks")
"""In braces in a command: the interpreter, the run directory, the number of processes."""

_BRACES = re.compile(r"\{([a-z_]+)\}")

_STARTED = ("argv", "directory", "time_limit", "environment", "progress", "success", "inputs")
_TEMPLATE = Path(__file__).with_name("plan_template.toml")


class PlanError(ValueError):
    """A plan that cannot be run; the message names the position, what is wrong and the fix."""


# Names of cases become names of directories.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,119}")


@dataclass(frozen=True, kw_only=True)
class Change:
    """Settings of the base, or those that a level of a factor changes; ``shows`` is a regular expression."""

    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str | int | float] = field(default_factory=dict)
    directory: str | None = None
    ranks: Annotated[int, Meta(ge=1, le=4096)] | None = None
    command: Annotated[list[str], Meta(min_length=1)] | None = None
    shows: str = ""

    def __post_init__(self) -> None:
        _check_pattern("shows", self.shows)
        for name, value in self.environment.items():
            if not name or "=" in name or "\0" in f"{name}{value}":
                raise ValueError(f"environment: {name!r} = {value!r} cannot be a variable")


@dataclass(frozen=True, kw_only=True)
class Base(Change):
    """Settings that all cases share; ``progress`` and ``success`` are regular expressions."""

    watch: bool = True
    run_options: list[str] = field(default_factory=list)
    progress: str = ""
    success: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.command is None:
            raise ValueError("the key 'command' is missing")
        _check_pattern("progress", self.progress)
        _check_pattern("success", self.success)


def _check_pattern(name: str, text: str) -> None:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{name}: expected a regular expression, got {text!r} ({error})") from None


@dataclass(frozen=True, kw_only=True)
class CaseTable:
    """A case; ``levels`` names a level for each factor that is not at its first."""

    control: str | None = None
    levels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Action:
    """One thing to do: where (``file:line``), and the command that shows whether it helped."""

    do: str
    at: str = ""
    verify: str = ""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A question (``case`` or ``compare``, with ``on``) or a conclusion of the decision tree."""

    ask: str = ""
    case: str | None = None
    compare: str | None = None
    on: dict[str, str] = field(default_factory=dict)
    conclusion: str = ""
    actions: list[Action] = field(default_factory=list)

    @property
    def edges(self) -> list[tuple[str, str]]:
        """Each answer with the node that it leads to: ``"BLOCKED|SPIN"`` gives two."""
        return [(a.strip(), target) for answers, target in self.on.items() for a in answers.split("|")]

    def __post_init__(self) -> None:
        asks = self.case is not None or self.compare is not None
        for wrong, problem in (
            (None not in (self.case, self.compare), "it has both case and compare; expected one question"),
            (asks == bool(self.conclusion), "expected a question (case or compare, with on) or a conclusion"),
            (asks and not self.on, "the question leads nowhere: expected on = { answer = node }"),
            (self.on and not asks, "a conclusion ends the tree; it takes no on"),
        ):
            if wrong:
                raise ValueError(problem)
        answers = OUTCOMES if self.compare is not None else VERDICTS
        for answer, _ in self.edges:
            if answer not in answers:
                raise ValueError(f"on: unknown answer {answer!r}; expected one of {', '.join(answers)}")
        if len(dict(self.edges)) < len(self.edges):
            raise ValueError("on: one answer leads to two nodes; expected one")


@dataclass(frozen=True, kw_only=True)
class MatrixPlan:
    """A whole plan; ``time_limit`` is that of each case, in seconds."""

    name: str = ""
    time_limit: Annotated[float, Meta(ge=3, le=7 * 24 * 3600)] = 60.0
    base: Base
    factors: dict[str, dict[str, Change]] = field(default_factory=dict)
    cases: dict[str, CaseTable] = field(default_factory=dict)
    tree: dict[str, Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.cases and not self.factors:
            raise ValueError("no cases: write [factors.NAME.LEVEL], and [cases.NAME] to choose among them")
        for name, levels in self.factors.items():
            if len(levels) < MIN_LEVELS:
                raise ValueError(f"factors.{name}: expected {MIN_LEVELS} levels or more, got {len(levels)}")
        for name in (*self.factors, *(level for levels in self.factors.values() for level in levels)):
            _check_name("factors", name)
        for name in self.cases:
            _check_name("cases", name)


def _check_name(section: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        problem = "expected a name of letters, digits and . _ = , + -, which begins with a letter or digit"
        raise ValueError(f"{section}.{name}: {problem}")


def read_plan(path: Path) -> MatrixPlan:
    """Return the plan in a file; a PlanError names the first thing in it that a plan cannot hold."""
    try:
        return _plan(tomllib.loads(read_text(path)))
    except OSError as error:
        problem = f"cannot be read: {error.strerror}; `backlight test-matrix --init {path}` writes a plan"
    except tomllib.TOMLDecodeError as error:
        problem = f"not valid TOML: {error}"
    except UnicodeDecodeError as error:
        problem = f"not valid TOML: {error}"
    except ValueError as error:
        problem = str(error)
    except RecursionError:
        problem = "not valid TOML: it nests too deeply"
    raise PlanError(problem)


def _plan(data: dict[str, Any]) -> MatrixPlan:
    # Table by table, so that messages name the table. An unknown key explains a missing one: it comes first.
    _refuse_unknown(data, MatrixPlan, "")
    tables = dict(data)
    if isinstance(base := tables.get("base"), dict):
        tables["base"] = _table(base, Base, "base")
    for section, kind in (("cases", CaseTable), ("tree", Node)):
        tables[section] = _tables(tables.get(section, {}), kind, section)
    factors = tables.get("factors", {})
    if isinstance(factors, dict):
        tables["factors"] = {
            name: _tables(level, Change, f"factors.{name}") for name, level in factors.items()
        }
    return codec.convert(tables, MatrixPlan, "")


def _tables(data: Any, kind: type[T], place: str) -> dict[str, T]:
    tables = codec.convert(data, dict[str, Any], "", place)
    return {name: _table(table, kind, f"{place}.{name}") for name, table in tables.items()}


def _table(data: Any, kind: type[T], place: str) -> T:
    if isinstance(data, dict):
        _refuse_unknown(data, kind, place)
        for action in data.get("actions", ()) if kind is Node else ():
            _refuse_unknown(action, Action, f"{place}.actions")
    return codec.convert(data, kind, "", place)


def _refuse_unknown(data: dict[str, Any], kind: Any, place: str) -> None:
    names = [each.name for each in fields(kind)]
    for key in data:
        if key not in names:
            raise ValueError(f"{place and f'[{place}]: '}unknown key {key!r}{did_you_mean(key, names)}")


def write_plan(path: Path) -> None:
    """Write a plan to be adapted by hand; a PlanError if the file exists already."""
    if path.exists():
        raise PlanError(f"{path}: exists already; --init overwrites nothing, choose another name")
    atomic_files.write(path, _TEMPLATE.read_bytes())


@dataclass(frozen=True, slots=True)
class Case:
    """One case: a command that can be started, and how it differs from its control.

    ``argv`` still holds ``{run}``. ``inputs`` are digests of the script and of the files that arguments name:
    a stored result is stale where they changed. ``factor`` is the difference from ``control``.
    """

    name: str
    argv: tuple[str, ...]
    directory: str
    time_limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    progress: str = ""
    success: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)
    shows: tuple[str, ...] = ()
    control: str = ""
    factor: str = ""

    @property
    def digest(self) -> str:
        """Identity of what is started: a stored result counts only where it agrees."""
        parts = [FORMAT, *(getattr(self, name) for name in _STARTED)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def fill(part: str, values: Mapping[str, str]) -> str:
    """Replace ``{name}`` by its value where it has one."""
    return _BRACES.sub(lambda match: values.get(match[1], match[0]), part)


def cases_of(plan: MatrixPlan, folder: Path) -> tuple[Case, ...]:
    """Return the cases of a plan in the order in which they run; ``folder`` is that of the plan."""
    tables = plan.cases or dict(_each_alone(plan))
    changes = {name: _changes(plan, name, table) for name, table in tables.items()}
    # One rank is started by the same launcher as several: the launcher would be a second factor.
    distributed = any((change.ranks or 1) > 1 for each in changes.values() for change in each)
    cases = {name: _case(plan, name, changes[name], folder, distributed=distributed) for name in tables}
    for name, table in tables.items():
        if table.control is not None:
            factor = _factor(plan, name, table.control, tables, cases)
            cases[name] = replace(cases[name], control=table.control, factor=factor)
    return tuple(cases.values())


def _each_alone(plan: MatrixPlan) -> Iterator[tuple[str, CaseTable]]:
    yield "base", CaseTable()
    for factor, levels in plan.factors.items():
        for level in list(levels)[1:]:
            yield f"{factor}={level}", CaseTable(control="base", levels={factor: level})


def _levels(plan: MatrixPlan, table: CaseTable) -> dict[str, str]:
    return {factor: table.levels.get(factor, next(iter(levels))) for factor, levels in plan.factors.items()}


def _changes(plan: MatrixPlan, name: str, table: CaseTable) -> list[Change]:
    """Return the base and the levels of a case."""
    for factor, level in table.levels.items():
        where, levels_of = f"case {name!r}: levels", plan.factors.get(factor, {})
        if factor not in plan.factors:
            raise PlanError(f"{where}: no factor is called {factor!r}{did_you_mean(factor, plan.factors)}")
        if level not in levels_of:
            raise PlanError(f"{where}: {factor} has no level {level!r}{did_you_mean(level, levels_of)}")
    levels = {f"factors.{f}.{level}": plan.factors[f][level] for f, level in _levels(plan, table).items()}
    # Two factors that set the same thing are not two factors: the later one would win silently.
    setters: dict[str, str] = {}
    for level, change in levels.items():
        settings = ("directory", "ranks", "command")
        settings_of = [name for name in settings if getattr(change, name) is not None]
        for key in (*settings_of, *(f"environment {variable}" for variable in change.environment)):
            if key in setters:
                raise PlanError(f"{setters[key]} and {level} both set {key}; only one factor may")
            setters[key] = level
    return [plan.base, *levels.values()]


def _case(plan: MatrixPlan, name: str, changes: Sequence[Change], folder: Path, *, distributed: bool) -> Case:
    base, where = plan.base, f"case {name!r}"
    command = next(change.command for change in reversed(changes) if change.command)
    ranks = next((change.ranks for change in reversed(changes) if change.ranks), None)
    directory = next((change.directory for change in reversed(changes) if change.directory), ".")
    at = (folder / directory).resolve()
    if not at.is_dir():
        raise PlanError(f"{where}: {at}: no such directory")
    if command[0] == "-m" or command[0].endswith(".py"):
        if command[0] != "-m" and not (at / command[0]).exists():
            raise PlanError(f"{where}: {at / command[0]}: no such file; a script is relative to directory")
        watch = ("-m", "backlight", "run", "--out", "{run}", *base.run_options) if base.watch else ()
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node={ranks}")
        command = ["{python}", *(torchrun if distributed else ()), *watch, *command]
    elif ranks and not any("{ranks}" in part for part in command):
        raise PlanError(f"{where}: ranks is given, but its command has no {{ranks}} where it would go")
    for word in _BRACES.findall(" ".join(command)):
        if word not in PLACEHOLDERS:
            raise PlanError(f"{where}: unknown placeholder {{{word}}}{did_you_mean(word, PLACEHOLDERS)}")
    values = {"python": sys.executable, "ranks": str(ranks or 1)}
    argv = [fill(part, values) for part in (*command, *(a for change in changes for a in change.arguments))]
    environment = {key: str(value) for change in changes for key, value in change.environment.items()}
    program = str(at / argv[0]) if "/" in argv[0] else argv[0]
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise PlanError(f"{where}: {argv[0]}: no such program; expected one that can be executed")
    return Case(
        name, tuple(argv), str(at), plan.time_limit, environment=environment, inputs=_digests(at, argv),
        progress=base.progress,
        success=base.success,
        shows=tuple(change.shows for change in changes if change.shows),
    )  # fmt: skip


def _digests(directory: Path, argv: Sequence[str]) -> dict[str, str]:
    digests = {}
    for name in (name for part in argv[1:] for name in (part, part.partition("=")[2]) if name):
        with contextlib.suppress(OSError, ValueError):
            if (directory / name).stat().st_size <= MAX_DIGEST_BYTES:
                digests[name] = hashlib.sha256((directory / name).read_bytes()).hexdigest()[:16]
    return digests


def _factor(
    plan: MatrixPlan, name: str, control: str, tables: Mapping[str, CaseTable], cases: Mapping[str, Case]
) -> str:
    """Return the one factor in which a case differs from its control."""
    if control not in cases:
        raise PlanError(f"case {name!r}: unknown control {control!r}{did_you_mean(control, cases)}")
    here, there = _levels(plan, tables[name]), _levels(plan, tables[control])
    moved = [factor for factor in here if here[factor] != there[factor]]
    if len(moved) > 1:
        raise PlanError(
            f"case {name!r} differs from its control {control!r} in {len(moved)} factors: "
            f"{', '.join(moved)}; expected one. Take a nearer control, or make them one factor"
        )
    if not moved or cases[name].digest == cases[control].digest:
        by = f" ({moved[0]} changes nothing of what is started)" if moved else ""
        raise PlanError(f"case {name!r} is equal to its control {control!r}{by}; change one factor")
    return moved[0]
