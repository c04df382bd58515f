"""Sidecars of several machines, each of which sees its own ranks: the reader makes one diagnosis of them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backlight.findings.evaluate import findings_of
from backlight.monitors.stalls.model import joint_diagnosis, runtime_dir
from backlight.monitors.stalls.model.joint_diagnosis import pack, together, unpack
from backlight.monitors.stalls.model.observation import Observation
from backlight.monitors.stalls.model.shared_state import PHASES, SharedState, Slot, State
from backlight.monitors.stalls.model.thresholds import Thresholds
from backlight.monitors.stalls.model.watchdog import Watchdog
from backlight.records import Phase
from backlight.store.read.run import Run, open_run
from backlight.store.write.watchdog import WatchdogWriter, host_name
from backlight.store.write.writer import RunWriter

S = 10**9
GROUP, CALL, SHAPE = 7, 11, 13


@pytest.fixture
def run(tmp_path: Path) -> Path:
    writer = RunWriter.create(tmp_path / "run", monitors=("stalls",), world_size=2)
    writer.scalar(0, "loss", 1.0)
    writer.close()
    return tmp_path / "run"


class Machine:
    """One rank with its board and its own sidecar, which lives in this process."""

    def __init__(self, folder: Path, run: Path, rank: int, pid: int) -> None:
        self.place = folder / f"node-{rank}"
        runtime_dir.prepare(self.place)
        self.board = SharedState(runtime_dir.state_path(self.place, rank))
        self.board.open(rank=rank, world=2, main_ident=1, main_tid=pid, stall=5.0)
        self.board.slots[Slot.PID] = pid
        self.board.slots[Slot.BACKWARDS] = self.board.slots[Slot.FORWARDS] = self.board.slots[Slot.STEP] = 3
        runtime_dir.write_document(
            runtime_dir.document_path(self.place, rank, "groups"), {str(GROUP): [0, 1]}
        )
        self.watchdog = Watchdog(self.place, run, run / "attempt-000", Thresholds(), host=f"node-{rank}")

    def waits(self, seconds: float, text: bytes = b"all_reduce(8 float32) #4") -> None:
        self.board.slots[Slot.DISTRIBUTED] = 1
        self.board.enter(GROUP, 4, CALL, SHAPE, text, waits=True)
        self.stands(seconds)

    def stands(self, seconds: float, phase: Phase = Phase.OTHER) -> None:
        self.board.slots[Slot.PHASE] = PHASES.index(phase)
        self.board.slots[Slot.HEARTBEAT] = time.monotonic_ns() - int(seconds * S)
        self.board.slots[Slot.PHASE_SINCE] = self.board.slots[Slot.HEARTBEAT]


@contextmanager
def machines(folder: Path, run: Path) -> Iterator[tuple[Machine, Machine]]:
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    found = [Machine(folder, run, rank, child.pid) for rank, child in enumerate(children)]
    try:
        yield found[0], found[1]
    finally:
        for one, child in zip(found, children, strict=True):
            child.kill()
            child.wait()
            one.watchdog._writer.close()


def stalls(run: Run) -> list[tuple[str | None, int | None, str]]:
    return [(f.subject.verdict, f.subject.rank, f.detail) for f in findings_of(run) if f.rule == "stall"]


def test_a_rank_that_waits_here_for_one_that_stands_elsewhere(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with machines(tmp_path, run) as (here, there):
        here.waits(40)
        there.stands(40, Phase.DATA)
        assert here.watchdog.poll()
        alone = stalls(open_run(run))
        assert len(alone) == 1
        assert alone[0][1] is None  # one machine alone names nobody
        assert "1 of 2 ranks are not seen from this machine, so that the cause is open" in alone[0][2]
        assert there.watchdog.poll()
    ((verdict, rank, claim),) = stalls(open_run(run))
    assert (verdict, rank) == ("PHASE", 1)
    assert "waiting for data" in claim
    assert claim.endswith("Waiting for it: rank 0 in all_reduce(8 float32) #4")
    assert sorted(p.name for p in (run / "attempt-000").glob("watchdog-*.db")) == [
        "watchdog-node-0.db", "watchdog-node-1.db",
    ]  # fmt: skip
    (found,) = findings_of(open_run(run))
    assert any(e.value == "observed on node-0, node-1" for e in found.evidence)
    assert any(e.path.endswith("stall-rank-00000.txt") for e in found.evidence)
    capsys.readouterr()


def test_a_machine_that_has_nothing_to_say_itself_answers_when_it_is_asked(tmp_path: Path, run: Path) -> None:
    with machines(tmp_path, run) as (here, there):
        here.waits(40)
        there.board.slots[Slot.STALL] = 600 * S
        there.stands(20, Phase.DATA)  # far from its own patience, and beyond that of who asks
        assert there.watchdog.poll()
        assert not list((run / "attempt-000").glob("watchdog-node-1.db"))
        assert here.watchdog.poll()
        there.watchdog._elsewhere._next = 0.0
        assert there.watchdog.poll()
        before = len(open_run(run).events(joint_diagnosis.KIND))
        there.watchdog._elsewhere._next = 0.0
        there.watchdog.poll()
        assert len(open_run(run).events(joint_diagnosis.KIND)) == before == 2  # a question is answered once
    ((verdict, rank, _),) = stalls(open_run(run))
    assert (verdict, rank) == ("PHASE", 1)


def test_a_machine_that_has_left_is_remembered(tmp_path: Path, run: Path) -> None:
    with machines(tmp_path, run) as (here, there):
        there.board.close(State.FINISHED)
        there.watchdog.run()
        here.waits(40)
        here.board.slots[Slot.BACKWARDS] = 4
        here.watchdog.poll()
    ((verdict, rank, claim),) = stalls(open_run(run))
    assert (verdict, rank) == ("DEAD", 1)
    assert "rank 1 has ended its training" in claim


@pytest.mark.full
def test_two_stalls_of_a_run_are_two_diagnoses(tmp_path: Path, run: Path) -> None:
    with machines(tmp_path, run) as (here, there):
        for step, phase in ((3, Phase.DATA), (4, Phase.FORWARD)):
            for one in (here, there):
                one.board.slots[Slot.STEP] = step
                one.board.slots[Slot.PROGRESS] += 1
            here.waits(40)
            there.stands(40, phase)
            here.watchdog.poll()
            there.watchdog.poll()
    said = stalls(open_run(run))
    assert [(verdict, rank) for verdict, rank, _ in said] == [("PHASE", 1), ("PHASE", 1)]
    assert ["forward" in claim for _, _, claim in said] == [False, True]


def test_observations_survive_being_stored(tmp_path: Path) -> None:
    observation = Observation(rank=3, ended="killed by SIGKILL", ended_at=5.0)
    seen = unpack(pack([observation], {3: None}, {GROUP: [0, 3]}, 4))
    assert seen is not None
    assert (seen.world, seen.groups, seen.diagnoses) == (4, {GROUP: [0, 3]}, {3: None})
    assert abs(seen.observations[0].ended_at - (time.time() - time.monotonic() + 5.0)) < 1.0
    assert unpack({"ranks": [{}]}) is None
    assert together([]) is None


def test_the_environment_may_name_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BACKLIGHT_HOST", raising=False)
    assert host_name() == socket.gethostname()
    monkeypatch.setenv("BACKLIGHT_HOST", "pod-7")
    assert WatchdogWriter(tmp_path, tmp_path).host == "pod-7"


@pytest.mark.full
@pytest.mark.alone
def test_a_launch_over_two_machines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(2, requires_grad=True)\n"
        "for step in range(3):\n"
        "    x.sum().backward()\n"
        "    dist.all_reduce(x.grad)\n"
        "    if step == 1 and dist.get_rank() == 3:\n"
        "        time.sleep(8)\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    launch += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    watched = ["-m", "backlight", "run", "--monitors", "stalls", "--stall", "2", "--out", "run", str(script)]
    started = [
        subprocess.Popen(
            [*launch, "--node-rank", str(node), *watched],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "BACKLIGHT_HOST": f"node-{node}"},
        )
        for node in range(2)
    ]
    assert [one.wait(120) for one in started] == [0, 0]
    ((verdict, rank, claim),) = stalls(open_run(tmp_path / "run"))
    assert (verdict, rank) == ("PHASE", 3)
    assert re.search(r"train\.py:8 .*Waiting for it: rank 0, 1, 2 in all_reduce", claim), claim
