"""When the hooks on process groups report a transfer; real ranks are in ``tests/ranks/test_transfers.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from backlight.capture.transfers import Transfers


class Work:
    """Stands for the handle of an asynchronous call."""


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [4, 5])
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    return []


def transfers(reported: list[Any]) -> Any:
    return Transfers(SimpleNamespace(delivers=bool, emit=lambda event, one: reported.append(one)))


GROUP = SimpleNamespace(group_name="0", rank=lambda: 1)


def test_result_is_reported_when_it_has_arrived(reported: list[Any]) -> None:
    hooks, x = transfers(reported), torch.ones(3)
    work = hooks.wrap("allreduce", lambda group, tensors: Work())(GROUP, [x])
    assert reported == []
    wait = hooks.wrap_wait(lambda work: None)
    wait(work)
    wait(work)  # only the first time
    hooks.wrap("allreduce", lambda group, tensors: None)(GROUP, [x])  # ordered by the stream
    assert [(one.call, one.number, one.ranks) for one in reported] == [
        ("all_reduce", 1, (4, 5)),
        ("all_reduce", 2, (4, 5)),
    ]


def test_result_that_the_script_wrote_to_is_not_reported(reported: list[Any]) -> None:
    hooks, x = transfers(reported), torch.ones(3)
    work = hooks.wrap("broadcast", lambda group, tensors: Work())(GROUP, [x])
    x.add_(1)
    hooks.wrap_wait(lambda work: None)(work)
    assert reported == []


def test_calls_started_together_arrive_together(reported: list[Any]) -> None:
    hooks, x = transfers(reported), torch.ones(3)
    together = Work()
    hooks.wrap_start(lambda group: None)(GROUP)
    hooks.wrap("send", lambda group, tensors, peer, tag: None)(GROUP, [x], 0, 7)
    hooks.wrap("recv", lambda group, tensors, peer, tag: None)(GROUP, [x], 0, 7)
    assert [one.call for one in reported] == ["send"]  # read before it may be overwritten
    assert hooks.wrap_end(lambda group: together)(GROUP) is together
    assert len(reported) == 1
    hooks.wrap_wait(lambda work: None)(together)
    assert [(one.channel, one.ranks) for one in reported] == [("0 1 0 7", (5, 4)), ("0 0 1 7", (4, 5))]


def test_call_that_raises_is_the_error_of_the_script(reported: list[Any]) -> None:
    def fails(group: Any, tensors: Any) -> None:
        raise RuntimeError("connection closed by peer")

    with pytest.raises(RuntimeError, match="connection closed by peer"):
        transfers(reported).wrap("allreduce", fails)(GROUP, [torch.ones(3)])
    assert reported == []


def test_exchange_is_read_up_to_its_neighbours(reported: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(10, 20)))
    hooks, x = transfers(reported), torch.arange(10.0)
    hooks.wrap("alltoall_base", lambda *args: None)(GROUP, torch.empty(10), x, [], [], None)
    ends = [(one.end, one.ranks, one.tensors[0].numel()) for one in reported]
    assert ends[:4] == [("send", (11, 12 + n), 1) for n in range(4)]
    assert sorted(ends[4:]) == [("recv", (rank, 11), 1) for rank in (10, 17, 18, 19)]
    assert [float(one.tensors[0]) for one in reported[:4]] == [2.0, 3.0, 4.0, 5.0]
