"""The plan of a matrix as it stands in a TOML file: what each key may hold.

What a case amounts to (its command, what it shares with its control) is worked out in
:mod:`backlight.diagnose.matrix.cases`; here only the words of the file are checked.
"""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from backlight.diagnose.matrix.plan_errors import PlanError, sentence
from backlight.records import DiagnosisKind

LONGEST = 7 * 24 * 3600.0
"""Seconds beyond which a time limit is taken for a mistake."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,119}")
"""Names of cases become names of folders."""

UNDECIDED = (DiagnosisKind.DID_NOT_FINISH, DiagnosisKind.UNKNOWN)
"""Verdicts that decide no question: they say that the evidence did not suffice."""

OUTCOMES = ("causes", "cures", "changes", "none")
"""What a case can say against its control; see :func:`backlight.diagnose.matrix.comparison.compare`."""


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
    def _one_kind(self) -> Self:
        by_text = self.find is not None and self.replace is not None
        by_key = self.key is not None and "value" in self.model_fields_set
        if by_text == by_key or (self.find is None) != (self.replace is None):
            raise ValueError("an edit takes either find and replace, or key and value")
        if by_key and not self.file.endswith(".json"):
            raise ValueError(f"key and value edit JSON files; for {self.file!r} use find and replace")
        if self.find == "":
            raise ValueError("find is empty; expected the text to replace")
        return self


class Change(_Table):
    """What a level of a factor, or a case, changes of the base."""

    arguments: tuple[str, ...] = Field((), strict=False)
    environment: dict[str, str] = {}
    unset: tuple[str, ...] = Field((), strict=False)
    edits: tuple[Edit, ...] = Field((), strict=False)
    interpreter: str | None = None
    directory: str | None = None
    branch: str | None = None
    ranks: int | None = Field(None, ge=1, le=4096)
    script: str | None = None
    module: str | None = None
    command: tuple[str, ...] | None = Field(None, strict=False)
    shows: str | None = None

    @field_validator("environment", mode="before")
    @classmethod
    def _as_text(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            k: str(v) if isinstance(v, (int, float)) and not isinstance(v, bool) else v
            for k, v in given.items()
        }

    @field_validator("environment")
    @classmethod
    def _names(cls, given: dict[str, str]) -> dict[str, str]:
        for name, value in given.items():
            if not name or "=" in name or "\0" in name + value:
                raise ValueError(f"environment: {name!r} cannot be set; a name holds no '=' and no NUL")
        return given

    @field_validator("shows")
    @classmethod
    def _pattern(cls, given: str | None) -> str | None:
        return _compiles(given)

    @model_validator(mode="after")
    def _one_command(self) -> Self:
        named = [name for name in ("script", "module", "command") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} are both given; expected one of script, module, command")
        if self.command is not None and not self.command:
            raise ValueError("command is empty; expected a program and its arguments")
        return self


class Base(Change):
    """What all cases share."""

    watch: bool = True
    run_options: tuple[str, ...] = Field((), strict=False)
    progress: str | None = None
    success: str | None = None

    @field_validator("progress", "success")
    @classmethod
    def _patterns(cls, given: str | None) -> str | None:
        return _compiles(given)


class CaseTable(Change):
    """A case that is written out; ``levels`` names a level for each factor that is not at its first."""

    control: str | None = None
    levels: dict[str, str] = {}
    time_limit: float | None = Field(None, strict=False)

    @field_validator("time_limit")
    @classmethod
    def _limit(cls, given: float | None) -> float | None:
        return given if given is None else _limit(given)


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
    actions: tuple[Action, ...] = Field((), strict=False)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        asks = (self.case is not None) + (self.compare is not None)
        if asks > 1:
            raise ValueError("a question asks about one case, or compares one; it has both case and compare")
        if bool(asks) == bool(self.conclusion):
            raise ValueError("expected a question (case or compare, with on) or a conclusion")
        if asks and not self.on:
            raise ValueError("the question leads nowhere: expected on = { answer = node }")
        if self.conclusion and self.on:
            raise ValueError("a conclusion ends the tree; it takes no on")
        for answers in self.on:
            for answer in answers.split("|"):
                _check_answer(answer.strip(), compares=self.compare is not None)
        return self


class Plan(_Table):
    """A whole plan. ``window`` is the time before the limit over which a case is judged, in seconds."""

    name: str = ""
    time_limit: float = Field(60.0, strict=False)
    window: float | None = Field(None, strict=False, gt=0)
    grace: float = Field(3.0, strict=False, ge=0, le=600)
    design: Literal["listed", "one-at-a-time", "product"] = "listed"
    base: Base
    factors: dict[str, dict[str, Change]] = {}
    cases: dict[str, CaseTable] = {}
    tree: dict[str, Node] = {}

    @field_validator("time_limit")
    @classmethod
    def _limits(cls, given: float) -> float:
        return _limit(given)

    @field_validator("cases", "factors")
    @classmethod
    def _case_names(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in given:
            if not NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no name: expected letters, digits and . _ = , + - (at most 120)"
                )
        return given

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.base.script is None and self.base.module is None and self.base.command is None:
            raise ValueError("base: expected one of script, module, command")
        for factor, levels in self.factors.items():
            if len(levels) < 2:
                raise ValueError(f"factors.{factor}: has {len(levels)} level; expected two or more")
            for level in levels:
                if not NAME.fullmatch(level):
                    raise ValueError(f"factors.{factor}: {level!r} is no name of a level")
        if self.design == "listed" and not self.cases:
            raise ValueError('no cases: write [cases.NAME], or design = "one-at-a-time" with factors')
        if self.design != "listed" and not self.factors:
            raise ValueError(f"design = {self.design!r} needs factors: write [factors.NAME.LEVEL]")
        return self


def read_plan(path: Path) -> Plan:
    """Read and check a plan.

    Raises
    ------
    PlanError
        If the file cannot be read, is not TOML, or holds something that a plan cannot hold.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise PlanError(
            f"{path}: cannot be read: {reason}; `backlight matrix --init {path}` writes a plan"
        ) from None
    try:
        return Plan.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{path}: not valid TOML: {error}") from None
    except ValidationError as error:
        raise PlanError(f"{path}: {sentence(error, Plan)}") from None


def _limit(given: float) -> float:
    if not math.isfinite(given) or not 0 < given <= LONGEST:
        raise ValueError(
            f"time_limit = {given:g}: expected seconds, above 0 and at most {LONGEST:.0f} (7 days)"
        )
    return given


def _compiles(pattern: str | None) -> str | None:
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


def _check_answer(answer: str, *, compares: bool) -> None:
    known = list(OUTCOMES) if compares else [v.value for v in DiagnosisKind if v not in UNDECIDED]
    if answer in known:
        return
    if not compares and answer in set(UNDECIDED):
        raise ValueError(f"on: {answer} decides nothing, it leaves every branch open; remove it")
    raise ValueError(f"on: unknown answer {answer!r}; expected one of {', '.join(known)}")
