"""The keywords of ``watch`` and of the integrations are the fields of ``Settings``."""

from __future__ import annotations

import dataclasses
import importlib
import inspect

import pytest

import backlight
from backlight.session.settings import Settings, SettingsKeywords, given_settings

ENTRIES = (
    "session.watch.watch",
    "integrations.hosted.HostedCallback",
    "integrations.accelerate.watch",
    "integrations.torchtitan.watch",
)


@pytest.mark.parametrize("entry", ENTRIES)
def test_keywords_and_defaults_are_those_of_the_settings(entry: str) -> None:
    module, _, name = entry.rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(f"backlight.{module}"), name)).parameters
    assert not [p for p in parameters.values() if p.kind is p.VAR_KEYWORD]
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    assert [name for name in parameters if name in fields] == list(fields)
    for name, field in fields.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        if parameters[name].default is not None:  # None stands for the default
            assert parameters[name].default == field.default
    others = [*parameters][: -len(fields)]
    assert [*parameters] == [*others, *fields]


def test_typed_keywords_are_those_of_the_settings() -> None:
    assert [*SettingsKeywords.__annotations__] == [field.name for field in dataclasses.fields(Settings)]


def test_none_stands_for_the_default() -> None:
    assert (
        Settings.of(given_settings({name.name: None for name in dataclasses.fields(Settings)})) == Settings()
    )
    assert given_settings({"every": 3, "run": "x", "steps": None}) == {"every": 3}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"evry": 3}, r"^watch\(\) has no parameter 'evry'; did you mean 'every'\?$"),
        ({"sample": 3}, r"'sample'; did you mean 'samples'\?$"),
        ({"out": "runs/first"}, r"'out'; here it is run='runs/first'$"),
        ({"log_freq": 100}, r"'log_freq'; here it is every=100$"),
    ],
)
def test_unknown_keyword_names_the_right_one(given: dict[str, object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        backlight.watch(**given)
