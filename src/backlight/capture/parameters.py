"""The models, optimizers and parameters of a run: which tensor is which row, and its local part.

A table holds weak references only, so that a model the user drops is freed as it would have been.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import call
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from backlight.capture.engines import engine_places, why_unmeasured
from backlight.capture.hub import HUB
from backlight.capture.modules import Prefixes, SeenModules, holding, named_parameters, walk
from backlight.capture.optimizers import parameters_of
from backlight.capture.sharding import flat_places
from backlight.records import Layout, ParameterRecord, Placement
from backlight.user_code import SourceLine, user_line

if TYPE_CHECKING:
    from torch import nn

    from backlight.capture.hooks import Patches


@dataclass(frozen=True)
class Candidate:
    """A parameter with its names in the living models."""

    name: str
    parameter: torch.Tensor
    owner: nn.Module | None
    module: str
    root: int
    aliases: tuple[str, ...] = ()


def named_roots(seen: SeenModules) -> list[tuple[str, nn.Module]]:
    """Return the living outermost modules with a prefix, empty where there is one only.

    Modules without parameters, such as losses, are left out.
    """
    return Prefixes().of([r for r in seen.roots() if any(True for _ in named_parameters(r))])


def candidates(roots: list[tuple[str, nn.Module]]) -> list[Candidate]:
    """Return every parameter of the models in model order, a tied one once."""
    by_id: dict[int, Candidate] = {}
    for index, (prefix, root) in enumerate(roots):
        modules = dict(walk(root, prefix))
        for named in named_parameters(root, prefix):
            key = id(named.parameter)
            earlier = by_id.get(key)
            if earlier is None:
                owner = modules.get(named.module)
                by_id[key] = Candidate(named.name, named.parameter, owner, named.module, index)
            else:
                by_id[key] = Candidate(
                    earlier.name, earlier.parameter, earlier.owner, earlier.module, earlier.root,
                    (*earlier.aliases, named.name),
                )  # fmt: skip
    return list(by_id.values())


def plain_tensors(roots: list[tuple[str, nn.Module]]) -> list[tuple[str, torch.Tensor]]:
    """Return tensors that modules hold as plain attributes and that require a gradient but are no leaves."""
    tensors = []
    for prefix, root in roots:
        for name, module in walk(root, prefix):
            for key, value in list(vars(module).items()):
                # type() first: isinstance() on a third-party object may run its __class__ property.
                if hasattr(type(value), "requires_grad") and value.requires_grad and not value.is_leaf:
                    tensors.append((f"{name}.{key}" if name else key, value))
    return tensors


class RegistrationLines:
    """Lines at which parameters were registered and optimizers created."""

    def __init__(self) -> None:
        self._parameters: dict[int, tuple[weakref.ref[Any], SourceLine]] = {}
        self._optimizers: dict[int, tuple[weakref.ref[Any], SourceLine]] = {}

    def install(self, patches: Patches) -> list[Any]:
        """Start recording; return the handles of the hooks."""
        from torch.optim import Optimizer  # noqa: PLC0415 - typing only above

        registration_lines = self._optimizers

        def wrap(original: Any) -> Any:
            def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
                line = user_line()
                original(self, *args, **kwargs)
                if line is not None:
                    registration_lines[id(self)] = (weakref.ref(self), line)

            __init__.__wrapped__ = original  # type: ignore[attr-defined]
            return __init__

        patches.replace(Optimizer, "__init__", wrap)

        def on_parameter(_module: Any, _name: str, parameter: Any) -> None:
            line = user_line()
            if parameter is not None and line is not None:
                self._parameters[id(parameter)] = (weakref.ref(parameter), line)

        return [register_module_parameter_registration_hook(on_parameter)]

    def of_parameter(self, parameter: Any) -> SourceLine | None:
        """Return the line that registered ``parameter``."""
        return _line_of(self._parameters, parameter)

    def of_optimizer(self, optimizer: Any) -> SourceLine | None:
        """Return the line that created ``optimizer``."""
        return _line_of(self._optimizers, optimizer)


def _line_of(table: dict[int, tuple[weakref.ref[Any], SourceLine]], thing: Any) -> SourceLine | None:
    entry = table.get(id(thing))
    return entry[1] if entry is not None and entry[0]() is thing else None


PLAIN = (torch.Tensor, torch.nn.Parameter)

MAX_VARIANTS = 16
"""Tables of the same parameters, some of them frozen: a loop may choose those to train at random."""


class ParameterTable:
    """Rows of parameters in model order; tied weights are one row with aliases.

    ``records`` has one record per row. ``rows`` is the row by ``id`` of a tensor that is alive.
    """

    def __init__(self, records: Sequence[ParameterRecord], tensors: Sequence[torch.Tensor]) -> None:
        self.records = tuple(records)
        self.rows = {id(tensor): row for row, tensor in enumerate(tensors)}
        self._references = [weakref.ref(tensor) for tensor in tensors]
        self._placed: dict[int, Any] = {}
        self._is_trainable = tuple(record.requires_grad for record in records)
        # Of loops that freeze and unfreeze in turn: equal tables are to be one object.
        self._variants = {self._is_trainable: self.records}

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

    def rows_of(self, tensors: Sequence[torch.Tensor]) -> list[int | None]:
        """Return the row of each tensor, as :meth:`row` does."""
        references = self._references
        return [
            row if row is not None and references[row]() is tensor else None
            for row, tensor in zip(map(self.rows.get, map(id, tensors)), tensors, strict=True)
        ]

    def place_gradient(self, row: int, gradient: torch.Tensor) -> bool:
        """Note where ``gradient`` sits in the whole; True if that is news.

        Tensor parallelism gives a gradient the placement that falls out of the operations: a partial sum for
        a replicated weight, the whole for a sharded one.
        """
        kind = getattr(gradient, "placements", None)
        if kind is None:
            return False
        parameter, record = self.tensor(row), self.records[row]
        placed = self._placed.get(row, getattr(parameter, "placements", None))
        if placed == kind:
            return False
        self._placed[row] = kind
        is_same = kind == getattr(parameter, "placements", None)
        placement = None if is_same else _placement(gradient, local(gradient))
        self.records = (*self.records[:row], replace(record, gradient=placement), *self.records[row + 1 :])
        self._variants = {self._is_trainable: self.records}
        return True

    def read_again(self) -> bool:
        """Bring ``requires_grad`` of the records up to date; return whether one has changed.

        Once there are many variants of the table, a parameter that was trainable stays so.
        """
        before = self._is_trainable
        tensors = map(call, self._references)
        now = tuple([was if x is None else x.requires_grad for x, was in zip(tensors, before, strict=True)])
        if now not in self._variants and len(self._variants) >= MAX_VARIANTS:
            now = tuple(map(max, before, now))
        if now == before:
            return False
        if now not in self._variants:
            rows = zip(self.records, self._references, now, strict=True)
            self._variants[now] = tuple(
                record if record.requires_grad == flag else _with_flag(record, reference(), flag)
                for record, reference, flag in rows
            )
        self._is_trainable, self.records = now, self._variants[now]
        return True


def _with_flag(record: ParameterRecord, tensor: torch.Tensor | None, is_trainable: bool) -> ParameterRecord:
    """Return a record with another ``requires_grad``."""
    return replace(record, requires_grad=is_trainable, unmeasured=_why_unmeasured(tensor, is_trainable))


def _why_unmeasured(tensor: torch.Tensor | None, is_trainable: bool) -> str:
    if not is_trainable:
        return "frozen"
    return "" if tensor is None else why_unmeasured(tensor)


def build_table(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    seen: SeenModules,
    prefixes: Prefixes | None = None,
    by_hand: Sequence[torch.Tensor] = (),
    former: ParameterTable | None = None,
) -> ParameterTable:
    """Name the parameters of ``models`` and ``optimizers``, or those that a script trains ``by_hand``.

    Without models they are searched for: among the modules observed at construction, then by a scan. A
    parameter that no module holds any more is ``replaced.`` and its former name where that was observed. Else
    it keeps its name in the ``former`` table, or is named by its position in the optimizer.
    """
    groups = _groups(optimizers)
    if not optimizers:
        groups = {id(tensor): ("", tensor, f"tensor{n}") for n, tensor in enumerate(by_hand)}
    wanted = set(groups)
    roots = list(models)
    if not models:
        roots = holding(seen.roots(), wanted)
        model_ids = {id(n.parameter) for root in roots for n in named_parameters(root)}
        if wanted - model_ids:
            seen.scan()
            roots = holding(seen.roots(), wanted)
    named_roots = (prefixes or Prefixes()).of(roots)
    rows: dict[int, list[Any]] = {}
    for prefix, root in named_roots:
        for named in named_parameters(root, prefix):
            rows.setdefault(id(named.parameter), [named.parameter, []])[1].append(named)
    records, tensors = [], []
    flat = flat_places(roots) | engine_places(roots)
    for key, (tensor, names) in rows.items():
        first, *others = names
        group = groups[key][0] if key in groups else ""
        record = _record(tensor, first.name, group, first.module, first.kind, [n.name for n in others])
        if (place := flat.get(key)) is not None:
            numel = math.prod(place.placement.local_shape)
            record = replace(record, shape=place.shape, numel=numel, placement=place.placement)
        records.append(record)
        tensors.append(tensor)
    modules = {id(module): name for prefix, root in named_roots for name, module in walk(root, prefix)}
    taken = {record.name for record in records}
    for key, (group, tensor, position) in groups.items():
        if key not in rows:
            row = None if former is None else former.row(tensor)
            earlier = None if former is None or row is None else former.records[row]
            name = _former_name(tensor, seen, modules) or (earlier.name if earlier is not None else "")
            if not name or name in taken:
                name = position
            taken.add(name)
            records.append(_record(tensor, name, group, "", "", []))
            tensors.append(tensor)
    return ParameterTable(records, tensors)


def _former_name(tensor: torch.Tensor, seen: SeenModules, modules: Mapping[int, str]) -> str:
    """Return ``replaced.`` and the name that a tensor had in one of ``modules``, empty if it had none."""
    replaced = seen.replaced(tensor)
    if replaced is None or id(replaced[0]) not in modules:
        return ""
    return ".".join(part for part in ("replaced", modules[id(replaced[0])], replaced[1]) if part)


def _groups(
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[int, tuple[str, torch.Tensor, str]]:
    """Return by id the group of each tensor, the tensor, and a name for its position in the optimizer."""
    return {
        id(tensor): (f"{number}/{index}", tensor, f"optimizer{number}.group{index}.parameter{position}")
        for number, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
        for position, tensor in enumerate(group["params"])
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
        unmeasured=_why_unmeasured(tensor, tensor.requires_grad),
        placement=_placement(tensor, part),
    )


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of ``tensor`` that this process holds; the tensor itself where that is all."""
    if type(tensor) in PLAIN:
        return tensor
    # A DTensor's own operators answer for the local part without saying so.
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part


