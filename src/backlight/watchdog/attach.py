"""`backlight attach`: a running process, a job of this machine, or dumps, observed and decided. No torch.

A watched process has a shared state and is diagnosed as by its watchdog. Of any other process the kernel
reports states and CPU times, and py-spy the stacks, where it is installed and tracing is permitted. The ranks
of a job share the address of its store.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from backlight import clock, processes
from backlight.distributed import ProcessNotFoundError, find_ranks
from backlight.records import DiagnosisKind, Finding
from backlight.store.read.run import open_run
from backlight.threads import executor
from backlight.watchdog import runtime_dir, stacks
from backlight.watchdog.cause import MAX_IDLE_CORES, cause_of, is_idle, moves, name_function, named_cause
from backlight.watchdog.collectives import Dump
from backlight.watchdog.decision import decide_dumps, decide_job, group_by_stack, shown_stack
from backlight.watchdog.diagnosis import Cause
from backlight.watchdog.flight_recorder import RasStatus, read_dumps, read_ras
from backlight.watchdog.observation import (
    IssuedCollectives,
    Observation,
    changes_stack,
    holds_one_stack,
    is_starved,
    main_stacks,
)
from backlight.watchdog.observer import RankObserver, observe_unwatched
from backlight.watchdog.shared_state import read_state
from backlight.watchdog.stacks import Frame, StackSample, in_collective
from backlight.watchdog.text import Diagnosis, describe
from backlight.watchdog.timeouts import StallLimits
from backlight.watchdog.waits import WorkerStack

DURATION_S = 2.0
"""Time over which a process is observed."""

POLL_S = 0.15

MAX_FRAMES = 6
"""Innermost frames of a group of ranks that are shown."""

MAX_AT_ONCE = 8
STORE_TIMEOUT_S = 20.0

_LIST_KEYS = """
import datetime, json, sys, torch.distributed as dist
store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, wait_for_workers=False,
                      timeout=datetime.timedelta(seconds=5))
