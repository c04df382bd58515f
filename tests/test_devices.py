"""Device functions on a host without accelerator: no values and no errors."""

from __future__ import annotations

import pytest
import torch

from backlight import devices

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this host has an accelerator")


def test_host_without_accelerator_has_no_device_in_use() -> None:
    assert not devices.is_available()
    assert not devices.is_in_use()
    assert not devices.is_capturing_graph()
    assert devices.count() == 0
    assert devices.memory() is None
    assert devices.record_events(["cpu"]) == []
    devices.synchronize("test")
    assert not devices.synchronizations
    assert devices.types() == ("cpu",)
    assert not devices.has_async_copies(torch.device("cpu"))
    assert not devices.is_accelerator("cuda:0")


def test_random_states_of_other_accelerators_are_not_restored() -> None:
    assert devices.accelerator_random_states() == []
    before = torch.get_rng_state()
    devices.set_accelerator_random_states([])
    devices.set_accelerator_random_states(
        [torch.zeros(16, dtype=torch.uint8)]
    )  # saved on a host with an accelerator
    assert torch.equal(torch.get_rng_state(), before)


def test_host_random_state_is_restored() -> None:
    states = devices.random_states([])
    first = torch.rand(3)
    devices.set_random_states([], states)
    assert torch.equal(torch.rand(3), first)


def test_missing_stream_is_a_no_op() -> None:
    with devices.on_stream(None), devices.own_streams(["cpu"], [torch.ones(1)]):
        assert torch.ones(2).sum() == 2


def test_memory_of_a_back_end_that_does_not_report_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_device: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuse, raising=False)
    assert devices.free_memory(torch.device("cpu")) is None
    monkeypatch.delattr(torch.accelerator, "get_memory_info")  # as in torch 2.9
    monkeypatch.setattr(devices, "kind", lambda: "cpu")  # its module has no mem_get_info
    assert devices.free_memory(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cpu, "mem_get_info", lambda _device: (3, 4), raising=False)
    assert devices.free_memory(torch.device("cpu")) == 3
