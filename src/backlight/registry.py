"""Registries that fill themselves: a new probe, rule, experiment or panel is one new file.

A registry knows which sub-package of a monitor holds its entries, and the entry-point group through
which other distributions add to it. Nothing is imported until somebody asks for the entries.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.metadata
import pkgutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from backlight.records import Finding

T = TypeVar("T")

_REGISTRIES: list[Registry[Any]] = []
_FAILED: dict[str, str] = {}
"""Modules of plug-ins that raised, with what they said: a second look would half register them again."""


class DuplicateNameError(ValueError):
    """Two entries of one registry claim the same name."""


class PlugInWarning(UserWarning):
    """A plug-in of another distribution that cannot be used: it is named and left out."""


class UnknownNameError(KeyError):
    """A name that no entry of the registry has; the message lists those that exist."""

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
    """Warn, and print instead where a filter makes warnings errors: a training must not end by one."""
    try:
        warnings.warn(text, category, stacklevel=3)
    except category as warning:
        print(warning, file=sys.stderr)


@dataclass
class Registry(Generic[T]):
    """Named entries of one kind, discovered in the monitors' ``part`` and in an entry-point ``group``.

    Parameters
    ----------
    kind:
        What an entry is called in messages, such as ``"rule"``.
    part:
        Name of the sub-package that holds such entries in every monitor: with ``"rules"``, each module
        of each ``backlight.<monitor>.rules`` is imported on the first look.
    group:
        Entry-point group for other distributions; empty for none. An entry point names a module that
        registers entries when it is imported, or an entry itself.
    holds:
        Type of the entries.
    """

    kind: str
    part: str = ""
    group: str = ""
    holds: type[Any] = object
    _entries: dict[str, T] = field(default_factory=dict, repr=False)
    _discovered: bool = field(default=False, repr=False)
    _plug_ins: list[PlugIn] = field(default_factory=list, repr=False)
    _lock: Any = field(default_factory=threading.RLock, repr=False)

    def add(self, name: str, entry: T) -> T:
        """Register ``entry`` under ``name``.

        Raises
        ------
        DuplicateNameError
            If another entry has that name.
        TypeError
            If it is not what this registry holds, or the name is no text.
        """
        if not isinstance(entry, self.holds):
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
        return entry

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers what it decorates, unchanged, under ``name``."""

        def decorate(entry: T) -> T:
            return self.add(name, entry)

        return decorate

    def __post_init__(self) -> None:
        _REGISTRIES.append(self)

    def _discover(self) -> None:
        if not self._discovered:
            with self._lock:
                self._fill()

    def _fill(self) -> None:
        if self._discovered:
            return
        for package_name in _packages(self.part) if self.part else ():
            package = importlib.import_module(package_name)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{package_name}.{module.name}")
        # From here on, so that a plug-in that looks into the registry sees the house's own.
        self._discovered = True
        points = importlib.metadata.entry_points(group=self.group) if self.group else ()
        for point in sorted(points, key=lambda p: (p.name, p.value)):
            self._plug_ins.append(self._plugged(point))

    def _plugged(self, point: importlib.metadata.EntryPoint) -> PlugIn:
        """Load a plug-in whole, or not at all with one warning that names it."""
        whose = (point.dist.name, point.dist.version) if point.dist is not None else ("", "")
        module = point.value.partition(":")[0]
        before = [(registry, set(registry._entries)) for registry in _REGISTRIES]
        known = set(self._entries)
        entries: tuple[str, ...] = ()
        problem = _FAILED.get(module, "")
        if not problem:
            try:
                loaded = point.load()
                if self.holds is not object and isinstance(loaded, self.holds):
                    self.add(getattr(loaded, "name", point.name), loaded)
                # A module that stands in several groups registers everything when it is first imported.
                entries = tuple(n for n, e in self._entries.items() if n not in known or _made_in(e, module))
                if not entries:
                    problem = f"it registers no {self.kind}, and is none: got {type(loaded).__name__}"
            except (Exception, SystemExit) as error:  # noqa: BLE001 - third-party code must not stop us
                entries, problem = (), f"{type(error).__name__}: {error}"
                _FAILED[module] = problem
                for registry, had in before:
                    for name, entry in list(registry._entries.items()):
                        if name not in had and _made_in(entry, module):
                            del registry._entries[name]
        if problem:
            of = f" of {' '.join(whose)}" if whose[0] else ""
            warn(
                f"backlight: the {self.kind} plug-in {point.name!r} ({point.value}){of} could not be "
                f"loaded and is left out: {problem}"
            )
        return PlugIn(self.kind, point.name, point.value, *whose, entries, problem)

    def plug_ins(self) -> tuple[PlugIn, ...]:
        """Return what other distributions add or tried to add, by name."""
        self._discover()
        return tuple(self._plug_ins)

    def origin(self, name: str) -> PlugIn | None:
        """Return the plug-in that an entry is from, None for the house's own."""
        return next((plug_in for plug_in in self.plug_ins() if name in plug_in.entries), None)

    def __getitem__(self, name: str) -> T:
        """Return the entry called ``name``.

        Raises
        ------
        UnknownNameError
            If there is none.
        """
        self._discover()
        try:
            return self._entries[name]
        except KeyError:
            known = ", ".join(sorted(self._entries)) or "none"
            raise UnknownNameError(f"no {self.kind} is called {name!r}; there are: {known}") from None

    def __contains__(self, name: object) -> bool:
        """Tell whether an entry has that name."""
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

    def items(self) -> list[tuple[str, T]]:
        """Return names with entries, sorted by name."""
        return [(name, self._entries[name]) for name in self]


