"""Collectives of the matrix checks; no-ops in a run of one rank."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def together() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank() -> int:
    return dist.get_rank() if together() else 0


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    if not together():
        return [value]
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def wait() -> None:
    if together():
        dist.barrier()
