"""Watchdogs of several machines, each of which observes its own ranks; the reader joins them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backlight.findings.evaluate import findings_of
from backlight.processes import ProcessEnd
from backlight.records import DiagnosisKind, Phase
from backlight.store.format.manifest import read_manifest
from backlight.store.format.schema import STALL_VIEWS
from backlight.store.read.run import Run, open_run
from backlight.store.write.watchdog import WatchdogWriter, host_name
from backlight.watchdog import runtime_dir
from backlight.watchdog.collectives import CollectiveRecord, Reduction
from backlight.watchdog.diagnosis import Cause, Decision, What
from backlight.watchdog.observation import Observation
from backlight.watchdog.peers import HostObservation, join, newest_stall, pack, stall_events, unpack
from backlight.watchdog.shared_state import PHASES, RankStatus, SharedState, Slot
from backlight.watchdog.timeouts import StallLimits
from backlight.watchdog.waits import WaitCause, WaitName
from backlight.watchdog.watchdog import Watchdog
from ranks.launching import watching
from run_builder import build_run

S = 10**9
GROUP, CALL, SHAPE = 7, 11, 13


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return build_run(tmp_path / "run", monitors=("stalls",), world_size=2, scalars={"loss": [1.0]}).path


class Machine:
    """One rank with its shared state and the watchdog of its machine, which runs in this process."""

    def __init__(self, folder: Path, run: Path, rank: int, pid: int, node: int) -> None:
        self.directory = folder / f"node-{node}"
        runtime_dir.create(self.directory)
        self.state = SharedState(runtime_dir.state_path(self.directory, rank))
        self.state.open(rank=rank, world_size=2, main_ident=1, main_tid=pid, timeout_s=5.0)
        self.state.slots[Slot.PID] = pid
        self.state.slots[Slot.BACKWARDS] = self.state.slots[Slot.FORWARDS] = self.state.slots[Slot.STEP] = 3
        runtime_dir.write_document(
            runtime_dir.document_path(self.directory, rank, "groups"), {str(GROUP): [0, 1]}
        )
        self.watchdog = Watchdog(self.directory, run, run / "attempt-000", StallLimits(), host=f"node-{node}")

    def wait_in_collective(self, seconds: float, call: bytes = b"all_reduce(8 float32)") -> None:
        self.state.slots[Slot.DISTRIBUTED] = 1
        self.state.enter_collective(GROUP, 4, CALL, SHAPE, call, blocking=True)
        self.hang(seconds)

    def hang(self, seconds: float, phase: Phase = Phase.OTHER) -> None:
        self.state.slots[Slot.PHASE] = PHASES.index(phase)
        self.state.slots[Slot.HEARTBEAT] = time.monotonic_ns() - int(seconds * S)
        self.state.slots[Slot.PHASE_SINCE] = self.state.slots[Slot.HEARTBEAT]


@contextmanager
def machines(folder: Path, run: Path, nodes: tuple[int, int] = (0, 1)) -> Iterator[tuple[Machine, Machine]]:
    children = [subprocess.Popen(["sleep", "60"]) for _ in nodes]
    found = [Machine(folder, run, rank, children[rank].pid, node) for rank, node in enumerate(nodes)]
    try:
        yield found[0], found[1]
    finally:
        for machine, child in zip(found, children, strict=True):
            child.kill()
            child.wait()
            if "_writer" in vars(machine.watchdog):
                machine.watchdog._writer.close()


@pytest.mark.slow
def test_each_slow_phase_and_each_mismatch_is_reported_once(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an overloaded machine a slow phase pauses, and a rank may end before its mismatch is read again."""
    with machines(tmp_path, run) as (first, _):
        watchdog = first.watchdog

        def report(kind: DiagnosisKind, step: int, **changes: object) -> list[str]:
            first.hang(40, Phase.BACKWARD)
            first.state.slots[Slot.PHASE_SINCE] = since
            first.state.slots[Slot.PROGRESS] += 1
            watchdog.poll()
            cause = Cause(kind, What.STRAGGLER, Phase.BACKWARD, rank=0, step=step, ranks=(0,))
            host = HostObservation(tuple(watchdog._observe()), {0: cause}, 2)
            decision = Decision(cause, **changes)
            monkeypatch.setattr(watchdog, "_decide", lambda _due: (decision, host, 5.0))
            watchdog._report_stall(list(watchdog._ranks.values()))
            return [claim for _, _, claim in stalls(open_run(run))]

        monkeypatch.setattr(Watchdog, "_is_due", lambda *_: False)
        since = 1 * S
        (one,) = report(DiagnosisKind.SLOW, 12)
        assert report(DiagnosisKind.SLOW, 43) == [one]
        since = 2 * S  # the control: the next backward is slow as well
        assert len(report(DiagnosisKind.SLOW, 13)) == 2
        assert len(report(DiagnosisKind.MISMATCH, 3, noticed=(0, ProcessEnd(signal.SIGABRT)))) == 3
        monkeypatch.setattr("backlight.watchdog.watchdog.decide_calls", not_called)
        watchdog._report_mismatch()


