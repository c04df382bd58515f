"""The parameter table of a watched training: which tensor is which row, and its local part.

A table holds weak references only, so that a model the user drops is freed as it would have been.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.modules import Prefixes, SeenModules, holding, named_parameters
from backlight.capture.sharding.fsdp1 import flat_places
from backlight.records import Layout, ParameterRecord, Placement

if TYPE_CHECKING:
    from torch import nn

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class ParameterTable:
    """Rows of parameters in model order; tied weights are one row with aliases.

    Attributes
    ----------
    records:
        One record per row.
    rows:
        Row by ``id`` of the tensor object; only valid for tensors that are alive.
    """

    def __init__(self, records: Sequence[ParameterRecord], tensors: Sequence[torch.Tensor]) -> None:
        self.records = tuple(records)
        self.rows = {id(tensor): row for row, tensor in enumerate(tensors)}
        self._references = [weakref.ref(tensor) for tensor in tensors]
        self._placed: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.records)

    def tensor(self, row: int) -> torch.Tensor | None:
        """Return the tensor of a row, or None if it is gone."""
        return self._references[row]()

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are alive, in the order of their rows."""
        return [tensor for reference in self._references if (tensor := reference()) is not None]

    def row(self, tensor: torch.Tensor) -> int | None:
        """Return the row of ``tensor``, or None if the table does not hold it."""
        row = self.rows.get(id(tensor))
        # An id may have been taken over by a new tensor after the old one was freed.
        return row if row is not None and self._references[row]() is tensor else None

    def place_gradient(self, row: int, gradient: torch.Tensor) -> bool:
        """Note where ``gradient`` sits in the whole; True if that is news.

        Tensor parallelism gives a gradient the placement that falls out of the operations: a partial sum for
        a replicated weight, the whole for a sharded one.
        """
        kind = getattr(gradient, "placements", None)
        if kind is None:
            return False
        parameter, record = self.tensor(row), self.records[row]
        known = self._placed.get(row, getattr(parameter, "placements", None))
        if known == kind:
            return False
        self._placed[row] = kind
        alike = kind == getattr(parameter, "placements", None)
        placement = None if alike else _placement(gradient, local(gradient))
        self.records = (*self.records[:row], replace(record, gradient=placement), *self.records[row + 1 :])
        return True

    def missing(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether some tensor has no row, so that the table is out of date."""
        return any(self.row(tensor) is None for tensor in tensors)


def build_table(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    seen: SeenModules,
    prefixes: Prefixes | None = None,
) -> ParameterTable:
    """Name the parameters of ``models`` and ``optimizers``.

    Without models they are looked for: among the modules seen being built, then by a scan. What no
    module holds is named by its place in the optimizer.
    """
    groups = _groups(optimizers)
    wanted = set(groups)
    roots = list(models)
    if not models:
        roots = holding(seen.roots(), wanted)
        held = {id(n.parameter) for root in roots for n in named_parameters(root)}
        if wanted - held:
            seen.scan()
            roots = holding(seen.roots(), wanted)
    named_roots = (prefixes or Prefixes()).of(roots)
    rows: dict[int, list[Any]] = {}
    for prefix, root in named_roots:
        for named in named_parameters(root, prefix):
            rows.setdefault(id(named.parameter), [named.parameter, []])[1].append(named)
    records, tensors = [], []
    flat = flat_places(roots)
    for key, (tensor, names) in rows.items():
        first, *others = names
        group = groups[key][0] if key in groups else ""
        record = _record(tensor, first.name, group, first.module, first.kind, [n.name for n in others])
        if (place := flat.get(key)) is not None:
            numel = math.prod(place.placement.local_shape)
            record = replace(record, shape=place.shape, numel=numel, placement=place.placement)
        records.append(record)
        tensors.append(tensor)
    for key, (group, tensor) in groups.items():
        if key not in rows:
            optimizer, number = group.split("/")
            name = f"optimizer{optimizer}.group{number}.parameter{len(records)}"
            records.append(_record(tensor, name, group, "", "", []))
            tensors.append(tensor)
    return ParameterTable(records, tensors)


def _groups(
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[int, tuple[str, torch.Tensor]]:
    return {
        id(tensor): (f"{number}/{index}", tensor)
        for number, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
        for tensor in group["params"]
    }


def _record(
    tensor: torch.Tensor, name: str, group: str, module: str, kind: str, aliases: list[str]
) -> ParameterRecord:
    part = local(tensor.detach())
    return ParameterRecord(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        device=str(tensor.device),
        numel=part.numel(),
        requires_grad=tensor.requires_grad,
        module=module,
        module_type=kind,
        aliases=tuple(aliases),
        group=group,
        unmeasured="" if tensor.requires_grad else "frozen",
        placement=_placement(tensor, part),
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of ``tensor`` that this process holds; the tensor itself where that is all."""
    if type(tensor) in _PLAIN:
        return tensor
    # A DTensor's own operators answer for the local part without saying so.
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part


def settled(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a scalar as this process knows it; None where only a collective could tell it."""
    if type(tensor) in _PLAIN:
        return tensor
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return tensor
    return local(tensor) if all(p.is_replicate() for p in placements) else None


def _placement(tensor: torch.Tensor, part: torch.Tensor) -> Placement:
    shape = tuple(tensor.shape)
    placements = getattr(tensor, "placements", None)
    if placements is None or part is tensor:
        return Placement(Layout.WHOLE, shape, shape, (0,) * len(shape))
    mesh = tuple(tensor.device_mesh.shape)  # type: ignore[attr-defined]
    # By elimination: the strided shards of FSDP2 on top of tensor parallelism do not count as shards.
    kinds = [
        ("replicate" if p.is_replicate() else "partial" if p.is_partial() else "shard") for p in placements
    ]
    replicas = 1
    for kind, size in zip(kinds, mesh, strict=True):
        replicas *= size if kind == "replicate" else 1
    layout = Layout.PARTIAL if "partial" in kinds else Layout.SHARD if "shard" in kinds else Layout.REPLICATE
    # Not at the top: importing DTensor costs every start a second that few need.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

    _, offset = compute_local_shape_and_global_offset(shape, tensor.device_mesh, placements)  # type: ignore[attr-defined]
    return Placement(layout, shape, tuple(part.shape), tuple(offset), replicas, mesh)
