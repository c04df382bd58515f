"""Rank, world size and launch of this process, and the ranks of a job by their processes. No torch.

The only reader of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and SLURM_*.

torchrun and most launchers set ``RANK`` and ``WORLD_SIZE``; srun sets variables of its own for a script that
derives its rank from them later. Nonsense does not stop a training run: such a process is watched as a single
one, and a problem is reported. An initialised process group takes precedence over any variable.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from backlight import processes

JOB_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
"""Variables that the ranks of one job share."""

JOB_SEPARATOR = "+"
"""In the id of a launch, the separator of the job and the number of its restart."""

MAX_RANKS = 10_000_000
"""Ranks of a launch, beyond any real one."""

WATCHDOG = "backlight.watchdog.process"
"""Argument of the watchdog process, which has the environment of a rank."""


class ProcessNotFoundError(ValueError):
    """There is no such process."""


@dataclass(frozen=True)
class World:
    """Rank and world size of this process; ``problem`` says why the environment was not believed."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    problem: str = ""


def world(environment: Mapping[str, str] | None = None) -> World:
    """Return rank and world size by the environment alone; never raises."""
    env = os.environ if environment is None else environment
    if "RANK" in env or "WORLD_SIZE" in env:
        names = ("RANK", "WORLD_SIZE")
    elif _is_one_of_several_tasks(env):
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    else:
        return World()
    values = ", ".join(f"{name}={env[name]!r}" if name in env else f"no {name}" for name in names)
    rank, size = (_number(env.get(name)) for name in names)
    if rank is None and names[0] not in env and size == 1:
        rank = 0
    if rank is None or size is None or not rank < size <= MAX_RANKS:
        return World(
            problem=f"the environment says {values}; expected whole numbers with 0 <= {names[0]} < {names[1]}"
        )
    number, local_size = _local_rank(env), _number(env.get("LOCAL_WORLD_SIZE"))
    return World(rank, size, number or 0, local_size or 1)


def world_of(environment: Mapping[str, str]) -> World | None:
    """Return rank and world size of another process by its environment; None where that names no rank."""
    return world(environment) if {"RANK", "SLURM_PROCID"} & environment.keys() else None


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks: ``(0, 1)`` for a single process."""
    # Not imported here: without torch.distributed there is no group.
    group = sys.modules.get("torch.distributed")
    if group is not None and group.is_available() and group.is_initialized():
        return group.get_rank(), group.get_world_size()
    here = world()
    return here.rank, here.size


def local_rank() -> int:
    """Return the number of this process among those of its machine, by the launcher's variables."""
    number = _local_rank(os.environ)
    return rank_and_size()[0] if number is None else number


def launch_id() -> str | None:
    """Return an id that all ranks of this launch have in common, None for a single process.

    ``BACKLIGHT_RUN_ID`` where it is given; else the address at which the ranks meet, with the launcher's
    process where all of them are on one machine, so that the next launch has another. What follows
    :data:`JOB_SEPARATOR` counts the restarts of one job.
    """
    run_id = os.environ.get("BACKLIGHT_RUN_ID")
    return run_id if run_id or rank_and_size()[1] <= 1 else _id_of_launcher()


def given_directory() -> str | None:
    """Return the run directory that the launcher has chosen, ``BACKLIGHT_RUN_DIR``; None without one."""
    return os.environ.get("BACKLIGHT_RUN_DIR") or None


def start_id() -> str | None:
    """Return the id of this launch; for a single process, that of its job under torchrun or Slurm.

    Commands of one job that run at the same time share it: it identifies restarts of the job, not a run.
    """
    is_launched = any(os.environ.get(name) for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"))
    return launch_id() or (_id_of_launcher() if is_launched else None)


def _id_of_launcher() -> str:
    size = rank_and_size()[1]
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT")
    parts = [os.environ.get(name, "") for name in names]
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        parts.append(str(os.getppid()))
    job = "-".join(part for part in parts if part) or "launch"
    restarts = (os.environ.get(n) for n in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return f"{job}{JOB_SEPARATOR}{'.'.join(r for r in restarts if r) or '0'}"


def _local_rank(env: Mapping[str, str]) -> int | None:
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if (number := _number(env.get(name))) is not None:
            return number
    return None


def _is_one_of_several_tasks(env: Mapping[str, str]) -> bool:
    """Return whether srun started this process as one of several; a batch script is a single one."""
    return "SLURM_PROCID" in env and (_number(env.get("SLURM_STEP_NUM_TASKS")) or 0) > 1


def _number(text: str | None) -> int | None:
    """Return a whole number that is not negative, None for anything else."""
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


# Other processes


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
    below = [p for p in environments if p == pid or _descends(p, pid, table)]
    if not below:
        raise ProcessNotFoundError(
            f"attach --job: process {pid} is no rank and has none; expected a process with RANK in its "
            "environment, or its launcher"
        )
    job = _job(environments[pid if pid in environments else below[0]])
    members = {
        p: world(e).rank
        for p, e in environments.items()
        if _job(e) == job and WATCHDOG not in processes.command_line(p)
    }
    # What a rank starts, such as workers of a data loader, inherits its environment.
    mains = {p: rank for p, rank in members.items() if members.get(table[p].parent) != rank}
    pid_of_rank = {rank: p for p, rank in sorted(mains.items(), reverse=True)}
    first = environments[pid_of_rank[min(pid_of_rank)]]
    return dict(sorted(pid_of_rank.items())), world(first).size, first


def _job(environment: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(environment.get(name, "") for name in JOB_VARIABLES)


def _descends(pid: int, ancestor: int, table: Mapping[int, processes.Process]) -> bool:
    while pid in table and pid > 1:
        pid = table[pid].parent
        if pid == ancestor:
            return True
    return False
