"""Sources of random numbers inside a data set, of which each worker of a loader gets a copy."""

from __future__ import annotations

import dis
import random
from collections.abc import Iterator
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
"""Types of such sources."""

SEEDING = frozenset({"seed", "manual_seed", "setstate", "set_state", "default_rng", "RandomState", "Random"})
"""Names by which code gives a generator another state."""


def copied_generator(data: Any) -> str:
    """Return the generator from which a data set draws for its samples, as ``rng`` or ``transform.rng``.

    Empty where there is none, or where the code that draws also gives it another state. Workers that share
    the order of a stream need equal generators: iterable data sets are left out.
    """
    if issubclass(type(data), IterableDataset):
        return ""
    held = getattr(data, "__dict__", {})
    owners = [("", data, "__getitem__"), *((f"{name}.", one, "__call__") for name, one in held.items())]
    for prefix, owner, entry in owners:
        codes = list(_reachable(type(owner), entry))
        steps = [step for code in codes for step in dis.get_instructions(code)]
        names = {str(step.argval) for step in steps}
        stored = {str(step.argval) for step in steps if step.opname == "STORE_ATTR"}
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, GENERATORS) and name in names - stored and not SEEDING & names:
                return f"{prefix}{name}"
    return ""


def _reachable(kind: type, entry: str) -> Iterator[CodeType]:
    """Yield the code of a method, and of the methods of its class that it names."""
    pending, done = [entry], set()
    while pending:
        name = pending.pop()
        code = getattr(getattr(kind, name, None), "__code__", None)
        if isinstance(code, CodeType) and name not in done:
            done.add(name)
            yield code
            pending += code.co_names
