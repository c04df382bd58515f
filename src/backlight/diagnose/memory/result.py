"""Memory of a step, measured or predicted: its allocation log, the account of it, and the stored records.

No torch, so that a prediction travels between processes.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from backlight import codec
from backlight.extras import require
from backlight.records import RunStatus
from backlight.store.errors import RunWriteError
from backlight.store.write.writer import RunWriter

Integers = npt.NDArray[np.int64]

MAX_CURVE_POINTS = 2000
"""Points of a reduced curve."""


class MemoryKind(enum.StrEnum):
    """Use of a storage; every storage has exactly one kind."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"
    OPTIMIZER_STATE = "optimizer_state"
    INPUTS = "inputs"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"
    HELD = "held"
    """Allocated before the first recorded step and none of the others: copies of weights, caches."""


@dataclass(slots=True)
class Storage:
    """One storage: its bytes, and where it was allocated."""

    nbytes: int
    kind: MemoryKind
    module: str
    phase: str
    operation: str
    shape: tuple[int, ...]
    dtype: str


@dataclass
class StorageLog:
    """Allocations and frees in order.

    ``events`` hold ``index + 1`` of a storage for its allocation, and the negative for its free; ``phases``
    hold the position in ``events`` at which a phase began, with its name.
    """

    storages: list[Storage] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)

    def allocate(self, storage: Storage) -> int:
        """Append an allocation and return the index of the storage."""
        self.storages.append(storage)
        self.events.append(len(self.storages))
        return len(self.storages) - 1

    def free(self, index: int) -> None:
        """Append a free."""
        self.events.append(-index - 1)

    def phase_at(self, position: int) -> str:
        """Return the phase during the event at ``position``."""
        return next((name for begin, name in reversed(self.phases) if begin <= position), "")


@dataclass(frozen=True, kw_only=True)
class ModuleMemory:
    """Bytes of a module at the peak: exclusive, those by kind, and inclusive of the modules inside it."""

    name: str
    exclusive: int
    inclusive: int
    kinds: dict[MemoryKind, int]


@dataclass(frozen=True, kw_only=True)
class TensorGroup:
    """Storages at the peak that have kind, module, operation, shape and dtype in common."""

    kind: MemoryKind
    module: str
    operation: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    bytes: int


