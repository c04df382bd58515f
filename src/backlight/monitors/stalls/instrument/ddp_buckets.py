"""Buckets of DistributedDataParallel: which parameters are reduced together, read without a hook.

DDP allows one communication hook, which is the user's. Observable without one are the assignment of
parameters to buckets, and that all gradients of a bucket have arrived, which starts its all-reduce. The end
of one bucket's all-reduce is not observable; all have ended when backward returns.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Assignment:
    """The buckets of one wrapped model, in the order of reduction; empty where they are not known."""

    model: str
    buckets: tuple[tuple[str, ...], ...]  # names of parameters, and their `id`
    ids: tuple[tuple[int, ...], ...]
    reduced: bool
    note: str


def wrappers(modules: Iterable[nn.Module]) -> list[Any]:
    """Return those of ``modules`` that are DistributedDataParallel."""
    distributed = sys.modules.get("torch.nn.parallel.distributed")
    if distributed is None:
        return []
    return [m for m in modules if issubclass(type(m), distributed.DistributedDataParallel)]


def assignment(model: Any) -> Assignment:
    """Return the present assignment of the parameters of a DistributedDataParallel to buckets."""
    # DDP starts with one bucket (several where it looks for unused parameters) and rebuilds them after the
    # first backward, in the order in which gradients arrived.
    kind = type(model.module).__name__
    data = model._get_ddp_logging_data()
    parameters, sparse = model._build_params_for_reducer()
    names = {id(p): name for name, p in model.module.named_parameters()}
    notes = []
    rebuilt = data.get("rebuilt_per_bucket_param_indices", "")
    indices: list[list[int]] | None
    if rebuilt:
        indices = [[int(i) for i in bucket.split()] for bucket in rebuilt.split(",")]
    elif getattr(model, "_has_rebuilt_buckets", False):
        # Rebuilt in this forward; what DDP logs follows one step later.
        order = [int(i) for i in str(data.get("prev_iteration_grad_ready_order_indices", "")).split(",") if i]
        complete = sorted(order) == list(range(len(parameters)))
        indices = _spread(model, parameters, sparse, order) if complete else None
    else:
        indices = _first(model, parameters, sparse, data)
        notes.append("assignment of the first backward; buckets are rebuilt after it")
    hooks = getattr(model, "_comm_hooks", None)
    if hooks:
        notes.append(f"reduced by the communication hook {getattr(hooks[0][0], '__qualname__', hooks[0][0])}")
    reduced = bool(getattr(model, "require_backward_grad_sync", True))
    if not reduced:
        notes.append("no_sync: gradients stay on this rank")
    if indices is None or any(i >= len(parameters) for bucket in indices for i in bucket):
        return Assignment(
            kind, (), (), reduced, "; ".join([*notes, "which parameters share a bucket is not known"])
        )
    return Assignment(
        kind,
        tuple(tuple(names.get(id(parameters[i]), f"parameter {i}") for i in bucket) for bucket in indices),
        tuple(tuple(id(parameters[i]) for i in bucket) for bucket in indices),
        reduced,
        "; ".join(notes),
    )


def _first(
    model: Any, parameters: list[Any], sparse: list[bool], data: dict[str, Any]
) -> list[list[int]] | None:
    sizes = [int(size) for size in str(data.get("bucket_sizes", "")).split(",") if size.strip()]
    if len(sizes) == 1:
        return [list(range(len(parameters)))]
    buckets = _spread(model, parameters, sparse, None)
    if buckets is None:
        return None
    weights = [p.numel() * p.element_size() for p in parameters]
    found_sizes = sorted(sum(weights[i] for i in bucket) for bucket in buckets)
    return buckets[::-1] if found_sizes == sorted(sizes) else None


def _spread(
    model: Any, parameters: list[Any], sparse: list[bool], order: list[int] | None
) -> list[list[int]] | None:
    """Assign parameters to buckets by DDP's own function; None where this torch has another."""
    try:
        dist: Any = sys.modules["torch.distributed"]
        cap = int(model.bucket_bytes_cap)
        first = int(dist._DEFAULT_FIRST_BUCKET_BYTES) if model.bucket_bytes_cap_default else cap
        limits = list(getattr(model, "bucket_bytes_cap_list", ())) or ([first, cap] if first < cap else [cap])
        if order is None:
            buckets, _ = dist._compute_bucket_assignment_by_size(parameters, limits, sparse)
        else:
            ordered = [parameters[i] for i in order]
            rows = [sparse[i] for i in order]
            buckets, _ = dist._compute_bucket_assignment_by_size(ordered, limits, rows, order)
    except (AttributeError, RuntimeError, TypeError, KeyError):
        return None
    return [list(bucket) for bucket in buckets]
