"""The simulated accelerator itself: results as on the CPU, asynchronous, and closed to the host."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import simulated
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from processes import run_captured

SECONDS = 0.05


def trained(device: str, make: Callable[[], nn.Module]) -> list[Tensor]:
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(4, 1, 8, 8, generator=generator).to(device)
        y = torch.randint(4, (4,), generator=generator).to(device)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [tensor.cpu() for tensor in model.state_dict().values()]


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 4))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))


@pytest.mark.parametrize("make", [linear, convolutional])
def test_training_gives_the_weights_of_the_cpu(make: Callable[[], nn.Module]) -> None:
    assert all(map(torch.equal, trained("sim", make), trained("cpu", make)))


def test_kernels_run_later_in_order() -> None:
    x = torch.zeros(4, device="sim")
    simulated.sleep(SECONDS)
    begin = time.perf_counter()
    x += 1
    x *= 3
    assert not torch.accelerator.current_stream("sim").query()
    assert x.tolist() == [3.0] * 4
    assert time.perf_counter() - begin > SECONDS / 2


def test_events_measure_the_work_between_them() -> None:
    events = [torch.Event("sim", enable_timing=True) for _ in range(3)]
    for event, seconds in zip(events, (SECONDS, 2 * SECONDS, 0), strict=True):
        event.record()
        simulated.sleep(seconds)
    assert not events[1].query()
    events[2].synchronize()
    first, second = (begin.elapsed_time(end) for begin, end in pairwise(events))
    assert first >= SECONDS * 1e3
    assert second >= 2 * SECONDS * 1e3


def test_streams_wait_only_for_events() -> None:
    x, side = torch.zeros(1, device="sim"), torch.Stream("sim")
    torch.accelerator.synchronize()
    simulated.sleep(SECONDS)
    x.fill_(1)
    with side:
        early = x.clone()
    side.wait_stream(torch.accelerator.current_stream("sim"))
    with side:
        late = x.clone()
        assert (early.item(), late.item()) == (0, 1)


def test_freed_memory_is_used_again_by_its_stream_at_once() -> None:
    simulated.sleep(SECONDS)
    x = torch.ones(100, device="sim")
    address = x.data_ptr()
    del x
    assert torch.ones(100, device="sim").data_ptr() == address
    with torch.Stream("sim"):
        assert torch.ones(100, device="sim").data_ptr() != address


def test_recorded_stream_keeps_memory() -> None:
    side = torch.Stream("sim")
    with side:
        simulated.sleep(SECONDS)
    x = torch.ones(300, device="sim")
    address = x.data_ptr()
    x.record_stream(side)
    del x
    assert torch.ones(300, device="sim").data_ptr() != address
    side.synchronize()
    assert torch.ones(300, device="sim").data_ptr() == address


def test_copies_to_the_host_wait_unless_pinned() -> None:
    x = torch.ones(3, device="sim")
    pinned, pageable = torch.zeros(3).pin_memory(), torch.zeros(3)
    torch.accelerator.synchronize()
    simulated.sleep(SECONDS)
    with simulated.no_synchronization():
        pinned.copy_(x, non_blocking=True)
        assert pinned.tolist() == [0, 0, 0]
        with pytest.raises(RuntimeError, match="synchronization where it is forbidden"):
            pageable.copy_(x, non_blocking=True)
        with pytest.raises(RuntimeError, match="synchronization where it is forbidden"):
            x.sum().item()
    torch.accelerator.synchronize()
    assert pinned.tolist() == [1, 1, 1]


def test_counters_name_the_thread() -> None:
    before = simulated.counts(simulated.SYNCHRONIZATION).get("MainThread", 0)
    torch.accelerator.synchronize()
    assert simulated.counts(simulated.SYNCHRONIZATION)["MainThread"] == before + 1


def test_devices_wait_for_each_other_in_copies() -> None:
    simulated.sleep(SECONDS)
    x = torch.ones(3, device="sim:0")
    y = x.to("sim:1")
    assert (y + 1).tolist() == [2, 2, 2]
    assert y.device == torch.device("sim", 1)


def test_errors_of_kernels_are_raised_by_the_next_synchronisation() -> None:
    wrong = torch.nn.functional.embedding(torch.tensor([7], device="sim"), torch.zeros(3, 2, device="sim"))
    with pytest.raises(RuntimeError, match="simulated accelerator: index out of range"):
        wrong.cpu()


def test_random_numbers_have_a_state_of_the_device() -> None:
    host, state = torch.get_rng_state(), torch.sim.get_rng_state("sim")  # type: ignore[attr-defined]
    first = torch.rand(3, device="sim")
    second = F.dropout(torch.ones(100, device="sim"))
    torch.sim.set_rng_state(state, "sim")  # type: ignore[attr-defined]
    assert torch.equal(first.cpu(), torch.rand(3, device="sim").cpu())
    assert torch.equal(second.cpu(), F.dropout(torch.ones(100, device="sim")).cpu())
    assert torch.equal(host, torch.get_rng_state())


STRAY = """
import ctypes, simulated, torch
x = torch.ones(3, device="sim")
torch.accelerator.synchronize()
print(ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))[0])
"""


def test_host_access_ends_the_process() -> None:
    done = run_captured([sys.executable, "-c", STRAY], cwd=Path(__file__).parents[1])
    assert done.returncode < 0
    assert done.stdout == ""
    host = torch.ones(3)
    assert ctypes.cast(host.data_ptr(), ctypes.POINTER(ctypes.c_float))[0] == 1  # the control
