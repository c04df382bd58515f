"""A profile as one object of JSON types: what ``--json`` prints and ``evidence/profile.json`` holds."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backlight.distributed import world
from backlight.records import to_json

if TYPE_CHECKING:
    from backlight.diagnose.profile.run import Profile

VERSION = 1
"""Of the object; a reader ignores keys that it does not know."""


def document(profile: Profile) -> dict[str, Any]:
    """Return a profile as JSON types; what was not measured is null. Times are milliseconds per step."""
    steps, reached, tables = profile.steps, profile.throughput, profile.operations
    return {
        "version": VERSION,
        "script": profile.script,
        "arguments": list(profile.arguments),
        "rank": profile.rank,
        "world_size": world().size,
        "exit_code": profile.code,
        "step": None
        if steps.step is None
        else {
            "median_ms": steps.step.median * 1e3,
            "low_ms": steps.step.low * 1e3,
            "high_ms": steps.step.high * 1e3,
            "p95_ms": steps.step.p95 * 1e3,
            "mad_ms": steps.step.mad * 1e3,
            "steps": steps.step.count,
        },
        "first_ms": steps.steady.first * 1e3,
        "warmup_dropped": steps.steady.warmup,
        "phases": {
            phase.name: {
                "median_ms": phase.median_ms,
                "p95_ms": phase.p95_ms,
                "mad_ms": phase.mad_ms,
                "share": phase.share,
            }
            for phase in steps.phases
        },
        "times_are": "host",
        "device_phases": _device_phases(profile),
        "sum_error": steps.sum_error,
        "backwards_per_step": _backwards(profile),
        "parameters": profile.parameters,
        "tokens_per_second": None if reached is None else reached.tokens_per_second,
        "mfu": None if reached is None else reached.mfu,
        "mfu_basis": None if reached is None else reached.basis,
        "modules": _modules(profile),
        "backward_unattributed_ms": None if profile.modules is None else profile.modules.unattributed * 1e3,
        **(_tables(profile) if tables is not None else dict.fromkeys(_TABLES)),
        "memory": to_json(profile.memory),
        "controls": to_json(profile.controls),
        "optimizations": to_json(profile.optimizations),
        "tracing_overhead": profile.overhead,
        "trace": None if profile.trace_path is None else str(profile.trace_path),
        "not_measured": [text for text in (*profile.trouble, steps.steady.trouble) if text],
    }


_TABLES = (
    "traced_step_ms", "exposed_communication", "logits",
    "traced_steps", "trace_sum_error", "operators", "kinds", "kernels", "copies", "joined",
    "device", "trace_notes",
)  # fmt: skip


def _tables(profile: Profile) -> dict[str, Any]:
    tables = profile.operations
    assert tables is not None
    device = tables.device
    return {
        "traced_steps": tables.steps,
        "traced_step_ms": tables.step_ms,
        "exposed_communication": tables.exposed_communication,
        "logits": to_json(tables.logits),
        "trace_sum_error": tables.sum_error,
        "operators": to_json(tables.operators),
        "kinds": to_json(tables.kinds),
        "kernels": to_json(tables.kernels),
        "copies": [{**to_json(row), "line": short_line(row.line)} for row in tables.copies],
        "joined": to_json(tables.pairs),
        "device": None
        if device is None
        else {**to_json(device), "launch_bound": device.launch_bound, "statement": device.statement},
        "trace_notes": list(tables.notes),
    }


def short_line(line: str) -> str:
    """Return a line with its file seen from here, where it lies below."""
    here = str(Path.cwd()) + os.sep
    return line.removeprefix(here)


def _device_phases(profile: Profile) -> dict[str, float] | None:
    """Return the median milliseconds of the device by phase, over the steady steps; None without one."""
    # The first step has no begin on the device.
    steps = profile.observed.device[max(0, profile.steps.steady.warmup - 1) :]
    names = dict.fromkeys(name for step in steps for name in step)
    return {
        str(name): 1e3 * statistics.median(step.get(name, 0.0) for step in steps) for name in names
    } or None


def _backwards(profile: Profile) -> float | None:
    counts = sorted(step.backwards for step in profile.observed.steps)
    return counts[len(counts) // 2] if counts else None


def _modules(profile: Profile) -> list[dict[str, Any]] | None:
    if profile.modules is None:
        return None
    return [
        {
            "name": module.name,
            "calls": module.calls,
            "forward_ms": module.forward * 1e3,
            "forward_exclusive_ms": module.forward_exclusive * 1e3,
            "recomputed_ms": module.recomputed * 1e3,
            "backward_ms": module.backward * 1e3,
            "backward_exclusive_ms": module.backward_exclusive * 1e3,
        }
        for module in profile.modules.modules
    ]
