"""Synthetic stored runs for the report, with injected faults.

``write_run`` draws plausible series from a fixed seed; a :class:`Plan` lists the injected faults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from activation_runs import write_activations
from backlight.records import (
    Evidence,
    Finding,
    Fingerprint,
    Made,
    ParameterRecord,
    RunStatus,
    Severity,
    Subject,
)
from backlight.report.page import render_page, write_page
from backlight.report.source import Source
from backlight.series import HISTOGRAM_BINS, HISTOGRAM_LOWEST
from backlight.store.read.run import Run, open_run
from backlight.store.write.watchdog import WatchdogWriter
from backlight.store.write.writer import RunWriter
from grokking_runs import Grok, write_grokking
from spectra_runs import Injected, write_spectra

PIECES = (
    ("ln_1.weight", (64,), "LayerNorm"),
    ("ln_1.bias", (64,), "LayerNorm"),
    ("attn.qkv.weight", (192, 64), "Linear"),
    ("attn.qkv.bias", (192,), "Linear"),
    ("attn.out.weight", (64, 64), "Linear"),
    ("attn.out.bias", (64,), "Linear"),
    ("ln_2.weight", (64,), "LayerNorm"),
    ("ln_2.bias", (64,), "LayerNorm"),
    ("mlp.up.weight", (256, 64), "Linear"),
    ("mlp.up.bias", (256,), "Linear"),
    ("mlp.down.weight", (64, 256), "Linear"),
    ("mlp.down.bias", (64,), "Linear"),
)


MEMORY: dict[str, Any] = {
    "how": "measured",
    "peak": 100,
    "phase_at_peak": "forward",
    "kinds": {"parameters": 40, "activations": 60},
    "modules": [
        {
            "name": "<b>block",
            "exclusive": 90,
            "inclusive": 90,
            "kinds": {"parameters": 30, "activations": 60},
        },
        {"name": "", "exclusive": 10, "inclusive": 100, "kinds": {"parameters": 10}},
    ],
    "curve": {
        "kinds": ["parameters", "activations"],
        "phases": [[0, "forward"], [2, "backward"]],
        "events": 4,
    },
}
"""Content that ``backlight memory --out`` stores for a step of four events."""

PROFILE: dict[str, Any] = {
    "version": 1,
    "modules": [
        {"name": "", "calls": 1, "forward_ms": 4.0, "forward_exclusive_ms": 0.5, "recomputed_ms": 0.0,
         "backward_ms": 8.0, "backward_exclusive_ms": 0.0},
        {"name": "<b>block", "calls": 2, "forward_ms": 3.5, "forward_exclusive_ms": 3.5, "recomputed_ms": 1.5,
         "backward_ms": 8.0, "backward_exclusive_ms": 8.0},
    ],
    "backward_unattributed_ms": 0.25,
    "operators": [
        {"name": "aten::mm", "phase": "backward", "kind": "matmul", "calls": 2, "host_ms": 6.0,
         "device_ms": 0, "share": 0.75},
        {"name": "(no operator)", "phase": "backward", "kind": "", "calls": 0, "host_ms": 2.0,
         "device_ms": 0, "share": 0.25},
    ],
    "kinds": [{"name": "matmul", "calls": 2, "host_ms": 6.0, "device_ms": 0.0, "share": 1.0}],
    "kernels": [],
    "copies": [
        {"source": "float", "target": "double", "contiguous": True, "line": "train.py:7 (step)", "calls": 1,
         "elements": 4096, "host_ms": 0.5, "device_ms": 0.0, "share": 0.04},
        {"source": "", "target": "", "contiguous": None, "line": "", "calls": 1, "elements": None,
         "host_ms": 0.1, "device_ms": 0.0, "share": 0.01},
    ],
    "lines": [
        {"phase": "data", "line": "train.py:9", "function": "mix", "samples": 30, "share": 0.75, "ms": 3.0},
        {"phase": "data", "line": "", "function": "", "samples": 10, "share": 0.25, "ms": 1.0},
    ],
    "stacks": [
        {"phase": "data", "frames": [["train.py", 20, "main"], ["train.py", 9, "mix"]], "ms": 3.0},
        {"phase": "data", "frames": [["train.py", 20, "main"]], "ms": 0.5},
        {"phase": "before_optimizer", "frames": [["train.py", 30, "main"]], "ms": 0.5},
    ],
    "joined": [
        {"forward": "aten::addmm", "backward": "AddmmBackward0", "calls": 2, "forward_ms": 3,
         "backward_ms": 7}
    ],
    "device": None,
    "optimizations": [{"name": "fused optimizer", "state": "off", "detail": "AdamW: a loop over parameters"}],
    "mfu": None,
    "mfu_basis": "tokens per step were not given (--tokens-per-step)",
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Run to write. Rows are indices into the parameters; a step of -1 means never."""

    steps: int = 300
    every: int = 1
    blocks: int = 4
    name: str = "synthetic"
    rename: Mapping[int, str] = field(default_factory=dict)
    nan_row: int = 10
    nan_step: int = -1
    spike_row: int = 20
    spike_step: int = -1
    vanishing_rows: tuple[int, ...] = ()
    dead_row: int = -1
    unmeasured: Mapping[int, str] = field(default_factory=dict)
    gradients: bool = True
    updates: bool = True
    clip: float = 0.0
    scaler: bool = False
    histogram: bool = False
    phases: bool = False
    user: Mapping[str, float] = field(default_factory=dict)
    killed: bool = False
    grokking: bool = False
    spectra: bool = False
    stalled: bool = False
    checked: bool = False
    activations: bool = False
    attempts: int = 1
    overrides: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    groups: Mapping[str, str] = field(default_factory=dict)
    seed: int = 1


