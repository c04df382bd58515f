"""Tables of one step are copied together and exactly; pending results wait only when read."""

import threading
import weakref

import numpy as np
import pytest
import torch

from backlight.measure import transfer as module
from backlight.measure.transfer import AsyncCopy, PendingArrays, TransferBatch, start_copy


@pytest.fixture
def copies(monkeypatch):
    """Sizes of the copies to the host, whose own memory is treated like that of a device."""
    sizes = []
    original = module.start_copy
    monkeypatch.setattr(
        module, "_travels_alone", lambda table: table.dtype not in {torch.float64, torch.int64}
    )
    monkeypatch.setattr(module, "start_copy", lambda table: (sizes.append(table.numel()), original(table))[1])
    return sizes


def test_one_copy_for_floats_and_integers(copies):
    tables = [
        torch.randn(4, dtype=torch.float64),
        torch.arange(3),
        torch.empty(0, dtype=torch.float64),
        torch.tensor([[float("nan"), -0.0], [float("inf"), 5e-324]], dtype=torch.float64),
    ]
    batch = TransferBatch()
    slots = [batch.add(table) for table in tables]
    assert copies == []
    assert not any(slot.done() for slot in slots)
    batch.start()
    batch.start()
    assert copies == [11]
    assert all(slot.done() for slot in slots)
    for slot, table in zip(slots, tables, strict=True):
        assert slot.read().tobytes() == table.numpy().tobytes()
        assert str(slot.read().dtype) == str(table.dtype).removeprefix("torch.")


def test_reading_starts_copy_that_was_not_started(copies):
    slot = TransferBatch().add(torch.ones(2, dtype=torch.float64))
    assert slot.read().tolist() == [1.0, 1.0]
    assert copies == [2]


def test_late_table_is_copied_on_its_own(copies):
    batch = TransferBatch()
    early = batch.add(torch.ones(2, dtype=torch.float64))
    batch.start()
    late = batch.add(torch.zeros(3, dtype=torch.float64))
    assert copies == [2, 3]
    assert late.read().tolist() == [0.0, 0.0, 0.0]
    assert early.read().tolist() == [1.0, 1.0]


def test_other_types_and_host_tables_are_copied_on_their_own():
    batch = TransferBatch()
    for table in (torch.ones(2), torch.ones(2, dtype=torch.float64)):
        copy = batch.add(table)
        assert copy.done()
        assert copy.read().tolist() == [1.0, 1.0]


class Event:
    """An event of a device that the test sets."""

    device = torch.device("cpu")

    def __init__(self):
        self.done = threading.Event()
        self.waits = 0

    def query(self):
        return self.done.is_set()

    def synchronize(self):
        self.waits += 1
        self.done.wait(10)


def pending_of(event, host):
    numbers = np.ones((1, 1), dtype=np.int64)
    return PendingArrays([AsyncCopy(host, event, host)], lambda received: (received[0][None], numbers))


def test_pending_waits_only_when_read():
    event, host = Event(), torch.zeros(2, dtype=torch.float64)
    pending = pending_of(event, host)
    assert not pending.ready()
    assert event.waits == 0
    host.fill_(7.0)
    threading.Timer(0.05, event.done.set).start()
    assert pending.arrays()[0].tolist() == [[7.0, 7.0]]
    assert event.waits == 1
    assert pending.arrays() is pending.arrays()
    assert event.waits == 1


def test_copy_that_is_over_is_read_without_waiting():
    event = Event()
    pending = pending_of(event, torch.full((2,), 7.0, dtype=torch.float64))
    event.done.set()
    assert pending.ready()
    assert pending.arrays()[0].tolist() == [[7.0, 7.0]]
    assert event.waits == 0


def test_reading_frees_memory_of_device():
    source, released = torch.ones(3), []
    weakref.finalize(source, released.append, True)
    numbers = (np.zeros((0, 3)), np.zeros((0, 5), dtype=np.int64))
    pending = PendingArrays([AsyncCopy(torch.ones(3), None, source)], lambda received: numbers)
    del source
    assert released == []
    pending.arrays()
    assert released == [True]


def test_several_threads_finish_once():
    calls = []

    def finish(received):
        calls.append(received)
        return np.zeros((0, 3)), np.zeros((0, 5), dtype=np.int64)

    pending = PendingArrays([], finish)
    threads = [threading.Thread(target=pending.arrays) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_host_table_is_available_at_once():
    copy = start_copy(torch.arange(3.0))
    assert copy.done()
    assert copy.read().tolist() == [0.0, 1.0, 2.0]
