"""Replicates are sent to the owner of a layer in bounded chunks; errors are raised on all ranks."""

import queue
import threading
from collections import defaultdict

import pytest
import torch

from backlight.monitors.spectra.instrument import rank_group as module
from backlight.monitors.spectra.instrument.rank_group import RankGroup
from backlight.monitors.spectra.settings import SpectraError


class Wire:
    """A fake process group whose ranks are threads."""

    def __init__(self):
        self.rank = threading.local()
        self.queues = defaultdict(queue.Queue)
        self.largest = 0

    def send(self, tensor, to, group=None):
        self.largest = max(self.largest, tensor.nbytes)
        self.queues[self.rank.value, to].put(tensor.clone())

    def recv(self, tensor, source, group=None):
        tensor.copy_(self.queues[source, self.rank.value].get(timeout=10))


@pytest.mark.parametrize("chunk", [4, 40, 10**6])
@pytest.mark.parametrize(("ranks", "replicates"), [(1, 3), (2, 5), (3, 4), (5, 3)])
def test_all_replicates_are_gathered_at_owner(monkeypatch, ranks, replicates, chunk):
    wire = Wire()
    monkeypatch.setattr(module, "dist", wire)
    G = [torch.randn(4, 6) for _ in range(replicates)]
    out = {}

    def work(rank, owner):
        wire.rank.value = rank
        held = [G[r] for r in range(rank, replicates, ranks)]
        sources = [r % ranks for r in range(replicates)]
        out[rank] = RankGroup(rank, ranks).gather_at(
            owner, held, sources, shape=(4, 6), dtype=torch.float32, chunk_bytes=chunk
        )

    for owner in range(ranks):
        threads = [threading.Thread(target=work, args=(rank, owner)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert all(torch.equal(x, y) for x, y in zip(out[owner], G, strict=True))
        assert all(out[rank] == [] for rank in range(ranks) if rank != owner)
    assert wire.largest <= chunk
    assert ranks == 1 or wire.largest > 0


def test_first_of_several_errors_is_raised_by_all(monkeypatch):
    messages = [None, (7, "late"), (2, "early")]
    for rank in range(3):
        group = RankGroup(rank, 3)
        monkeypatch.setattr(group, "all_gather", lambda _value: messages)
        with pytest.raises(SpectraError, match=r"^early$"):
            group.raise_first(None)


def test_error_keeps_its_cause():
    def fails():
        raise TypeError("a bug")

    with pytest.raises(SpectraError, match="TypeError: a bug") as caught:
        RankGroup().run(fails)
    assert isinstance(caught.value.__cause__, TypeError)
    assert RankGroup().run(lambda: 3) == 3


def test_rank_that_has_ended_is_reported(monkeypatch):
    def fails(*_args, **_options):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(module.dist, "all_gather_object", fails)
    with pytest.raises(SpectraError, match="lost contact: another rank has ended"):
        RankGroup(0, 2).all_gather(1)
