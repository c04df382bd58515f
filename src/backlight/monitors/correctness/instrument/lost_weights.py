"""Whether the weights, statistics and averages of a checkpoint reach the model that a script trains."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from backlight.capture.hub import HUB
from backlight.capture.modules import kind_of, named_parameters, walk
from backlight.capture.optimizers import parameters_of
from backlight.capture.parameters import local
from backlight.monitors.correctness.instrument.check import Check, TensorSet
from backlight.monitors.correctness.instrument.module_modes import is_batch_norm
from backlight.monitors.correctness.instrument.samples import (
    UNRELATED,
    Snapshot,
    cosine,
    sampled,
    thinned,
)
from backlight.monitors.correctness.model.facts import Names
from backlight.monitors.correctness.rules import restored_state as facts
from backlight.user_code import user_line

MAX_TABLES = 8
"""Tables of tensors in checkpoints that are remembered."""

MAX_ENTRIES = 20_000
"""Entries of a mapping, above which it is data and no state."""

MATRICES = 16
"""Matrices of each whose values are compared, evenly over it."""

VALUES = 64
"""Values of each that are compared."""

MIN_MATRICES = 2
"""Matrices that must be compared: of one, a sample may be related by chance, or changed on purpose."""

EQUAL = 0.999
"""Cosine above which two samples are the same weights, perhaps of another type."""

MIN_BATCHES = 10
"""Batches that the statistics of a checkpoint must have counted."""

WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts of names that wrappers of torch insert."""


Shapes = Mapping[str, tuple[int, ...]]


def unwrapped(name: str) -> str:
    """Return a name without the parts that wrappers insert."""
    for part in WRAPPERS:
        name = name.replace(part, "")
    return name


def renaming(wanted: Shapes, offered: Shapes) -> dict[str, str]:
    """Return the offered name of each wanted tensor, by the one prefix that fits most of them.

    A prefix is added or removed, and what wrappers insert is ignored; shapes are equal.
    """
    plain = {unwrapped(name): name for name in offered}
    prefixes = {("", "")}
    for name in map(unwrapped, list(wanted)[:3]):
        prefixes |= {(key[: -len(name)], "") for key in plain if key.endswith(f".{name}")}
        parts = name.split(".")
        for cut in range(1, len(parts)):
            if ".".join(parts[cut:]) in plain:
                prefixes.add(("", ".".join(parts[:cut]) + "."))
    return max((_matches(wanted, offered, plain, *prefix) for prefix in sorted(prefixes)), key=len)


def _matches(
    wanted: Shapes, offered: Shapes, plain: Mapping[str, str], added: str, removed: str
) -> dict[str, str]:
    matches = {}
    for name, shape in wanted.items():
        bare = unwrapped(name)
        key = plain.get(added + bare.removeprefix(removed)) if bare.startswith(removed) else None
        if key is not None and offered[key] == shape:
            matches[name] = key
    return matches


@dataclass(frozen=True)
class _Table:
    """The tensors of a state in a checkpoint: shapes, samples of ``matrices``, and counts of batches."""

    shapes: Shapes
    matrices: tuple[str, ...]
    values: Snapshot
    counts: Mapping[str, int]
    line: str


@dataclass(frozen=True)
class _Renamed:
    """Tensors of a module that a state has under other names, and samples of those in the state."""

    module: weakref.ref[nn.Module]
    tensors: Sequence[weakref.ref[Tensor]]
    values: Snapshot
    fact: facts.Renamed


