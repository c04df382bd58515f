"""The configuration of one run: an experiment's settings, what is measured, and how the run is kept.

A file is YAML with the sections of the experiment (``data``, ``model``, ``training``), ``measures``
and ``keeping``, beside ``experiment``, ``preset``, ``seed``, ``device`` and ``control``. Every key is
optional but ``experiment``; one that does not exist is refused with the nearest that does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from backlight.experiments.experiment import EXPERIMENTS, Experiment
from backlight.monitors.grokking.model.measures import Measures
from backlight.records import to_json
from backlight.registry import UnknownNameError
from backlight.text import assignment, did_you_mean

PRESETS = ("ci", "paper")
CONTROLS = ("", "random-labels")


class ConfigurationError(ValueError):
    """A configuration that cannot be run; the message names the key, what was expected and what came."""


@dataclass(frozen=True)
class Keeping:
    """How a run is kept.

    Attributes
    ----------
    checkpoint_every:
        Steps between two checkpoints; a kill loses the steps since the last one, which are trained again.
    checkpoints:
        Newest checkpoints that stay.
    disk_free:
        Bytes that the disk is to have free; below, the run keeps less.
    flush_seconds:
        Seconds between two writes.
    threads:
        Threads of torch on the host. One is fastest for small models, leaves the cores to other runs,
        and makes sums that do not depend on the machine.
    """

    checkpoint_every: int = 1000
    checkpoints: int = 2
    disk_free: int = 1_000_000_000
    flush_seconds: float = 2.0
    threads: int = 1

    def __post_init__(self) -> None:
        for name, least in (("checkpoint_every", 1), ("checkpoints", 1), ("disk_free", 0), ("threads", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"keeping.{name}={getattr(self, name)}: expected {least} or more")
        if not 0.01 <= self.flush_seconds <= 3600:
            raise ValueError(f"keeping.flush_seconds={self.flush_seconds}: expected 0.01 to 3600")


@dataclass(frozen=True)
class Configuration:
    """All that a run follows from; two runs of one configuration on one machine give the same numbers."""

    experiment: str
    settings: Any
    preset: str = "ci"
    seed: int = 0
    device: str = "cpu"
    control: str = ""
    measures: Measures = field(default_factory=Measures)
    keeping: Keeping = field(default_factory=Keeping)

    def as_mapping(self) -> dict[str, Any]:
        """Return the configuration as a file holds it."""
        told: dict[str, Any] = {key: getattr(self, key) for key in _PLAIN}
        told |= to_json(self.settings)
        told["measures"], told["keeping"] = to_json(self.measures), to_json(self.keeping)
        return told

    def as_yaml(self) -> str:
        """Return the configuration as YAML that :func:`read` takes back."""
        return str(yaml.safe_dump(self.as_mapping(), sort_keys=False, allow_unicode=True))


_PLAIN = ("experiment", "preset", "seed", "device", "control")


def experiment_of(name: str) -> Experiment[Any]:
    """Return the experiment called ``name``; the fast oracle has the name ``oracle``.

    Raises
    ------
    ConfigurationError
        If there is none; the message says the nearest.
    """
    from backlight.experiments.oracle import ORACLE  # noqa: PLC0415 - reaches torch

    if name == ORACLE.name:
        return ORACLE
    try:
        return EXPERIMENTS[name]
    except UnknownNameError:
        known = [*EXPERIMENTS, ORACLE.name]
        raise ConfigurationError(f"no experiment is called {name!r}{_nearest(name, known)}") from None


def preset(name: str, chosen: str = "ci") -> Configuration:
    """Return the configuration of an experiment's preset: ``ci`` or the published one, ``paper``.

    Raises
    ------
    ConfigurationError
        If there is no such experiment or preset.
    """
    if chosen not in PRESETS:
        raise ConfigurationError(f"preset {chosen!r}: expected {' or '.join(PRESETS)}")
    experiment = experiment_of(name)
    return Configuration(name, experiment.ci if chosen == "ci" else experiment.settings, chosen)


def read(path: Path) -> dict[str, Any]:
    """Return what a YAML file holds.

    Raises
    ------
    ConfigurationError
        If it cannot be read, is no YAML, or no mapping.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ConfigurationError(
            f"{path}: expected keys with values, as `backlight grok config` prints, got {kind}"
        )
    return found


