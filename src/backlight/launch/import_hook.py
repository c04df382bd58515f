"""A call as soon as the script has imported a package, which it does as it would without backlight."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class ImportHook:
    """Calls ``call`` once: when the first import of ``package`` is complete, before the import returns.

    In a package that is imported already the call is made by :meth:`install`. A forked child makes none.
    Finders of others may look the package up again while they are asked: the hook answers the first only.
    """

    def __init__(self, package: str, call: Callable[[], None]) -> None:
        self._package = package
        self._call = call
        self._pid = os.getpid()
        self._is_asking = self._is_done = False

    def install(self) -> None:
        """Wait for the import."""
        if self._package in sys.modules:
            self._call()
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop waiting."""
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders find, with a loader that makes the call; None for other packages."""
        if name != self._package or os.getpid() != self._pid or self._is_asking or self._is_done:
            return None
        self._is_asking = True
        try:
            finders = [finder for finder in sys.meta_path if finder is not self]
            specs = (finder.find_spec(name, path, target) for finder in finders)
            spec = next((spec for spec in specs if spec is not None), None)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported)  # type: ignore[assignment]  # stands in for it
        return spec

    def _imported(self) -> None:
        self.remove()
        if not self._is_done:
            self._is_done = True
            self._call()


class _Loader:
    """A loader that behaves as another one, and then calls ``done``."""

    def __init__(self, loader: Any, done: Callable[[], None]) -> None:
        self._loader = loader
        self._done = done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, which sees its own loader."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._done()