def settled(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a scalar on this process; None where it takes a collective to compute it."""
    if type(tensor) in PLAIN:
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
    return Placement(layout, shape, tuple(part.shape), tuple(offset), replicas)


class Scope:
    """The models and optimizers of one watch, and their parameter table as of the last :meth:`refresh`.

    Without ``models``, every model of the process; without ``optimizers``, every one that holds a parameter
    of ``models``, or all; ``numbers`` has theirs, by id. ``on_change`` is called, in order, when the table is
    a new one. None of them is kept alive.
    """

    def __init__(
        self, models: Sequence[nn.Module] = (), optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        self._models = [weakref.ref(model) for model in models]
        # By id, which may be that of another one when it is gone.
        self._chosen = {id(optimizer): weakref.ref(optimizer) for optimizer in optimizers}
        self._changes = -1
        self._by_hand: list[weakref.ref[torch.Tensor]] = []
        self._groups: tuple[int, ...] = ()
        self.numbers: dict[int, int] = {}
        self._orphan_rows: list[int] = []
        self._prefixes = Prefixes()
        self.table = ParameterTable((), ())
        self.on_change: list[Callable[[], None]] = []

    @property
    def models(self) -> list[nn.Module]:
        """The models that were given, as far as they exist."""
        return [model for reference in self._models if (model := reference()) is not None]

    def roots(self, ids: set[int] | None = None) -> list[nn.Module]:
        """Return the models of the scope; of all in the process those that hold one of ``ids``, by id."""
        if self._models:
            return self.models
        seen_roots = HUB.seen.roots()
        return seen_roots if ids is None else holding(seen_roots, ids)

    @property
    def has_models(self) -> bool:
        """Whether models were given, which may be gone."""
        return bool(self._models)

    @property
    def has_optimizers(self) -> bool:
        """Whether optimizers were given, which may be gone."""
        return bool(self._chosen)

    def prefix(self, root: nn.Module) -> str:
        """Return the prefix of the names below a root module."""
        return self._prefixes.of([root])[0][0]

    def renewed(self) -> Scope:
        """Return a scope of the same models and optimizers, with nothing known of them yet."""
        scope = Scope()
        scope._models, scope._chosen = self._models, self._chosen
        return scope

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of the scope that exist now, in a stable order."""
        if not self._chosen:
            return self._covered(HUB.optimizers.alive())
        return [optimizer for reference in self._chosen.values() if (optimizer := reference()) is not None]

    def covers(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether ``optimizer`` is or would be of the scope, whatever thread it is used in."""
        return bool(self._covered([optimizer]))

    def _covered(self, optimizers: list[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
        if self._chosen:
            return [o for o in optimizers if (r := self._chosen.get(id(o))) is not None and r() is o]
        if not self._models:
            return optimizers
        ids = {id(n.parameter) for model in self.models for n in named_parameters(model)}
        return [o for o in optimizers if any(id(p) in ids for p in parameters_of(o))]

    def refresh(self) -> bool:
        """Bring the table up to date with modules, optimizers, groups and what is frozen; True if changed."""
        if self._changes != HUB.seen.changes or self._groups != self._signature():
            return self._rebuild()
        has_changed = self.table.read_again()
        if has_changed:
            self._find_orphans()
        return has_changed

    def _rebuild(self) -> bool:
        optimizers = self.optimizers()
        self.numbers = self._numbered(optimizers)
        by_hand = [tensor for noted in self._by_hand if (tensor := noted()) is not None]
        table = build_table(self.models, optimizers, HUB.seen, self._prefixes, by_hand, self.table)
        self._changes, self._groups = HUB.seen.changes, self._signature()
        if not len(table):  # all are gone: what was recorded of them goes on to be known
            return False
        changed = table.records != self.table.records or table.rows != self.table.rows
        self.table = table
        if changed:
            for action in self.on_change:
                action()
        self._find_orphans()
        return changed

    def _find_orphans(self) -> None:
        records = enumerate(self.table.records)
        self._orphan_rows = [row for row, record in records if record.requires_grad and not record.group]

    def _numbered(self, optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, int]:
        # Who had a number keeps it: learning rates are recorded under it.
        numbers = {id(o): self.numbers[id(o)] for o in optimizers if id(o) in self.numbers}
        free = (n for n in itertools.count() if n not in set(numbers.values()))
        return {id(o): numbers[id(o)] if id(o) in numbers else next(free) for o in optimizers}

    def alone(self) -> bool:
        """Whether there is one optimizer only, so that its step ends the training step."""
        return len(self.numbers) == 1

    def train_by_hand(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take in tensors that get gradients and are in no optimizer, because none exists."""
        noted_ids = {id(tensor) for noted in self._by_hand if (tensor := noted()) is not None}
        news = [weakref.ref(tensor) for tensor in tensors if id(tensor) not in noted_ids]
        if news:
            self._by_hand += news
            self._changes = -1

    def _signature(self) -> tuple[int, ...]:
        # Cheap enough for every step: a changed group is another list or has another length.
        signature: list[int] = []
        alive = map(call, self._chosen.values()) if self._chosen else HUB.optimizers.alive()
        for optimizer in alive:
            for group in () if optimizer is None else optimizer.param_groups:
                signature += (id(optimizer), id(group["params"]), len(group["params"]))
        return tuple(signature)

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the scope covers ``optimizer``."""
        if self._chosen:
            reference = self._chosen.get(id(optimizer))
            return reference is not None and reference() is optimizer
        if id(optimizer) not in self.numbers:
            self.refresh()
        return id(optimizer) in self.numbers

    def number(self, optimizer: torch.optim.Optimizer) -> int:
        """Return the number under which the optimizer's learning rates are recorded."""
        return self.numbers.get(id(optimizer), 0)

    def parameters_of(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return the parameters that ``optimizer`` holds now, each of which then has a row."""
        parameters = parameters_of(optimizer)
        if None in self.table.rows_of(parameters):
            self._rebuild()  # a tensor was exchanged inside a list of the same length
        return parameters

    def orphans(self) -> list[torch.Tensor]:
        """Return parameters that want a gradient but that no optimizer of the scope holds."""
        rows = self._orphan_rows  # of most models none
        return [t for row in rows if (t := self.table.tensor(row)) is not None] if rows else []
