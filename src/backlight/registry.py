"""Registries that fill themselves: a new monitor, rule, experiment or panel is one new file.

A registry knows which modules of backlight hold its entries, and the entry-point group through which other
distributions add to it. Nothing is imported before the entries are needed.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from backlight.interrupts import is_interrupt
from backlight.records import Finding
from backlight.terminal import write

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class DuplicateNameError(ValueError):
    """Two entries of one registry have the same name."""


class PlugInWarning(UserWarning):
    """A plug-in of another distribution cannot be used and is left out."""


class UnknownNameError(KeyError):
    """No entry of the registry has that name; the message lists those that exist."""

    def __str__(self) -> str:
        """Return the message without the quotes that KeyError adds."""
        return str(self.args[0])


@dataclass(frozen=True)
class PlugIn:
    """An entry point of another distribution: what it adds, or why it is left out."""

    kind: str
    name: str
    value: str
    distribution: str
    version: str
    entries: tuple[str, ...] = ()
    problem: str = ""


def warn(text: str, category: type[Warning] = PlugInWarning) -> None:
    """Warn, or print where a filter makes warnings errors: they must not end a training run."""
    try:
        warnings.warn(text, category, stacklevel=3)
    except category as warning:
        write(warning, file=sys.stderr)


_loading: list[str] = []
"""Module of the plug-in that is being loaded, innermost last: what it registers is its own."""


@dataclass
class Registry(Generic[T]):
    """Named entries of one kind, discovered in modules of backlight and in an entry-point group.

    Parameters
    ----------
    kind:
        What an entry is called in messages, such as ``"rule"``.
    modules:
        Files below the package, as glob patterns such as ``"monitors/*/rules/*.py"``; all are imported when
        the entries are first needed, and register themselves; those of some monitors alone, by :meth:`of`.
    group:
        Entry-point group for other distributions; empty for none. An entry point names a module that
        registers entries when it is imported, or an entry itself.
    holds:
        Type of the entries, or base class where entries are classes; classes need no registration.
    """

    kind: str
    modules: tuple[str, ...] = ()
    group: str = ""
    holds: type[Any] = object
    _entries: dict[str, T] = field(default_factory=dict, repr=False)
    _loaded_by: dict[str, str] = field(default_factory=dict, repr=False)
    _discovered: bool = field(default=False, repr=False)
    _plug_ins: list[PlugIn] = field(default_factory=list, repr=False)
    _lock: Any = field(default_factory=threading.RLock, repr=False)

    def __post_init__(self) -> None:
        os.register_at_fork(after_in_child=self._unlock)

    def _unlock(self) -> None:
        """Begin with a free lock in a forked child, which lacks the thread that may have held it."""
        self._lock = threading.RLock()

    def add(self, name: str, entry: T) -> T:
        """Register ``entry`` under ``name``."""
        if not self._fits(entry):
            raise TypeError(
                f"{self.kind} {name!r}: expected {self.holds.__module__}.{self.holds.__qualname__}, "
                f"got {type(entry).__name__}"
            )
        if not (isinstance(name, str) and name):
            raise TypeError(f"the name of a {self.kind} must be a text that is not empty, got {name!r}")
        if name in self._entries and self._entries[name] is not entry:
            raise DuplicateNameError(
                f"{self.kind} {name!r} is registered twice: by {_origin(self._entries[name])} "
                f"and by {_origin(entry)}; rename one of them"
            )
        self._entries[name] = entry
        if _loading:
            self._loaded_by[name] = _loading[-1]
        return entry

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers what it decorates, unchanged, under ``name``."""

        def decorate(entry: T) -> T:
            return self.add(name, entry)

        return decorate

    def _fits(self, entry: Any) -> bool:
        return isinstance(entry, self.holds) or (isinstance(entry, type) and issubclass(entry, self.holds))

    def _discover(self) -> None:
        if not self._discovered:
            with self._lock:
                self._fill()

    def _fill(self) -> None:
        if self._discovered:
            return
        for name in _module_names(self.modules):
            self._import(name)
        # Set before plug-ins load, so that one that looks into the registry sees backlight's entries.
        self._discovered = True
        for point in sorted(_entry_points(self.group) if self.group else (), key=lambda p: (p.name, p.value)):
            self._plug_ins.append(self._load(point))

    def _import(self, name: str) -> None:
        entries: list[Any] = list(vars(importlib.import_module(name)).values())
        for entry in entries:
            # Imported base classes have no name of their own, or another module.
            if self._holds_class(entry) and entry.__module__ == name:
                self.add(entry.name, entry)

    def _holds_class(self, entry: Any) -> bool:
        if self.holds is object or not isinstance(entry, type):
            return False
        return issubclass(entry, self.holds) and "name" in vars(entry)

    def _load(self, point: EntryPoint) -> PlugIn:
        """Load a plug-in; one that cannot be used is named in one warning and left out."""
        dist = (point.dist.name, point.dist.version) if point.dist is not None else ("", "")
        entries: tuple[str, ...] = ()
        problem = ""
        _loading.append(point.module)
        try:
            loaded = point.load()
            if self.holds is not object and self._fits(loaded):
                self.add(getattr(loaded, "name", point.name), loaded)
            entries = tuple(name for name, module in self._loaded_by.items() if module == point.module)
            if not entries:
                problem = f"it registers no {self.kind}, and is none: got {type(loaded).__name__}"
        except (Exception, SystemExit) as error:
            if is_interrupt(error):
                raise
            problem = f"{type(error).__name__}: {error}"
            for name in [n for n, module in self._loaded_by.items() if module == point.module]:
                del self._entries[name], self._loaded_by[name]
        finally:
            _loading.pop()
        if problem:
            of = f" of {' '.join(dist)}" if dist[0] else ""
            warn(
                f"backlight: the {self.kind} plug-in {point.name!r} ({point.value}){of} could not be "
                f"loaded and is left out: {problem}"
            )
        return PlugIn(self.kind, point.name, point.value, *dist, entries, problem)

    def group_is_extended(self) -> bool:
        """Return whether other distributions add to the registry; nothing is imported."""
        return bool(self.group) and any(_entry_points(self.group))

    def plug_ins(self) -> tuple[PlugIn, ...]:
        """Return the plug-ins of other distributions, those that were left out included, by name."""
        self._discover()
        return tuple(self._plug_ins)

    def origin(self, name: str) -> PlugIn | None:
        """Return the plug-in that an entry is from, None for backlight's own."""
        return next((plug_in for plug_in in self.plug_ins() if name in plug_in.entries), None)

    def __getitem__(self, name: str) -> T:
        """Return the entry called ``name``."""
        if name not in self._entries:
            self._discover()
        try:
            return self._entries[name]
        except KeyError:
            names = ", ".join(sorted(self._entries)) or "none"
            raise UnknownNameError(f"no {self.kind} is called {name!r}; there are: {names}") from None

    def __contains__(self, name: object) -> bool:
        """Return whether an entry has that name."""
        self._discover()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names, sorted, so that no order depends on the file system."""
        self._discover()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        """Return the number of entries."""
        self._discover()
        return len(self._entries)

    def of(self, monitors: Collection[str], pause: Callable[[], object] = bool) -> list[tuple[str, T]]:
        """Return names with entries, sorted by name: at least those of ``monitors``, all where that is empty.

        A watched run ends sooner without the modules of other monitors. Where there are plug-ins, all are
        imported: one may take a name that exists. ``pause`` is called after each module.
        """
        if not monitors or self.group_is_extended():
            return self.items()
        with self._lock:
            for name in _module_names(self.modules):
                package = name.split(".")
                if package[1] != "monitors" or package[2] in monitors:
                    self._import(name)
                    pause()
            return sorted(self._entries.items())

    def items(self) -> list[tuple[str, T]]:
        """Return names with entries, sorted by name."""
        return [(name, self._entries[name]) for name in self]


def _entry_points(group: str) -> Iterable[EntryPoint]:
    entry_points: Iterable[EntryPoint] = _all_entry_points(tuple(sys.path)).select(group=group)
    return entry_points


@functools.lru_cache(maxsize=1)  # reads a file of every distribution on the path
def _all_entry_points(_path: tuple[str, ...]) -> Any:
    from importlib.metadata import entry_points  # noqa: PLC0415 - the watchdog process has no use for it

    return entry_points()


def _module_names(patterns: Iterable[str]) -> list[str]:
    """Return the modules of backlight that match glob patterns, without importing any."""
    root = Path(__file__).parent
    files = {file for pattern in patterns for file in root.glob(pattern) if file.name != "__init__.py"}
    return sorted(".".join(("backlight", *file.relative_to(root).with_suffix("").parts)) for file in files)


def _origin(entry: object) -> str:
    """Return where an entry comes from: of a rule or a panel the function that it calls."""
    if not isinstance(entry, type):
        attributes = vars(entry).values() if hasattr(entry, "__dict__") else ()
        entry = next((value for value in attributes if callable(value)), entry)
    module = getattr(entry, "__module__", type(entry).__module__)
    return f"{module}.{getattr(entry, '__qualname__', type(entry).__qualname__)}"


@dataclass(frozen=True)
class Rule:
    """A rule of a monitor: a stored run goes in, findings come out; it never sees a live model.

    ``evaluate(run, limits)`` takes a :class:`backlight.store.read.run.Run` and an object of ``limits``, a
    class of :class:`backlight.findings.limits.Limits`, with what the run and the user overrode. ``needs``
    names the series without which the rule is skipped. A rule that ``restates`` yields its stored findings
    again, or better ones: nothing else of it is taken from the store. The findings of one that is ``logged``
    are printed by the process that makes them.

    Its findings are facts (a state that was observed, two facts that contradict each other), unless it
    ``is_statistic``: numbers compared with limits. At equal severity facts come first. A statistic whose
    cause a finding of the rules in ``explained_by`` names is merged into that finding.
    """

    name: str
    monitor: str
    version: int
    evaluate: Callable[[Any, Any], Iterable[Finding]]
    limits: type[Any] | None = None
    needs: tuple[str, ...] = ()
    restates: bool = False
    logged: bool = False
    is_statistic: bool = False
    explained_by: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.evaluate):
            raise TypeError(f"rule {self.name!r}: evaluate must be callable, got {self.evaluate!r}")


RULES: Registry[Rule] = Registry(
    "rule", modules=("monitors/*/rules/*.py",), group="backlight.rules", holds=Rule
)


def rule(
    name: str, *, monitor: str, version: int = 1, **more: Any
) -> Callable[[Callable[[Any, Any], Iterable[Finding]]], Callable[[Any, Any], Iterable[Finding]]]:
    """Register the decorated function as the rule ``name`` of ``monitor``; see :class:`Rule`."""

    def decorate(
        evaluate: Callable[[Any, Any], Iterable[Finding]],
    ) -> Callable[[Any, Any], Iterable[Finding]]:
        RULES.add(name, Rule(name, monitor, version, evaluate, **more))
        return evaluate

    return decorate


DISPLAYS: Registry[Callable[[Any], str]] = Registry("display", modules=("*/displays.py",))
"""How something is shown, as HTML or as text; by what is shown, which may lie below what shows it."""