print(json.dumps(store.list_keys()))
"""


@dataclass(frozen=True)
class Attached:
    """Result of :func:`attach`."""

    pid: int
    diagnosis: Diagnosis
    threads: str  # a table
    samples: tuple[StackSample, ...]
    unseen: tuple[str, ...]  # what is not observable, and why
    workers: tuple[WorkerStack, ...] = ()  # of a DataLoader, in the user's code
    spins: bool = False  # the main thread ran, and held the interpreter lock on one line in every sample
    idle: bool = False  # it used no core and queued for none
    moves: bool = False  # the stack of the main thread changed between samples, or it is watched and moves


@dataclass(frozen=True)
class StackGroup:
    """Ranks whose main threads have the same stack."""

    ranks: tuple[int, ...]
    words: str
    frames: tuple[Frame, ...]
    in_collective: bool


@dataclass(frozen=True)
class AttachedJob:
    """Result of :func:`attach_job`; ``elsewhere`` are ranks without a process on this machine."""

    diagnosis: Diagnosis
    groups: tuple[StackGroup, ...]
    pids: dict[int, int]  # by rank
    elsewhere: tuple[int, ...]
    unseen: tuple[str, ...]
    nccl: RasStatus | None = None  # what NCCL itself reports


@dataclass(frozen=True)
class RankRecords:
    """What the dump of a rank holds: its collectives, its last one, and the first that has not completed."""

    rank: int
    recorded: int
    last: str
    pending: str
    line: str  # that issued the pending one
    step: int | None = None  # last step in backlight's run


@dataclass(frozen=True)
class AttachedDumps:
    """Result of :func:`attach_dumps`."""

    diagnosis: Diagnosis
    ranks: tuple[RankRecords, ...]
    missing: tuple[int, ...]  # members of the groups without a dump
    findings: tuple[Finding, ...] = ()  # stalls in backlight's run


# A process


def attach(pid: int, duration_s: float = DURATION_S, *, native: bool = True) -> Attached:
    """Observe a process for some seconds and diagnose what it does.

    ``native``: also take native stacks at the end, which pauses the process for a moment.

    Raises
    ------
    ProcessNotFoundError
        If there is no such process.
    """
    obs, cause = observe(pid, duration_s, native=native)
    is_watched = obs.state is not None
    is_alive = obs.end is None and not obs.stopped
    starved = is_starved(obs.thread_cpu, obs.scheduled)
    idle = is_idle(obs, StallLimits()) if is_watched else (obs.cpu or 0.0) <= MAX_IDLE_CORES and not starved
    return Attached(
        pid,
        describe(cause),
        stacks.format_threads(pid),
        (*obs.samples[-1:], *obs.native_samples),
        obs.not_collected,
        obs.workers.stacks if obs.workers is not None else (),
        spins=not is_watched and holds_one_stack(obs),
        idle=idle and (is_watched or is_alive),
        moves=cause.kind is DiagnosisKind.PASS if is_watched else changes_stack(obs),
    )


def observe(pid: int, duration_s: float, *, rank: int = -1, native: bool = True) -> tuple[Observation, Cause]:
    """Observe a process for some seconds; return the observation and its cause.

    Raises
    ------
    ProcessNotFoundError
        If there is no such process.
    """
    process = processes.read_process(pid)
    if process is None:
        raise ProcessNotFoundError(f"attach: no process {pid}; expected the id of a running process")
    watched = _find_state(pid)
    if watched is not None:
        return _observe_watched(*watched, duration_s, native=native)
    obs = observe_unwatched(process, duration_s, rank=rank, native=native)
    cause = cause_of(obs, StallLimits())
    assert cause is not None
    return obs, cause


def _find_state(pid: int) -> tuple[Path, int] | None:
    for directory in runtime_dir.runtime_directories():
        for rank in runtime_dir.ranks_in(directory):
            with contextlib.suppress(OSError):
                state = read_state(runtime_dir.state_path(directory, rank))
                if state is not None and state.pid == pid:
                    return directory, rank
    return None


def _observe_watched(
    directory: Path, rank: int, duration_s: float, *, native: bool
) -> tuple[Observation, Cause]:
    """Observe a watched process as its watchdog does, with the duration as the timeout."""
    limits = StallLimits()
    observer = RankObserver(directory, rank, limits)
    request = directory / f"sample-{os.getpid()}"
    try:
        request.touch()
        deadline = clock.monotonic() + duration_s
        while clock.monotonic() < deadline:
            observer.poll(closely=True)
            clock.sleep(POLL_S)
        obs = observer.observe()
        cause = cause_of(obs, limits, duration_s)
        if cause is not None and cause.kind is DiagnosisKind.UNKNOWN and native:
            observer.take_native_samples()
            obs = observer.observe()
            cause = cause_of(obs, limits, duration_s) or cause
        elif cause is not None and cause.holds_interpreter and native:
            cause = name_function(cause, observer.find_native_function())
    finally:
        request.unlink(missing_ok=True)
        observer.close()
    return obs, cause or named_cause(obs, limits) or moves(obs)


# A job


def attach_job(pid: int, duration_s: float = DURATION_S) -> AttachedJob:
    """Observe every rank of a job on this machine at the same time, and diagnose the job.

    Raises
    ------
    ProcessNotFoundError
        If ``pid`` belongs to no job.
    """
    pids, world_size, environment = find_ranks(pid)
    with executor(MAX_AT_ONCE) as pool:
        pairs = [
            pool.submit(observe, process, duration_s, rank=rank, native=False)
            for rank, process in pids.items()
        ]
        observed = dict(zip(pids, (pair.result() for pair in pairs), strict=True))
    observations = [obs for obs, _ in observed.values()]
    causes = {rank: cause for rank, (_, cause) in observed.items()}
    elsewhere = tuple(rank for rank in range(world_size) if rank not in pids)
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    decision = decide_job(observations, causes, elsewhere, partial(ranks_in_store, address, port))
    groups = tuple(_stack_group(ranks, *observed[ranks[0]]) for ranks in group_by_stack(observations))
    unseen = tuple(dict.fromkeys(reason for obs in observations for reason in obs.not_collected))
    return AttachedJob(describe(decision), groups, pids, elsewhere, unseen, read_ras(environment))


def _stack_group(ranks: list[int], obs: Observation, cause: Cause) -> StackGroup:
    waits = any(map(in_collective, main_stacks(obs)[:1]))
    return StackGroup(tuple(ranks), describe(cause).claim, shown_stack(obs)[:MAX_FRAMES], waits)


def ranks_in_store(address: str, port: str) -> frozenset[int]:
    """Return the ranks that have written their address into the store; empty where it does not answer.

    gloo writes one key per rank. The store is asked in a process of its own, which ends after a while.
    """
    if not address or not port.isdigit():
        return frozenset()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LIST_KEYS, address, port],
            capture_output=True, text=True, timeout=STORE_TIMEOUT_S, check=True,
        )  # fmt: skip
        keys = json.loads(done.stdout)
        ends = [str(key).rpartition("/")[2] for key in keys if "default_pg/0//" in str(key)]
    except (OSError, subprocess.SubprocessError, ValueError, TypeError):
        return frozenset()
    return frozenset(int(end) for end in ends if end.isdigit())


# Dumps


def attach_dumps(directory: Path, run: Path | None = None) -> AttachedDumps:
    """Diagnose the dumps of a directory; ``run`` adds the steps of the ranks and the diagnoses stored there.

    Raises
    ------
    DumpError
        If the directory holds no dumps, or a file is not one.
    """
    dumps = read_dumps(directory)
    steps: dict[int, int] = {}
    findings: tuple[Finding, ...] = ()
    if run is not None:
        opened = open_run(run)
        steps = {state.rank: state.last_step for state in opened.ranks()}
        findings = tuple(f for f in opened.stored_findings() if f.rule == "stall")
    observations = [Observation(rank, issued=IssuedCollectives(dump=dump)) for rank, dump in dumps.items()]
    decision, missing = decide_dumps(observations)
    records = tuple(_rank_records(dump, steps.get(rank)) for rank, dump in dumps.items())
    return AttachedDumps(describe(decision), records, missing, findings)


def _rank_records(dump: Dump, step: int | None) -> RankRecords:
    pending = next((r for r in dump.records if not r.completed), None)
    last = dump.records[-1].text if dump.records else ""
    text, line = ("", "") if pending is None else (pending.text, pending.line)
    return RankRecords(dump.rank, len(dump.records), last, text, line, step)
