"""Records of collective calls: arguments that must agree on all ranks are compared, others are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from backlight.monitors.stalls.instrument.collectives import Collectives
from backlight.monitors.stalls.model.shared_state import Collective, SharedState, read_state


@pytest.fixture
def shared_state(tmp_path: Path) -> Iterator[SharedState]:
    """A shared state with a process group of one rank, whose calls are recorded."""
    made = SharedState(tmp_path / "rank-00000.state")
    made.open(rank=0, world_size=1, main_ident=1, main_tid=1, timeout_s=None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    records = Collectives(made, lambda _key, _ranks: None)
    records.attach()
    yield made
    records.detach()
    dist.destroy_process_group()


def calls(shared_state: SharedState) -> tuple[Collective, ...]:
    state = read_state(shared_state.path)
    return state.collectives


X = torch.ones(4)


def reduce_plainly() -> None:
    dist.all_reduce(X.clone())


def reduce_sums() -> None:
    dist.all_reduce(X.clone(), op=dist.ReduceOp.SUM)


def reduce_largest() -> None:
    dist.all_reduce(X.clone(), dist.ReduceOp.MAX)


def reduce_integers() -> None:
    dist.all_reduce(X.int())


def reduce_more() -> None:
    dist.all_reduce(torch.ones(5))


def gather_something() -> None:
    dist.all_gather_object([None], X)


def gather_something_else() -> None:
    dist.all_gather_object([None], torch.ones(3, 3))


def from_global() -> None:
    dist.broadcast(X.clone(), src=0)


def from_group() -> None:
    dist.broadcast(X.clone(), group_src=0)


def gather_here() -> None:
    dist.gather(X, [torch.ones(4)], dst=0)


def gather_there() -> None:
    # What every other rank than the root calls; alone it is refused, after it has been recorded.
    with pytest.raises(ValueError, match="gather_list"):
        dist.gather(X, None, dst=0)


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (reduce_plainly, reduce_sums, True),
        (reduce_plainly, reduce_largest, False),
        (reduce_plainly, reduce_integers, False),
        (reduce_plainly, reduce_more, False),
        (gather_something, gather_something_else, True),
        (from_global, from_group, True),
        (gather_here, gather_there, True),
    ],
)
def test_arguments_that_must_agree(one: Any, other: Any, alike: bool, shared_state: SharedState) -> None:
    one()
    other()
    first, second = calls(shared_state)
    assert first.kind == second.kind
    assert (first.shape == second.shape) is alike
    assert [first.number, second.number] == [1, 2]


def test_call_that_raises_is_marked(shared_state: SharedState) -> None:
    reduce_plainly()
    with pytest.raises(TypeError):
        dist.all_reduce("no tensor")
    good, bad = calls(shared_state)
    assert (good.failed, bad.failed) == (False, True)
    assert not bad.inside


def test_two_groups_of_the_same_ranks_are_counted_separately(shared_state: SharedState) -> None:
    again = dist.new_group([0])
    reduce_plainly()
    dist.all_reduce(X.clone(), group=again)
    first, second = calls(shared_state)
    assert first.group != second.group
    assert [first.number, second.number] == [1, 1]


def test_recv_has_a_number_of_its_own(shared_state: SharedState) -> None:
    reduce_plainly()
    with pytest.raises((RuntimeError, ValueError)):
        dist.recv(X.clone(), src=0)
    reduce_plainly()
    first, receipt, last = calls(shared_state)
    assert receipt.group != first.group
    assert (first.number, last.number) == (1, 2)