FULL = Plan(
    steps=120,
    clip=0.02,
    scaler=True,
    histogram=True,
    phases=True,
    user={"accuracy": 0.9},
    grokking=True,
    spectra=True,
    stalled=True,
    checked=True,
    activations=True,
    nan_step=90,
    dead_row=25,
    vanishing_rows=(3,),
    unmeasured={7: "frozen"},
    groups={"lower": "blocks.0", "upper": "blocks.1"},
)
"""Run with data for every panel of one process."""


def records(plan: Plan) -> tuple[ParameterRecord, ...]:
    """Return the parameters of a small transformer in model order."""
    named = [("embed.weight", (96, 64), "Embedding")]
    named += [(f"blocks.{b}.{name}", shape, kind) for b in range(plan.blocks) for name, shape, kind in PIECES]
    named += [("ln_f.weight", (64,), "LayerNorm"), ("ln_f.bias", (64,), "LayerNorm")]
    return tuple(
        ParameterRecord(
            plan.rename.get(row, name),
            shape,
            "float32",
            "cpu",
            int(np.prod(shape)),
            requires_grad="frozen" not in plan.unmeasured.get(row, ""),
            module=name.rpartition(".")[0],
            module_type=kind,
            aliases=("head.weight",) if row == 0 and 0 not in plan.rename else (),
            group="" if row in plan.unmeasured else "0/0",
            unmeasured=plan.unmeasured.get(row, ""),
        )
        for row, (name, shape, kind) in enumerate(named)
    )


def rms_of(plan: Plan, steps: NDArray[np.int64], amount: int, seed: int | None = None) -> NDArray[np.float64]:
    """Return rms values ``[S, P]``: a decaying level per parameter, noise and the injected faults."""
    draw = np.random.default_rng(plan.seed if seed is None else seed)
    level = 10 ** draw.uniform(-3.6, -2.2, amount)
    progress = steps / max(1, plan.steps)
    decay = 1 / (1 + 6 * progress) + 0.25 * np.exp(-60 * progress)
    rms = level * decay[:, None] * np.exp(draw.normal(0, 0.16, (len(steps), amount)))
    for row in plan.vanishing_rows:
        rms[:, row] *= 10 ** (-8 * np.minimum(1, progress * 2))
    if plan.spike_step >= 0:
        rms[steps == plan.spike_step, plan.spike_row] *= 5000
    if plan.dead_row >= 0:
        rms[:, plan.dead_row] = 0
    return rms