def assigned(items: Iterable[str]) -> dict[str, Any]:
    """Return nested values from ``section.key=value`` items; values are read as YAML.

    Raises
    ------
    ConfigurationError
        If an item has another form.
    """
    out: dict[str, Any] = {}
    for item in items:
        example = "section.key=value, such as training.lr=0.001"
        name, text = assignment(item, "--set", example, ConfigurationError)
        path = name.split(".")
        if not all(path):
            raise ConfigurationError(f"--set {item!r}: expected {example}")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise ConfigurationError(f"--set {item!r}: the value {text!r} is not valid YAML") from None
        place = out
        for part in path[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigurationError(f"--set {item!r}: {part!r} is given a value and keys")
        place[path[-1]] = value
    return out


def configure(name: str | None, chosen: str | None, *layers: tuple[str, Mapping[str, Any]]) -> Configuration:
    """Return the configuration that ``layers`` make of a preset, the last one winning.

    Parameters
    ----------
    name, chosen:
        Experiment and preset; None takes them from the first layer that has them.
    layers:
        Where the values come from, for messages, and nested values.

    Raises
    ------
    ConfigurationError
        If a key is unknown, a value has the wrong type or range, or no experiment is named.
    """
    for where, values in layers:
        name = name or values.get("experiment")
        chosen = chosen or values.get("preset")
        stated = values.get("experiment", name)
        if stated != name:
            raise ConfigurationError(f"{where}: is a configuration of {stated!r}, not of {name!r}")
    if not name:
        raise ConfigurationError("no experiment is named; `backlight grok list` shows them")
    result = preset(str(name), str(chosen or "ci"))
    for where, values in layers:
        result = _overlaid(result, values, where)
    if result.control not in CONTROLS:
        raise ConfigurationError(
            f"control {result.control!r}: expected one of {', '.join(map(repr, CONTROLS))}"
        )
    if not -(2**63) <= result.seed < 2**63:
        raise ConfigurationError(f"seed {result.seed}: expected a whole number of 64 bits")
    for key in ("steps", "log_every", "thorough_every"):
        value = getattr(training(result), key, None)
        if value is not None and value < 1:
            raise ConfigurationError(f"training.{key}={value}: expected 1 or more")
    return result


def training(configuration: Configuration) -> Any:
    """Return the section of the settings that says how long and how is trained."""
    return configuration.settings.training


def _overlaid(base: Configuration, values: Mapping[str, Any], where: str) -> Configuration:
    sections = [f.name for f in dataclasses.fields(base.settings)]
    known = [*_PLAIN, *sections, "measures", "keeping"]
    for key in values:
        if key not in known:
            raise ConfigurationError(f"{where}: unknown key {key!r}{_nearest(str(key), known)}")
    plain = {key: values[key] for key in _PLAIN if key in values and key not in {"experiment", "preset"}}
    settings = _section(base.settings, {k: v for k, v in values.items() if k in sections}, "", where)
    measures = _section(base.measures, values.get("measures", {}), "measures", where)
    keeping = _section(base.keeping, values.get("keeping", {}), "keeping", where)
    for key, kind in (("seed", int), ("device", str), ("control", str)):
        if key in plain:
            plain[key] = _checked(kind, plain[key] if plain[key] is not None else "", key, where)
    return dataclasses.replace(base, settings=settings, measures=measures, keeping=keeping, **plain)


def _section(base: Any, values: Any, path: str, where: str) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{where}: {path}: expected keys with values, got {values!r}")
    known = [f.name for f in dataclasses.fields(base)]
    merged: dict[str, Any] = {f.name: getattr(base, f.name) for f in dataclasses.fields(base)}
    for key, value in values.items():
        full = f"{path}.{key}" if path else str(key)
        if key not in known:
            raise ConfigurationError(f"{where}: unknown key {full!r}{_nearest(str(key), known, path)}")
        inner = getattr(base, key)
        nested = dataclasses.is_dataclass(inner)
        merged[key] = _section(inner, value, full, where) if nested else value
    return _checked(type(base), merged, path, where)


def _checked(kind: Any, value: Any, path: str, where: str) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(part for part in (path, *(str(p) for p in first["loc"])) if part)
        message = first["msg"].removeprefix("Value error, ")
        got = "" if isinstance(first["input"], dict) else f", got {first['input']!r}"
        raise ConfigurationError(f"{where}: {f'{place}: ' if place else ''}{message}{got}") from None


def _nearest(name: str, known: Iterable[str], path: str = "") -> str:
    return did_you_mean(name, known, f"{path}." if path else "")
