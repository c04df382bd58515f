"""Which rank of how many this process is, by what its launcher says in the environment.

torchrun and most launchers give ``RANK`` and ``WORLD_SIZE``; srun gives numbers of its own to a script that
derives its rank from them later. Nonsense does not stop a training: such a process is watched as one that is
alone, and says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

JOB_SEPARATOR = "+"
"""In the id of a launch, what stands between the job and the number of its restart."""

LARGEST = 10_000_000
"""Ranks of a launch, beyond any real one."""


@dataclass(frozen=True)
class World:
    """The place of this process; ``problem`` says why what the environment claims is not believed."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    problem: str = ""


def world(environment: Mapping[str, str] | None = None) -> World:
    """Return the place of this process; it never raises."""
    given = os.environ if environment is None else environment
    if "RANK" in given or "WORLD_SIZE" in given:
        names = ("RANK", "WORLD_SIZE")
    elif _several_tasks(given):
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    else:
        return World()
    said = ", ".join(f"{name}={given[name]!r}" if name in given else f"no {name}" for name in names)
    rank, size = (_number(given.get(name)) for name in names)
    if rank is None and names[0] not in given and size == 1:
        rank = 0
    if rank is None or size is None or not rank < size <= LARGEST:
        return World(
            problem=f"the environment says {said}; expected whole numbers with 0 <= {names[0]} < {names[1]}"
        )
    local_rank, local_size = _number(given.get("LOCAL_RANK")), _number(given.get("LOCAL_WORLD_SIZE"))
    return World(rank, size, local_rank or 0, local_size or 1)


def _several_tasks(given: Mapping[str, str]) -> bool:
    """Tell whether srun started this process as one of several: in a batch script itself it is alone."""
    return "SLURM_PROCID" in given and (_number(given.get("SLURM_STEP_NUM_TASKS")) or 0) > 1


def _number(text: str | None) -> int | None:
    """Return a whole number that is not negative, None for anything else."""
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
