"""Names of several models of one process: those of their variables, else of their classes."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from torch import nn

from backlight.capture.modules import Prefixes


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return an empty main module."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def names(prefixes: Prefixes, *models: nn.Module) -> list[str]:
    return [name for name, _ in prefixes.of(models)]


def test_models_are_named_by_the_variables_of_the_script(script: ModuleType) -> None:
    generator, critic = nn.Linear(2, 2), nn.DataParallel(nn.Linear(2, 1))
    script._last, script.G, script.net = generator, generator, generator
    script.D = critic.module
    assert names(Prefixes(), generator, critic) == ["G", "D"]


def test_models_without_a_variable_are_numbered_by_class(script: ModuleType) -> None:
    script.models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert names(Prefixes(), *script.models) == ["Linear", "Linear#2"]


def test_a_model_keeps_its_name_when_another_one_joins(script: ModuleType) -> None:
    prefixes, script.G, script.D = Prefixes(), nn.Linear(2, 2), nn.Linear(2, 1)
    assert names(prefixes, script.G) == [""]
    assert names(prefixes, script.G, script.D) == ["", "D"]
