"""Inspects activation checkpointing: what ``backlight checkpoints`` observes.

``torch.utils.checkpoint.checkpoint`` is wrapped, and the function handed to it as well: its first run
is the forward, every later one a recomputation, and what differs between the two is told.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from backlight.capture.expected_parameters import candidates, named_roots
from backlight.capture.hooks import Patches
from backlight.capture.hub import HUB, Listener
from backlight.capture.module_calls import ModuleCalls, module_names
from backlight.capture.operations import tensors_in
from backlight.diagnose.checkpointing.region_state import differences, snapshot
from backlight.diagnose.checkpointing.regions import Region, RegionMode, Run, Usage, first_difference, storage
from backlight.user_code import SourceLine, user_line

if TYPE_CHECKING:
    from backlight.diagnose.checkpointing.region_state import Snapshot


class CheckpointObserver(Listener):
    """Observes the checkpointed regions of the first steps; a context manager around the script.

    Parameters
    ----------
    steps:
        Optimizer steps to observe.
    end:
        Called when they are over; expected to raise what ends the script.
    """

    def __init__(self, steps: int, end: Callable[[], None]) -> None:
        self._steps = steps
        self._end = end
        self._calls = ModuleCalls()
        self._usage = Usage(self._calls)
        self._patches = Patches()
        self._exit = contextlib.ExitStack()
        self._regions: dict[tuple[str, str, bool | None], Region] = {}
        self._running: list[Region] = []
        self._numbers: dict[int, Region] = {}
        self._stepped = False
        self._failed = False
        self._names: dict[int, str] = {}
        self.steps = 0
        self.backwards = 0
        self.notes: list[str] = []

    @property
    def regions(self) -> list[Region]:
        """The regions in the order in which they were first met."""
        return list(self._regions.values())

    def __enter__(self) -> CheckpointObserver:
        """Begin to observe."""
        HUB.add(self)
        self._patches.replace(torch.utils.checkpoint, "checkpoint", self._wrapped)
        self._patches.replace(torch.nn.functional, "scaled_dot_product_attention", self._attending)
        self._exit.enter_context(self._calls)
        self._exit.enter_context(self._usage)
        return self

    def __exit__(self, *_: object) -> None:
        """Take everything off."""
        self._usage.paused = True
        self._exit.close()
        self._patches.undo()
        HUB.remove(self)
        self._boundaries()
        for region in self.regions:
            if not region.recomputations and self.backwards and not self._failed:
                region.remark("unused", "never recomputed: no backward came through it")

    def dropped(self, error: Exception) -> None:
        """Say that observing ended early."""
        text = f"observing stopped after {type(error).__name__}: {error}"
        self.notes.append(f"{text}; what follows is not known")

    # Events

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """A forward pass is complete: look at what its boundaries cut."""
        if self._stepped or (self.backwards and not HUB.optimizers.alive()):
            self._stepped = False
            self.steps += 1
        self._boundaries()
        if self.steps >= self._steps:
            self._end()
            return
        self.backwards += 1
        self._usage.paused = True

    def backward_end(self) -> None:
        """The next forward pass begins."""
        self._usage.paused = False
        self._failed |= sys.exception() is not None

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Uses of parameters by the optimizer do not count."""
        self._usage.paused = not has_closure

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """A step is over."""
        self._usage.paused = False
        self._stepped = self.backwards > 0

    # Regions

    def _wrapped(self, original: Any) -> Any:
        @functools.wraps(original)
        def checkpoint(function: Any, *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return original(function, *args, use_reentrant=use_reentrant, **kwargs)
            region = self._region(function, user_line(), use_reentrant, kwargs)
            inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
            if use_reentrant is not False and not inputs:
                text = "none of its inputs requires a gradient, so nothing inside is trained"
                region.remark("no gradient", text, region.line)
            observed = _Observed(self, region, function)
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
        return self._names

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
        """Follow one run of a region."""
        self._running.append(region)
        self._usage.current.append(number)
        self._numbers[number] = region
        try:
            yield
        finally:
            self._running.pop()
            self._usage.current.pop()

    # Attention

    def _attending(self, original: Any) -> Any:
        @functools.wraps(original)
        def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
            if self._running and not self._usage.paused:
                region = self._running[-1]
                for name, tensor in zip(("query", "key", "value"), args, strict=False):
                    _look_at_layout(region, name, tensor)
                for name in ("query", "key", "value"):
                    if name in kwargs:
                        _look_at_layout(region, name, kwargs[name])
            return original(*args, **kwargs)

        return scaled_dot_product_attention

    # Boundaries

    def _boundaries(self) -> None:
        shared = list(self._usage.shared())
        if shared:
            names = {id(c.parameter): c for c in candidates(named_roots(HUB.seen))}
            for key, places in shared:
                self._cut(names.get(key), places)
        self._usage.used.clear()

    def _cut(self, candidate: Any, places: dict[int, tuple[str, SourceLine | None]]) -> None:
        name = "a parameter" if candidate is None else "/".join((candidate.name, *candidate.aliases))
        for number in places:
            region = self._numbers.get(number)
            if region is None:
                continue
            others = [(n, place) for n, place in places.items() if n != number]
            other, (operation, line) = others[0]
            elsewhere = self._numbers.get(other)
            what = "outside" if elsewhere is None else "in the same region called again"
            if elsewhere is not None and elsewhere is not region:
                what = "in another region"
            text = f"its boundary cuts {name}: also used {what}, by {operation} at {line}"
            if region.reentrant is not False:
                text += "; under DDP the gradient then comes in two parts and is refused"
            region.remark("boundary", text, region.line)


def _look_at_layout(region: Region, name: str, tensor: Any) -> None:
    if isinstance(tensor, Tensor) and not tensor.is_contiguous():
        last = "its last dimension is" if tensor.stride(-1) == 1 else "not even its last dimension is"
        text = f"{name} of attention is not contiguous (strides {tuple(tensor.stride())}); {last}"
        region.remark("attention", text, user_line())


class _Observed:
    """Stands in for the function of a region; its first call is the forward."""

    _count = 0

    def __init__(self, observer: CheckpointObserver, region: Region, function: Any) -> None:
        self._observer = observer
        self._region = region
        self._function = function
        self._forward: Run | None = None
        self._modules = _modules_of(function)
        _Observed._count += 1
        self._number = _Observed._count

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function and compare a recomputation with the forward."""
        first = self._forward is None
        run = Run(self._snapshot())
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

    def _snapshot(self) -> Snapshot:
        return snapshot(self._modules, self._observer.names())

    def _compare(self, again: Run) -> None:
        region, forward = self._region, self._forward
        region.recomputations += 1
        if forward is None or forward.end is None or again.end is None:
            return
        for text in differences(forward.begin, again.begin, again.end):
            region.remark("state", text, region.line)
        drew = forward.begin.random != forward.end.random
        if drew and forward.begin.random != again.begin.random:
            why = "" if region.preserves else " (preserve_rng_state=False)"
            text = f"draws random numbers, and the recomputation draws others{why}"
            region.remark("random", text, region.line)
        departed = first_difference(forward.steps, again.steps)
        if departed is not None:
            region.remark(departed.kind, departed.text, departed.line)


def _modules_of(function: Any) -> list[nn.Module]:
    """Return the modules whose state a region may read: its own, its object's, those it closes over."""
    roots = [function, getattr(function, "__self__", None)]
    if isinstance(function, functools.partial):
        roots += [function.func, *function.args, *function.keywords.values()]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # a cell that is not filled yet
            roots.append(cell.cell_contents)
    found: dict[int, nn.Module] = {}
    for root in roots:
        owner = getattr(root, "__self__", root)
        if isinstance(owner, nn.Module):
            found.update((id(module), module) for module in owner.modules())
    return list(found.values())
