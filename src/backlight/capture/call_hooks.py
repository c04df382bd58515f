"""Hooks before and after the calls of chosen modules, which stand in the modules' classes.

A hook that ``register_forward_hook`` adds is part of the module: it is saved, copied, scripted and exported
with it. Here the class of a followed module gets a ``__call__`` of ours for as long as a module of it is
followed, and the modules themselves stay as they are.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from backlight.capture.unrecorded import FORWARDS, NUMBERS, PHASE, PROGRESS
from backlight.records import Phase

if TYPE_CHECKING:
    from backlight.capture.hub import Hub


class CallHooks:
    """Calls ``before(module, args, kwargs)`` and ``after(module, result)`` around each call that it follows.

    ``after`` is called also when the module raised, with None for the result. Code that a compiler traces
    calls neither. Two objects with the same ``before`` and ``after`` report a call once.
    """

    def __init__(
        self, before: Callable[[Any, Any, Any], None], after: Callable[[Any, Any], None] | None = None
    ) -> None:
        self._pair = before, after
        self._modules: dict[int, weakref.ref[nn.Module]] = {}

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Follow these modules as well."""
        for module in modules:
            key = id(module)
            if key not in self._modules:
                self._modules[key] = weakref.ref(module, lambda _, key=key: self._forget(key))  # type: ignore[misc]
                _followed.setdefault(key, (_patched(type(module)), Counter()))[1][self._pair] += 1

    def leave(self) -> None:
        """Follow none any more; the classes are as they were once no one follows a module of theirs."""
        for key in list(self._modules):
            self._forget(key)

    def _forget(self, key: int) -> None:
        if self._modules.pop(key, None) is None:
            return
        kind, pairs = _followed[key]
        pairs[self._pair] -= 1
        if not pairs[self._pair]:
            del pairs[self._pair]
        if not pairs:
            del _followed[key]
            if all(other is not kind for other, _ in _followed.values()):
                _restore(kind)


HUB_COUNTING: list[Hub | None] = [None]
"""The hub, in steps whose calls are counted on its board and not reported; see
:mod:`backlight.capture.unrecorded`."""

_FORWARD, _LOSS, _BACKWARD, _EVALUATION = (
    NUMBERS[phase] for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.EVALUATION)
)

_Pair = tuple[Callable[[Any, Any, Any], None], Callable[[Any, Any], None] | None]

_followed: dict[int, tuple[type[nn.Module], Counter[_Pair]]] = {}
"""By ``id`` of a followed module: the class whose ``__call__`` reports it, and what is called, and for how
many objects."""

_replaced: dict[type[nn.Module], tuple[Any, Any]] = {}
"""Classes with a ``__call__`` of ours: that, and what was there; None where it was inherited."""


def _current(module: nn.Module, kind: type[nn.Module]) -> tuple[_Pair, ...]:
    """Return what to call around a call of ``module`` that arrives in ``kind``."""
    reporter, pairs = _followed.get(id(module), (None, ()))
    return tuple(pairs) if reporter is kind else ()


def _reporting(kind: type[nn.Module], original: Any) -> Callable[..., Any]:
    """Return a ``__call__`` for a class.

    It refers to this module by name alone: pickled by value with a class, as cloudpickle does, it loads
    and works where backlight is not installed.
    """

    def inherited(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Looked up at each call: torch.fx replaces the method of nn.Module while it traces.
        return super(kind, self).__call__(*args, **kwargs)  # type: ignore[misc]

    go_on = inherited if original is None else original

    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        # What reads a tensor inside of torch.jit.trace becomes a part of the trace.
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            return go_on(self, *args, **kwargs)
        ours = sys.modules.get("backlight.capture.call_hooks")
        if ours is not None and (hub := ours.HUB_COUNTING[0]) is not None:
            if id(self) not in ours._followed:
                return go_on(self, *args, **kwargs)
            is_training = torch.is_grad_enabled()
            if is_training or not hub.ends_for_evaluation():
                board = hub.board
                board[PROGRESS] += 1
                if board[PHASE] == _BACKWARD:  # a checkpointed model is computed again
                    return go_on(self, *args, **kwargs)
                board[PHASE] = _FORWARD if is_training else _EVALUATION
                board[FORWARDS] += 1
                if original is None:
                    result = super(kind, self).__call__(*args, **kwargs)  # type: ignore[misc]
                else:
                    result = original(self, *args, **kwargs)
                board[PHASE] = _LOSS if is_training else _EVALUATION
                return result
        pairs = ours._current(self, kind) if ours is not None else ()
        for before, _ in pairs:
            before(self, args, kwargs)
        result = None
        try:
            result = go_on(self, *args, **kwargs)
            return result
        finally:
            for _, after in pairs:
                if after is not None:
                    after(self, result)

    return __call__


def _patched(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class in whose ``__call__`` calls of ``kind`` are reported; replaced if none is yet."""
    for base in kind.__mro__:
        if base in _replaced:
            return base
    original = vars(kind).get("__call__")
    _replaced[kind] = _reporting(kind, original), original
    kind.__call__ = _replaced[kind][0]  # type: ignore[method-assign]
    return kind


def _restore(kind: type[nn.Module]) -> None:
    ours, original = _replaced.pop(kind)
    if vars(kind).get("__call__") is not ours:
        return  # someone has replaced ours since
    if original is None:
        del kind.__call__
    else:
        kind.__call__ = original  # type: ignore[method-assign]
