"""Facts are stored and read back as they are, and every check is in the registry."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from backlight.monitors.correctness.instrument.check import CHECKS, Check
from backlight.monitors.correctness.model.facts import Fact, Names, decode, encode, facts_by_kind, facts_of
from backlight.registry import RULES
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter


def subclasses(cls: type) -> list[type]:
    return [cls, *(inner for direct in cls.__subclasses__() for inner in subclasses(direct))]


def value(hint: Any) -> Any:
    """Return a value of a type."""
    if hint in {str, int, float, bool}:
        return {str: "a", int: 3, float: 0.5, bool: True}[hint]
    if dataclasses.is_dataclass(hint):
        return hint(**{name: value(kind) for name, kind in get_type_hints(hint).items()})
    if get_origin(hint) is UnionType:
        return value(get_args(hint)[0])
    if get_origin(hint) is dict:
        return {value(get_args(hint)[0]): value(get_args(hint)[1])}
    return get_origin(hint)(value(get_args(hint)[0]) for _ in range(2))


def test_every_fact_is_read_back_as_it_was(tmp_path: Path) -> None:
    list(RULES)
    kinds = [kind for kind in subclasses(Fact)[1:] if kind.rule or kind.event != Fact.event]
    assert len(kinds) > 45
    facts = []
    with RunWriter.create(tmp_path / "run", monitors=("correctness",)) as writer:
        for step, kind in enumerate(kinds):
            hints = {f.name: get_type_hints(kind)[f.name] for f in dataclasses.fields(kind)}
            values = {name: value(hint) for name, hint in hints.items() if name not in {"rank", "attempt"}}
            facts.append(kind(**{**values, "step": step}))
            writer.event(step, kind.event, encode(facts[-1]))
        writer.event(0, Fact.event, {"rule": "of a newer release"})
        writer.event(0, Fact.event, {"rule": "clipping"})  # a field is missing
    run = open_run(tmp_path / "run")
    assert [fact for event in run.events() if (fact := decode(event)) is not None] == facts
    for fact in facts:
        assert facts_of(run, type(fact)) == [fact]
    groups = facts_by_kind(run, "mixed_precision")
    assert [[type(fact).__name__ for fact in group] for group in groups] == [
        ["ClippedBeforeUnscale"], ["ScalerBypassed"], ["AutocastWithoutEffect"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "text", "verb"),
    [
        (["a"], "`a`", "is"),
        (["a", "b"], "`a` and `b`", "are"),
        (list("abcdefgh"), "`a`, `b` and 6 more", "are"),
    ],
)
def test_names_are_counted_and_shortened(names: list[str], text: str, verb: str) -> None:
    counted = Names.of(names)
    assert (str(counted), counted.verb("is", "are"), counted.count) == (text, verb, len(names))
    assert len(counted.first) <= 5


def test_registry_holds_every_check() -> None:
    assert {check for _, check in CHECKS.items()} == set(subclasses(Check)[1:])
    assert [check.name for _, check in CHECKS.items()] == list(CHECKS)
