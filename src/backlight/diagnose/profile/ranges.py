"""Ranges in a torch profile: which phase a training is in, and which module's forward.

Only in the few steps that are traced: a range costs some microseconds even where nobody records it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from backlight.capture.hub import Listener
from backlight.capture.modules import Prefixes, inner
from backlight.records import Phase
from backlight.trace.module_times import MODULE, PHASE


class PhaseRanges(Listener):
    """Writes the phases of a training into the profile that is being taken.

    What follows a forward is called loss: that no backward came is not known before.
    """

    def __init__(self) -> None:
        self._open: list[tuple[str, Any]] = []

    def batch_begin(self, source: int) -> None:
        """Waiting for data begins."""
        self._rest()
        self._enter(Phase.DATA)

    def batch(self, index: int, seconds: float) -> None:
        """A batch came."""
        self._leave(Phase.DATA)

    def batch_missing(self) -> None:
        """No batch came."""
        self._leave(Phase.DATA)

    def forward_begin(self) -> None:
        """An outermost module is called."""
        if not self._inside(Phase.BACKWARD):
            self._rest()
            self._enter(Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION)

    def forward_end(self) -> None:
        """An outermost module has returned."""
        if self._inside(Phase.EVALUATION):
            self._leave(Phase.EVALUATION)
        elif self._inside(Phase.FORWARD):
            self._leave(Phase.FORWARD)
            if not self._open:
                self._enter(Phase.LOSS)

    def backward_begin(self, roots: Sequence[torch.Tensor]) -> None:
        """Backward begins."""
        self._rest()
        self._enter(Phase.BACKWARD)

    def backward_end(self) -> None:
        """Backward is over."""
        self._leave(Phase.BACKWARD)

    def norm_begin(self) -> None:
        """The norm is computed, which clipping does first."""
        self._rest()
        self._enter(Phase.CLIP)

    def norm_end(self) -> None:
        """The norm is computed."""
        self._leave(Phase.CLIP)

    def clip_begin(
        self, kind: str, tensors: Sequence[torch.Tensor], limit: float, norm: torch.Tensor | None
    ) -> None:
        """Clipping begins."""
        self._rest()
        self._enter(Phase.CLIP)

    def clip_end(self) -> None:
        """Clipping is over."""
        self._leave(Phase.CLIP)

    def optimizer_begin(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """The optimizer begins."""
        self._rest()
        self._enter(Phase.OPTIMIZER)

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is done."""
        self._leave(Phase.OPTIMIZER)

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)

    def _inside(self, phase: str) -> bool:
        return any(name == phase for name, _ in self._open)

    def _rest(self) -> None:
        self._leave(Phase.LOSS)

    def _enter(self, phase: str) -> None:
        opened = torch.profiler.record_function(PHASE + phase)
        opened.__enter__()  # type: ignore[no-untyped-call]  # as torch has it
        self._open.append((phase, opened))

    def _leave(self, phase: str) -> None:
        if self._inside(phase):
            while True:
                name, opened = self._open.pop()
                opened.__exit__(None, None, None)
                if name == phase:
                    break


class ModuleRanges:
    """Writes the forward of every module into the profile that is being taken."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    @property
    def autocast(self) -> set[str]:
        """Types of the autocast that was on when a module was called."""
        return set(_autocast)

    def follow(self, roots: Iterable[nn.Module]) -> None:
        """Hook every module of the models, each under its first name; several models have prefixes.

        The inside of a compiled module is left alone: a hook there would be compiled in, or compile
        the model again.
        """
        seen: set[int] = set()
        _autocast.clear()
        for prefix, root in Prefixes().of(list(roots)):
            for name, module in _reachable(root, prefix):
                if id(module) not in seen:
                    seen.add(id(module))
                    _names[module] = name
                    self._handles.append(module.register_forward_pre_hook(entered))
                    self._handles.append(module.register_forward_hook(returned, always_call=True))

    def leave(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _names.clear()
        _entered.clear()


_names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_entered: list[tuple[nn.Module, Any]] = []
_autocast: set[str] = set()


def entered(module: nn.Module, _args: Any) -> None:
    """Hook before the forward of a module."""
    if torch.compiler.is_compiling() or module not in _names:
        return
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            _autocast.add(str(torch.get_autocast_dtype(device)).removeprefix("torch."))
    opened = torch.profiler.record_function(MODULE + _names[module])
    opened.__enter__()  # type: ignore[no-untyped-call]  # as torch has it
    _entered.append((module, opened))


def returned(module: nn.Module, _args: Any, _output: Any) -> None:
    """Hook after the forward of a module, also when it raised."""
    if torch.compiler.is_compiling() or not any(module is other for other, _ in _entered):
        return
    while True:
        other, opened = _entered.pop()
        opened.__exit__(None, None, None)
        if other is module:
            break


def _reachable(wrapper: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of a model, a compiled module as itself and nothing below it."""
    module = wrapper
    while not is_compiled(module) and (wrapped := inner(module)) is not None:
        module = wrapped
    yield name, module
    if not is_compiled(module):
        for key, child in module.named_children():
            yield from _reachable(child, f"{name}.{key}" if name else key)


def is_compiled(module: nn.Module) -> bool:
    """Tell whether a module's forward is compiled, in place or as a wrapper."""
    return (
        type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
    )


def compiled() -> bool:
    """Tell whether anything was compiled in this process so far, a function included."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return bool(counters is not None and counters["frames"]["ok"])
