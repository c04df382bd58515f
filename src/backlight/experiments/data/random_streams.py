"""Random numbers that depend on a seed and a purpose, and on nothing that ran before."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derived_seed(seed: int, purpose: str) -> int:
    """Return a seed in [0, 2⁶³) for one ``purpose`` of a run, such as ``"split"``.

    Two purposes of one seed give unrelated streams, so that a longer split does not change the
    initial weights.
    """
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(seed: int, purpose: str) -> torch.Generator:
    """Return a generator on the CPU, so that every device sees the same draws."""
    return torch.Generator().manual_seed(derived_seed(seed, purpose))


@contextmanager
def seeded(seed: int, purpose: str) -> Iterator[None]:
    """Draw from the global CPU state as ``seed`` and ``purpose`` say, and put the state back after."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, purpose))
        yield
