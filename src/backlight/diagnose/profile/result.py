"""A profile as one record: for ``--json``, ``evidence/profile.json`` and the terminal."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from backlight import atomic_files, codec
from backlight.diagnose.profile.controls import ControlResult
from backlight.diagnose.profile.line_samples import LineSampling, LineTime, StackTime, speedscope
from backlight.diagnose.profile.optimizations import Optimization
from backlight.diagnose.profile.step_summary import ModuleRow, OptimizerTime, PhaseTime, StepMilliseconds
from backlight.distributed import launch_id, world
from backlight.findings.evaluate import evaluate_rules
from backlight.monitors.steptime.model.evidence import GARBAGE_COLLECTION, RUNTIME_INFO
from backlight.monitors.steptime.model.step_line import REMAINDER
from backlight.monitors.steptime.monitor import optimizer_scalars
from backlight.records import Finding, Made, Phase, RunStatus
from backlight.store.errors import RunWriteError
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter
from backlight.trace.module_times import ModuleTime
from backlight.trace.step_operators import (
    CopyTime,
    DeviceTime,
    JoinedTime,
    Logits,
    OperatorTime,
    TracedOptimizer,
)

if TYPE_CHECKING:
    from backlight.diagnose.profile.run import Profile

PROFILE = "profile.json"
TRACE = "trace.json.gz"
FLAME_GRAPH = "lines.speedscope.json"


@dataclass(frozen=True)
class PeakMemory:
    """Bytes: the peak so far, and the capacity; ``of`` is ``device`` or ``process``."""

    peak: int
    capacity: int
    of: str


@dataclass(frozen=True, kw_only=True)
class ProfileResult:
    """A profile; what was not measured is None. Times are milliseconds per step.

    Rank 0 alone is traced. ``phases`` are host times, ``device_phases`` median device times. The
    ``sum_error`` values are the largest share by which phases miss their step. ``mfu_basis`` states what the
    MFU rests on, or why there is none. ``modules`` are of traced steps, ``module_tree`` is of clocked ones.
    ``backward_unattributed_ms`` belongs to no module: the loss, sums of gradients, the engine.
    ``tracing_overhead`` is the ratio of a traced step to a clocked one.
    """

    version: int = 2
    script: str
    arguments: tuple[str, ...]
    rank: int
    world_size: int
    exit_code: int
    step: StepMilliseconds | None
    first_ms: float
    warmup_dropped: int
    phases: dict[str, PhaseTime]
    device_phases: dict[str, float] | None
    sum_error: float
    optimizers: tuple[OptimizerTime, ...] = ()
    lines: tuple[LineTime, ...] | None = None
    stacks: tuple[StackTime, ...] | None = None
    sampling: LineSampling | None = None
    backwards_per_step: float | None
    parameters: int
    tokens_per_second: float | None = None
    mfu: float | None = None
    mfu_basis: str | None = None
    modules: tuple[ModuleTime, ...] | None = None
    module_tree: tuple[ModuleRow, ...] | None = None
    backward_unattributed_ms: float | None = None
    traced_steps: int | None = None
    traced_step_ms: float | None = None
    traced_phases: dict[str, float] | None = None
    trace_sum_error: float | None = None
    exposed_communication: float | None = None
    exposed_by_step: tuple[float, ...] = ()
    logits: Logits | None = None
    operators: tuple[OperatorTime, ...] | None = None
    kinds: tuple[OperatorTime, ...] | None = None
    kernels: tuple[OperatorTime, ...] | None = None
    traced_optimizers: tuple[TracedOptimizer, ...] = ()
    copies: tuple[CopyTime, ...] | None = None
    joined: tuple[JoinedTime, ...] | None = None
    device: DeviceTime | None = None
    trace_notes: tuple[str, ...] = ()
    memory: PeakMemory
    controls: tuple[ControlResult, ...] = ()
    optimizations: tuple[Optimization, ...]
    tracing_overhead: float | None
    trace: str | None = None
    not_measured: tuple[str, ...]


@contextlib.contextmanager
def profile_run(path: Path | None, script: str, arguments: list[str]) -> Iterator[RunWriter | None]:
    """Open the run directory of a profile ahead of it; without a path, a temporary one on rank 0."""
    with contextlib.ExitStack() as stack:
        if path is None and world().rank != 0:
            yield None
            return
        if path is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="backlight-profile-"))
            path = Path(folder) / "run"
        yield stack.enter_context(
            RunWriter.create(
                path,
                name=path.name,
                script=script,
                arguments=arguments,
                monitors=("steptime",),
                rank=world().rank,
                world_size=world().size,
                run_id=launch_id(),
            )
        )


def find_findings(writer: RunWriter) -> list[Finding]:
    """Return the findings on the stored profile."""
    return evaluate_rules(open_run(writer.path), made=Made.LIVE)


def store_profile(profile: Profile, writer: RunWriter) -> ProfileResult:
    """Write a profile and close its run; return the result as stored.

    Every clocked step has the scalars ``phase/<phase>``, in seconds, the cold first one included; the rest
    is in ``evidence/profile.json``, and the trace next to it.

    Raises
    ------
    RunWriteError
        If the disk refuses.
    """
    result, steps, description = profile.result, profile.observed.steps, profile.observed.description
    if description is not None:
        writer.fingerprint(description.fingerprint)
        writer.parameter_table(description.records)
        writer.event(None, RUNTIME_INFO, description.runtime_info)
    for at, payload in profile.pauses:
        if at < len(steps):
            writer.event(at, GARBAGE_COLLECTION, payload)
    for number, step in enumerate(steps):
        values = {_scalar(name, separated=step.separated): s for name, s in step.phases.items()}
        writer.scalars(
            number, values | (optimizer_scalars(step.optimizer_seconds) if result.optimizers else {})
        )
    for text in result.not_measured:
        what, _, reason = text.partition(": ")
        writer.event(None, "unmeasured", {"what": what, "reason": reason or text})
    if profile.trace:
        result = replace(result, trace=writer.evidence(TRACE, profile.trace))
    if result.rank == 0:
        if result.stacks:
            writer.evidence(FLAME_GRAPH, codec.encode(speedscope(result.script, result.stacks)))
        writer.evidence(PROFILE, codec.encode(result, indent=1))
    writer.flush()
    lost = writer.lost
    writer.close(RunStatus.FINISHED if result.exit_code == 0 else RunStatus.FAILED)
    if lost is not None:
        raise RunWriteError(f"the profile was not stored: {lost}")
    return result


def write_flame_graph(result: ProfileResult, path: Path) -> None:
    """Write the lines of a profile for speedscope; ValueError without a line, or where the disk refuses."""
    if not result.stacks:
        raise ValueError(f"{path}: not written: no line was sampled in steady steps; raise --timed")
    try:
        atomic_files.write(path, codec.encode(speedscope(result.script, result.stacks)).encode())
    except OSError as error:
        raise ValueError(f"{path}: cannot write the flame graph: {error.strerror}") from None


def _scalar(phase: str, separated: bool) -> str:
    return f"phase/{REMAINDER if phase == Phase.OTHER and not separated else phase}"
