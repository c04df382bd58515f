"""Events of loaded state, schedules and autocast; torch is as it was once no one listens."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel

from backlight.capture.hub import HUB, Listener

EVENTS = (
    "loaded", "state_loaded", "optimizer_loaded", "emptied", "averaged", "schedule_end", "autocast_begin",
    "autocast_end",
)  # fmt: skip


@pytest.fixture
def seen() -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    found: list[tuple[str, tuple[Any, ...]]] = []
    kind = type(
        "All",
        (Listener,),
        {event: lambda _, *given, event=event: found.append((event, given)) for event in EVENTS},
    )
    listener = kind()
    before = [
        torch.load,
        nn.Module.load_state_dict,
        nn.Module.to_empty,
        torch.optim.lr_scheduler.LRScheduler.step,
    ]
    HUB.add(listener)
    yield found
    HUB.remove(listener)
    assert before == [
        torch.load,
        nn.Module.load_state_dict,
        nn.Module.to_empty,
        torch.optim.lr_scheduler.LRScheduler.step,
    ]


def test_what_is_loaded_and_by_whom(seen: list[tuple[str, tuple[Any, ...]]]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.Adam(model.parameters())
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert [event for event, _ in seen] == ["loaded", "state_loaded", "optimizer_loaded"]
    assert seen[0][1][0] is state
    assert seen[1][1][:2] == (model, state["model"])
    assert seen[2][1][:2] == (optimizer, state["optimizer"])


def test_what_is_allocated_without_values(seen: list[tuple[str, tuple[Any, ...]]]) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert model.to_empty(device="cpu") is model
    assert seen == [("emptied", (model,))]


def test_updates_of_an_average_are_counted(seen: list[tuple[str, tuple[Any, ...]]]) -> None:
    model = nn.Linear(2, 2)
    first, second = AveragedModel(model), AveragedModel(model)
    for average in (first, second, first):
        average.update_parameters(model)
    assert seen == [("averaged", (first, 0)), ("averaged", (second, 0)), ("averaged", (first, 1))]
    assert int(first.n_averaged) == 2


def test_a_load_that_raises_is_not_reported(seen: list[tuple[str, tuple[Any, ...]]]) -> None:
    with pytest.raises(RuntimeError, match="Missing key"):
        nn.Linear(2, 2).load_state_dict({})
    assert seen == []


def test_steps_of_schedules_without_the_one_of_their_construction(
    seen: list[tuple[str, tuple[Any, ...]]],
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    parts = [LinearLR(optimizer, total_iters=2), LambdaLR(optimizer, lambda step: 0.5**step)]
    schedule = SequentialLR(optimizer, parts, milestones=[2])
    assert seen == []
    optimizer.step()
    schedule.step()
    assert seen == [("schedule_end", (parts[0],))]


def test_outermost_regions_of_autocast_that_are_enabled(seen: list[tuple[str, tuple[Any, ...]]]) -> None:
    with torch.autocast("cpu", enabled=False):
        pass
    assert seen == []
    with torch.autocast("cpu", torch.bfloat16) as outer, torch.autocast("cpu", torch.bfloat16):
        assert torch.is_autocast_enabled("cpu")
    assert seen == [("autocast_begin", (outer,)), ("autocast_end", (outer,))]
    assert not torch.is_autocast_enabled("cpu")
