"""The keywords of ``watch`` and of the integrations are the fields of ``Settings``."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest
from settings_page import PAGE, page

import backlight
from backlight.cli.options import given_options
from backlight.monitors.health.settings import HealthSettings
from backlight.session.settings import Settings, given_settings
from backlight.settings import built_in_settings

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
    fields = {field.name: field for field in dataclasses.fields(Settings) if field.name != "of_monitors"}
    monitors = built_in_settings()
    assert [name for name in parameters if name in fields] == list(fields)
    assert [*parameters][-len(monitors) :] == monitors
    for name, field in fields.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        if parameters[name].default is not None:  # None stands for the default
            assert parameters[name].default == field.default


def test_none_stands_for_the_default() -> None:
    nothing = dict.fromkeys([*(field.name for field in dataclasses.fields(Settings)), "health"])
    assert Settings.of(given_settings(nothing)) == Settings()
    assert given_settings({"every": 3, "run": "x", "steps": None}) == {"every": 3}


def test_settings_of_a_monitor_are_the_same_from_everywhere(tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text("[health]\nexact_updates = 8\ndecompose = [3]\n")
    file = Settings.read(tmp_path / "settings.toml", {})
    line = Settings.of(given_options({"health__decompose": [3]}, ["health.exact_updates=8"]))
    python = Settings.of({"health": {"exact_updates": 8, "decompose": 3}})
    assert file == line == python == Settings.of({"health": HealthSettings(exact_updates=8, decompose=(3,))})
    assert HealthSettings.of(python).exact_updates == 8
    assert HealthSettings.of(Settings()) == HealthSettings()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"healht": {}}, r"^settings: unknown key 'healht'; did you mean 'health'\?$"),
        ({"health": {"exact_update": 1}}, r"^settings: health: unknown key 'exact_update'; did you mean"),
        ({"health": {"exact_updates": 0}}, r"^health.exact_updates: 0: expected 1 or more$"),
        (
            {"health": {"exact_updates": "x"}},
            r"health.exact_updates: expected int \| null, got 'x'$",
        ),
        ({"health": 3}, r"^health: expected HealthSettings or a mapping, got int$"),
        (
            {"monitors": "steptime", "health": {"exact_updates": 1}},
            r"^health.exact_updates: needs the monitor health, which is not requested; add it to monitors$",
        ),
        ({"monitors": 3}, r"^settings: monitors: expected a list, got 3$"),
        ({"monitors": [1]}, r"^settings: monitors.0: expected str, got 1$"),
        ({"groups": 3}, r"^settings: groups: expected keys with values, got 3$"),
        ({"groups": [3]}, r"^settings: groups: expected keys with values, got \[3\]$"),
        ({"health": {"decompose": 1.5}}, r"^settings: health.decompose: expected a list, got 1.5$"),
        ({"stalls": {"trace": 3}}, r"^settings: stalls.trace: expected a list, got 3$"),
        ({"max_disk": "5 apples"}, r"^--max-disk '5 apples': expected a size such as 500M or 2G$"),
    ],
)
def test_what_cannot_be_used_is_one_line(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.of(given)


def test_the_page_of_settings_is_that_of_the_declarations() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python docs/settings_page.py"


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