class LostWeights(Check):
    """Compares the tensors of checkpoints with those of the model, at the first step of each optimizer."""

    name = "lost_weights"
    steps = "all"

    def _start(self) -> None:
        self._tables: list[_Table] = []
        self._averages: list[tuple[int, str]] = []  # updates of averages in checkpoints, and the line
        self._loaded = TensorSet()  # parameters and buffers that a state was loaded into
        self._renamed: list[_Renamed] = []
        self._resumed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._begun: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._has_resumed = False

    # Events

    def loaded(self, value: Any) -> None:
        """Remember the tables of tensors in a checkpoint."""
        line = str(user_line() or "")
        for part in tables_in(value):
            shapes = {name: tuple(tensor.shape) for name, tensor in part.items()}
            if "n_averaged" in part and (updates := _count(part["n_averaged"])):
                self._averages.append((updates, line))
            chosen = thinned([name for name, t in part.items() if _is_matrix(t)], MATRICES)
            ends = ("num_batches_tracked",)
            counts = {n: count for n, t in part.items() if n.endswith(ends) and (count := _count(t))}
            if chosen:
                values = self.snapshot([sampled(part[name], VALUES) for name in chosen])
                table = _Table(shapes, tuple(chosen), values, counts, line)
                self._tables = [*self._tables, table][-MAX_TABLES:]

    def state_loaded(self, module: nn.Module, state: Mapping[str, Any], result: Any) -> None:
        """Remember what has been loaded, and what the state has under another name."""
        if HUB.own_passes or not isinstance(state, Mapping):
            return
        missing = set(getattr(result, "missing_keys", ()))
        tensors = {n.name: n.parameter for n in named_parameters(module)} | dict(module.named_buffers())
        for name, tensor in tensors.items():
            if name in state and name not in missing:
                self._loaded.add(tensor)
        unexpected = [key for key in getattr(result, "unexpected_keys", ()) if _is_tensor(state.get(key))]
        if not missing or not unexpected or len(unexpected) == len(state):
            return  # a state of which nothing fits is another fact
        offered = {key: tuple(state[key].shape) for key in unexpected}
        wanted = {name: tuple(tensors[name].shape) for name in sorted(missing) if name in tensors}
        pairs = renaming(wanted, offered)
        chosen = thinned([name for name in pairs if _is_matrix(tensors[name])], MATRICES)
        if chosen:
            values = self.snapshot([sampled(state[pairs[name]], VALUES) for name in chosen])
            line = str(user_line() or "")
            first, total = chosen[0], len(tensors)
            fact = facts.Renamed(0, kind_of(module), len(pairs), total, pairs[first], first, line)
            references = [weakref.ref(tensors[name]) for name in chosen]
            self._renamed.append(_Renamed(weakref.ref(module), references, values, fact))

    def optimizer_loaded(self, optimizer: torch.optim.Optimizer, state: Any, result: Any) -> None:
        """Note an optimizer that goes on from a state with moments."""
        if optimizer.state:
            self._resumed.add(optimizer)
            self._has_resumed = True

    def averaged(self, average: nn.Module, count: int) -> None:
        """Compare the first update of an average with those of the checkpoint."""
        averages, self._averages = self._averages, []
        is_loaded = any(parameter in self._loaded for parameter in average.parameters())
        if count == 0 and len(averages) == 1 and self._has_resumed and not is_loaded:
            updates, line = averages[0]
            part = facts.PartNotRestored(self.step, kind_of(average), "n_averaged", float(updates), 0.0, line)
            self.report(part)

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Compare what an optimizer begins to train with the checkpoints."""
        if optimizer in self._begun or not self.run.scope.holds(optimizer):
            return
        self._begun.add(optimizer)
        if not self._tables and not self._renamed:
            return
        trained_ids = {id(p) for p in parameters_of(optimizer)}
        roots = self.run.scope.roots(trained_ids)
        self._compare_renamed([module for root in roots for module in root.modules()])
        if optimizer in self._resumed and optimizer.state:
            self._compare_resumed(optimizer, roots)
        for root in roots:
            self._compare_statistics(root)

    # Comparisons

    def _compare_renamed(self, trained: Sequence[nn.Module]) -> None:
        modules = set(map(id, trained))
        for renamed in [r for r in self._renamed if id(r.module()) in modules]:
            self._renamed.remove(renamed)
            tensors = [tensor for reference in renamed.tensors if (tensor := reference()) is not None]
            if len(tensors) == len(renamed.tensors) and not any(t in self._loaded for t in tensors):
                now = self.snapshot([sampled(local(tensor), VALUES) for tensor in tensors])
                fact = replace(renamed.fact, step=self.step)
                self.when_known(functools.partial(self._report_unrelated, fact, renamed.values, now))

    def _report_unrelated(self, fact: facts.Renamed, saved: Snapshot, now: Snapshot) -> None:
        if all(cosine(*pair) < UNRELATED for pair in _comparable(saved.arrays, now.arrays)):
            self.report(fact)

    def _compare_resumed(self, optimizer: torch.optim.Optimizer, roots: Iterable[nn.Module]) -> None:
        """Report weights that are not those of the checkpoint, whose moments the optimizer has."""
        stepped = {id(p) for p in parameters_of(optimizer)}
        tensors = {
            n.name: n.parameter
            for root in roots
            for n in named_parameters(root)
            if id(n.parameter) in stepped
        }
        if len(tensors) != len(stepped) or any(p in self._loaded for p in tensors.values()):
            return
        if any(local(p) is not p or p.is_meta for p in tensors.values()):
            return
        shapes = {name: tuple(p.shape) for name, p in tensors.items()}
        rows: list[tuple[_Table, int, str]] = []
        for table in self._tables:
            pairs = renaming(shapes, table.shapes)
            names = {key: name for name, key in pairs.items()}
            if len(pairs) == len(shapes):
                rows += [(table, row, names[key]) for row, key in enumerate(table.matrices) if key in names]
        if len({name for *_, name in rows}) < MIN_MATRICES:
            return
        now = self.snapshot([sampled(tensors[name], VALUES) for *_, name in rows])
        kind, step, line = type(optimizer).__name__, self.step, rows[-1][0].line

        def report() -> None:
            largest = max(
                cosine(t.values.arrays[row], v) for (t, row, _), v in zip(rows, now.arrays, strict=True)
            )
            if largest < UNRELATED:
                names = Names.of(list(dict.fromkeys(name for *_, name in rows)))
                self.report(facts.WeightsNotRestored(step, kind, len(tensors), names, largest, line))

        self.when_known(report)

    def _compare_statistics(self, root: nn.Module) -> None:
        """Report batch norms that have the weights of a checkpoint and not its statistics."""
        tensors: dict[str, Tensor] = {n.name: n.parameter for n in named_parameters(root)}
        tensors |= dict(root.named_buffers())
        norms = [
            (f"{name}.num_batches_tracked".lstrip("."), module, counter)
            for name, module in walk(root)
            if is_batch_norm(module) and (counter := module.num_batches_tracked) is not None
        ]
        norms = [norm for norm in norms if norm[-1] not in self._loaded]
        for table in reversed(self._tables) if norms else ():
            pairs = renaming({name: tuple(t.shape) for name, t in tensors.items()}, table.shapes)
            names = {key: name for name, key in pairs.items()}
            counted = [norm for norm in norms if pairs.get(norm[0]) in table.counts]
            rows = [(row, names[key]) for row, key in enumerate(table.matrices) if key in names]
            rows = [(row, n) for row, n in rows if local(tensors[n]) is tensors[n] and not tensors[n].is_meta]
            if counted and len(rows) >= MIN_MATRICES:
                now = self.snapshot([sampled(tensors[name], VALUES) for _, name in rows])
                saved = [table.counts[pairs[name]] for name, *_ in counted]
                owners = Names.of([name.rpartition(".")[0] for name, *_ in counted])
                is_off = not any(module.training for _, module, _ in counted)
                kind, line = kind_of(root), table.line
                fact = facts.StatisticsNotRestored(self.step, kind, owners, max(saved), 0, is_off, line)
                then = functools.partial(self._report_statistics, fact, table, rows, now, saved)
                self.when_known(then, *(counter for *_, counter in counted))
                return

    def _report_statistics(
        self,
        fact: facts.StatisticsNotRestored,
        table: _Table,
        rows: Sequence[tuple[int, str]],
        now: Snapshot,
        saved: Sequence[int],
        *counts: NDArray[np.generic],
    ) -> None:
        are_equal = all(
            cosine(table.values.arrays[row], value) > EQUAL
            for (row, _), value in zip(rows, now.arrays, strict=True)
        )
        present = [int(count) for count in counts]
        if are_equal and all(n >= MIN_BATCHES and 2 * m < n for n, m in zip(saved, present, strict=True)):
            self.report(replace(fact, present=max(present)))


def _comparable(
    first: Sequence[NDArray[np.generic]], second: Sequence[NDArray[np.generic]]
) -> Iterable[tuple[NDArray[np.generic], NDArray[np.generic]]]:
    return [(a, b) for a, b in zip(first, second, strict=True) if len(a) == len(b)]


def tables_in(value: Any, depth: int = 3) -> list[dict[str, Tensor]]:
    """Return the mappings of names to tensors in what was loaded, without the states of optimizers."""
    if not isinstance(value, Mapping) or not depth or len(value) > MAX_ENTRIES or "param_groups" in value:
        return []
    tensors = {str(name): t for name, t in value.items() if isinstance(name, str) and _is_tensor(t)}
    inner = [table for part in value.values() for table in tables_in(part, depth - 1)]
    return [tensors, *inner] if tensors else inner


def _is_tensor(value: Any) -> bool:
    return (
        isinstance(value, Tensor) and value.layout is torch.strided and type(value) in {Tensor, nn.Parameter}
    )


def _is_matrix(tensor: Tensor) -> bool:
    is_plain = tensor.is_floating_point() and not tensor.is_meta and local(tensor) is tensor
    return is_plain and tensor.ndim > 1 and math.prod(tensor.shape) >= VALUES // 4


def _count(tensor: Tensor) -> int:
    """Return the value of a counter on the host, 0 elsewhere: to read one may wait for a device."""
    return int(tensor) if tensor.device.type == "cpu" and tensor.numel() == 1 else 0
