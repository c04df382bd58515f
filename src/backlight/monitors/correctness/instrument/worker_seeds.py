"""Random numbers that the workers of a loader draw: from copies of a generator, or with the same seed."""

from __future__ import annotations

import contextlib
import dis
import functools
import random
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from backlight.user_code import definition, is_user_code

GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
"""Types of sources of random numbers."""

SEEDING = frozenset({"seed", "manual_seed", "setstate", "set_state", "default_rng", "RandomState", "Random"})
"""Names by which code gives a generator another state."""

DRAWS = {
    *("rand", "randn", "random", "random_sample", "randint", "randrange", "uniform", "normal", "gauss"),
    *("normalvariate", "standard_normal", "choice", "choices", "sample", "shuffle", "permutation"),
    *("randperm", "bernoulli", "binomial", "multinomial", "beta", "betavariate", "poisson"),
}
"""Functions that draw from a global generator: those of ``random``, ``numpy.random`` and torch."""

FRESH = {
    *("initial_seed", "get_worker_info", "seed_worker", "default_rng", "SeedSequence", "SystemRandom"),
    *("time", "time_ns", "perf_counter", "getpid", "urandom", "getrandbits", "token_bytes", "environ"),
}
"""Names in a function that seeds workers by which its seeds may differ from epoch to epoch."""

MAX_PARTS = 32
"""Transforms and functions of a data set that are looked at."""


def copied_generator(data: Any) -> str:
    """Return the generator from which a data set draws for its samples, as ``rng`` or ``transform.rng``.

    Empty where there is none, or where the code that draws also gives it another state. Workers that share
    the order of a stream need equal generators: iterable data sets are left out.
    """
    if issubclass(type(data), IterableDataset):
        return ""
    fields = getattr(data, "__dict__", {})
    owners = [("", data, "__getitem__"), *((f"{name}.", part, "__call__") for name, part in fields.items())]
    for prefix, owner, entry in owners:
        codes = [method.__code__ for method in reachable_methods(type(owner), entry)]
        steps = [step for code in codes for step in dis.get_instructions(code)]
        names = {str(step.argval) for step in steps}
        stored = {str(step.argval) for step in steps if step.opname == "STORE_ATTR"}
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, GENERATORS) and name in names - stored and not SEEDING & names:
                return f"{prefix}{name}"
    return ""


def reachable_methods(kind: type, entry: str) -> Iterator[FunctionType]:
    """Yield a method, and the methods of its class that it names."""
    pending, done = [entry], set()
    while pending:
        name = pending.pop()
        method = getattr(kind, name, None)
        if isinstance(getattr(method, "__code__", None), CodeType) and name not in done:
            done.add(name)
            yield method  # type: ignore[misc]
            pending += method.__code__.co_names  # type: ignore[union-attr]


def worker_seed(init: Any) -> tuple[tuple[str, ...], str, str] | None:
    """Return which global generators a ``worker_init_fn`` seeds, what it computes the seeds of, and its line.

    None where they may differ from epoch to epoch.
    """
    values: list[Any] = []
    while isinstance(init, functools.partial):
        values += [*init.args, *init.keywords.values()]
        init = init.func
    owner, function = getattr(init, "__self__", None), getattr(init, "__func__", init)
    if not isinstance(function, FunctionType) or not is_user_code(function.__code__.co_filename):
        return None
    functions = _called_of([function])
    user_functions = [called for called in functions if is_user_code(called.__code__.co_filename)]
    names = {
        name for called in user_functions for name in called.__code__.co_names + called.__code__.co_freevars
    }
    if names & FRESH or any("epoch" in name for name in names):
        return None
    scopes: list[Mapping[str, Any]] = [getattr(owner, "__dict__", {})]
    for called in user_functions:
        scopes += [called.__globals__, _cells(called)]
        values += called.__defaults__ or ()
    values += [scope[name] for scope in scopes for name in sorted(names) if name in scope]
    simple = [value for value in values if isinstance(value, (bool, int, float, str))]
    seeded = {name for called in functions for name in _generators_in(called, {"seed", "manual_seed"})}
    return tuple(sorted(seeded)), repr(simple), str(definition(function) or "")


def drawn_from(data: Any) -> set[str]:
    """Return the global generators that the samples of a data set, or its transforms, draw from."""
    functions: list[FunctionType] = []
    pending, seen = [data], set[int]()
    while pending and len(seen) < MAX_PARTS:
        part = pending.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        is_list = isinstance(part, (list, tuple))
        fields = part[:MAX_PARTS] if is_list else list(getattr(part, "__dict__", {}).values())
        pending += [x for x in fields if callable(x) or isinstance(x, (list, tuple, Dataset))]
        functions += [part] if type(part) is FunctionType else []
        for entry in ("__getitem__", "__call__", "forward"):
            functions += reachable_methods(type(part), entry)
    return {name for function in _called_of(functions) for name in _generators_in(function, DRAWS)}


def _called_of(functions: list[FunctionType]) -> list[FunctionType]:
    """Return functions and those that they name, two levels deep, outside of torch and NumPy."""
    reached = dict.fromkeys(functions)
    for _ in range(2):
        for function in list(reached):
            scope = {**_cells(function), **function.__globals__}
            values = (scope.get(name) for name in function.__code__.co_names + function.__code__.co_freevars)
            reached |= dict.fromkeys(value for value in values if type(value) is FunctionType)
            if len(reached) > MAX_PARTS:
                break
    return [
        function for function in reached if function.__module__.partition(".")[0] not in {"torch", "numpy"}
    ]


def _cells(function: FunctionType) -> dict[str, Any]:
    """Return the variables of outer functions that a function names."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # it has no value yet
            values[name] = cell.cell_contents
    return values


def _generators_in(function: FunctionType, uses: set[str]) -> Iterator[str]:
    """Yield the modules whose functions of such names a function names: of each its global generator."""
    names = set(function.__code__.co_names)
    for value in (function.__globals__.get(name) for name in names):
        if getattr(value, "__self__", None) is random._inst and getattr(value, "__name__", "") in uses:
            yield "random"
        if not names & uses:
            continue
        if value is np.random or (value is np and "random" in names):
            yield "np.random"
        elif value is random:
            yield "random"
        elif value is torch:
            yield "torch"
