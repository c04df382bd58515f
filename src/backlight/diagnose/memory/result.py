"""Memory of a step, measured or predicted: the records that ``--json`` prints and a run directory stores.

No torch, so that a prediction travels between processes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from backlight import codec
from backlight.diagnose.memory.storage_log import Account, MemoryKind, ModuleMemory, TensorGroup
from backlight.extras import require
from backlight.records import RunStatus
from backlight.store.errors import RunWriteError
from backlight.store.write.writer import RunWriter

GRANULE_BYTES = 512
"""CUDA's caching allocator rounds a request up to a multiple of this."""

CONTEXT_BYTES = (300 * 2**20, 1200 * 2**20)
"""Range of a CUDA context with its libraries; device, driver and kernels decide."""

COMMUNICATION_BYTES = (64 * 2**20, 1024 * 2**20)
"""Range of NCCL's buffers on one device; channels, protocols and ranks decide."""

MAX_TENSORS = 20
"""Tensor groups that a result lists."""

DOCUMENT = "memory.json"

NOT_MEASURED = (
    "workspaces that kernels allocate and free inside themselves (convolutions, matrix products)",
    "memory outside of torch's tensors (numpy, the CUDA context, communication) and in worker processes",
)

NOT_PREDICTED = (
    "workspaces of kernels: their size depends on the device, its instruction set and the number of threads",
    "other kernels: recurrent and normalisation layers of another device may keep other tensors",
    "compiled code, which may keep less",
)


