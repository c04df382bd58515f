"""Which rank of how many this process is, and what all ranks of one launch have in common.

A process group that is up knows best: not every launcher sets the variables that torchrun sets.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from backlight.distributed import JOB_SEPARATOR, world


def place() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks: ``(0, 1)`` for one that is alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    here = world()
    return here.rank, here.size


def local_rank() -> int:
    """Return the number of this process among those of its machine, as far as the launcher says."""
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    return place()[0]


def launch_id() -> str | None:
    """Return what all ranks of this launch have in common, None for a process that is alone.

    ``BACKLIGHT_RUN_ID`` where it is given; else the address at which the ranks meet, with the launcher's
    process where all of them are on one machine, so that the next launch has another. What follows
    :data:`backlight.distributed.JOB_SEPARATOR` counts the restarts of one job.
    """
    given = os.environ.get("BACKLIGHT_RUN_ID")
    size = place()[1]
    if given or size <= 1:
        return given
    names = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID", "MASTER_ADDR", "MASTER_PORT")
    parts = [os.environ.get(name, "") for name in names]
    if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
        parts.append(str(os.getppid()))
    job = "-".join(part for part in parts if part) or "launch"
    restarts = (os.environ.get(n) for n in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return f"{job}{JOB_SEPARATOR}{'.'.join(r for r in restarts if r) or '0'}"
