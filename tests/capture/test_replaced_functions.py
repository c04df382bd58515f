"""What is replaced while a script is watched pickles, copies and inspects as the original."""

from __future__ import annotations

import contextlib
import copy
import inspect
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset

import backlight
from backlight.capture.hooks import Patches

pytestmark = pytest.mark.slow


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
        if name != "manual_seed":  # torch's compiler wraps it, and pickle refuses it also without backlight
            assert pickle.loads(pickle.dumps(function)) is function, name
        assert copy.deepcopy(function) is function
        if isinstance(original, FunctionType):
            assert inspect.signature(function) == inspect.signature(original), name
        for attribute in ("__module__", "__qualname__", "__doc__"):
            assert getattr(function, attribute) == getattr(original, attribute), (name, attribute)


def test_warnings_count_no_frame_of_a_replaced_function(replaced: list[tuple[Any, str, Any]]) -> None:
    for owner, name, original in replaced:
        function = inspect.getattr_static(owner, name)
        if isinstance(original, FunctionType):
            assert {"importlib", "_bootstrap"} <= {*re.findall(r"\w+", function.__code__.co_filename)}, name


class Warns(nn.Module):
    """Warns about the line that calls it, past the two frames of torch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("called", stacklevel=4)
        return x


def too_long(model: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    class Endless(IterableDataset[torch.Tensor]):
        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter([torch.ones(2), torch.ones(2)])

    loader = DataLoader(Endless())
    len(loader)  # else the length is not compared
    return list(loader)


WARNING: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "epoch parameter in": lambda _, optimizer: StepLR(optimizer, 2).step(3),
    "Length of IterableDataset": too_long,
    "called": lambda model, _: nn.Sequential(model, Warns())(torch.ones(2)),
}


@pytest.mark.parametrize("message", WARNING)
def test_a_warning_names_the_line_of_the_script(tmp_path: Path, message: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    files = []
    for is_watched in (False, True):
        with contextlib.ExitStack() as stack:
            if is_watched:
                stack.enter_context(backlight.watch(model, optimizer, run=tmp_path / "run", summary=False))
            seen = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            model(torch.ones(2)).backward()
            optimizer.step()
            WARNING[message](model, optimizer)
        files.append([(one.filename, one.lineno) for one in seen if message in str(one.message)])
    assert files[0]
    assert files[1] == files[0]


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
