"""How a run was executed: optimizer implementations, compiler, threads and memory.

Rules on time need these facts; none of them shows in a gradient. They are read once, when a run ends. What
torch keeps under private names is read in one place each; where it is gone, the fact is None, not zero.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from backlight import clock, devices
from backlight.distributed import world
from backlight.processes import available_cores, queued_s

MAX_REASONS = 20
"""Reasons of graph breaks, and functions that were compiled again, that are kept."""


class CoreWait:
    """Run-queue delay of the training thread since construction, which only Linux counts."""

    def __init__(self) -> None:
        self._began = clock.perf_counter()
        self._waited = queued_s()

    def share(self) -> float | None:
        """Return the share of the time since then; None where it is not counted."""
        now, elapsed = queued_s(), clock.perf_counter() - self._began
        if now is None or self._waited is None or elapsed <= 0:
            return None
        return min(1.0, max(0.0, (now - self._waited) / elapsed))


def runtime_info(
    optimizers: Sequence[dict[str, Any]],
    workers: int | None,
    waiting: CoreWait | None = None,
    *,
    anomaly_steps: int = 0,
) -> dict[str, Any]:
    """Return the facts as JSON types.

    ``optimizers`` are their parameter groups, read while they existed; ``workers`` those of the loaders that
    gave batches, None where none of torch's did; ``anomaly_steps`` are the recorded steps under anomaly
    detection.
    """
    return {
        "anomaly_steps": anomaly_steps,
        "core_wait": waiting.share() if waiting is not None else None,
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "local_ranks": world().local_size,
        "workers": workers,
        "optimizers": list(optimizers),
        "memory": memory(),
        "compilation": compilation(),
    }


def optimizer_groups(optimizer: torch.optim.Optimizer, number: int = 0) -> list[dict[str, Any]]:
    """Return type, number of tensors, and whether fused or foreach is in use, of each parameter group.

    ``number`` is that of the optimizer. Without a choice torch takes foreach where every tensor is a plain
    one on an accelerator. What an
    optimizer without these options does is not known: foreach is None.
    """
    groups = []
    for group in optimizer.param_groups:
        tensors = [p for p in group["params"] if isinstance(p, torch.Tensor)]
        fused, foreach = group.get("fused"), group.get("foreach")
        if foreach is None and not fused and "foreach" in group:
            foreach = bool(tensors) and all(p.device.type != "cpu" for p in tensors)
        groups.append(
            {
                "optimizer": number,
                "type": type(optimizer).__name__,
                "tensors": len(tensors),
                "fused": bool(fused),
                "foreach": bool(foreach) if "foreach" in group or "fused" in group else None,
            }
        )
    return groups


def memory() -> dict[str, Any]:
    """Return peak and capacity in bytes: of the device, with the allocator's reserve, or of the process."""
    if (device := devices.memory()) is not None:
        return {
            "where": "device",
            "peak": device.peak_allocated,
            "reserved": device.peak_reserved,
            "retries": device.retries,
            "capacity": device.capacity,
        }
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"where": "process", "peak": int(peak), "capacity": int(pages)}


OF_HOOKS = re.compile(
    r"function <function install_\w+\.<locals>\."
    r"|function `backward` in file `\S*torch.autograd.__init__\.py`"
)
"""Reasons of the breaks that hooks on steps and backward passes add where torch has breaks of its own."""


def compilation() -> dict[str, Any] | None:
    """Return what torch.compile counted; None where it was not used or the counters are missing."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    counters = getattr(utils, "counters", None)
    if counters is None or not counters.get("frames"):
        return None
    inductor = counters.get("inductor") or {}
    compiled = list(getattr(utils, "get_compilation_metrics", list)())
    breaks: Counter[str] = Counter()
    for reason, count in (counters.get("graph_break") or {}).items():
        if OF_HOOKS.search(str(reason)) is None:
            breaks[_first(reason)] += int(count)
    skipped = {_first(why) for row in compiled if (why := getattr(row, "cudagraph_skip_reason", None))}
    return {
        "graphs": int((counters.get("stats") or {}).get("unique_graphs", 0)),
        "graph_breaks": dict(breaks.most_common(MAX_REASONS)),
        "recompiled": _recompiled(compiled),
        "cuda_graph_skips": int(inductor.get("cudagraph_skips", 0)),
        "cuda_graph_reasons": sorted(skipped),
    }


def _recompiled(rows: list[Any]) -> list[dict[str, Any]]:
    by_function: dict[tuple[str, str, int], dict[str, Any]] = {}
    for row in rows:
        reason = getattr(row, "recompile_reason", None)
        if not reason:
            continue
        name, file = str(row.co_name), str(row.co_filename)
        entry = by_function.setdefault(
            (name, file, int(row.co_firstlineno or 0)),
            {"function": name, "line": f"{file}:{row.co_firstlineno}", "count": 0, "seconds": 0.0},
        )
        entry["count"] += 1
        entry["seconds"] += float(getattr(row, "entire_frame_compile_time_s", None) or 0.0)
        entry["reason"] = _first(str(reason))  # the last one: the first is usual
    return sorted(by_function.values(), key=lambda entry: -int(entry["count"]))[:MAX_REASONS]


def _first(text: str) -> str:
    """Return the first line of a reason, without the guard's number before it and the spaces inside."""
    line = " ".join(text.strip().splitlines()[0].split("  # ")[0].split())
    head, separator, rest = line.partition(": ")
    return rest if separator and head.replace("/", "").isdigit() else line
