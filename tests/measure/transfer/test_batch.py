"""Tables of one step travel in one copy and come back as they were."""

import pytest
import torch

from backlight.measure.transfer import batch as module
from backlight.measure.transfer.batch import Carrier


@pytest.fixture
def copies(monkeypatch):
    """Sizes of the copies to the host; the host's own memory is treated like that of a device."""
    sizes = []
    original = module.send
    monkeypatch.setattr(module, "_alone", lambda table: table.dtype not in {torch.float64, torch.int64})
    monkeypatch.setattr(module, "send", lambda table: (sizes.append(table.numel()), original(table))[1])
    return sizes


def test_one_copy_for_numbers_and_counts(copies):
    tables = [
        torch.randn(4, dtype=torch.float64),
        torch.arange(3),
        torch.empty(0, dtype=torch.float64),
        torch.tensor([[float("nan"), -0.0], [float("inf"), 5e-324]], dtype=torch.float64),
    ]
    carrier = Carrier()
    seats = [carrier.take(table) for table in tables]
    assert copies == []
    assert not any(seat.landed() for seat in seats)
    carrier.send()
    carrier.send()
    assert copies == [11]
    assert all(seat.landed() for seat in seats)
    for seat, table in zip(seats, tables, strict=True):
        assert seat.read().tobytes() == table.numpy().tobytes()
        assert str(seat.read().dtype) == str(table.dtype).removeprefix("torch.")


def test_reading_sends_what_nobody_sent(copies):
    carrier = Carrier()
    seat = carrier.take(torch.ones(2, dtype=torch.float64))
    assert seat.read().tolist() == [1.0, 1.0]
    assert copies == [2]


def test_what_comes_too_late_travels_on_its_own(copies):
    carrier = Carrier()
    early = carrier.take(torch.ones(2, dtype=torch.float64))
    carrier.send()
    late = carrier.take(torch.zeros(3, dtype=torch.float64))
    assert copies == [2, 3]
    assert late.read().tolist() == [0.0, 0.0, 0.0]
    assert early.read().tolist() == [1.0, 1.0]


def test_other_types_and_the_hosts_memory_travel_on_their_own():
    carrier = Carrier()
    for table in (torch.ones(2), torch.ones(2, dtype=torch.float64)):
        flight = carrier.take(table)
        assert flight.landed()
        assert flight.read().tolist() == [1.0, 1.0]
