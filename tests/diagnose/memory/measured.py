"""Peak of memory on the CPU by torch.profiler, which counts in the allocator, independent of the recorder.

Kernels allocate workspaces and free them before they return. Their sizes depend on the CPU's instruction set
and on the number of threads, so that no prediction can contain them; they are measured separately.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from backlight.launch.recipe import read_recipe


class MeasuredPeak(NamedTuple):
    """Bytes at the peak of a step: of the tensors that operations return, and with kernel workspaces."""

    tensors: int
    with_workspaces: int


def measured_peak(path: Path, settings: dict[str, Any]) -> MeasuredPeak:
    """Run two real steps of a recipe and return the largest numbers of bytes allocated in the second."""
    recipe = read_recipe(path, settings)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        model = recipe.build_model()
        optimizer = recipe.build_optimizer(model)
        batch = next(recipe.batches())
        for step in range(2):
            with torch.profiler.record_function(f"step {step}"):
                value = recipe.loss(model, batch)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    begin = next(node.start_time_ns for node, _ in _walk(roots) if node.name == "step 1")
    changes = sorted(_changes(roots), key=lambda change: change[0])
    tensors = [(time, size) for time, size, workspace in changes if not workspace]
    return MeasuredPeak(_peak(tensors, begin), _peak([(time, size) for time, size, _ in changes], begin))


def _peak(changes: list[tuple[int, int]], begin: int) -> int:
    live = peak = 0
    for time, size in changes:
        live += size
        if time >= begin:
            peak = max(peak, live)
    return peak


def _changes(roots: list[Any]) -> Iterator[tuple[int, int, bool]]:
    """Yield time, signed bytes, and whether the memory is freed by the operation that has allocated it."""
    open_by_address: dict[int, tuple[int, int, int | None]] = {}
    found = [pair for pair in _walk(roots) if hasattr(pair[0].extra_fields, "alloc_size")]
    for node, operation in sorted(found, key=lambda pair: pair[0].start_time_ns):
        size, address = node.extra_fields.alloc_size, node.extra_fields.ptr
        if size > 0:
            open_by_address[address] = (node.start_time_ns, size, operation)
        elif address in open_by_address:
            time, size, allocated_by = open_by_address.pop(address)
            workspace = operation is not None and operation == allocated_by
            yield time, size, workspace
            yield node.start_time_ns, -size, workspace
    yield from ((time, size, False) for time, size, _ in open_by_address.values())


def _walk(roots: list[Any]) -> Iterator[tuple[Any, int | None]]:
    """Yield every event with the outermost operation around it that has a kernel of its own, as a number."""
    waiting: list[tuple[Any, int | None]] = [(root, None) for root in roots]
    while waiting:
        node, operation = waiting.pop()
        yield node, operation
        if operation is None and _has_kernel(node.name):
            operation = node.id
        waiting += [(child, operation) for child in node.children]


@functools.cache
def _has_kernel(name: str) -> bool:
    """Return whether an operation reaches the dispatcher's backends whole, and is not made of others."""
    overloads = [known for known in torch._C._dispatch_get_all_op_names() if known.partition(".")[0] == name]
    composite = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(overloads) and not any(composite(known, "CompositeImplicitAutograd") for known in overloads)
