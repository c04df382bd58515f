"""The plan of a matrix: what each key of its TOML file may hold, and the plan that ``--init`` writes."""

from __future__ import annotations

import json
import os
import re
import string
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from backlight.records import DiagnosisKind
from backlight.text import did_you_mean

UNDECIDED = (DiagnosisKind.DID_NOT_FINISH, DiagnosisKind.UNKNOWN)
"""Verdicts that answer no question: the evidence did not suffice."""

VERDICTS = [kind.value for kind in DiagnosisKind if kind not in UNDECIDED]
OUTCOMES = ["causes", "cures", "changes", "none"]
"""Answers of a case against its control; see :func:`backlight.diagnose.matrix.comparison.compare`."""

_TEMPLATE = Path(__file__).with_name("plan_template.toml")


class PlanError(ValueError):
    """A plan that cannot be run; the message names the position, what is wrong and the fix."""


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


Pattern = Annotated[str, AfterValidator(_check_pattern)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600, allow_inf_nan=False)]
# Names of cases become names of directories.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._=,+-]{0,119}$")]
Variables = dict[
    Annotated[str, Field(pattern=r"^[^=\x00]+$")],
    Annotated[str, Field(strict=False, coerce_numbers_to_str=True, pattern=r"^[^\x00]*$")],
]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Edit(_Table):
    """One change of a configuration file, made in a copy: ``find`` and ``replace``, or a ``key`` of JSON."""

    file: str
    find: str | None = None
    replace: str | None = None
    key: str | None = None
    value: Any = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        by_text = bool(self.find) and self.replace is not None
        by_key = self.key is not None and "value" in self.model_fields_set
        if by_text == by_key or (self.find is None) != (self.replace is None):
            raise ValueError("an edit takes either find and replace, or key and value")
        if by_key and not self.file.endswith(".json"):
            raise ValueError(f"key and value edit JSON files; for {self.file!r} use find and replace")
        return self


class Change(_Table):
    """What a level of a factor, or a case, changes of the base."""

    arguments: list[str] = []
    environment: Variables = {}
    unset: list[str] = []
    edits: list[Edit] = []
    interpreter: str | None = None
    directory: str | None = None
    branch: str | None = None
    ranks: Annotated[int, Field(ge=1, le=4096)] | None = None
    script: str | None = None
    module: str | None = None
    command: Annotated[list[str], Field(min_length=1)] | None = None
    shows: Pattern | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [name for name in ("script", "module", "command") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; expected one of script, module, command")
        return self


class Base(Change):
    """What all cases share."""

    watch: bool = True
    run_options: list[str] = []
    progress: Pattern | None = None
    success: Pattern | None = None


class CaseTable(Change):
    """A case; ``levels`` names a level for each factor that is not at its first."""

    control: str | None = None
    levels: dict[str, str] = {}
    time_limit: Seconds | None = None


class Action(_Table):
    """One thing to do: where (``file:line``), and the command that shows whether it helped."""

    do: str
    at: str = ""
    verify: str = ""


class Node(_Table):
    """A question (``case`` or ``compare``, with ``on``) or a conclusion of the decision tree."""

    ask: str = ""
    case: str | None = None
    compare: str | None = None
    on: dict[str, str] = {}
    conclusion: str = ""
    actions: list[Action] = []

    @property
    def edges(self) -> list[tuple[str, str]]:
        """Each answer with the node that it leads to: ``"BLOCKED|SPIN"`` gives two."""
        return [(word.strip(), target) for words, target in self.on.items() for word in words.split("|")]

    @model_validator(mode="after")
    def _check(self) -> Self:
        asks = (self.case is not None) + (self.compare is not None)
        if asks > 1:
            raise ValueError("a question asks about one case, or compares one; it has both case and compare")
        if bool(asks) == bool(self.conclusion):
            raise ValueError("expected a question (case or compare, with on) or a conclusion")
        if asks and not self.on:
            raise ValueError("the question leads nowhere: expected on = { answer = node }")
        if self.on and not asks:
            raise ValueError("a conclusion ends the tree; it takes no on")
        known = OUTCOMES if self.compare is not None else VERDICTS
        for answer, _ in self.edges:
            if self.case is not None and answer in set(UNDECIDED):
                raise ValueError(f"on: {answer} decides nothing, it leaves every branch open; remove it")
            if answer not in known:
                raise ValueError(f"on: unknown answer {answer!r}; expected one of {', '.join(known)}")
        return self


class Plan(_Table):
    """A whole plan. ``window`` is the time before the limit over which a case is evaluated, in seconds."""

    name: str = ""
    time_limit: Seconds = 60.0
    window: Annotated[float, Field(gt=0)] | None = None
    grace: Annotated[float, Field(ge=0, le=600)] = 3.0
    design: Literal["listed", "one-at-a-time", "product"] = "listed"
    base: Base
    factors: dict[Name, Annotated[dict[Name, Change], Field(min_length=2)]] = {}
    cases: dict[Name, CaseTable] = {}
    tree: dict[str, Node] = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.base.script is None and self.base.module is None and self.base.command is None:
            raise ValueError("base: expected one of script, module, command")
        if self.design == "listed" and not self.cases:
            raise ValueError('no cases: write [cases.NAME], or design = "one-at-a-time" with factors')
        if self.design != "listed" and not self.factors:
            raise ValueError(f"design = {self.design!r} needs factors: write [factors.NAME.LEVEL]")
        return self


def read_plan(path: Path) -> Plan:
    """Return the plan in a file.

    Raises
    ------
    PlanError
        If the file cannot be read, is not TOML, or holds what a plan cannot hold.
    """
    try:
        return Plan.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise PlanError(
            f"{path}: cannot be read: {error.strerror}; `backlight matrix --init {path}` writes a plan"
        ) from None
    except ValidationError as error:
        raise PlanError(f"{path}: {_first_problem(error)}") from None
    except ValueError as error:
        raise PlanError(f"{path}: not valid TOML: {error}") from None


_SECTIONS: dict[str, type[BaseModel]] = {"base": Base, "cases": CaseTable, "factors": Change, "tree": Node}


def _first_problem(error: ValidationError) -> str:
    # An unknown key explains a missing one that it was meant to be, so it comes first.
    first = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"] if part != "[key]"]
    if first["type"] == "extra_forbidden":
        table = _SECTIONS.get(path[0], Plan) if len(path) > 1 else Plan
        table = Edit if "edits" in path else Action if "actions" in path else table
        where = f"[{'.'.join(path[:-1])}]: " if len(path) > 1 else ""
        return f"{where}unknown key {path[-1]!r}{did_you_mean(path[-1], table.model_fields)}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] not in {"missing", "value_error"}:
        got = repr(first["input"])
        message += f", got {got if len(got) <= 60 else got[:57] + '...'}"
    return f"{'.'.join(path)}: {message}" if path else message


def write_plan(path: Path, command: Sequence[str] = ()) -> Path:
    """Write a plan for ``command`` (a script and its arguments), to be adapted by hand.

    Raises
    ------
    PlanError
        If the file exists already, or cannot be written.
    """
    words = [word for word in command if word != "--"]
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]
    script, *arguments = words or ["train.py"]
    text = string.Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        file=path.name,
        script=script.replace('"', "'"),
        script_text=json.dumps(os.path.relpath(script, path.absolute().parent) if words else script),
        arguments=json.dumps(arguments),
        verdicts=", ".join(VERDICTS),
    )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise PlanError(f"{path}: exists already; --init overwrites nothing, choose another name") from None
    except OSError as error:
        raise PlanError(f"{path}: cannot be written: {error.strerror}") from None
    return path
