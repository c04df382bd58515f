"""Ranges in a torch profile: phases of the step, forwards of modules, and source lines of operations.

Only in the few traced steps: a range costs some microseconds even where nothing records it.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from backlight import devices
from backlight.capture.hub import Listener
from backlight.capture.modules import Prefixes, inner, is_compiled
from backlight.records import Phase
from backlight.trace.copies import LINE
from backlight.trace.module_times import MODULE, PHASE
from backlight.user_code import user_line


class PhaseRanges(Listener):
    """Writes the phases of a step into the active profile."""

    uses_modes = True

    def __init__(self) -> None:
        self._range: Any = None

    def phase_changed(self, phase: Phase) -> None:
        """End the range of the phase before, and begin that of ``phase``; what is in no phase has none."""
        self.close()
        if phase is not Phase.OTHER:
            self._range = torch.profiler.record_function(PHASE + phase)
            self._range.__enter__()

    def close(self) -> None:
        """End the open range."""
        opened, self._range = self._range, None
        if opened is not None:
            opened.__exit__(None, None, None)


class ModuleRanges:
    """Writes the forward of every module into the active profile."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    @property
    def autocast(self) -> set[str]:
        """Types of the autocast that was active when a module was called."""
        return set(_autocast)

    def follow(self, roots: Iterable[nn.Module]) -> None:
        """Hook every module of the models, each under its first name; several models have prefixes.

        The inside of a compiled module gets no hooks: they would be compiled in, or recompile the model.
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
        """Remove all hooks."""
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
    for device in devices.types():
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
    """Yield name and module of a model, nothing below a compiled module."""
    module = wrapper
    while not is_compiled(module) and (wrapped := inner(module)) is not None:
        module = wrapped
    yield name, module
    if not is_compiled(module):
        for key, child in module.named_children():
            yield from _reachable(child, f"{name}.{key}" if name else key)


def has_compiled() -> bool:
    """Return whether anything was compiled in this process, a function included."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return bool(counters is not None and counters["frames"]["ok"])


class LineRanges:
    """Writes the source line of every torch call into the active profile, for one traced step.

    torch.profiler's own stacks name the line at which a function begins, and cost a hook on every Python
    call. Here each torch call gets a range with its exact line; a copy inside such a call, as for a layout
    change in a matrix product, lies in the range of that call.
    """

    def __init__(self) -> None:
        self._mode: _LineMode | None = None

    def begin(self) -> bool:
        """Start; return False where another mode is active that could be left in the wrong order."""
        if _function_modes():
            return False
        self._mode = _LineMode()
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # as torch has it
        return True

    def end(self) -> None:
        """Stop; a mode that is not the innermost is only switched off."""
        mode, self._mode = self._mode, None
        if mode is None:
            return
        mode.on = False
        modes = _function_modes()
        if modes and modes[-1] is mode:
            mode.__exit__(None, None, None)


def lines_possible() -> bool:
    """Return whether :class:`LineRanges` can be used: no other function mode is active."""
    return not _function_modes()


def _function_modes() -> list[Any]:
    with contextlib.suppress(AttributeError):  # a private name of torch
        stack: Any = torch.overrides._get_current_function_mode_stack
        return list(stack())
    return [None]


class _LineMode(TorchFunctionMode):
    on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        # Reading an attribute is no operation; the operations of backward have lines of their own.
        if not self.on or name in {"__get__", "backward"}:
            return func(*args, **(kwargs or {}))
        line = user_line(sys._getframe(1))
        place = f"{line.path}:{line.number} ({line.function})" if line is not None else name
        with torch.profiler.record_function(LINE + place):
            return func(*args, **(kwargs or {}))