class PredictionError(ValueError):
    """A step cannot be predicted: what, where in the recipe, and the fix."""


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Floating-point operations of one step, by the formulas of :mod:`torch.utils.flop_counter`.

    ``forward`` includes the loss; a multiplication and an addition are two. ``recomputed`` ones of
    checkpointed forwards are a part of ``backward``. ``modules`` are those of the forward, inclusive of the
    modules inside.
    """

    forward: int
    backward: int
    recomputed: int
    modules: dict[str, int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """All of a step; those of the optimizer are not counted."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class LogitsMemory:
    """The logits of a classifier or language model, as its loss reads them.

    ``copies`` are further storages of as many elements that are live at once at most; ``live_at_most`` are
    the bytes of all of them. ``formula`` is elements times (item size + 4): the logits and one fp32 copy.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    copies: int
    live_at_most: int
    bytes: int = field(init=False, default=0)
    formula: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        elements = math.prod(self.shape)
        object.__setattr__(self, "bytes", elements * self.itemsize)
        object.__setattr__(self, "formula", elements * (self.itemsize + 4))


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Sibling modules of one structure."""

    parent: str
    type: str
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Effect of checkpointing the ``wrapped`` modules of one group, by a prediction with it.

    ``recomputed_flops`` come on top; ``share_of_step`` is their share of the step without checkpointing.
    """

    parent: str
    type: str
    wrapped: tuple[str, ...]
    peak: int
    saved: int
    recomputed_flops: int
    share_of_step: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The largest batch whose predicted step stays within a budget of bytes.

    ``above`` is one more sample, with a peak over the budget; None where the search ended at ``batch``.
    ``tried`` are batch and peak of every prediction.
    """

    setting: str
    budget: int
    batch: int
    peak: int
    above: int | None
    peak_above: int | None
    tried: tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class AllocatorStatistics:
    """The caching allocator of CUDA over the recorded steps, in bytes.

    ``inactive_split`` is free now, inside segments of which other parts are in use. ``retries`` counts how
    often the cache was emptied for lack of memory. ``fragmentation`` is the share of the reserved
    memory that no tensor used at the peak; the two peaks may differ in time.
    """

    allocated_peak: int
    reserved_peak: int
    inactive_split: int
    retries: int
    failures: int

    fragmentation: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        share = 1 - self.allocated_peak / self.reserved_peak if self.reserved_peak else 0.0
        object.__setattr__(self, "fragmentation", share)


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The memory of one training step, in bytes.

    Each storage is rounded up to a multiple of ``rounded_to``. ``between_steps`` stays allocated between
    steps; ``phases`` are the highest bytes by phase; ``parameters`` counts elements, tied ones once.
    ``workspaces`` are calls by operation whose kernels may allocate a workspace, which comes on top of the
    peak.
    """

    peak: int
    rounded_to: int
    between_steps: int
    phase_at_peak: str
    kinds: dict[MemoryKind, int]
    phases: dict[str, int]
    modules: list[ModuleMemory]
    largest: list[TensorGroup]
    parameters: int
    flops: Flops
    logits: LogitsMemory | None
    workspaces: dict[str, int]
    not_seen: tuple[str, ...]
    account: Account = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory(StepMemory):
    """The memory of recorded steps of a script; ``exit_code`` is the script's own.

    ``kept_graphs`` and ``kept_data`` are the facts of the events of those names, and the ``step`` at which
    they were observed.
    """

    how: Literal["measured"] = "measured"
    exit_code: int
    steps: int
    warmup: int
    device: str
    allocator: AllocatorStatistics | None
    trouble: tuple[str, ...]
    kept_graphs: dict[str, Any] | None = None
    kept_data: dict[str, Any] | None = None
    not_seen: tuple[str, ...] = NOT_MEASURED


@dataclass(frozen=True, kw_only=True)
class PredictedMemory(StepMemory):
    """A prediction for a step after the first.

    ``device`` is whose rules were followed, ``assumed`` what was assumed of it beyond the recipe. ``built``
    is how the model was built: ``meta``, ``piecewise`` (one parameter at a time) or ``real``. The ranges
    ``context_bytes``, ``communication_bytes`` and ``ddp_bucket_bytes`` come on top on a GPU, with NCCL and
    with DDP. ``too_low`` lists kinds of operations with which predictions were too low, and by how much.
    """

    how: Literal["predicted"] = "predicted"
    device: str
    assumed: tuple[str, ...]
    built: str
    seconds: float
    trainable: int
    peak_unrounded: int
    ddp_bucket_bytes: tuple[int, int]
    context_bytes: tuple[int, int] = CONTEXT_BYTES
    communication_bytes: tuple[int, int] = COMMUNICATION_BYTES
    blocks: tuple[Blocks, ...]
    checkpointing: tuple[Saving, ...] = ()
    fit: Fit | None = None
    not_seen: tuple[str, ...] = NOT_PREDICTED
    too_low: tuple[str, ...] = ()


def account_fields(account: Account) -> dict[str, Any]:
    """Return the fields of :class:`StepMemory` that an account determines."""
    return {
        "account": account,
        "peak": account.peak,
        "rounded_to": account.granule,
        "between_steps": account.between_steps,
        "phase_at_peak": account.log.phase_at(account.position),
        "kinds": account.kinds(),
        "phases": account.phase_peaks(),
        "modules": account.modules(),
        "largest": account.largest(MAX_TENSORS),
    }


def as_document(result: MeasuredMemory | PredictedMemory) -> dict[str, Any]:
    """Return a result as JSON types, without the account that it was computed from."""
    names = (each.name for each in fields(result) if each.name != "account")
    return {name: codec.plain(getattr(result, name)) for name in names}


def open_memory_run(path: Path, script: str, arguments: Sequence[str]) -> RunWriter:
    """Open the run directory of a result, before anything is measured."""
    require("h5py", what="a stored memory result")
    return RunWriter.create(
        path, name=path.name, script=script, arguments=list(arguments), monitors=("steptime",)
    )


def store_memory(writer: RunWriter, result: MeasuredMemory | PredictedMemory) -> None:
    """Write a result and close its run.

    The array ``memory/curve`` [kinds, points] holds bytes over the events of the steps, at the events of
    ``memory/positions`` [points]; ``evidence/memory.json`` is the result with the curve's kinds and phases.

    Raises
    ------
    RunWriteError
        If the disk refuses.
    """
    account = result.account
    positions, curve = account.curve_by_kind()
    writer.array("memory/positions", 0, positions, dims=("point",), unit="event")
    writer.array("memory/curve", 0, curve, dims=("kind", "point"), unit="byte")
    start, end = account.start, len(account.log.events)
    rows = {
        "kinds": [kind.value for kind in MemoryKind],
        "phases": [[at - start, name] for at, name in account.log.phases if start <= at < end],
        "events": end - start,
    }
    content = {**as_document(result), "curve": rows}
    writer.evidence(DOCUMENT, codec.encode(content, indent=1))
    failed = False
    if isinstance(result, MeasuredMemory):
        failed = result.exit_code != 0
        for text in result.trouble:
            writer.event(None, "unmeasured", {"what": "memory", "reason": text})
    writer.flush()
    lost = writer.lost
    writer.close(RunStatus.FAILED if failed else RunStatus.FINISHED)
    if lost is not None:
        raise RunWriteError(f"the memory result was not stored: {lost}")
