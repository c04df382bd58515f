"""Exit reasons of ranks, and the bucket of DDP for which a rank waits."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from backlight.records import Phase
from backlight.store.read.run import open_run
from backlight.watchdog.collectives import CollectiveRecord, Dump
from backlight.watchdog.observation import (
    Buckets,
    ExitReason,
    IssuedCollectives,
    Observation,
    exit_reason_of,
    name_reductions,
)
from backlight.watchdog.shared_state import SharedState, Slot, StateSnapshot, read_state
from backlight.watchdog.words import call_text
from ranks.launching import torchrun, watching

BUCKETS = Buckets(((2, 3), (0, 1)), (30, 20))
NAMES = ("first.weight", "first.bias", "head.weight", "head.bias")
UNKNOWN = "a reduction inside backward"


def raised_in(error: BaseException, file: str = "/home/me/train.py", name: str = "main") -> BaseException:
    """Return the error raised in a function of the given file."""
    space: dict[str, Any] = {"error": error}
    exec(compile(f"def {name}():\n    raise error\n", file, "exec"), space)
    try:
        space[name]()
    except BaseException as caught:  # noqa: BLE001 - an interrupt as well
        return caught
    raise AssertionError


def exit_reason(error: BaseException, **where: str) -> ExitReason:
    return exit_reason_of(raised_in(error, **where))


def test_error_of_the_rank_with_its_line() -> None:
    found = exit_reason(ValueError("injected\nhere"))
    assert (found.error, found.line, found.function) == (
        "ValueError: injected here",
        "/home/me/train.py:2",
        "main",
    )
    assert (found.inside, found.interrupted, found.out_of_memory) == ("", False, False)


COLLECTIVES = "/x/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("error", "where", "inside"),
    [
        (RuntimeError("Connection closed by peer"), {"file": COLLECTIVES}, "a collective"),
        (RuntimeError("anything"), {"file": COLLECTIVES}, "a collective"),
        (ValueError("bad argument"), {"file": COLLECTIVES}, ""),
        (RuntimeError("[gloo/transport/tcp/pair.cc:1] Read error"), {}, "a collective"),
        (RuntimeError("sizes do not match"), {}, ""),
        (
            RuntimeError("Expected to have finished reduction"),
            {"file": "/x/torch/nn/parallel/distributed.py"},
            "",
        ),
        (
            RuntimeError("Connection reset by peer"),
            {"file": "/x/torch/autograd/graph.py", "name": "_engine_run_backward"},
            "backward",
        ),
    ],
)
def test_error_caused_by_another_rank(error: BaseException, where: dict[str, str], inside: str) -> None:
    assert exit_reason(error, **where).inside == inside


@pytest.mark.parametrize(
    ("error", "attribute"),
    [
        (MemoryError(), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out_of_memory"),
        (RuntimeError("CUDA out of memory"), "out_of_memory"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_out_of_memory_and_interrupt_are_recognised(error: BaseException, attribute: str) -> None:
    assert getattr(exit_reason(error), attribute)


@pytest.fixture
def state(tmp_path: Path) -> StateSnapshot:
    shared = SharedState(tmp_path / "rank-00000.state")
    shared.open(rank=0, world_size=2, main_ident=1, main_tid=1, timeout_s=None)
    shared.slots[Slot.BACKWARDS] = 3
    return dataclasses.replace(read_state(shared.path), phase=Phase.BACKWARD)


def observation(state: StateSnapshot, rank: int, arrived: str, **changes: object) -> Observation:
    shared = dataclasses.replace(state, rank=rank, arrived=bytes(map(int, arrived)), **changes)
    return Observation(rank=rank, snapshots=(shared,), names=NAMES, buckets=BUCKETS)


def reductions(*observations: Observation) -> list[str]:
    return [call_text(obs.reduction) for obs in name_reductions(observations)]


def test_rank_waits_for_the_bucket_that_another_has_not_filled(state: StateSnapshot) -> None:
    waits, lacks = reductions(observation(state, 0, "1111"), observation(state, 1, "0011"))
    assert waits == "the reduction of bucket 2 of 2 (first.weight ... first.bias, 2 parameters)"
    assert lacks == "the reduction of bucket 1 of 2 (head.weight ... head.bias, 2 parameters)"


def test_rank_before_this_backward_lacks_the_first_bucket(state: StateSnapshot) -> None:
    late = observation(state, 1, "1111", phase=Phase.OTHER)  # of the backward before
    assert reductions(observation(state, 0, "1111"), late)[0].startswith("the reduction of bucket 1 of 2")


def test_bucket_whose_reduction_is_recorded_as_open_is_named(state: StateSnapshot) -> None:
    """By its size: the gradients of both buckets have arrived on both ranks."""
    records = tuple(
        CollectiveRecord("0", (0, 1), number, "all_reduce", ((numel,),), completed=number == 1)
        for number, numel in ((1, 30), (2, 20))
    )
    issued = IssuedCollectives(1, (), Dump(0, records))
    one = dataclasses.replace(observation(state, 0, "1111"), issued=issued)
    assert reductions(one, observation(state, 1, "1111"))[0].startswith("the reduction of bucket 2 of 2")
    assert call_text(one.pending).startswith(
        "all_reduce(20) #2 of group 0 [0, 1], issued in backward for bucket 2 of 2 ("
    )


def test_undetermined_bucket_is_not_named(state: StateSnapshot) -> None:
    both = reductions(observation(state, 0, "1111"), observation(state, 1, "1111"))
    assert set(both) == {f"{UNKNOWN} (of 2 buckets of DDP that have all their gradients)"}
    assert reductions(observation(state, 0, "0001")) == [UNKNOWN]
    assert reductions(dataclasses.replace(observation(state, 0, "1111"), buckets=Buckets())) == [UNKNOWN]
    assert reductions(observation(state, 0, "1111", phase=Phase.FORWARD)) == [UNKNOWN]


@pytest.mark.alone
@pytest.mark.full
def test_bucket_is_named_in_a_real_launch(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch, torch.distributed as dist\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "dist.init_process_group('gloo')\n"
        "model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 600))\n"
        "model = DistributedDataParallel(model, bucket_cap_mb=1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(4):\n"
        "    if step == 3 and dist.get_rank():\n"
        "        time.sleep(4)\n"
        "    model(torch.ones(2, 600)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    torchrun(
        2, "-m", *watching("--monitors", "stalls", "--stall", 1.5, "--out", tmp_path / "run", script)[2:]
    )
    (found,) = [f for f in open_run(tmp_path / "run").stored_findings() if f.rule == "stall"]
    assert found.subject.rank == 1
    assert re.search(
        r"Waiting for it: rank 0 in the reduction of bucket 1 of 2 \(1\.(bias|weight)", found.detail
    ), found.detail


FIRST, HEAD = "first.weight ... first.bias, 2 parameters", "head.weight ... head.bias, 2 parameters"
SHARDS = Buckets(shard_rows=((2, 3), (0, 1)), shard_numels=(15, 10))


@pytest.mark.parametrize(
    ("buckets", "record", "words"),
    [
        (BUCKETS, {"inputs": ((30,),)}, f", issued in backward for bucket 1 of 2 ({HEAD})"),
        (BUCKETS, {"inputs": ((31,),)}, ""),
        (BUCKETS, {"inputs": ((5, 6),)}, ""),  # DDP reduces flat tensors
        (BUCKETS, {"inputs": ((30,),), "operation": "broadcast"}, ""),
        (Buckets(((2, 3), (0, 1)), (30, 30)), {"inputs": ((30,),)}, ""),  # either may be the one
        (
            SHARDS,
            {"operation": "_allgather_base", "inputs": ((10,),), "phase": Phase.FORWARD},
            f", issued in forward for the shards of {FIRST}",
        ),
        (
            SHARDS,
            {"operation": "_reduce_scatter_base", "outputs": ((15,),), "line": "/x/train.py:3"},
            f", issued for the shards of {HEAD} at /x/train.py:3",
        ),
        (BUCKETS, {"inputs": ((30,),), "completed": True}, None),
    ],
)
def test_pending_collective_has_its_phase_and_parameters(
    buckets: Buckets, record: dict[str, Any], words: str | None
) -> None:
    """As over NCCL: the host is elsewhere, and only the record shows what the device waits in."""
    made = CollectiveRecord("0", (0, 1), 7, **{"operation": "all_reduce", **record})
    found = Observation(0, names=NAMES, buckets=buckets, issued=IssuedCollectives(dump=Dump(0, (made,))))
    assert words is not None or found.pending is None
    assert words is None or call_text(found.pending) == f"{made.text}{words}"
