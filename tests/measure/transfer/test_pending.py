import threading
import weakref

import numpy as np
import torch

from backlight.measure.transfer.pending import Flight, Pending, send


class Event:
    """An event of a device, told by the test when it is done."""

    def __init__(self):
        self.done = threading.Event()
        self.waits = 0

    def query(self):
        return self.done.is_set()

    def synchronize(self):
        self.waits += 1
        self.done.wait(10)


def test_nothing_waits_until_the_numbers_are_asked_for():
    event, host = Event(), torch.zeros(2, dtype=torch.float64)
    pending = Pending(
        [Flight(host, event, host)], lambda arrived: (arrived[0][None], np.ones((1, 1), dtype=np.int64))
    )
    assert not pending.ready()
    assert event.waits == 0
    host.fill_(7.0)
    event.done.set()
    assert pending.ready()
    assert pending.arrays()[0].tolist() == [[7.0, 7.0]]
    assert event.waits == 1
    assert pending.arrays() is pending.arrays()
    assert event.waits == 1


def test_the_memory_of_the_device_is_let_go():
    source, gone = torch.ones(3), []
    weakref.finalize(source, gone.append, True)
    numbers = (np.zeros((0, 3)), np.zeros((0, 5), dtype=np.int64))
    pending = Pending([Flight(torch.ones(3), None, source)], lambda arrived: numbers)
    del source
    assert gone == []
    pending.arrays()
    assert gone == [True]


def test_numbers_may_be_asked_for_by_several_threads():
    calls = []

    def finish(arrived):
        calls.append(arrived)
        return np.zeros((0, 3)), np.zeros((0, 5), dtype=np.int64)

    pending = Pending([], finish)
    threads = [threading.Thread(target=pending.arrays) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


def test_the_hosts_own_table_is_there_at_once():
    table = torch.arange(3.0)
    flight = send(table)
    assert flight.landed()
    assert flight.read().tolist() == [0.0, 1.0, 2.0]
