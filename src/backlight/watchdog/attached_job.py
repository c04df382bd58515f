"""Diagnosis of all ranks of a job on this machine: equal stacks grouped, and the rank that differs. No torch.

The ranks of a job share the address of its store. A rank that waits in a call of torch.distributed waits for
those that are elsewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from backlight.records import DiagnosisKind, Phase
from backlight.threads import executor
from backlight.watchdog.attach import Attached, attach, main_thread
from backlight.watchdog.nccl_ras import RasStatus, read_ras
from backlight.watchdog.observation import HIGH, LOW, MEDIUM, Diagnosis
from backlight.watchdog.rank_processes import find_ranks
from backlight.watchdog.stacks import (
    Frame,
    ThreadStack,
    in_collective,
    strip_backlight,
    user_frame,
)

MAX_FRAMES = 6
"""Innermost frames of a group that are shown."""

MAX_AT_ONCE = 8
STORE_TIMEOUT_S = 20.0

_FOR_RANKS = {"rendezvous", "group_creation"}
"""Named waits whose cause is another rank."""

_LIST_KEYS = """
import datetime, json, sys, torch.distributed as dist
store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, wait_for_workers=False,
                      timeout=datetime.timedelta(seconds=5))
print(json.dumps(store.list_keys()))
"""


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


def span(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``0-2, 5``."""
    runs = []
    for _, group in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        found = [rank for _, rank in group]
        runs.append(f"{found[0]}-{found[-1]}" if len(found) > 1 else str(found[0]))
    return ", ".join(runs)


def attach_job(pid: int, duration_s: float = 2.0) -> AttachedJob:
    """Observe every rank of a job on this machine at the same time, and diagnose the job.

    Raises
    ------
    ProcessNotFoundError
        If ``pid`` belongs to no job.
    """
    pids, world_size, environment = find_ranks(pid)
    with executor(MAX_AT_ONCE) as pool:
        found = dict(
            zip(pids, pool.map(lambda p: attach(p, duration_s, native=False), pids.values()), strict=True)
        )
    elsewhere = tuple(rank for rank in range(world_size) if rank not in pids)
    groups = _group(found)
    unseen = tuple(dict.fromkeys(reason for one in found.values() for reason in one.unseen))
    diagnosis = _diagnose(found, groups, elsewhere, environment)
    return AttachedJob(diagnosis, groups, pids, elsewhere, unseen, read_ras(environment))


def _group(found: Mapping[int, Attached]) -> tuple[StackGroup, ...]:
    ranks: dict[tuple[Frame, ...], list[int]] = {}
    collective: dict[tuple[Frame, ...], bool] = {}
    for rank, one in found.items():
        stack = main_thread(one.samples[0], one.pid) if one.samples else None
        frames = strip_backlight(stack.frames) if stack is not None else ()
        ranks.setdefault(frames, []).append(rank)
        collective[frames] = stack is not None and in_collective(stack)
    ordered = sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1]))
    return tuple(
        StackGroup(tuple(members), found[members[0]].diagnosis.claim, frames[:MAX_FRAMES], collective[frames])
        for frames, members in ordered
    )


def _diagnose(
    found: Mapping[int, Attached],
    groups: Sequence[StackGroup],
    elsewhere: Sequence[int],
    environment: Mapping[str, str],
) -> Diagnosis:
    """Diagnose: a rank that has ended, a wait with a name, ranks that do not come, the rank that differs."""
    ended = [r for r, a in found.items() if a.diagnosis.kind in {DiagnosisKind.DEAD, DiagnosisKind.STOPPED}]
    causes = {r: a.cause for r, a in found.items() if a.cause is not None}
    named = [r for r, c in causes.items() if c.name not in _FOR_RANKS and not c.progresses]
    coming = [r for r, c in causes.items() if c.name in _FOR_RANKS]
    if ended or named:
        rank = [*ended, *named][0]
        return _of_rank(rank, found[rank].diagnosis, found)
    if coming and not all(causes[rank].progresses for rank in coming):
        return _not_come(coming, found, elsewhere, environment)
    if causes:  # what they wait for computes
        rank = next(iter(causes))
        return _of_rank(rank, found[rank].diagnosis, found)
    waiting = [rank for group in groups if group.in_collective for rank in group.ranks]
    if all(one.moves for one in found.values()) or any(found[rank].moves for rank in waiting):
        return _moving(found)
    others = [rank for rank in found if rank not in waiting]
    if waiting and len(others) == 1:
        return _of_rank(others[0], found[others[0]].diagnosis, found, waiting)
    if len(groups) == 2 and len(groups[1].ranks) == 1 < len(groups[0].ranks):
        return _of_rank(groups[1].ranks[0], found[groups[1].ranks[0]].diagnosis, found, waiting)
    first = found[groups[0].ranks[0]].diagnosis
    where = "; ".join(f"rank {span(g.ranks)} {_where(g)}" for g in groups[:4])
    kind = DiagnosisKind.UNKNOWN if waiting else first.kind
    return replace(
        first,
        kind=kind,
        claim=f"{kind}: no single rank differs from the others: {where}",
        confidence=LOW,
        next_check="take the dumps of the flight recorder: `backlight attach --flight-recorder DIR`",
    )


def _moving(found: Mapping[int, Attached]) -> Diagnosis:
    moving = [rank for rank, one in found.items() if one.moves]
    return Diagnosis(
        DiagnosisKind.PASS,
        Phase.OTHER,
        f"PASS: the job moves: the stacks of rank {span(moving)} change between samples",
        refuted_if="no step has ended after a while",
        next_check="attach again later",
        confidence=MEDIUM,
    )


def _of_rank(
    rank: int, diagnosis: Diagnosis, found: Mapping[int, Attached], waiting: Sequence[int] = ()
) -> Diagnosis:
    word, _, rest = diagnosis.claim.partition(": ")
    others = [r for r in waiting if r != rank]
    after = f". Rank {span(others)} wait{'' if len(others) > 1 else 's'} for it" if others else ""
    claim = f"{word}: rank {rank} (process {found[rank].pid}): {rest}{after}"
    return replace(
        diagnosis, claim=claim, rank=rank, confidence=HIGH if diagnosis.confidence == HIGH else MEDIUM
    )


def _where(group: StackGroup) -> str:
    frame = user_frame(ThreadStack(0, group.frames)) if group.frames else None
    return f"at {frame.location} in {frame.qualified_name}" if frame is not None else "without a stack"


def _not_come(
    coming: Sequence[int],
    found: Mapping[int, Attached],
    elsewhere: Sequence[int],
    environment: Mapping[str, str],
) -> Diagnosis:
    """Name the ranks that have not come to the rendezvous, or not to the creation of a group."""
    in_store = ranks_in_store(environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", ""))
    late = [rank for rank in found if rank not in coming]
    missing = [rank for rank in elsewhere if rank not in in_store]
    diagnosis = found[coming[0]].diagnosis
    parts = [f"rank {span(coming)} wait{'' if len(coming) > 1 else 's'}"]
    if late:
        parts.append(f"rank {span(late)} of this machine {'are' if len(late) > 1 else 'is'} elsewhere")
    if missing:
        seen = "; the store holds no key of them" if in_store else ""
        parts.append(f"rank {span(missing)} has no process on this machine{seen}")
    one = [*late, *missing]
    return replace(
        diagnosis,
        kind=DiagnosisKind.BLOCKED,
        phase=Phase.OTHER,
        claim=f"BLOCKED: ranks have not come to the rendezvous: {'; '.join(parts)}",
        rank=one[0] if len(one) == 1 else None,
        confidence=HIGH if one else LOW,
    )


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
