"""Facts of a training loop as typed records, stored as events, and what their findings share. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from backlight import codec
from backlight.findings import phrases
from backlight.records import Evidence, Finding, Severity, Subject
from backlight.store.read.run import Event, Run

CONTRADICTION = "contradiction"
"""Kind of the events with facts that the author of a loop cannot have meant."""

NAMED = 5
"""Parameters or modules that a fact names."""

F = TypeVar("F", bound="Fact")


_CLASSES: dict[tuple[str, str, str], type[Any]] = {}
_OF_THE_EVENT = {"step", "rank", "attempt"}


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
class _Stored:
    """Makes a frozen dataclass of each subclass, and keeps which event holds it."""

    event: ClassVar[str] = CONTRADICTION
    rule: ClassVar[str] = ""
    kind: ClassVar[str] = ""

    def __init_subclass__(cls, rule: str = "", kind: str = "", event: str = CONTRADICTION) -> None:
        super().__init_subclass__()
        cls.rule, cls.kind, cls.event = rule, kind, event
        dataclasses.dataclass(frozen=True)(cls)
        if rule or event != CONTRADICTION:
            _CLASSES[event, rule, kind] = cls


class Fact(_Stored):
    """A fact of a step. A subclass is a frozen dataclass of what is stored of it.

    ``rule`` names the rule that reads it, ``kind`` tells apart what one rule reads, ``event`` is the kind of
    event that it is stored as. Rank and attempt are those of the event.
    """

    step: int
    rank: int = dataclasses.field(default=0, kw_only=True)
    attempt: int = dataclasses.field(default=0, kw_only=True)

    def _finding(self, facts: Sequence[Any]) -> Finding:
        """Return the finding on ``facts`` of this class in the order of their steps; this is the first."""
        raise NotImplementedError

    def finding(
        self,
        title: str,
        detail: str,
        *,
        severity: Severity = Severity.WARNING,
        evidence: tuple[float | str, str] | tuple[float | str],
        fix: str,
        refuted_if: str,
        **subject: str,
    ) -> Finding:
        """Return a finding that cites this fact: ``evidence`` are a value and its unit.

        ``subject`` are further fields of :class:`Subject`; an empty one is left out.
        """
        about: dict[str, Any] = {name: value or None for name, value in subject.items()}
        return Finding(
            severity=severity,
            title=title,
            detail=detail,
            subject=Subject(step=self.step, **about),
            evidence=(Evidence(f"events/{self.event}", self.step, *evidence),),
            fix=fix,
            refuted_if=refuted_if,
        )


@dataclasses.dataclass(frozen=True)
class Names:
    """The first names of ``count`` parameters or modules."""

    first: tuple[str, ...]
    count: int

    @classmethod
    def of(cls, names: Sequence[str]) -> Self:
        """Return the first of these names."""
        return cls(tuple(names[:NAMED]), len(names))

    def __str__(self) -> str:
        return phrases.parameters(self.first, self.count)

    def verb(self, singular: str, plural: str) -> str:
        """Return the form of a verb that follows the names."""
        return singular if self.count == 1 else plural


class Observed(Fact, event="observed"):
    """How many steps a process has observed, at its end."""

    steps: int


def encode(fact: Fact) -> dict[str, Any]:
    """Return the payload of the event as which a fact is stored."""
    names = {"rule": fact.rule, "kind": fact.kind}
    values = {name: value for name, value in dataclasses.asdict(fact).items() if name not in _OF_THE_EVENT}
    return {**{key: name for key, name in names.items() if name}, **values}


def decode(event: Event) -> Fact | None:
    """Return the fact that an event holds; None where it is none that this release reads."""
    names = (event.payload.get(key, "") for key in ("rule", "kind"))
    kind = _CLASSES.get((event.kind, *map(str, names)))  # type: ignore[arg-type]
    place = {"step": event.step or 0, "rank": event.rank, "attempt": event.attempt}
    try:
        return None if kind is None else codec.convert({**event.payload, **place}, kind)
    except ValueError:
        return None


def facts_of(run: Run, kind: type[F]) -> list[F]:
    """Return the facts of a class, in the order of their steps."""
    facts = [fact for event in run.events(kind.event) if isinstance(fact := decode(event), kind)]
    return sorted(facts, key=lambda fact: (fact.step, fact.rank))


def facts_by_kind(run: Run, rule: str) -> list[list[Any]]:
    """Return the contradictions that a rule reads: those of each class, in the order of their steps."""
    groups: dict[type[Fact], list[Fact]] = {}
    for event in sorted(run.events(CONTRADICTION), key=lambda event: (event.step or 0, event.rank)):
        if event.payload.get("rule") == rule and (fact := decode(event)) is not None:
            groups.setdefault(type(fact), []).append(fact)
    return list(groups.values())


def finding_on(facts: Sequence[Fact]) -> Finding:
    """Return the finding on facts of one class."""
    return facts[0]._finding(facts)


def findings_by_kind(run: Run, rule: str) -> Iterator[Finding]:
    """Yield a finding on the facts of each class that a rule reads."""
    yield from map(finding_on, facts_by_kind(run, rule))


def observed_steps(run: Run) -> int:
    """Return at how many steps facts were compared, in the process that observed most; 0 where unknown."""
    return max((fact.steps for fact in facts_of(run, Observed)), default=0)


def steps_of(facts: Sequence[Fact]) -> list[int]:
    """Return the distinct steps of facts."""
    return sorted({fact.step for fact in facts})


def observed(facts: Sequence[Fact]) -> str:
    """Write ``step 3`` or ``5 observed steps from step 3 on``."""
    steps = steps_of(facts)
    return f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} observed steps from step {steps[0]} on"
