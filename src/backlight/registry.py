"""Registries that fill themselves: a new probe, rule, experiment or panel is one new file.

A registry knows which sub-package of a room holds its entries, and the entry-point group through
which other distributions add to it. Nothing is imported until somebody asks for the entries.
"""

from __future__ import annotations

import enum
import importlib
import importlib.metadata
import pkgutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from backlight.records import Finding

T = TypeVar("T")


class DuplicateNameError(ValueError):
    """Two entries of one registry claim the same name."""


class UnknownNameError(KeyError):
    """A name that no entry of the registry has; the message lists those that exist."""

    def __str__(self) -> str:
        """Return the message without the quotes that KeyError adds."""
        return str(self.args[0])


@dataclass
class Registry(Generic[T]):
    """Named entries of one kind, discovered in the rooms' ``part`` and in an entry-point ``group``.

    Parameters
    ----------
    kind:
        What an entry is called in messages, such as ``"rule"``.
    part:
        Name of the sub-package that holds such entries in every room: with ``"rules"``, each module
        of each ``backlight.<room>.rules`` is imported on the first look.
    group:
        Entry-point group for other distributions; empty for none.
    """

    kind: str
    part: str = ""
    group: str = ""
    _entries: dict[str, T] = field(default_factory=dict, repr=False)
    _discovered: bool = field(default=False, repr=False)

    def add(self, name: str, entry: T) -> T:
        """Register ``entry`` under ``name``.

        Raises
        ------
        DuplicateNameError
            If another entry has that name.
        """
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

    def _discover(self) -> None:
        if self._discovered:
            return
        for package_name in _packages(self.part) if self.part else ():
            package = importlib.import_module(package_name)
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"{package_name}.{module.name}")
        if self.group:
            for point in importlib.metadata.entry_points(group=self.group):
                try:
                    point.load()
                except Exception as error:  # noqa: BLE001 - a stranger's plug-in must not stop us
                    warnings.warn(
                        f"backlight: the {self.kind} plug-in {point.name!r} ({point.value}) could "
                        f"not be loaded and is left out: {type(error).__name__}: {error}",
                        stacklevel=2,
                    )
        self._discovered = True

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
    """Return the packages ``backlight.<room>.<part>`` that exist, without importing any room twice."""
    house = importlib.import_module("backlight")
    rooms = [m.name for m in pkgutil.iter_modules(house.__path__) if m.ispkg]
    found = []
    for room in rooms:
        if any((Path(base) / room / part / "__init__.py").is_file() for base in house.__path__):
            found.append(f"backlight.{room}.{part}")
    return found


def _origin(entry: object) -> str:
    module = getattr(entry, "__module__", type(entry).__module__)
    return f"{module}.{getattr(entry, '__qualname__', type(entry).__qualname__)}"


@dataclass(frozen=True)
class Rule:
    """A rule of a room: a stored run goes in, findings come out; it never sees a live model.

    ``evaluate(run, thresholds)`` takes a :class:`backlight.store.reader.Run` and the room's frozen
    thresholds. ``thresholds`` names the fields that it reads, so that a finding can show which of
    them the user overrode. ``needs`` names the series without which the rule stays silent. A rule that
    ``restates`` gives what was stored of it again, or something better in its place: nothing else of it
    is taken from the store.
    """

    name: str
    room: str
    version: int
    evaluate: Callable[[Any, Any], Iterable[Finding]]
    thresholds: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    restates: bool = False


RULES: Registry[Rule] = Registry("rule", part="rules", group="backlight.rules")


def rule(
    name: str,
    *,
    room: str,
    version: int = 1,
    thresholds: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
    restates: bool = False,
) -> Callable[[Callable[[Any, Any], Iterable[Finding]]], Callable[[Any, Any], Iterable[Finding]]]:
    """Register the decorated function as the rule ``name`` of ``room``; see :class:`Rule`."""

    def decorate(
        evaluate: Callable[[Any, Any], Iterable[Finding]],
    ) -> Callable[[Any, Any], Iterable[Finding]]:
        RULES.add(name, Rule(name, room, version, evaluate, thresholds, needs, restates))
        return evaluate

    return decorate


class Needs(enum.StrEnum):
    """What of a capture a probe is given."""

    GRADIENTS = "gradients"
    WEIGHTS = "weights"
    STEPS = "steps"


@dataclass(frozen=True)
class Probe:
    """What a room measures of a live training, declared as data.

    ``make(**options)`` returns the measuring object, whose form follows ``needs``:
    gradients: ``measure(tensors, scale, carrier) -> Pending``; weights: ``before(parameters)`` and
    ``after(carrier) -> Pending``, where the carrier takes results of a whole step to the host in one
    copy; steps: ``measure(summary) -> dict`` of scalars. ``series`` is the
    series of the store that the numbers go to, empty for scalars. A probe ``on_request`` is only
    there when an option of its name is set. ``spacing`` makes it take part in every Nth recorded
    step only (all of them while a finding is looked at in detail).
    """

    name: str
    room: str
    needs: Needs
    make: Callable[..., Any]
    series: str = ""
    on_request: bool = False
    spacing: int = 1


PROBES: Registry[Probe] = Registry("probe", part="probes", group="backlight.probes")


def probe(
    name: str,
    *,
    room: str,
    needs: Needs,
    series: str = "",
    on_request: bool = False,
    spacing: int = 1,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated class or function as the probe ``name`` of ``room``; see :class:`Probe`."""

    def decorate(make: Callable[..., Any]) -> Callable[..., Any]:
        PROBES.add(name, Probe(name, room, needs, make, series, on_request, spacing))
        return make

    return decorate
