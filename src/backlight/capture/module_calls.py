"""Which module is running: a stack kept by torch's global forward hooks, and who was ever called.

For the commands that explain; ``backlight run`` puts no hook on every call of every module.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from backlight.capture.modules import walk


class ModuleCalls:
    """The modules whose ``forward`` runs now, innermost last; a context manager.

    Attributes
    ----------
    elsewhere:
        ``id`` of modules that ran in another thread than the one that entered this object.
    """

    def __init__(self) -> None:
        self._thread = 0
        self._handles: list[Any] = []
        self.stack: list[nn.Module] = []
        self.called: dict[int, weakref.ref[nn.Module]] = {}
        self.elsewhere: set[int] = set()

    def __enter__(self) -> ModuleCalls:
        """Begin to follow calls."""
        self._thread = threading.get_ident()
        self._handles = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, _args: Any) -> None:
        if threading.get_ident() != self._thread:
            self.elsewhere.add(id(module))
            return
        self.stack.append(module)
        if id(module) not in self.called:
            self.called[id(module)] = weakref.ref(module)

    def _end(self, module: nn.Module, _args: Any, _output: Any) -> None:
        # An exception may have left calls without an end: everything above this one is over too.
        if threading.get_ident() == self._thread and any(m is module for m in self.stack):
            while self.stack.pop() is not module:
                pass

    def current(self) -> nn.Module | None:
        """Return the innermost module that runs now."""
        return self.stack[-1] if self.stack else None

    def was_called(self, module: nn.Module) -> bool:
        """Whether ``module`` has run in the thread that is followed."""
        reference = self.called.get(id(module))
        return reference is not None and reference() is module


def module_names(roots: Iterable[tuple[str, nn.Module]]) -> dict[int, str]:
    """Return the name of every module by its ``id``; a root without a prefix is called by its class."""
    names: dict[int, str] = {}
    for prefix, root in roots:
        for name, module in walk(root, prefix):
            names.setdefault(id(module), name or type(module).__name__)
    return names
