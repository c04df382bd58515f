"""Inspection of activation checkpointing: what ``backlight check --recompute`` observes.

``torch.utils.checkpoint.checkpoint`` and the function passed to it are wrapped: its first run is the forward,
every later one a recomputation, and differences between the two are reported.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from backlight.capture.batches import tensors_in
from backlight.capture.calls import NO_COMPUTATION, module_names, operation_name, written_in_place
from backlight.capture.checkpoint_regions import (
    RegionState,
    checksum,
    differences,
    modules_of,
    near,
    other_modules,
    region_state,
    variable_differences,
)
from backlight.capture.hub import HUB
from backlight.capture.parameters import candidates, named_roots
from backlight.diagnose.script_observer import Pausable, ScriptObserver
from backlight.user_code import SourceLine, user_line

MAX_REMARKS = 20
"""Remarks of one kind that are kept for a region."""


REMARK_KINDS = (
    "in-place on input", "in-place", "unused", "no gradient", "boundary", "attention", "state", "random",
    "recomputation",
)  # fmt: skip
"""What a remark may be about."""


@dataclass(frozen=True)
class Remark:
    """A remark on a region; ``kind`` groups remarks, ``number`` is that of the region in its forward."""

    kind: str
    text: str
    line: SourceLine | None = None
    number: int = 0


@dataclass
class Region:
    """A line that calls ``checkpoint``, with all calls; ``reentrant`` is None where it is not given."""

    line: SourceLine | None
    function: str
    reentrant: bool | None
    preserves: bool
    calls: int = 0
    recomputations: int = 0
    remarks: list[Remark] = field(default_factory=list)

    def remark(self, kind: str, text: str, line: SourceLine | None = None, number: int = 0) -> None:
        """Add a remark once."""
        remark = Remark(kind, text, line, number)
        if remark not in self.remarks and sum(r.kind == kind for r in self.remarks) < MAX_REMARKS:
            self.remarks.append(remark)

    @property
    def mode(self) -> str:
        """The mode in words."""
        if self.reentrant is None:
            return "re-entrant (by default: use_reentrant is not given)"
        return "re-entrant" if self.reentrant else "not re-entrant"


@dataclass(frozen=True, slots=True)
class RegionStep:
    """One operation of a run: name, shapes and sums of its outputs; ``ended`` unless it raised.

    ``parameters`` are the ``id`` of those among its inputs.
    """

    name: str
    line: SourceLine | None
    shapes: tuple[tuple[int, ...], ...]
    sums: tuple[float, ...]
    exact: bool
    ended: bool = True
    parameters: tuple[int, ...] = ()


@dataclass
class RegionRun:
    """One run of a region's function, forward or recomputed."""

    begin: RegionState
    end: RegionState | None = None
    steps: list[RegionStep] = field(default_factory=list)


