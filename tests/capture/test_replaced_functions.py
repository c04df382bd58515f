"""What is replaced while a script is watched pickles, copies and inspects as the original."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import pytest
import torch
from torch import nn

import backlight
from backlight.capture.hooks import Patches


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Yield owner, name and original of everything that a watch replaces, while it runs."""
    found: list[tuple[Any, str, Any]] = []
    replace = Patches.replace

    def recording(self: Patches, owner: Any, name: str, wrap: Callable[[Any], Any]) -> bool:
        found.append((owner, name, vars(owner).get(name)))
        return replace(self, owner, name, wrap)

    monkeypatch.setattr(Patches, "replace", recording)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, optimizer, run=tmp_path / "run", summary=False):
        yield [one for one in found if one[2] is not None]


def test_replaced_functions_are_found_by_pickle_and_look_as_they_were(
    replaced: list[tuple[Any, str, Any]],
) -> None:
    assert len(replaced) > 20
    for owner, name, original in replaced:
        function = inspect.getattr_static(owner, name)
        if not isinstance(original, FunctionType | BuiltinFunctionType):
            continue  # methods of bound C++ classes, which nothing pickles
        assert pickle.loads(pickle.dumps(function)) is function, name
        assert copy.deepcopy(function) is function
        if isinstance(original, FunctionType):
            assert inspect.signature(function) == inspect.signature(original), name
        for attribute in ("__module__", "__qualname__", "__doc__"):
            assert getattr(function, attribute) == getattr(original, attribute), (name, attribute)


def test_a_pool_of_processes_loads_a_file(replaced: object, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "f.pt")
    with ProcessPoolExecutor(1) as pool:
        assert pool.submit(torch.load, tmp_path / "f.pt").result()["a"].tolist() == [1.0, 1.0]


def test_functions_are_restored_where_they_are_defined(tmp_path: Path) -> None:
    load = torch.serialization.load
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backlight.watch(model, optimizer, run=tmp_path / "run", summary=False):
        assert torch.serialization.load is torch.load is not load
    assert torch.serialization.load is torch.load is load