def _packages(part: str) -> list[str]:
    """Return the packages called ``part`` that exist, one or two levels down, without importing others."""
    root = importlib.import_module("backlight")
    found = []
    for base in root.__path__:
        for pattern in (f"*/{part}/__init__.py", f"*/*/{part}/__init__.py"):
            for init in sorted(Path(base).glob(pattern)):
                found.append(".".join(("backlight", *init.parent.relative_to(base).parts)))
    return found


def _made_in(entry: object, module: str) -> bool:
    """Tell whether an entry, or a function that it holds, is written in the package of a module."""
    held = dataclasses.fields(entry) if dataclasses.is_dataclass(entry) else ()
    parts = [entry, *(getattr(entry, part.name, None) for part in held)]
    package = module.partition(".")[0]
    return any(str(getattr(p, "__module__", "")).partition(".")[0] == package for p in parts if callable(p))


def _origin(entry: object) -> str:
    """Return where an entry comes from: of a rule or a panel the function that it calls."""
    if dataclasses.is_dataclass(entry) and not isinstance(entry, type):
        held = (getattr(entry, part.name) for part in dataclasses.fields(entry))
        entry = next((value for value in held if callable(value)), entry)
    module = getattr(entry, "__module__", type(entry).__module__)
    return f"{module}.{getattr(entry, '__qualname__', type(entry).__qualname__)}"


@dataclass(frozen=True)
class Rule:
    """A rule of a monitor: a stored run goes in, findings come out; it never sees a live model.

    ``evaluate(run, limits)`` takes a :class:`backlight.store.read.run.Run` and an object of ``limits``, a
    class of :class:`backlight.findings.limits.Limits`, with what the run and the user overrode. ``needs``
    names the series without which the rule is skipped. A rule that ``restates`` yields its stored findings
    again, or better ones: nothing else of it is taken from the store.
    """

    name: str
    monitor: str
    version: int
    evaluate: Callable[[Any, Any], Iterable[Finding]]
    limits: type[Any] | None = None
    thresholds: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    restates: bool = False

    def __post_init__(self) -> None:
        if not callable(self.evaluate):
            raise TypeError(f"rule {self.name!r}: evaluate must be callable, got {self.evaluate!r}")


RULES: Registry[Rule] = Registry("rule", part="rules", group="backlight.rules", holds=Rule)


def rule(
    name: str,
    *,
    monitor: str,
    version: int = 1,
    limits: type[Any] | None = None,
    thresholds: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
    restates: bool = False,
) -> Callable[[Callable[[Any, Any], Iterable[Finding]]], Callable[[Any, Any], Iterable[Finding]]]:
    """Register the decorated function as the rule ``name`` of ``monitor``; see :class:`Rule`."""

    def decorate(
        evaluate: Callable[[Any, Any], Iterable[Finding]],
    ) -> Callable[[Any, Any], Iterable[Finding]]:
        RULES.add(name, Rule(name, monitor, version, evaluate, limits, thresholds, needs, restates))
        return evaluate

    return decorate


class Needs(enum.StrEnum):
    """What of a capture a probe is given."""

    GRADIENTS = "gradients"
    WEIGHTS = "weights"
    STEPS = "steps"


@dataclass(frozen=True)
class Probe:
    """What a monitor measures of a live training, declared as data.

    ``make(**options)`` returns the measuring object, whose form follows ``needs``:
    gradients: ``measure(tensors, scale, transfer) -> Pending``; weights: ``before(parameters)`` and
    ``after(transfer) -> Pending``, where the transfer takes results of a whole step to the host in one
    copy; steps: ``measure(summary) -> dict`` of scalars. ``series`` is the
    series of the store that the numbers go to, empty for scalars. A probe ``on_request`` is only
    there when an option of its name is set. ``spacing`` makes it take part in every Nth recorded
    step only (all of them while a finding is looked at in detail).
    """

    name: str
    monitor: str
    needs: Needs
    make: Callable[..., Any]
    series: str = ""
    on_request: bool = False
    spacing: int = 1

    def __post_init__(self) -> None:
        if not callable(self.make):
            raise TypeError(f"probe {self.name!r}: make must be callable, got {self.make!r}")
        if self.needs not in set(Needs):
            raise TypeError(
                f"probe {self.name!r}: needs must be one of {', '.join(Needs)}, got {self.needs!r}"
            )


PROBES: Registry[Probe] = Registry("probe", part="instrument", group="backlight.probes", holds=Probe)


def probe(
    name: str,
    *,
    monitor: str,
    needs: Needs,
    series: str = "",
    on_request: bool = False,
    spacing: int = 1,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated class or function as the probe ``name`` of ``monitor``; see :class:`Probe`."""

    def decorate(make: Callable[..., Any]) -> Callable[..., Any]:
        PROBES.add(name, Probe(name, monitor, needs, make, series, on_request, spacing))
        return make

    return decorate


DISPLAYS: Registry[Callable[[Any], str]] = Registry("display", part="displays")
"""How something is shown in a notebook, as HTML; by what is shown, which may lie below what shows it."""