@dataclass(frozen=True)
class Account:
    """Memory of steps, from event ``start`` of a log on; sizes are rounded up to ``granule`` bytes.

    An allocator rounds as well: 512 for CUDA.
    """

    log: StorageLog
    start: int = 0
    granule: int = 1

    @cached_property
    def sizes(self) -> Integers:
        """Bytes of each storage, int64 [storages]."""
        sizes = np.array([storage.nbytes for storage in self.log.storages], dtype=np.int64)
        return -(-sizes // self.granule) * self.granule

    @cached_property
    def _whole_curve(self) -> Integers:
        events = np.array(self.log.events, dtype=np.int64)
        return np.cumsum(np.sign(events) * self.sizes[np.abs(events) - 1]) if len(events) else events

    @property
    def curve(self) -> Integers:
        """Live bytes after each event of the steps, int64 [events]."""
        return self._whole_curve[self.start :]

    @cached_property
    def position(self) -> int:
        """Index in the log of the event at which the peak is first reached; ValueError without events."""
        if not len(self.curve):
            raise ValueError(f"no memory was recorded from event {self.start} on")
        return self.start + int(np.argmax(self.curve))

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return int(self._whole_curve[self.position])

    @property
    def between_steps(self) -> int:
        """Bytes before the steps: what stays allocated between them."""
        return int(self._whole_curve[self.start - 1]) if self.start else 0

    @cached_property
    def live(self) -> list[int]:
        """Indices of the storages that are live at the peak."""
        events = np.array(self.log.events[: self.position + 1], dtype=np.int64)
        is_live = np.zeros(len(self.log.storages), dtype=bool)
        is_live[events[events > 0] - 1] = True
        is_live[-events[events < 0] - 1] = False
        return np.flatnonzero(is_live).tolist()

    def kinds(self) -> dict[MemoryKind, int]:
        """Return the bytes at the peak by kind, every kind listed."""
        by_kind = dict.fromkeys(MemoryKind, 0)
        for index in self.live:
            by_kind[self.log.storages[index].kind] += int(self.sizes[index])
        return by_kind

    def phase_peaks(self) -> dict[str, int]:
        """Return the highest point of each phase of the steps."""
        peaks: dict[str, int] = {}
        borders = [*self.log.phases, (len(self.log.events), "")]
        for (begin, name), (end, _) in pairwise(borders):
            part = self.curve[max(0, begin - self.start) : max(0, end - self.start)]
            if len(part):
                peaks[name] = max(peaks.get(name, 0), int(part.max()))
        return peaks

    def modules(self) -> list[ModuleMemory]:
        """Return the modules that hold memory at the peak, the largest without those inside it first.

        A storage is held by the innermost module that allocated it.
        """
        exclusive: defaultdict[str, Counter[MemoryKind]] = defaultdict(Counter)
        inclusive: Counter[str] = Counter()
        for index in self.live:
            storage, size = self.log.storages[index], int(self.sizes[index])
            exclusive[storage.module][storage.kind] += size
            above = storage.module
            inclusive[above] += size
            while above:
                above = above.rpartition(".")[0]
                inclusive[above] += size
        modules = [
            ModuleMemory(
                name=name, exclusive=exclusive[name].total(), inclusive=total, kinds=dict(exclusive[name])
            )
            for name, total in inclusive.items()
        ]
        return sorted(modules, key=lambda module: (-module.exclusive, module.name))

    def largest(self, count: int) -> list[TensorGroup]:
        """Return the largest live tensors at the peak, equal ones grouped."""
        groups: dict[tuple[MemoryKind, str, str, tuple[int, ...], str], list[int]] = {}
        for index in self.live:
            s = self.log.storages[index]
            groups.setdefault((s.kind, s.module, s.operation, s.shape, s.dtype), []).append(index)
        tensors = [
            TensorGroup(
                kind=kind, module=module, operation=operation, shape=shape, dtype=dtype,
                count=len(ids), bytes=int(self.sizes[ids].sum()),
            )
            for (kind, module, operation, shape, dtype), ids in groups.items()
        ]  # fmt: skip
        return sorted(tensors, key=lambda group: -group.bytes)[:count]

    def new_gradients(self) -> int:
        """Return the bytes of the gradients that the steps allocate; DDP's buckets take as much."""
        new = (self.log.storages[event - 1] for event in self.log.events[self.start :] if event > 0)
        return sum(storage.nbytes for storage in new if storage.kind is MemoryKind.GRADIENTS)

    def curve_by_kind(self, points: int = MAX_CURVE_POINTS) -> tuple[Integers, Integers]:
        """Return positions [P] within the steps, and bytes [K, P] by kind, ordered as :class:`MemoryKind`.

        With more events than ``points``, each range of events is represented by its highest.
        """
        order = list(MemoryKind)
        row_of = np.array([order.index(storage.kind) for storage in self.log.storages], dtype=np.int64)
        changes = np.diff(self._whole_curve, prepend=0)
        rows = np.zeros((len(order), len(changes)), dtype=np.int64)
        if len(changes):
            rows[row_of[np.abs(np.array(self.log.events)) - 1], np.arange(len(changes))] = changes
        rows, total = np.cumsum(rows, axis=1)[:, self.start :], self.curve
        if len(total) <= points:
            return np.arange(len(total), dtype=np.int64), rows
        edges = np.linspace(0, len(total), points + 1).astype(np.int64)
        highest = np.array(
            [int(a + np.argmax(total[a:b])) for a, b in pairwise(edges) if b > a], dtype=np.int64
        )
        return highest, rows[:, highest]


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
