"""Options: declared once, as annotated fields of a frozen dataclass.

From the declaration come the keywords of ``watch``, the options of ``backlight run``, the keys of a TOML
file, the tables of docs/settings.md, and the checks. A monitor declares its own in a subclass of
:class:`MonitorSettings`: in Python they are given as ``watch(health={"exact_updates": 8})``, in a file as the
table ``[health]``, on the command line as ``--set health.exact_updates=8``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from backlight.registry import Registry
from backlight.text import assignment, did_you_mean

S = TypeVar("S", bound="MonitorSettings")


class SettingError(ValueError):
    """A setting has a value that cannot be used.

    Parameters
    ----------
    setting:
        Its name: that of a field, after that of the monitor and a dot where a monitor declares it.
    problem:
        What is wrong, and what was expected; other settings are named in braces, as ``{every}``.
    """

    def __init__(self, setting: str, problem: str) -> None:
        self.setting, self._problem = setting, problem
        super().__init__(self.worded(str))

    def worded(self, name_of: Callable[[str], str]) -> str:
        """Return the message with each setting called as ``name_of`` returns it."""
        problem = re.sub(r"\{([a-z_.]+)\}", lambda match: name_of(match[1]), self._problem)
        return f"{name_of(self.setting)}: {problem}"


@dataclass(frozen=True)
class Option:
    """What a setting does, and how the command line takes it.

    Attributes
    ----------
    help:
        One sentence; it is printed by ``--help`` and in the documentation.
    flags:
        Options of ``backlight run``; without one the setting is given by ``--set``.
    metavar:
        Name of the value in the help.
    at_least:
        Lowest value, where the setting is a number.
    repeatable:
        Whether the option may be given several times on the command line.
    parse:
        Turns a text, or the list of texts of a repeatable option, into the value; takes other values as they
        are. ValueError where it cannot.
    """

    help: str
    flags: tuple[str, ...] = ()
    metavar: str = ""
    at_least: float | None = None
    repeatable: bool = False
    parse: Callable[[Any], Any] | None = None


def options_of(kind: Any) -> Mapping[str, Option]:
    """Return the options that a dataclass declares, by field."""
    return _options_of(kind)


@functools.cache
def _options_of(kind: Any) -> Mapping[str, Option]:
    hints = get_type_hints(kind, include_extras=True)
    declared = {field.name: get_args(hints[field.name])[1:] for field in dataclasses.fields(kind)}
    return {name: each for name, extras in declared.items() for each in extras if isinstance(each, Option)}


def type_of(kind: Any, name: str) -> Any:
    """Return the type of a field, without its annotations."""
    hint = get_type_hints(kind, include_extras=True)[name]
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def check_bounds(settings: Any, prefix: str = "") -> None:
    """Raise a SettingError for the first number below what its option allows."""
    for name, option in options_of(type(settings)).items():
        value = getattr(settings, name)
        if option.at_least is not None and value is not None and value < option.at_least:
            raise SettingError(f"{prefix}{name}", f"{value}: expected {option.at_least:g} or more")


class MonitorSettings:
    """Base of the settings of one monitor.

    Attributes
    ----------
    name:
        That of the monitor.
    without_monitor:
        Fields that count also where the monitor is not requested.
    """

    name: ClassVar[str]
    without_monitor: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        """Check the bounds; a subclass checks the rest."""
        check_bounds(self, f"{self.name}.")

    def check_requested(self, monitors: Sequence[str]) -> None:
        """Raise a SettingError for a setting that does nothing, as its monitor is not in ``monitors``."""
        if self.name in monitors:
            return
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # each subclass is a dataclass
            default = type(self)().__dict__[field.name]
            if field.name not in self.without_monitor and getattr(self, field.name) != default:
                problem = f"needs the monitor {self.name}, which is not requested; add it to {{monitors}}"
                raise SettingError(f"{self.name}.{field.name}", problem)

    @classmethod
    def of(cls: type[S], settings: Any) -> S:
        """Return the part of the settings of a watch that this class declares."""
        part: S = settings.of_monitors.get(cls.name) or cls()
        return part


MONITOR_SETTINGS: Registry[type[MonitorSettings]] = Registry(
    "settings", modules=("monitors/*/settings.py",), group="backlight.settings", holds=MonitorSettings
)
"""Settings of monitors, by the name of the monitor. The modules import no torch."""


def built_in_settings() -> list[str]:
    """Return the names of backlight's own monitors that have settings, without importing any."""
    return sorted(file.parent.name for file in (Path(__file__).parent / "monitors").glob("*/settings.py"))


def assigned(items: Sequence[str]) -> dict[str, Any]:
    """Return settings by name from ``KEY=VALUE`` items, those of a monitor in a mapping of its own.

    Values are read as TOML, or else are texts.

    Raises
    ------
    ValueError
        If an item has another form.
    """
    values: dict[str, Any] = {}
    for item in items:
        name, text = assignment(item, "--set", "KEY=VALUE, such as health.exact_updates=8")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        monitor, _, key = name.rpartition(".")
        target = values.setdefault(monitor, {}) if monitor else values
        if key in target:
            raise ValueError(f"--set {name}: is given twice; several values are one list, as {name}=[1, 2]")
        target[key] = value
    return values


def refuse_unknown(values: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Raise ValueError for the first key that is none of ``names``."""
    for key in values:
        if key not in names:
            raise ValueError(f"{where}: unknown key {key!r}{did_you_mean(key, names)}")
