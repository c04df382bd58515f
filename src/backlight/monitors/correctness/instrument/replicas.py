"""Digests of what other ranks may hold as well: weights, gradients, and what was transferred."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from backlight.capture.hooks import is_transforming
from backlight.capture.hub import HUB
from backlight.capture.optimizers import parameters_of
from backlight.capture.parameters import local
from backlight.capture.replicas import replicas, wrappers
from backlight.devices import is_capturing_graph
from backlight.measure.stats.compiled_rows import DTYPES, is_plain
from backlight.measure.stats.fused_rows import AddressTable, fused_rows
from backlight.monitors.correctness.instrument.check import Check
from backlight.monitors.correctness.model import replicas as facts
from backlight.records import Layout

if TYPE_CHECKING:
    from backlight.capture.parameters import ParameterTable
    from backlight.capture.transfers import RankTransfer

Digested = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Digests and norms of tensors, ``[P]`` each."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DigestReader:
    """Reads digests and norms of whole tensors: in one launch per type where a fused pass is compiled."""

    def __init__(self) -> None:
        self._tables: dict[torch.dtype, AddressTable] = {}

    def read(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[..., Digested]]:
        """Return values on the device of ``tensors``, and what the host makes of them."""
        rest = list(range(len(tensors)))
        values: list[Tensor] = []
        fused = fused_rows(tensors[0].device)
        parts: list[tuple[list[int], list[int]]] = []  # tensors, and how many rows each has
        for dtype in DTYPES if fused is not None else ():
            group = [n for n in rest if tensors[n].dtype is dtype and is_plain(tensors[n])]
            if fused is None or not group or not fused.is_ready():
                continue
            table = self._tables.setdefault(dtype, AddressTable())
            fused_digest = fused.attempt(partial(fused.digest, table, [tensors[n] for n in group]))
            if fused_digest is not None:
                values += fused_digest[:2]
                parts.append((group, fused_digest[2]))
                rest = [n for n in rest if n not in group]
        if fused is not None and not fused.is_ready():
            fused.request()
        if rest:
            with torch.no_grad():
                values += [_digests([tensors[n] for n in rest]), _norms([tensors[n] for n in rest])]

        def finish(*arrays: NDArray[np.generic]) -> Digested:
            digests_P, norms_P = np.zeros(len(tensors), np.int64), np.zeros(len(tensors), np.float32)
            for (group, rows), sums, squares in zip(parts, arrays[::2], arrays[1::2], strict=False):
                starts = np.cumsum([0, *rows[:-1]])
                digests_P[group] = np.add.reduceat(sums, starts).astype(np.int32)
                norms_P[group] = np.sqrt(np.add.reduceat(squares, starts))
            if rest:
                digests_P[rest], norms_P[rest] = arrays[-2:]
            return digests_P, norms_P

        return values, finish


def _digests(tensors: Sequence[Tensor]) -> Tensor:
    """Return ``[P]``: the sum of the bits of each tensor, read as integers, in wrap-around arithmetic."""
    sums = []
    for tensor in tensors:
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        size = values.element_size()
        # int32 into int64 is seven times slower on a CPU.
        sums.append(values.view(_BITS[size]).sum(dtype=torch.int64 if size == 8 else torch.int32).long())
    return torch.stack(sums)


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return ``[P]``: the fp32 norm of each tensor, not rounded to its type: other ranks may use the pass."""
    floating = [_floating(tensor) for tensor in tensors]
    has_doubles = any(tensor.dtype is torch.float64 for tensor in floating)
    widest = torch.float64 if has_doubles else torch.float32
    return torch.stack([n.float() for n in torch._foreach_norm(floating, 2, dtype=widest)])


