"""Replicates reach the owner of a layer whole and in bounded pieces; errors are agreed on."""

import queue
import threading
from collections import defaultdict

import pytest
import torch

from backlight.monitors.spectra.instrument import rank_group as module
from backlight.monitors.spectra.instrument.rank_group import Team, replicates_of
from backlight.monitors.spectra.model.errors import SpectraError


class Wire:
    """Messages between ranks that are threads, in place of a process group."""

    def __init__(self):
        self.rank = threading.local()
        self.queues = defaultdict(queue.Queue)
        self.largest = 0

    def send(self, tensor, to):
        self.largest = max(self.largest, tensor.nbytes)
        self.queues[self.rank.value, to].put(tensor.clone())

    def recv(self, tensor, source):
        tensor.copy_(self.queues[source, self.rank.value].get(timeout=10))


@pytest.mark.parametrize("chunk", [4, 40, 10**6])
@pytest.mark.parametrize(("ranks", "replicates"), [(1, 3), (2, 5), (3, 4), (5, 3)])
def test_all_replicates_reach_the_owner(monkeypatch, ranks, replicates, chunk):
    wire = Wire()
    monkeypatch.setattr(module, "dist", wire)
    G = [torch.randn(4, 6) for _ in range(replicates)]
    out = {}

    def work(rank, owner):
        wire.rank.value = rank
        held = {r: G[r] for r in replicates_of(rank, ranks, replicates)}
        out[rank] = Team(rank, ranks).gathered(
            held, owner, replicates=replicates, shape=(4, 6), dtype=torch.float32, chunk=chunk
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


def test_every_replicate_has_one_rank():
    for ranks in (1, 3, 8):
        numbers = [r for rank in range(ranks) for r in replicates_of(rank, ranks, 5)]
        assert sorted(numbers) == list(range(5))


def test_the_first_of_several_errors_is_raised_by_all(monkeypatch):
    said = [None, (7, "late"), (2, "early")]
    for rank in range(3):
        team = Team(rank, 3)
        monkeypatch.setattr(team, "everywhere", lambda _value: said)
        with pytest.raises(SpectraError, match=r"^early$"):
            team.agree(None)


def test_alone_an_error_keeps_its_cause():
    def fails():
        raise TypeError("a bug")

    with pytest.raises(SpectraError, match="TypeError: a bug") as caught:
        Team().together(fails)
    assert isinstance(caught.value.__cause__, TypeError)
    assert Team().together(lambda: 3) == 3


def test_a_rank_that_has_ended_is_said(monkeypatch):
    def gone(*_args):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(module.dist, "all_gather_object", gone)
    with pytest.raises(SpectraError, match="lost contact: another rank has ended"):
        Team(0, 2).everywhere(1)
