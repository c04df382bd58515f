"""One injected fault per rule as a stored run: the source of the findings snapshot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from activation_runs import write_activations
from backlight.monitors.correctness.model.facts import Fact, Names, encode
from backlight.monitors.correctness.model.replicas import MOMENTS, Digests, Followed, Promise, encoded
from backlight.monitors.correctness.rules.gradient_use import ClearedBeforeStep, EarlyClip, SummedGradients
from backlight.monitors.correctness.rules.loss_input import SoftmaxTwice
from backlight.monitors.correctness.rules.mixed_precision import ClippedBeforeUnscale
from backlight.monitors.correctness.rules.module_modes import Active, TrainedInEvaluation
from backlight.monitors.correctness.rules.recomputation import OtherRandomNumbers
from backlight.monitors.correctness.rules.repeated_data import SameOrder
from backlight.monitors.correctness.rules.restored_state import OptimizerState
from backlight.monitors.correctness.rules.schedule_steps import PerBatch
from backlight.monitors.correctness.rules.trained_tensors import Replaced
from backlight.monitors.correctness.rules.uneven_microbatches import Classes, UnevenMicrobatches
from backlight.monitors.correctness.rules.weight_changes import ChangedAfterStep, RoundedStep
from backlight.records import Evidence, Finding, Made, ParameterRecord, Severity, Subject
from backlight.store.read.run import Run, open_run
from grokking_runs import write_grokking_run
from run_builder import build_health_run, build_run, build_steptime_run, fill, open_ranks

Fault = Callable[[Path], Run]
GIB = 2**30
RANDOM = np.random.default_rng(0)
NORM = RANDOM.lognormal(0, 0.15, 200)
LEAP = np.where(np.arange(200) == 120, 20 * NORM, NORM)
ALIVE = {"a.weight": [1e-3] * 40, "b.weight": [1e-3] * 40}
STILL = {"a.weight": [0.0] * 40, "b.weight": [1e-3] * 40}
PHASES = {"data": 0.001, "backward": 0.03, "optimizer": 0.002, "between": 0.017}
STEP = {"step": {"median_ms": 50.0}, "optimizations": []}
LOOP = {"optimizers": [{"type": "AdamW", "tensors": 148, "fused": False, "foreach": False}]}
LOGITS = {"shape": [16, 1024, 32000], "dtype": "float32", "itemsize": 4}
COPY = {
    "source": "float", "target": "c10::BFloat16", "contiguous": True, "line": "train.py:12 (step)",
    "calls": 8.0, "host_ms": 3.5, "device_ms": 0.0, "share": 0.07,
}  # fmt: skip
RECOMPILED = {
    "function": "forward", "line": "model.py:10", "count": 7, "seconds": 12.5, "reason": "size mismatch",
}  # fmt: skip
LATE = {"data": 0.012, "backward": 0.03, "between": 0.018}
WAITS = {"data": 0.001, "backward": 0.041, "between": 0.018}
BLOCK = {"name": "blocks.0", "calls": 1.0, "forward_ms": 5.0, "backward_ms": 10.0, "recomputed_ms": 6.0}


def health(rms: Any, **more: Any) -> Fault:
    return lambda path: build_health_run(path, rms, **more)


KEPT = {
    "of": "loss",
    "since": 0,
    "until": 57,
    "marked": 58,
    "bytes_per_step": 262_144.0,
    "holder": {"name": "losses", "count": 40, "line": "train.py:11", "source": "losses.append(loss)"},
}


HOOKS = {
    "name": "encoder.1", "kind": "forward hook", "hooks": 56, "names": 1, "since": 7, "line": "train.py:12",
}  # fmt: skip

GATHERED = {
    "since": 7,
    "bytes": 2**25,
    "bytes_per_step": 524_288.0,
    "device": "cuda:0",
    "is_mapping": False,
    "holder": {"name": "outputs", "count": 56, "line": "train.py:9", "source": "outputs.append(y.detach())"},
    "capacity": 64 * GIB,
}


def steptime(phases: Any = None, **more: Any) -> Fault:
    return lambda path: build_steptime_run(path, phases, **more)


def stall(path: Path) -> Run:
    finding = Finding(
        rule="stall", monitor="stalls", severity=Severity.ERROR,
        title="BLOCKED: the main thread waits for a lock", detail="CPU 0 %; 12 s.",
        subject=Subject(step=7, rank=0, verdict="BLOCKED", phase="forward"),
        evidence=(Evidence("events/stall", 7, "confidence high"),),
        fix="Find the thread that holds the lock.",
        refuted_if="the step goes on without being touched.", made=Made.LIVE,
    )  # fmt: skip
    return build_run(path, monitors=("stalls",), findings=[finding])


def correctness(path: Path, *facts: Fact, **more: Any) -> Run:
    events = [(fact.step, fact.event, encode(fact)) for fact in facts]
    return build_run(path, monitors=("correctness",), events=events, **more)


AB = Names.of(["a.weight", "b.weight"])


def contradiction(fact: Fact, steps: tuple[int, ...] = (0, 1, 2)) -> Fault:
    """Return a function that writes a run of the monitor correctness with one contradiction per step."""
    return lambda path: correctness(path, *(replace(fact, step=step) for step in steps))


def activations(path: Path) -> Run:
    return build_run(path, monitors=("activations",), write=write_activations)


def guessing(path: Path) -> Run:
    loss = {step: 2.3026 + 0.01 * (step % 3) for step in range(0, 1200, 10)}
    return correctness(path, Classes(0, classes=10, factor=1.0), scalars={"loss": loss})


def uneven(path: Path) -> Run:
    targets = (812, 96), (455, 701), (230, 948)
    facts = (UnevenMicrobatches(i, of, max(of) / min(of), i + 1) for i, of in enumerate(targets))
    return correctness(path, *facts)


def replicas(
    path: Path, weights: Sequence[float], other: Sequence[float], *, exact: bool = True, by: str = "DDP",
    unsynced: bool = False,
) -> Run:  # fmt: skip
    """Write a run of two ranks with the norms of the weight ``a`` at each step; ``b`` is equal on both."""
    promises = (Promise(by, (0, 1), exact, rows=(0, 1)),) if by else ()
    ranks = zip(open_ranks(path, monitors=("correctness",)), (weights, other), strict=True)
    for writer, values in reversed([*ranks]):  # an attempt ends with its rank 0
        facts: list[Fact] = [Followed(0, ("a.weight", "b.weight"), promises)]
        for step, norm in enumerate(values):
            for moment in MOMENTS:
                norms = np.array([norm if moment == "weights" else 1.0, 2.0 + step], np.float32)
                content = encoded(norms.view(np.int32).astype(int), norms)
                facts.append(Digests(step, moment, step + (moment == "gradients"), unsynced, *content))
        fill(writer, events=[(fact.step, fact.event, encode(fact)) for fact in facts])
        writer.close()
    return open_run(path)


def fp16(name: str) -> ParameterRecord:
    return ParameterRecord(name, (8, 8), "float16", "cpu", 64, module=name, module_type="Linear")


FAULTS: dict[str, Fault] = {
    "always_clipped": health(
        {"a.weight": [1e-2] * 100},
        scalars={"clip/factor": [0.02] * 100, "clip/norm": [50.0] * 100, "clip/limit": [1.0] * 100},
    ),
    "exploding": health(
        {"a.weight": [1e-3] * 40 + [1e-3 * 4.0**i for i in range(1, 11)], "b.weight": [1e-3] * 50}
    ),
    "large_update": health({"a.weight": [1e-3] * 80}, update={"a.weight": [0.2] * 80}),
    "no_gradient": health(
        {"a.weight": [1e-2] * 40, "dead.weight": [0.0] * 40},
        extra=[
            ParameterRecord("unused.weight", (4, 4), "float32", "cpu", 16, module_type="Linear", group="0/0")
        ],
    ),
    "no_update": health(ALIVE, update=STILL),
    "non_finite": health({"a.weight": [1e-3] * 20, "b.weight": [1e-3] * 20}, nan={("a.weight", 12): 3}),
    "replicas_differ": lambda path: replicas(path, [4.0] * 5, [4.0, 4.0, 5.0, 5.0, 5.0]),
    "loss_scale": health(
        {"a.weight": [1e-11] * 150},
        records={"a.weight": fp16("a.weight")},
        zeros={"a.weight": [0.6] * 150},
        scalars={"scaler/skipped": (np.arange(150) % 8 == 3) * 1.0, "scaler/scale": [1024.0] * 150},
    ),
    "spike": health({"a.weight": LEAP / 8}, scalars={"total_norm": LEAP, "batch": {120: 17.0}}),
    "vanishing": health({f"layer{i}.weight": [1e-12 if i < 2 else 1e-3] * 40 for i in range(12)}),
    "clipping": contradiction(EarlyClip(0, line="train.py:12"), (1, 2, 3)),
    "gradients_discarded": contradiction(ClearedBeforeStep(0, AB)),
    "gradients_not_cleared": contradiction(SummedGradients(0, AB, followed=2), (1, 2, 3)),
    "loss_input": contradiction(SoftmaxTwice(0)),
    "loss_not_falling": guessing,
    "schedule": contradiction(
        PerBatch(0, "CosineAnnealingLR", taken=11, batches=500, is_past=True, rate=0.0024), (11,)
    ),
    "trained_tensors": contradiction(
        Replaced(0, "AdamW", Names.of(["head.weight", "head.bias"]), "train.py:12", stale=2), (0,)
    ),
    "mixed_precision": contradiction(ClippedBeforeUnscale(0, "norm", limit=1.0, scale=65536.0)),
    "repeated_data": contradiction(SameOrder(0, "RandomSampler", "Images", batches=8, epochs=2)),
    "not_restored": contradiction(OptimizerState(0, "AdamW", count=4, line="train.py:12"), (0,)),
    "module_modes": contradiction(
        TrainedInEvaluation(0, "Classifier", Active(("drop", "norm"), {"Dropout": 1, "BatchNorm1d": 1}, 1))
    ),
    "recomputation_differs": contradiction(OtherRandomNumbers(0, line="train.py:12 (forward)")),
    "uneven_microbatches": uneven,
    "weights_unchanged": contradiction(
        RoundedStep(0, "a.weight", 0.97, 1e-5, "bfloat16", 0.05, 0.01, comparisons=3)
    ),
    "weights_changed": contradiction(ChangedAfterStep(0, AB, reverted=0.99, comparisons=3)),
    "bottleneck": steptime(
        PHASES | {"data": 0.02, "optimizer": 0.012},
        runtime_info=LOOP | {"cores": 16, "threads": 16, "local_ranks": 8, "workers": 2},
        profile=STEP
        | {
            "controls": [],
            "copies": [COPY],
            "traced_steps": 10,
            "device": {"idle": 0.44, "idle_by_step": [0.44] * 10, "causes": {"host_bound": 0.7, "data": 0.3}},
            "exposed_communication": 0.23,
            "exposed_by_step": [0.23] * 10,
        },
    ),
    "compilation": steptime(
        runtime_info={
            "compilation": {
                "graphs": 3,
                "graph_breaks": {"Tensor.item()": 2},
                "recompiled": [RECOMPILED],
                "cuda_graph_skips": 2,
                "cuda_graph_reasons": ["cpu device (arg0)"],
            }
        }
    ),
    "memory": steptime(
        profile=STEP
        | {"memory": {"peak": 8 * GIB, "capacity": 64 * GIB}, "logits": LOGITS, "modules": [BLOCK]},
        runtime_info={"memory": {"reserved": 12 * GIB, "peak": 8 * GIB, "retries": 3}},
        events=[(59, "kept_graphs", KEPT), (56, "kept_data", GATHERED), (56, "growing_hooks", HOOKS)],
    ),
    "outlier_steps": steptime(PHASES, changes={(step, "data"): 0.4 for step in (30, 40, 50)}),
    "activations": activations,
    "grokking": write_grokking_run,
    "stall": stall,
}
"""Functions that write a run in which the rule has a finding, by rule."""