def write_run(path: Path, plan: Plan | None = None) -> Run:
    """Write a run by ``plan`` and open it."""
    plan = plan or Plan()
    share = plan.steps // plan.attempts
    for attempt in range(plan.attempts):
        first = attempt * share
        last = plan.steps if attempt == plan.attempts - 1 else first + share
        _write_attempt(path, plan, attempt, first, last)
    return open_run(path)


def _write_attempt(path: Path, plan: Plan, attempt: int, first: int, last: int) -> None:
    table = records(plan)
    writer = RunWriter.create(
        path,
        name=plan.name,
        resume=attempt > 0,
        script="train.py",
        arguments=("--steps", str(plan.steps)),
        monitors=(
            "health",
            "steptime",
            *(("grokking",) if plan.grokking else ()),
            *(("spectra",) if plan.spectra else ()),
            *(("correctness",) if plan.checked else ()),
            *(("activations",) if plan.activations else ()),
        ),
        overrides=plan.overrides,
        groups=plan.groups,
        step_offset=first,
    )
    writer.fingerprint(fingerprint(table))
    table_id = writer.parameter_table(table)
    draw = np.random.default_rng(plan.seed + 100 + attempt)
    steps = np.arange(first, last)
    recorded = steps[steps % plan.every == 0]
    rms = rms_of(plan, recorded, len(table), plan.seed + attempt)
    numel = np.array([record.numel for record in table])
    broken = (recorded >= plan.nan_step) if plan.nan_step >= 0 else np.zeros(len(recorded), bool)
    total = np.zeros(len(recorded))
    for at, step in enumerate(recorded.tolist() if plan.gradients else []):
        floats, integers = gradient_row(rms[at], numel, draw)
        if broken[at]:
            rows = (
                slice(plan.nan_row, None) if step > plan.nan_step else slice(plan.nan_row, plan.nan_row + 1)
            )
            floats[rows] = np.nan
            integers[rows, 3] = numel[rows]
        for row in plan.unmeasured:
            floats[row], integers[row] = 0, 0
        writer.append("gradient", step - first, table_id, floats, integers)
        total[at] = np.sqrt(np.sum(floats[:, 0] ** 2))
        if at % 200 == 199:
            writer.flush()
        if plan.updates:
            moved, sampled = update_row(rms[at], numel, integers[:, 0], draw, step / plan.steps)
            writer.append("update", step - first, table_id, moved, sampled)
        if plan.histogram and at % 5 == 0:
            counts = histogram_row(rms[at], numel, integers[:, 0], draw)
            writer.append("histogram", step - first, table_id, np.zeros((len(table), 0)), counts)
    _scalars(writer, plan, recorded, total, first, draw)
    for row, reason in plan.unmeasured.items():
        writer.event(
            None, "unmeasured", {"what": "gradient", "reason": reason, "parameters": [table[row].name]}
        )
    if not plan.updates:
        writer.event(None, "unmeasured", {"what": "update", "reason": "the optimizer steps inside backward"})
    if plan.grokking:
        write_grokking(writer, Grok(steps=plan.steps, every=2, generalises=60.0))
    if plan.spectra:
        write_spectra(
            writer, Injected(steps=(0, last - first - 1), shapes={"blocks.0.attn.out.weight": (20, 36)})
        )
    if plan.activations:
        write_activations(writer)
    if plan.stalled:
        watchdog = WatchdogWriter(path, path / f"attempt-{attempt:03d}")
        watchdog.evidence("stall-rank-00000.txt", "taken by watchdog\n  at ops.py:22 in LockedFn.backward\n")
        watchdog.event(last - first - 1, "stall", {"not_collected": {"0": ["py-spy: Permission denied"]}})
        watchdog.close()
    if plan.phases:
        writer.evidence("profile.json", json.dumps(PROFILE))
        writer.evidence("memory.json", json.dumps(MEMORY))
        writer.array("memory/positions", 0, np.arange(4), dims=("point",))
        writer.array("memory/curve", 0, [[40, 40, 40, 40], [0, 60, 20, 0]], dims=("kind", "point"))
    if plan.scaler:
        for step in range(first, last, max(1, plan.steps // 6)):
            writer.event(step - first, "scaler_skip", {"scale": 65536})
    if plan.checked:
        writer.event(None, "observed", {"steps": 12})
    if not plan.gradients:
        writer.event(None, "unmeasured", {"what": "gradient", "reason": "no optimizer step was seen"})
    writer.flush()
    if plan.killed and attempt == plan.attempts - 1:
        writer.event(last - first - 1, "warning", {"message": "the loader was slow"})
        writer.close(RunStatus.KILLED)
    else:
        writer.close(RunStatus.FINISHED)


def gradient_row(
    rms: NDArray[np.float64], numel: NDArray[np.int64], draw: np.random.Generator
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the blobs of one step of the series ``gradient``: ``[P, 3]`` and ``[P, 5]``."""
    floats = np.stack(
        [rms * np.sqrt(numel), rms * draw.uniform(3, 6, len(rms)), rms * draw.normal(0, 1, len(rms))], 1
    )
    integers = np.zeros((len(rms), 5), np.int64)
    integers[:, 0], integers[:, 1] = 1, numel
    integers[:, 2] = np.where(rms == 0, numel, (numel * draw.beta(1, 60, len(rms))).astype(np.int64))
    return floats, integers


def update_row(
    rms: NDArray[np.float64],
    numel: NDArray[np.int64],
    measured: NDArray[np.int64],
    draw: np.random.Generator,
    progress: float,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the blobs of one step of the series ``update``: ``[P, 2]`` and ``[P, 3]``."""
    ratio = 2e-3 * (1 - 0.9 * progress) * np.exp(draw.normal(0, 0.5, len(rms))) * (rms > 0)
    integers = np.stack([measured, np.minimum(numel, 64), numel], 1)
    return np.stack([ratio * 3.0, np.full(len(rms), 3.0)], 1) * measured[:, None], integers


def histogram_row(
    rms: NDArray[np.float64], numel: NDArray[np.int64], measured: NDArray[np.int64], draw: np.random.Generator
) -> NDArray[np.int64]:
    """Return the integers ``[P, 65]`` of one step of the series ``histogram``."""
    bins = np.zeros((len(rms), HISTOGRAM_BINS), np.int64)
    for row in np.flatnonzero((rms > 0) & np.isfinite(rms) & (measured > 0)):
        values = np.abs(draw.normal(0, rms[row], min(256, numel[row])))
        exponents = np.clip(np.frexp(values)[1] - 1 - HISTOGRAM_LOWEST, 0, HISTOGRAM_BINS - 1)
        bins[row] = np.bincount(exponents, minlength=HISTOGRAM_BINS) * (numel[row] // min(256, numel[row]))
    return np.concatenate([measured[:, None], bins], 1)


def _scalars(
    writer: RunWriter,
    plan: Plan,
    steps: NDArray[np.int64],
    total: NDArray[np.float64],
    first: int,
    draw: np.random.Generator,
) -> None:
    progress = steps / max(1, plan.steps)
    loss = 4.6 * np.exp(-3 * progress) + 1.4 + draw.normal(0, 0.03, len(steps))
    rate = 3e-4 * np.minimum(1, progress * 20) * (0.55 + 0.45 * np.cos(np.pi * progress))
    if plan.nan_step >= 0:
        loss[steps > plan.nan_step] = np.nan
    for at, step in enumerate(steps.tolist()):
        local = step - first
        if at % 200 == 199:
            writer.flush()
        values = {"loss": loss[at], "lr/0/0": rate[at], "backwards": 1.0}
        if plan.gradients:
            values["total_norm"] = total[at]
        if plan.clip and plan.gradients:
            factor = min(1.0, plan.clip / total[at]) if total[at] > 0 else 1.0
            values |= {"clip/norm": total[at], "clip/limit": plan.clip, "clip/factor": factor}
        if plan.scaler:
            skipped = step % max(1, plan.steps // 6) == 0
            values |= {
                "scaler/scale": 65536.0 / 2 ** (step // max(1, plan.steps // 6)),
                "scaler/skipped": float(skipped),
            }
        if plan.phases:
            slow = 40.0 if step == first else 1.0
            values |= {"phase/data": 0.004 * slow, "phase/forward": 0.011 + 0.002 * draw.random()}
            values |= {
                "phase/backward": 0.021 + 0.004 * draw.random(),
                "phase/optimizer": 0.003,
                "phase/other": 0.001,
                "host/memory": 2e9 + 1e6 * step,
                "gpu/utilization": 0.9 - 0.2 * draw.random(),
                "gpu/temperature": 60.0 + step % 5,
            }
            values |= {"cost": 2e-4 * (1 + draw.random()), "time": 1.7e9 + 0.04 * step}
        writer.scalars(local, values)
        if plan.user and step % 20 == 0:
            logged = {name: top * (1 - np.exp(-4 * progress[at])) for name, top in plan.user.items()}
            writer.scalars(local, logged, source="user")


def fingerprint(table: tuple[ParameterRecord, ...]) -> Fingerprint:
    """Return a fingerprint as a session would have written it."""
    return Fingerprint(
        script="train.py",
        arguments=("--steps", "300"),
        versions={"python": "3.11.9", "torch": "2.13.0"},
        device="cpu",
        host="node-1",
        module_hash="3f9c1b7a",
        modules=(
            ("", "GPT"),
            *((record.module, record.module_type) for record in table if record.name.endswith("weight")),
        ),
        parameter_count=sum(record.numel for record in table),
        dtypes={"float32": len(table)},
        optimizers=("AdamW(lr=0.0003, betas=(0.9, 0.95))",),
        flags={"tf32": "off", "threads": "4"},
    )


def finding(parameter: str, step: int, **more: Any) -> Finding:
    """Return a finding about a parameter at a step, with evidence that the page can show."""
    fields: dict[str, Any] = {
        "rule": "non_finite",
        "severity": Severity.ERROR,
        "title": f"The gradient of `{parameter}` is not finite from step {step} on",
        "detail": f"All 12288 values of {parameter} are NaN at step {step}.",
        "subject": Subject(parameter=parameter, step=step),
        "evidence": (
            Evidence(f"series/gradient/non_finite/{parameter}", step, 12288, "1"),
            Evidence("scalars/loss", step + 1, "nan", "loss"),
        ),
        "fix": "Run `backlight nan train.py` to find the operation that made the first NaN.",
        "refuted_if": "the same step, repeated from its checkpoint, has finite gradients",
        "made": Made.LIVE,
    }
    return Finding(**{**fields, **more})


def write_report(
    run: Run, findings: Sequence[Finding], target: Path, health: tuple[Any, Any] | None = None
) -> Path:
    """Write the page of a run."""
    return write_page(render_page(Source(run, tuple(findings), health)), target)


def health_of(run: Run) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return a substitute for the health score: 0 where a value is not finite, else close to 1."""
    frame = run.frame("gradient", "rms")
    bad = (frame.measured & ~np.isfinite(frame.values)).any(axis=1)
    small = ((frame.values < 1e-8) & frame.measured).mean(axis=1)
    return frame.steps, np.where(bad, 0.0, 1 - 0.5 * small)
