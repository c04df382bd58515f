"""Records of collective calls: arguments that must agree on all ranks are compared, others are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from backlight.devices import GATE
from backlight.monitors.stalls.instrument.collectives import Collectives, CollectiveTrace, _add_frames
from backlight.records import Phase
from backlight.watchdog.collectives import CollectiveRecord
from backlight.watchdog.flight_recorder import parse_dump
from backlight.watchdog.observation import parse_issued
from backlight.watchdog.shared_state import Collective, SharedState, read_state
from backlight.watchdog.words import call_text
from observed_processes import wait_until
from ranks.launching import torchrun


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
    return read_state(shared_state.path).collectives


X = torch.ones(4)


def all_reduce(*arguments: Any, **options: Any) -> Callable[[], object]:
    return lambda: dist.all_reduce(*(arguments or (X.clone(),)), **options)


def gather_as_other_rank() -> None:
    # The call of every rank but the root; in a group of one rank it fails after it has been recorded.
    with pytest.raises(ValueError, match="gather_list"):
        dist.gather(X, None, dst=0)


@pytest.mark.parametrize(
    ("one", "other", "agree"),
    [
        (all_reduce(), all_reduce(op=dist.ReduceOp.SUM), True),
        (all_reduce(), all_reduce(op=dist.ReduceOp.MAX), False),
        (all_reduce(), all_reduce(X.int()), False),
        (all_reduce(), all_reduce(torch.ones(5)), False),
        (
            lambda: dist.all_gather_object([None], X),
            lambda: dist.all_gather_object([None], torch.ones(3, 3)),
            True,
        ),
        (lambda: dist.broadcast(X.clone(), src=0), lambda: dist.broadcast(X.clone(), group_src=0), True),
        (lambda: dist.gather(X, [torch.ones(4)], dst=0), gather_as_other_rank, True),
    ],
    ids=["default", "reduction", "dtype", "shape", "objects", "source", "gather"],
)
def test_arguments_that_must_agree(one: Any, other: Any, agree: bool, shared_state: SharedState) -> None:
    one()
    other()
    first, second = calls(shared_state)
    assert first.kind == second.kind
    assert (first.shape == second.shape) is agree
    assert [first.number, second.number] == [1, 2]


def test_call_that_raises_is_marked(shared_state: SharedState) -> None:
    all_reduce()()
    with pytest.raises(TypeError):
        dist.all_reduce("no tensor")
    good, bad = calls(shared_state)
    assert (good.failed, bad.failed) == (False, True)
    assert not bad.inside


def test_two_groups_of_the_same_ranks_are_counted_separately(shared_state: SharedState) -> None:
    again = dist.new_group([0])
    all_reduce()()
    dist.all_reduce(X.clone(), group=again)
    first, second = calls(shared_state)
    assert first.group != second.group
    assert [first.number, second.number] == [1, 1]


def test_recv_has_a_number_of_its_own(shared_state: SharedState) -> None:
    all_reduce()()
    with pytest.raises((RuntimeError, ValueError)):
        dist.recv(X.clone(), src=0)
    all_reduce()()
    first, receipt, last = calls(shared_state)
    assert receipt.group != first.group
    assert (first.number, last.number) == (1, 2)


def test_nothing_is_asked_while_a_graph_is_captured(shared_state: SharedState, tmp_path: Path) -> None:
    asked = []

    class Handle:
        def is_completed(self) -> bool:
            asked.append(True)
            return False

    handle, document = Handle(), tmp_path / "collectives.json"
    trace = CollectiveTrace(document)
    trace.follow(3, handle)
    GATE.close()
    try:
        trace.write()
    finally:
        GATE.open()
    assert not asked
    assert not document.exists()
    trace.write()
    assert asked
    assert parse_issued(0, json.loads(document.read_text())).open_calls == (3,)


def test_handle_of_an_asynchronous_call_is_followed_to_its_end(tmp_path: Path) -> None:
    """Handles are not kept alive."""
    trace = CollectiveTrace(tmp_path / "collectives.json")

    class Handle:
        done = False

        def is_completed(self) -> bool:
            return self.done

    first, second = Handle(), Handle()
    trace.follow(3, first)
    trace.follow(4, second)
    assert trace.open_calls() == [3, 4]
    first.done = True
    assert trace.open_calls() == [4]
    del second
    assert trace.open_calls() == []
    trace.follow(5, 7)  # a handle of a type that cannot be referred to weakly
    assert trace.open_calls() == []


def test_document_holds_what_the_flight_recorder_holds(shared_state: SharedState, tmp_path: Path) -> None:
    document = tmp_path / "collectives.json"
    again = dist.new_group([0], group_desc="again")
    dist.all_reduce(X.clone(), group=again, async_op=True).wait()

    def last_record() -> CollectiveRecord:
        CollectiveTrace(document).write()
        found = parse_issued(0, json.loads(document.read_text()))
        assert found.dump is not None
        return found.dump.records[-1]

    wait_until(lambda: last_record().completed, "a thread of torch notes the end")
    last = last_record()
    assert (last.label, last.ranks, last.number, last.operation) == ("again", (0,), 1, "all_reduce")
    assert last.inputs == ((4,),)


def test_open_collective_has_the_phase_and_the_line_that_issued_it(shared_state: SharedState) -> None:
    """Entries as if the device had not completed them: only stacks of those are kept."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        pytest.skip("this release of torch has no flight recorder for gloo")
    weight = torch.ones(3, requires_grad=True)
    handles: list[Any] = []
    weight.register_post_accumulate_grad_hook(
        lambda w: handles.append(dist.all_reduce(w.grad, async_op=True))
    )
    (weight * 2).sum().backward()
    handles[0].wait()
    dist.all_reduce(X.clone())
    entries = json.loads(dump())["entries"][-2:]
    for entry in entries:
        entry["retired"] = False
    _add_frames(entries)
    inside, outside = parse_dump(0, {"entries": entries}).records
    assert (inside.phase, outside.phase) == (Phase.BACKWARD, None)
    assert all(record.line.startswith(f"{__file__}:") for record in (inside, outside))
    assert call_text(inside) == f"{inside.text}, issued in backward at {inside.line}"

    def retired() -> list[dict[str, Any]]:
        return [entry for entry in json.loads(dump())["entries"][-2:] if entry["retired"]]

    wait_until(lambda: len(retired()) == 2, "a thread of torch notes the end")
    kept = retired()
    _add_frames(kept)  # the control: both have completed
    assert all("frames" not in entry for entry in kept)


@pytest.mark.full
def test_shards_of_fsdp_are_written_by_their_collective(tmp_path: Path) -> None:
    """The sizes that are written, against those that the flight recorder holds."""
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"):
        pytest.skip("this release of torch has no flight recorder for gloo")
    torchrun(2, Path(__file__).parents[3] / "ranks" / "shards.py", tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["gathered"]
        assert set(found["gathered"]) == set(found["numels"])
        assert sorted(row for rows in found["rows"] for row in rows) == [0, 1, 2, 3]
