"""Recorder: bytes by kind and module, each storage counted once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backlight.diagnose.memory.prediction import checkpoint_modules
from backlight.diagnose.memory.recorder import MemoryRecorder, OperationCounter
from backlight.diagnose.memory.result import Account, MemoryKind, Storage
from backlight.records import Phase


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


def record(model: nn.Module, recorder: MemoryRecorder | None = None, steps: int = 1) -> MemoryRecorder:
    recorder = MemoryRecorder([model]) if recorder is None else recorder
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with recorder:
        for _ in range(steps):
            batch = torch.randn(16, 8)
            recorder.begin_phase(Phase.FORWARD)
            loss = model(batch).square().mean()
            recorder.begin_phase(Phase.BACKWARD)
            loss.backward()
            recorder.begin_phase(Phase.OPTIMIZER)
            optimizer.step()
            recorder.register_optimizer(optimizer)
            recorder.begin_phase(Phase.OTHER)
            optimizer.zero_grad()
    return recorder


def of(recorder: MemoryRecorder, kind: MemoryKind) -> list[Storage]:
    return [storage for storage in recorder.log.storages if storage.kind is kind]


def test_kinds_have_the_bytes_of_the_tensors() -> None:
    model = Net()
    recorder = record(model)
    held = sum(p.nbytes for p in model.parameters())
    assert sum(s.nbytes for s in of(recorder, MemoryKind.PARAMETERS)) == held
    assert sum(s.nbytes for s in of(recorder, MemoryKind.GRADIENTS)) == held
    assert sum(s.nbytes for s in of(recorder, MemoryKind.OPTIMIZER_STATE)) == held
    assert [s.nbytes for s in of(recorder, MemoryKind.BUFFERS)] == [8 * 4]
    assert [s.nbytes for s in of(recorder, MemoryKind.INPUTS)] == [16 * 8 * 4]
    assert {s.module for s in of(recorder, MemoryKind.GRADIENTS)} == {
        f"{outer}.{inner}" for outer in ("first", "second") for inner in ("up", "down")
    }


def test_forward_and_backward_are_attributed_to_nested_modules() -> None:
    storages = record(Net()).log.storages
    tanh = [s.module for s in storages if s.operation == "aten.tanh.default"]
    assert tanh == ["first", "second"]
    forward = {s.module for s in storages if s.phase == Phase.FORWARD and "addmm" in s.operation}
    assert forward == {"first.up", "first.down", "second.up", "second.down"}
    backward = [s.module for s in storages if s.phase == Phase.BACKWARD and "tanh_backward" in s.operation]
    assert backward == ["second", "first"]
    matrices = {s.module for s in storages if s.phase == Phase.BACKWARD and s.operation == "aten.mm.default"}
    assert matrices == {"first.up", "first.down", "second.up", "second.down"}


def test_tied_weight_is_counted_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    recorder = record(model)
    assert [s.nbytes for s in of(recorder, MemoryKind.PARAMETERS)] == [8 * 8 * 4]
    assert [s.nbytes for s in of(recorder, MemoryKind.GRADIENTS)] == [8 * 8 * 4]


def test_views_and_in_place_operations_allocate_nothing() -> None:
    recorder = MemoryRecorder([])
    with recorder:
        x = torch.ones(10, 10)
        count = len(recorder.log.storages)
        x.view(100)[3:].add_(1)
        x.t().mul_(2)
        x[0].zero_()
        assert len(recorder.log.storages) == count
        x.clone()
        assert len(recorder.log.storages) == count + 1


def test_storage_at_a_reused_address_is_a_new_one() -> None:
    recorder = MemoryRecorder([])
    with recorder:
        for _ in range(50):
            made = torch.empty(1000)
            del made
    assert len(recorder.log.storages) == 50
    assert Account(recorder.log).curve.max() == 4000
    assert Account(recorder.log).curve[-1] == 0


def test_recomputed_activations_belong_to_their_module() -> None:
    model = Net()
    plain, recomputing = record(model), OperationCounter()
    wrapped = MemoryRecorder([model], recomputing)
    checkpoint_modules(model, ["first", "second"], wrapped.module)
    record(model, wrapped)
    plain_storages = [s for s in of(plain, MemoryKind.ACTIVATIONS) if s.phase == Phase.FORWARD]
    checkpointed = [s for s in of(wrapped, MemoryKind.ACTIVATIONS) if s.phase == Phase.FORWARD]
    assert sum(s.nbytes for s in checkpointed) < sum(s.nbytes for s in plain_storages)
    recomputed = [s for s in of(wrapped, MemoryKind.ACTIVATIONS) if s.phase == Phase.BACKWARD]
    assert {"first", "second"} <= {s.module for s in recomputed if "tanh" in s.operation}
    # The second product is not needed to compute the gradients: it is stopped before.
    assert recomputing.flops().recomputed == 2 * (2 * 16 * 8 * 32)


def test_recording_changes_nothing() -> None:
    def train(*, watched: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = Net()
        if watched:
            record(model, MemoryRecorder([model], OperationCounter()), steps=3)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for _ in range(3):
                loss = model(torch.randn(16, 8)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    for one, other in zip(train(watched=True), train(watched=False), strict=True):
        assert torch.equal(one, other)


def test_error_of_the_recorder_does_not_stop_the_step() -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("injected")

    model = Net()
    recorder = record(model, MemoryRecorder([model], broken))
    assert "injected" in recorder.trouble
    assert all(p.grad is None for p in model.parameters())


def test_flops_of_known_products() -> None:
    model = nn.Linear(8, 32)
    counter = OperationCounter()
    record(model, MemoryRecorder([model], counter))
    assert counter.flops().forward == 2 * 16 * 8 * 32
    assert counter.flops().backward == 2 * 16 * 8 * 32  # the input needs no gradient
    assert counter.flops().modules[""] == counter.flops().forward


def test_sparse_gradients_are_counted_by_their_parts() -> None:
    model = nn.Sequential(nn.Embedding(100, 4, sparse=True))
    recorder = MemoryRecorder([model])
    with recorder:
        recorder.begin_phase(Phase.FORWARD)
        loss = model(torch.tensor([1, 5])).sum()
        recorder.begin_phase(Phase.BACKWARD)
        loss.backward()
        recorder.begin_phase(Phase.OTHER)
    assert sum(s.nbytes for s in of(recorder, MemoryKind.GRADIENTS)) == 2 * 4 * 4 + 2 * 8


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_one_device_type_is_counted(device: str) -> None:
    recorder = MemoryRecorder([], device=device)
    with recorder:
        kept = [torch.empty(10, device="cpu"), torch.empty(20, device="meta")]
    assert Account(recorder.log).peak == (40 if device == "cpu" else 80)
    assert len(kept) == 2
