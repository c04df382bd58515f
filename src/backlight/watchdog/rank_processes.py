"""Processes of this machine that are ranks of one job, by their environments. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from backlight import processes
from backlight.distributed import JOB_VARIABLES, world, world_of

WATCHDOG = "backlight.watchdog.watchdog"
"""Argument of backlight's own process, which has the environment of a rank."""


class ProcessNotFoundError(ValueError):
    """There is no such process."""


def find_ranks(pid: int) -> tuple[dict[int, int], int, Mapping[str, str]]:
    """Return the pids of a job by rank, its world size and the environment of a rank.

    ``pid`` is a rank of it, or a launcher.

    Raises
    ------
    ProcessNotFoundError
        If there is no such process, or neither it nor a descendant is a rank.
    """
    table = processes.read_process_table()
    if pid not in table:
        raise ProcessNotFoundError(f"attach: no process {pid}; expected the id of a running process")
    environments = {
        p: e
        for p in table
        if (here := world_of(e := processes.environment(p))) is not None and not here.problem
    }
    own = [p for p in environments if p == pid or _descends(p, pid, table)]
    if not own:
        raise ProcessNotFoundError(
            f"attach --job: process {pid} is no rank and has none; expected a process with RANK in its "
            "environment, or its launcher"
        )
    job = _job(environments[pid if pid in environments else own[0]])
    members = {
        p: world(e).rank
        for p, e in environments.items()
        if _job(e) == job and WATCHDOG not in processes.command_line(p)
    }
    # What a rank starts, such as workers of a data loader, inherits its environment.
    mains = {p: rank for p, rank in members.items() if members.get(table[p].parent) != rank}
    found = {rank: p for p, rank in sorted(mains.items(), reverse=True)}
    first = environments[found[min(found)]]
    return dict(sorted(found.items())), world(first).size, first


def _job(environment: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(environment.get(name, "") for name in JOB_VARIABLES)


def _descends(pid: int, ancestor: int, table: Mapping[int, processes.Process]) -> bool:
    while pid in table and pid > 1:
        pid = table[pid].parent
        if pid == ancestor:
            return True
    return False
