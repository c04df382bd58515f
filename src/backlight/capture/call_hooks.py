"""Hooks before and after the calls of chosen modules, which stand in the modules' classes.

A hook that ``register_forward_hook`` adds is part of the module: it is saved, copied, scripted and exported
with it. Here the class of a followed module gets a ``__call__`` of ours for as long as a module of it is
followed, and the modules themselves stay as they are.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from backlight.capture.hooks import uncounted
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
        self._entries: dict[int, _Followed] = {}

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Follow these modules as well, for as long as each exists."""
        for module in modules:
            key = id(module)
            followed, entry = self._entries.get(key), _followed.get(key)
            if followed is not None and followed.reference() is module:
                continue
            if entry is None or entry.reference() is not module:  # the id of one that is gone
                entry = _followed[key] = _Followed(weakref.ref(module), _patched(type(module)))
            entry.pairs[self._pair] += 1
            self._entries[key] = entry
            if followed is not None:
                self._drop(key, followed)
        # Here, not when one is freed: a class that changes while a compiler reads it breaks the compilation.
        for key, entry in list(self._entries.items()):
            if entry.reference() is None:
                self._drop(key, self._entries.pop(key))

    def leave(self) -> None:
        """Follow none any more; the classes are as they were once no one follows a module of theirs."""
        while self._entries:
            self._drop(*self._entries.popitem())

    def _drop(self, key: int, entry: _Followed) -> None:
        entry.pairs[self._pair] -= 1
        if not entry.pairs[self._pair]:
            del entry.pairs[self._pair]
        if not entry.pairs:
            if _followed.get(key) is entry:
                del _followed[key]
            if all(other.kind is not entry.kind for other in _followed.values()):
                _restore(entry.kind)


HUB_COUNTING: list[Hub | None] = [None]
"""The hub, in steps whose calls are counted on its board and not reported; see
:mod:`backlight.capture.unrecorded`."""

_FORWARD, _LOSS, _BACKWARD, _EVALUATION = (
    NUMBERS[phase] for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.EVALUATION)
)

_Pair = tuple[Callable[[Any, Any, Any], None], Callable[[Any, Any], None] | None]


@dataclass(eq=False, slots=True)
class _Followed:
    """A module, the class whose ``__call__`` reports it, and what is called, for how many objects."""

    reference: weakref.ref[nn.Module]
    kind: type[nn.Module]
    pairs: Counter[_Pair] = field(default_factory=Counter)


_followed: dict[int, _Followed] = {}
"""By ``id`` of a module, which may be that of another one when it is gone."""

_replaced: dict[type[nn.Module], tuple[Any, Any]] = {}
"""Classes with a ``__call__`` of ours: that, and what was there; None where it was inherited."""


def _current(module: nn.Module, kind: type[nn.Module]) -> tuple[_Pair, ...]:
    """Return what to call around a call of ``module`` that arrives in ``kind``."""
    entry = _followed.get(id(module))
    if entry is None or entry.kind is not kind or entry.reference() is not module:
        return ()
    return tuple(entry.pairs)


def _reporting(kind: type[nn.Module], original: Any) -> Callable[..., Any]:
    """Return a ``__call__`` for a class.

    It refers to this module by name alone: pickled by value with a class, as cloudpickle does, it loads
    and works where backlight is not installed.
    """

    def inherited(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Looked up at each call: torch.fx replaces the method of nn.Module while it traces.
        return super(kind, self).__call__(*args, **kwargs)  # type: ignore[misc]

    go_on = inherited if original is None else original

    @functools.wraps(nn.Module.__call__ if original is None else original)
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        # What reads a tensor inside of torch.jit.trace becomes a part of the trace.
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined,no-untyped-call]
            return go_on(self, *args, **kwargs)
        ours = sys.modules.get("backlight.capture.call_hooks")
        if ours is not None and (hub := ours.HUB_COUNTING[0]) is not None:
            entry = ours._followed.get(id(self))
            if entry is None or entry.reference() is not self:
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
                    result = super(kind, self).__call__(*args, **kwargs)
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
    _replaced[kind] = uncounted(_reporting(kind, original)), original
    kind.__call__ = _replaced[kind][0]  # type: ignore[method-assign]
    return kind


def _restore(kind: type[nn.Module]) -> None:
    ours, original = _replaced.pop(kind, (None, None))
    if ours is None or vars(kind).get("__call__") is not ours:
        return  # someone has replaced ours since
    if original is None:
        del kind.__call__
    else:
        kind.__call__ = original  # type: ignore[method-assign]