class RegionMode(TorchFunctionMode):
    """Records the operations of one run of a region.

    ``inputs`` and ``buffers`` are addresses of storages: of its arguments, and of what is reported as state.
    """

    def __init__(
        self, region: Region, run: RegionRun, inputs: set[int], buffers: set[int], *, first: bool
    ) -> None:
        super().__init__()
        self._region = region
        self._run = run
        self._inputs = inputs
        self._buffers = buffers
        self._first = first

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` and record the operation."""
        kwargs = kwargs or {}
        name = operation_name(func)
        try:
            result = func(*args, **kwargs)
        except BaseException:
            # A recomputation ends in the operation that saves the last tensor needed by backward.
            self._run.steps.append(RegionStep(name, user_line(), (), (), exact=False, ended=False))
            raise
        if name and name not in NO_COMPUTATION:
            self._note(name, tensors_in((args, kwargs)), kwargs, tensors_in(result))
        return result

    def _note(self, name: str, inputs: list[Tensor], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        line = user_line()
        changed = written_in_place(name, inputs, kwargs)
        if any(storage(tensor) in self._buffers for tensor in changed):
            return  # reported as state
        for tensor in changed if self._first else ():
            if storage(tensor) in self._inputs:
                text = f"{name} writes into an input of the region: recomputation starts from changed values"
                self._region.remark("in-place on input", text, line)
            else:
                self._region.remark("in-place", f"{name} works in place on a value of the region", line)
        if outputs:
            shapes = tuple(tuple(t.shape) for t in outputs)
            exact = all(t.device.type == "cpu" for t in outputs)
            used = tuple(id(tensor) for tensor in inputs if type(tensor) is nn.Parameter)
            sums = tuple(map(checksum, outputs))
            self._run.steps.append(RegionStep(name, line, shapes, sums, exact, parameters=used))


def storage(tensor: Tensor) -> int:
    """Return the address of the storage behind ``tensor``; its ``id`` where it has none."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def other_parameters(forward: list[RegionStep], again: list[RegionStep]) -> tuple[int, int] | None:
    """Return the ``id`` of the first two parameters that differ in one place, None where none do."""
    for step, two in zip(forward, again, strict=False):
        if step.name != two.name:
            return None
        for used, now in zip(step.parameters, two.parameters, strict=False):
            if used != now:
                return used, now
    return None


def first_difference(forward: list[RegionStep], again: list[RegionStep]) -> Remark | None:
    """Return where a recomputation departs from the forward, None as far as it went."""
    for s, two in zip(forward, again, strict=False):
        if s.name != two.name or (two.ended and s.shapes != two.shapes):
            text = (
                f"the recomputation runs another operation: {_shown(two)} at {two.line} "
                f"where the forward ran {_shown(s)}"
            )
            return Remark("recomputation", text, s.line)
        if not two.ended:
            return None
        limit = 1e-9 if s.exact else 1e-3
        if not all(near(a, b, limit) for a, b in zip(s.sums, two.sums, strict=True)):
            return Remark(
                "recomputation", f"the recomputation computes other values from here on: {s.name}", s.line
            )
    if len(again) > len(forward):
        more = again[len(forward)]
        text = f"the recomputation continues where the forward had ended: {_shown(more)}"
        return Remark("recomputation", text, more.line)
    return None


def _shown(step: RegionStep) -> str:
    return f"{step.name} -> {', '.join('x'.join(map(str, s)) or 'scalar' for s in step.shapes) or '?'}"


class ParameterUsage(Pausable, TorchFunctionMode):
    """Records which region uses which parameter in a forward pass; region 0 is outside of all."""

    def __init__(self) -> None:
        super().__init__()
        self.current: list[int] = []
        self.used: dict[int, dict[int, tuple[str, SourceLine | None]]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` and record the parameters among its arguments."""
        kwargs = kwargs or {}
        if not self.paused and (self.current or torch.is_grad_enabled()):
            name = operation_name(func)
            if name and name not in NO_COMPUTATION and not name.endswith((".get", ".set")):
                inputs = tensors_in((args, kwargs))
                parameters = [t for t in inputs if type(t) is nn.Parameter and t.requires_grad]
                if parameters and not written_in_place(name, inputs, kwargs):
                    region = self.current[-1] if self.current else 0
                    for parameter in parameters:
                        regions = self.used.setdefault(id(parameter), {})
                        if region not in regions:
                            regions[region] = (name, user_line())
        return func(*args, **kwargs)


class CheckpointObserver(ScriptObserver):
    """Observes the checkpointed regions of the first steps; a context manager around the script."""

    def __init__(self, max_steps: int, end: Callable[[], None]) -> None:
        super().__init__(max_steps, end)
        self._usage = ParameterUsage()
        self._regions: dict[tuple[str, str, bool | None], Region] = {}
        self._running: list[Region] = []
        self._numbers: dict[int, Region] = {}
        self._failed = False
        self._names: dict[int, str] = {}
        self._place = 0

    @property
    def regions(self) -> list[Region]:
        """The regions in the order of their first calls."""
        return list(self._regions.values())

    def _record(self) -> Iterator[Any]:
        self._patches.replace(torch.utils.checkpoint, "checkpoint", self._wrap_checkpoint)
        self._patches.replace(torch.nn.functional, "scaled_dot_product_attention", self._wrap_attention)
        yield self._usage

    def _complete(self) -> None:
        self._usage.paused = True
        self._remark_boundaries()
        for region in self.regions:
            region.remarks.sort(key=lambda remark: remark.number)
            if not region.recomputations and self.backwards and not self._failed:
                region.remark("unused", "never recomputed: no backward came through it")

    # Events

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """A forward pass is complete: report the parameters that boundaries of regions cut."""
        self._begins_step()
        self._remark_boundaries()
        if self._is_over():
            self._end()
            return
        self.backwards += 1
        self._place = 0
        self._usage.paused = True

    def backward_end(self) -> None:
        """The next forward pass begins."""
        self._usage.paused = False
        self._failed |= sys.exception() is not None

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Uses of parameters by the optimizer do not count."""
        self._usage.paused = not has_closure

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """A step is complete."""
        self._usage.paused = False
        self._stepped = self.backwards > 0

    # Regions

    def _wrap_checkpoint(self, original: Any) -> Any:
        @functools.wraps(original)
        def checkpoint(function: Any, *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return original(function, *args, use_reentrant=use_reentrant, **kwargs)
            region = self._region(function, user_line(), use_reentrant, kwargs)
            inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
            if use_reentrant is not False and not inputs:
                text = "none of its inputs requires a gradient, so nothing inside is trained"
                region.remark("no gradient", text, region.line)
            observed = _ObservedFunction(self, region, function)
            return original(observed, *args, use_reentrant=use_reentrant, **kwargs)

        return checkpoint

    def _region(
        self, function: Any, line: SourceLine | None, use_reentrant: bool | None, kwargs: dict[str, Any]
    ) -> Region:
        label = self._label(function)
        key = (str(line), label, use_reentrant)
        region = self._regions.get(key)
        if region is None:
            preserves = bool(kwargs.get("preserve_rng_state", True))
            region = self._regions[key] = Region(line, label, use_reentrant, preserves)
        region.calls += 1
        return region

    def names(self) -> dict[int, str]:
        """Return the names of all modules by their ``id``."""
        if not self._names:
            HUB.seen.refresh()
            self._names = module_names(named_roots(HUB.seen))
        return self._names

    def parameter_names(self) -> dict[int, str]:
        """Return the names of all parameters by their ``id``."""
        return {id(c.parameter): c.name for c in candidates(named_roots(HUB.seen))}

    def next_place(self) -> int:
        """Return the number of the region that begins, in the forward in progress."""
        self._place += 1
        return self._place

    def _label(self, function: Any) -> str:
        owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
        if isinstance(owner, nn.Module):
            if id(owner) not in self._names:
                HUB.seen.refresh()
                self._names = module_names(named_roots(HUB.seen))
            name = self._names.get(id(owner), type(owner).__name__)
            return name if owner is function else f"{name}.{function.__name__}"
        return str(getattr(function, "__qualname__", type(function).__name__)).replace(".<locals>", "")

    @contextlib.contextmanager
    def inside(self, region: Region, number: int) -> Iterator[None]:
        """Record one run of a region."""
        self._running.append(region)
        self._usage.current.append(number)
        self._numbers[number] = region
        try:
            yield
        finally:
            self._running.pop()
            self._usage.current.pop()

    # Attention

    def _wrap_attention(self, original: Any) -> Any:
        @functools.wraps(original)
        def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
            if self._running and not self._usage.paused:
                inputs = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
                for name in ("query", "key", "value"):
                    _check_layout(self._running[-1], name, inputs.get(name))
            return original(*args, **kwargs)

        return scaled_dot_product_attention

    # Boundaries

    def _remark_boundaries(self) -> None:
        shared = [(key, uses) for key, uses in self._usage.used.items() if len(uses) > 1]
        if shared:
            names = {id(c.parameter): c for c in candidates(named_roots(HUB.seen))}
            for key, uses in shared:
                self._remark_cut(names.get(key), uses)
        self._usage.used.clear()

    def _remark_cut(self, candidate: Any, uses: dict[int, tuple[str, SourceLine | None]]) -> None:
        name = "a parameter" if candidate is None else "/".join((candidate.name, *candidate.aliases))
        for number in uses:
            region = self._numbers.get(number)
            if region is None:
                continue
            others = [(n, use) for n, use in uses.items() if n != number]
            other, (operation, line) = others[0]
            other_region = self._numbers.get(other)
            what = "outside" if other_region is None else "in the same region called again"
            if other_region is not None and other_region is not region:
                what = "in another region"
            text = f"its boundary cuts {name}: also used {what}, by {operation} at {line}"
            if region.reentrant is not False:
                text += "; under DDP the gradient then comes in two parts and is refused"
            region.remark("boundary", text, region.line)


def _check_layout(region: Region, name: str, tensor: Any) -> None:
    if isinstance(tensor, Tensor) and not tensor.is_contiguous():
        last = "its last dimension is" if tensor.stride(-1) == 1 else "not even its last dimension is"
        text = f"{name} of attention is not contiguous (strides {tuple(tensor.stride())}); {last}"
        region.remark("attention", text, user_line())


class _ObservedFunction:
    """Replaces the function of a region; its first call is the forward."""

    _count = 0

    def __init__(self, observer: CheckpointObserver, region: Region, function: Any) -> None:
        self._observer = observer
        self._region = region
        self._function = function
        self._forward: RegionRun | None = None
        self._modules = modules_of(function)
        _ObservedFunction._count += 1
        self._number = _ObservedFunction._count
        self._place = observer.next_place()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function and compare a recomputation with the forward."""
        first = self._forward is None
        run = RegionRun(self._snapshot())
        if first:
            self._forward = run
        inputs = {storage(t) for t in tensors_in((args, kwargs))}
        buffers = {storage(b) for module in self._modules for b in module._buffers.values() if b is not None}
        mode = RegionMode(self._region, run, inputs, buffers, first=first)
        try:
            with self._observer.inside(self._region, self._number), mode:
                return self._function(*args, **kwargs)
        finally:  # a recomputation that has what it needs ends by an exception
            run.end = self._snapshot()
            if not first:
                self._compare(run)

    def _snapshot(self) -> RegionState:
        return region_state(self._function, self._modules, self._observer.names(), reads_values=True)

    def _compare(self, again: RegionRun) -> None:
        region, forward = self._region, self._forward
        region.recomputations += 1
        if forward is None or forward.end is None or again.end is None:
            return
        for text in differences(forward.begin, again.begin, again.end):
            region.remark("state", text, region.line)
        drew = forward.begin.random != forward.end.random
        if drew and forward.begin.random != again.begin.random:
            why = "" if region.preserves else " (preserve_rng_state=False)"
            text = f"draws random numbers, and the recomputation draws different ones{why}"
            region.remark("random", text, region.line)
        others = other_parameters(forward.steps, again.steps)
        names = self._observer.parameter_names() if others is not None else {}
        if others is not None and all(key in names for key in others):
            text = other_modules(self._place, *(names[key] for key in others))
            region.remark("recomputation", text, region.line, self._place)
            return
        departed = first_difference(forward.steps, again.steps)
        if departed is not None:
            changed = variable_differences(forward.begin, again.begin)
            region.remark(departed.kind, "; ".join((departed.text, *changed[:1])), departed.line)
