"""Which bucket of DDP a rank waits for, from the gradients that have arrived on each."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from backlight.monitors.stalls.model.ddp_reductions import name_reductions, read
from backlight.monitors.stalls.model.observation import Observation
from backlight.monitors.stalls.model.shared_state import SharedState, Slot, StateSnapshot, read_state
from backlight.records import Phase
from backlight.store.read.run import open_run

BUCKETS = ((2, 3), (0, 1))
NAMES = ("first.weight", "first.bias", "head.weight", "head.bias")
UNKNOWN = "a reduction inside backward"


@pytest.fixture
def state(tmp_path: Path) -> StateSnapshot:
    board = SharedState(tmp_path / "rank-00000.board")
    board.open(rank=0, world=2, main_ident=1, main_tid=1, stall=None)
    board.slots[Slot.BACKWARDS] = 3
    found = read_state(board.path)
    assert found is not None
    return dataclasses.replace(found, phase=Phase.BACKWARD)


def observation(state: StateSnapshot, rank: int, arrived: str, **changes: object) -> Observation:
    board = dataclasses.replace(state, rank=rank, arrived=bytes(map(int, arrived)), **changes)  # type: ignore[arg-type]
    return Observation(rank=rank, snapshots=(board,), names=NAMES, buckets=BUCKETS)


def said(*observations: Observation) -> list[str]:
    return [one.reducing for one in name_reductions(observations)]


def test_the_bucket_that_another_rank_has_not_filled(state: StateSnapshot) -> None:
    waits, lacks = said(observation(state, 0, "1111"), observation(state, 1, "0011"))
    assert waits == "the reduction of bucket 2 of 2 (first.weight ... first.bias, 2 parameters)"
    assert lacks == "the reduction of bucket 1 of 2 (head.weight ... head.bias, 2 parameters)"


def test_a_rank_that_has_not_come_to_this_backward_lacks_the_first(state: StateSnapshot) -> None:
    late = observation(state, 1, "1111", phase=Phase.OTHER)  # of the backward before
    assert said(observation(state, 0, "1111"), late)[0].startswith("the reduction of bucket 1 of 2")


def test_what_arrivals_do_not_tell_is_left_open(state: StateSnapshot) -> None:
    both = said(observation(state, 0, "1111"), observation(state, 1, "1111"))
    assert set(both) == {f"{UNKNOWN} (of 2 buckets of DDP that have all their gradients)"}
    assert said(observation(state, 0, "0001")) == [UNKNOWN]
    assert said(dataclasses.replace(observation(state, 0, "1111"), buckets=())) == [UNKNOWN]
    assert said(observation(state, 0, "1111", phase=Phase.FORWARD)) == [UNKNOWN]


def test_documents_that_are_not_understood_are_none() -> None:
    assert read([[0, 1], [2]]) == ((0, 1), (2,))
    assert read(None) == read([["x"]]) == read(7) == ()


@pytest.mark.alone
@pytest.mark.full
def test_the_bucket_is_named_in_a_real_launch(tmp_path: Path) -> None:
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
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = [
        "-m",
        "backlight",
        "run",
        "--monitors",
        "stalls",
        "--stall",
        "1.5",
        "--out",
        "run",
        str(script),
    ]
    done = subprocess.run(
        [*launch, *options], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (found,) = [f for f in open_run(tmp_path / "run").stored_findings() if f.rule == "stall"]
    assert found.subject.rank == 1
    assert re.search(
        r"Waiting for it: rank 0 in the reduction of bucket 1 of 2 \(1\.(bias|weight)", found.claim
    ), found.claim