def not_called(*_: object) -> None:
    raise AssertionError("the mismatch has been reported")


def launch_of(run: Path) -> str:
    return read_manifest(run).attempts[-1].launch


def stalls(run: Run) -> list[tuple[str | None, int | None, str]]:
    stored = [f for f in findings_of(run) if f.rule == "stall"]
    return [(f.subject.verdict, f.subject.rank, f"{f.title}; {f.detail}".removesuffix(".")) for f in stored]


@pytest.mark.slow
def test_rank_that_waits_for_a_rank_of_another_machine(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with machines(tmp_path, run) as (first, second):
        first.wait_in_collective(40)
        second.hang(40, Phase.DATA)
        assert first.watchdog.poll()
        partial = stalls(open_run(run))
        assert len(partial) == 1
        assert partial[0][1] is None  # one machine alone names no rank
        assert "1 of 2 ranks are not observable from this machine, so the cause is open" in partial[0][2]
        alone = newest_stall(stall_events(run, launch_of(run)))
        assert (alone.claim, alone.is_open) == (partial[0][2], True)
        assert second.watchdog.poll()
        newest = newest_stall(stall_events(run, launch_of(run)))
        for _ in range(2):
            second.state.slots[Slot.PROGRESS] += 1
            second.hang(0)
            second.watchdog.poll()
        over = newest_stall(stall_events(run, launch_of(run)))
    ((kind, rank, claim),) = stalls(open_run(run))
    assert (kind, rank) == ("PHASE", 1)
    assert "waiting for data" in claim
    assert claim.endswith("Waiting for it: rank 0 in all_reduce(8 float32) #4")
    assert (newest.claim, newest.rank, newest.is_open, newest.over) == (claim, 1, False, "")
    assert (over.claim, over.over) == (claim, "rank 1 moves again")
    assert stall_events(run, "another launch") == ()
    assert sorted(p.name for p in (run / "attempt-000").glob("watchdog-*.db")) == [
        "watchdog-node-0.db", "watchdog-node-1.db",
    ]  # fmt: skip
    (found,) = findings_of(open_run(run))
    assert any(e.value == "observed on node-0, node-1" for e in found.evidence)
    assert any(e.path.endswith("stall-rank-00000.txt") for e in found.evidence)
    capsys.readouterr()


@pytest.mark.slow
def test_diagnosis_of_the_machine_at_fault_is_open_until_the_others_answer(tmp_path: Path, run: Path) -> None:
    with machines(tmp_path, run) as (first, second):
        second.hang(40, Phase.DATA)
        second.watchdog.poll()
        alone = newest_stall(stall_events(run, launch_of(run)))
        assert (alone.rank, alone.is_open, "Waiting" in alone.claim) == (1, True, False)
        first.wait_in_collective(4)
        first.watchdog.poll()
        joint = newest_stall(stall_events(run, launch_of(run)))
    assert (joint.rank, joint.is_open) == (1, False)
    assert joint.claim.endswith("Waiting for it: rank 0 in all_reduce(8 float32) #4")


@pytest.mark.slow
def test_cause_that_stays_open_is_one_stall(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An inconclusive diagnosis is made again later: another one would be another stall of all machines."""
    kinds = iter([DiagnosisKind.UNKNOWN, DiagnosisKind.BLOCKED])
    with machines(tmp_path, run) as (first, _):
        watchdog = first.watchdog

        def decide(_due: object) -> tuple[Decision, HostObservation, float]:
            cause = Cause(next(kinds), What.ALL_WAIT, waits=True)
            host = HostObservation(tuple(watchdog._observe()), {0: cause}, 2)
            return Decision(cause, unobserved=(1, 2)), host, 5.0

        monkeypatch.setattr(watchdog, "_decide", decide)
        first.wait_in_collective(40)
        watchdog.poll()
        watchdog._log.ranks[0].retry_at = 0.0
        watchdog.poll()
        made = open_run(run).events("stall")
    assert next(kinds, None) is None
    assert [event.payload["verdict"] for event in made] == ["UNKNOWN"]


@pytest.mark.slow
def test_machine_without_a_diagnosis_answers_a_request_once(tmp_path: Path, run: Path) -> None:
    with machines(tmp_path, run) as (first, second):
        first.wait_in_collective(40)
        second.state.slots[Slot.TIMEOUT] = 600 * S
        second.hang(20, Phase.DATA)  # within its own timeout, over that of the request
        assert second.watchdog.poll()
        assert not list((run / "attempt-000").glob("watchdog-node-1.db"))
        assert first.watchdog.poll()
        second.watchdog._peers._next_poll = 0.0
        assert second.watchdog.poll()
        before = len(open_run(run).events(STALL_VIEWS))
        second.watchdog._peers._next_poll = 0.0
        second.watchdog.poll()
        assert len(open_run(run).events(STALL_VIEWS)) == before == 2  # a request is answered once
    ((kind, rank, _),) = stalls(open_run(run))
    assert (kind, rank) == ("PHASE", 1)


@pytest.mark.slow
def test_observations_of_a_machine_that_has_ended_count(tmp_path: Path, run: Path) -> None:
    with machines(tmp_path, run) as (first, second):
        second.state.close(RankStatus.FINISHED)
        second.watchdog.run()
        first.wait_in_collective(40)
        first.state.slots[Slot.BACKWARDS] = 4
        first.watchdog.poll()
    ((kind, rank, claim),) = stalls(open_run(run))
    assert (kind, rank) == ("DEAD", 1)
    assert "rank 1 has ended its training" in claim


@pytest.mark.slow
@pytest.mark.parametrize(
    ("waited", "overdue", "words"),
    [
        (4.0, 1.0, "Waiting for it: rank 0 in all_reduce"),  # within its own timeout
        (1.0, 1.0, None),  # it may move on: the diagnosis is made once that is known
        (1.0, 4.0, "waiting for data"),  # for so long it is not waited for
        (None, 1.0, "waiting for data"),  # the control is in no call
    ],
)
def test_diagnosis_names_the_rank_that_has_begun_to_wait(
    waited: float | None, overdue: float, words: str | None, tmp_path: Path, run: Path
) -> None:
    """The rank that is the cause is due first: the others come to the collective after it has stopped."""
    with machines(tmp_path, run, nodes=(0, 0)) as (first, second):
        if waited is None:
            first.hang(1.0)
        else:
            first.wait_in_collective(waited)
        second.hang(5.0 + overdue, Phase.DATA)
        first.watchdog.poll()
        reported = stalls(open_run(run))
    assert [(kind, rank) for kind, rank, _ in reported] == ([("PHASE", 1)] if words else [])
    assert all(words is not None and words in claim for _, _, claim in reported)
    assert all(("Waiting for it" in claim) is (waited == 4.0) for _, _, claim in reported)


@pytest.mark.full
def test_two_stalls_of_a_run_are_two_diagnoses(tmp_path: Path, run: Path) -> None:
    with machines(tmp_path, run) as (first, second):
        for step, phase in ((3, Phase.DATA), (4, Phase.FORWARD)):
            for machine in (first, second):
                machine.state.slots[Slot.STEP] = step
                machine.state.slots[Slot.PROGRESS] += 1
            first.wait_in_collective(40)
            second.hang(40, phase)
            first.watchdog.poll()
            second.watchdog.poll()
    reported = stalls(open_run(run))
    assert [(kind, rank) for kind, rank, _ in reported] == [("PHASE", 1), ("PHASE", 1)]
    assert ["forward" in claim for _, _, claim in reported] == [False, True]


def test_stored_observations_are_read(tmp_path: Path) -> None:
    killed = ProcessEnd(signal.SIGKILL)
    observation = Observation(rank=3, end=killed, ended_at=5.0, groups={GROUP: (0, 3)})
    call = CollectiveRecord("7", (0, 3), 4, "all_reduce")
    causes = {
        3: Cause(DiagnosisKind.DEAD, What.ENDED, end=killed),
        **{
            rank: Cause(DiagnosisKind.BLOCKED, What.IDLE, call=awaited, waits=True, named=named)
            for rank, (awaited, named) in enumerate([
                (call, None), (Reduction(num_started=2), None), (Reduction(), WaitCause(WaitName.STORAGE)),
            ])
        },
    }  # fmt: skip
    unpacked = unpack(pack(HostObservation((observation,), {**causes, 5: None}, 6)))
    assert (unpacked.world_size, unpacked.causes) == (6, {**causes, 5: None})
    assert unpacked.observations[0].groups == {GROUP: (0, 3)}
    assert unpacked.observations[0].end == killed
    assert abs(unpacked.observations[0].ended_at - (time.time() - time.monotonic() + 5.0)) < 1.0
    assert unpack({"observations": [{}]}) is None
    assert join([]) is None


def test_host_name_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BACKLIGHT_HOST", raising=False)
    assert host_name() == socket.gethostname()
    monkeypatch.setenv("BACKLIGHT_HOST", "pod-7")
    assert WatchdogWriter(tmp_path, tmp_path).host == "pod-7"


@pytest.mark.full
@pytest.mark.alone
def test_launch_over_two_machines(tmp_path: Path) -> None:
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
    watched = watching("--monitors", "stalls", "--stall", 2, "--out", "run", script)[1:]
    launches = [
        subprocess.Popen(
            [*launch, "--node-rank", str(node), *watched],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "BACKLIGHT_HOST": f"node-{node}"},
        )
        for node in range(2)
    ]
    errors = [launch.communicate(timeout=240)[1] for launch in launches]
    assert [launch.returncode for launch in launches] == [0, 0], errors
    ((kind, rank, claim),) = stalls(open_run(tmp_path / "run"))
    assert (kind, rank) == ("PHASE", 3)
    assert re.search(r"train\.py:8 .*Waiting for it: rank 0, 1, 2 in all_reduce", claim), claim