def _floating(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.abs().float()
    return tensor if tensor.is_floating_point() and tensor.element_size() > 1 else tensor.float()


class ReplicaDigests(Check):
    """Records digests of all whole or replicated parameters at observed steps, where there are several ranks.

    Weights are read before the first forward of a step, after all that belongs to the one before; gradients
    as the optimizer meets them. Ranks are compared by the rule ``replicas_differ``: no collective is needed.
    """

    name = "replicas"
    steps = "all"
    needs_ranks = True

    def _start(self) -> None:
        self._table: ParameterTable | None = None
        self._rows: list[int] = []  # of the table
        self._wrappers: list[weakref.ref[Any]] = []
        self._joins: list[Any] = []
        self._backwards = 0
        self._step = -1  # whose weights have been read
        self._is_unsynced = False
        self._is_off = False
        self._readers = {moment: DigestReader() for moment in facts.MOMENTS}

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Read the weights of this step."""
        if torch.is_grad_enabled() and not HUB.backward_depth:
            self._read_weights()

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Read the weights where no forward was reported."""
        self._read_weights()
        self._backwards += 1
        self._is_unsynced = any(
            not getattr(wrapper(), "require_backward_grad_sync", True) for wrapper in self._wrappers
        )

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Read the gradients that this optimizer uses."""
        if not self.due or self._is_off or has_closure or HUB.backward_depth or self._table is None:
            return
        trained_ids = {id(parameter) for parameter in parameters_of(optimizer)}
        tensors = [self._table.tensor(row) for row in self._rows]
        self._record(
            "gradients", [None if p is None or id(p) not in trained_ids else _comparable(p) for p in tensors]
        )

    def _read_weights(self) -> None:
        step = self.step
        if self._is_off or not self.due or step == self._step or is_transforming():
            return
        self._step = step
        scope = self.run.scope
        if self._table is not scope.table or not self._rows:
            self._follow()
        if self._has_joined_again():
            # Ranks with fewer batches took fewer steps: equal numbers mean different steps from here on.
            self._is_off = True
            return
        table = scope.table
        self._record(
            "weights", [None if (p := table.tensor(row)) is None else local(p) for row in self._rows]
        )

    def _follow(self) -> None:
        """Note which parameters are read, and which of them are promised to be equal."""
        scope = self.run.scope
        if self._table is None and scope.has_models:
            HUB.seen.scan()  # once: DDP may have been built before the hooks were there
        scope.refresh()
        self._table = table = scope.table
        roots = {id(root): root for root in [*scope.models, *HUB.seen.roots()]}.values()
        self._wrappers = [weakref.ref(wrapper) for wrapper in wrappers(roots)]
        self._joins = [getattr(wrapper(), "_join_config", None) for wrapper in self._wrappers]
        self._rows = [
            row
            for row, record in enumerate(table.records)
            if record.placement.layout in {Layout.WHOLE, Layout.REPLICATE} or record.placement.replicas > 1
        ]
        promised = replicas(roots, table.tensors())
        promises: dict[Any, list[int]] = {}
        for number, row in enumerate(self._rows):
            if (promise := promised.get(id(table.tensor(row)))) is not None:
                promises.setdefault(promise, []).append(number)
        names = tuple(table.records[row].name for row in self._rows)
        kept = tuple(
            facts.Promise(p.by, tuple(p.ranks), p.is_exact, tuple(rows)) for p, rows in promises.items()
        )
        self.record(facts.Followed(self._step, names, kept))

    def _has_joined_again(self) -> bool:
        """Return whether a second context of uneven inputs has begun."""
        now = [getattr(wrapper(), "_join_config", None) for wrapper in self._wrappers]
        before, self._joins = self._joins, now
        return any(
            c is not other and getattr(c, "enable", False) for c, other in zip(before, now, strict=True)
        )

    def _record(self, moment: str, tensors: Sequence[Tensor | None]) -> None:
        if is_capturing_graph():
            return
        device = next((tensor.device for tensor in tensors if tensor is not None), None)
        rows = [
            (row, t.detach())
            for row, t in enumerate(tensors)
            if t is not None and t.device == device and t.layout is torch.strided and t.numel()
        ]
        if not rows:
            return
        values, digests_of = self._readers[moment].read([tensor for _, tensor in rows])
        step, size, backwards, unsynced = self.step, len(tensors), self._backwards, self._is_unsynced
        here = [row for row, _ in rows]

        def store(*arrays: NDArray[np.generic]) -> None:
            digests_P, norms_P = np.zeros(size, np.int64), np.full(size, facts.ABSENT, np.float32)
            digests_P[here], norms_P[here] = digests_of(*arrays)
            content = facts.encoded(digests_P, norms_P)
            self.record(facts.Digests(step, moment, backwards, unsynced, *content))

        self.when_known(store, *values)


def _comparable(parameter: Tensor) -> Tensor | None:
    """Return the local gradient, None where ranks may hold different parts of it: a partial sum, a shard."""
    gradient = parameter.grad
    if gradient is None or getattr(gradient, "placements", None) is not None:
        return None
    return gradient


CHANNEL_CALLS = 16
"""Transfers of one channel that are read at one step."""

STEP_CALLS = 48
"""Transfers of all channels that are read at one step."""

EXACT = ("gloo",) if torch.version.hip else ("gloo", "nccl")
"""Backends that compute each sum once: others may round on each rank, as RCCL, which has the name of NCCL."""


class TransferDigests(Check):
    """Reads the first transfers of observed steps, where there are several ranks, which the rule compares."""

    name = "transfers"
    needs_ranks = True

    def _start(self) -> None:
        self._step = -1
        self._calls: Counter[str] = Counter()
        self._reader = DigestReader()

    def transferred(self, transfer: RankTransfer) -> None:
        """Read the tensors of a transfer."""
        if not self.due or is_transforming() or is_capturing_graph():
            return
        if transfer.call == "all_reduce" and not any(backend in transfer.backend for backend in EXACT):
            return
        step = self.step
        if step != self._step:
            self._step, self._calls = step, Counter()
        self._calls[transfer.channel] += 1
        if self._calls[transfer.channel] > CHANNEL_CALLS or self._calls.total() > STEP_CALLS:
            return
        tensors = [tensor.detach() for tensor in transfer.tensors if tensor.numel()]
        if not tensors or any(tensor.layout is not torch.strided for tensor in tensors):
            return
        if len({tensor.device for tensor in tensors}) > 1:
            return
        form = tuple(f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors[:4])
        call, end, channel, number = transfer.call, transfer.end, transfer.channel, transfer.number

        values, digests_of = self._reader.read(tensors)

        def store(*arrays: NDArray[np.generic]) -> None:
            digests_P, norms_P = digests_of(*arrays)
            # Tensors that changed places count as a difference.
            digest = int((digests_P * np.arange(1, len(digests_P) + 1)).sum())
            norm = float(np.sqrt(np.square(norms_P.astype(np.float64)).sum()))
            coded = f"{digest & 2**64 - 1:x}"
            self.record(facts.Transferred(step, call, end, channel, number, form, coded, norm))

        self.when_known(store, *values)
