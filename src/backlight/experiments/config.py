"""The configuration of one run: an experiment's settings, what is measured, and how the run is stored.

A file is YAML with the sections of the experiment (``data``, ``model``, ``training``), ``measures`` and
``run``, next to ``experiment``, ``preset``, ``seed``, ``device`` and ``control``. Only ``experiment``
is required; an unknown key is refused with the nearest known one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from backlight import codec
from backlight.experiments.data.algorithmic import modular_table, one_hot_pairs
from backlight.experiments.data.split import apply_control, draw_split, seeded
from backlight.experiments.experiment import EXPERIMENTS, Experiment, Paper, Setup
from backlight.experiments.models import PowerNet
from backlight.experiments.task import AdamWTraining, Task, one_hot_squared_error
from backlight.monitors.grokking.settings import Measures
from backlight.registry import UnknownNameError
from backlight.settings import SettingError
from backlight.store.format.arrays import Filters
from backlight.text import assignment, did_you_mean
from backlight.untrusted_files import read_text

# The fast oracle: modular addition mod 23 in a quadratic net, which groks in about a second.
#
# Half of the 529 pairs train a net f = ((U[a] + V[b])²)W of width 128 (8,832 parameters) with full batches,
# mean squared error on one-hot labels and AdamW. It memorises at step 30 to 40 and generalises near step 1000
# (architecture and closed-form solution: Gromov, 2301.02679; see docs/formulas.md, section 4). With a weight
# decay of .1, with random labels, or with a training share of .8 it does not grok. It is not a published
# experiment, so it is not registered.


@dataclass(frozen=True)
class Data:
    """Pairs (a, b) mod ``p``, and the share of them that is trained on."""

    p: int = 23
    operation: str = "add"
    train_share: float = 0.5


@dataclass(frozen=True)
class Model:
    """U, V ~ N(0, 1/(2p)) and W ~ N(0, 1/width)."""

    width: int = 128


@dataclass(frozen=True)
class Training(AdamWTraining):
    """AdamW on full batches; ``log_every`` steps between two evaluations."""

    steps: int = 2000
    lr: float = 5e-3
    log_every: int = 10
    thorough_every: int = 100


SETTINGS = Setup(Data(), Model(), Training())


def build(
    settings: Setup[Data, Model, Training] = SETTINGS,
    seed: int = 0,
    device: torch.device | str = "cpu",
    control: str = "",
) -> Task:
    """Return the oracle, ready to train."""
    p, width, device = settings.data.p, settings.model.width, torch.device(device)
    pairs, results = modular_table(p, settings.data.operation)
    split = draw_split(one_hot_pairs(pairs, p), results, round(settings.data.train_share * len(pairs)), seed)
    split = apply_control(split, control, seed).to(device)
    with seeded(seed, "model"):
        model = PowerNet(2 * p, width, p, power=2).to(device)
    return Task.with_adamw(
        model, split, seed, settings.training, chance=1 / p, sample_losses=one_hot_squared_error
    )


ORACLE = Experiment(
    "oracle",
    "Fast oracle: modular addition in a quadratic net",
    Paper(
        arxiv="2301.02679",
        title="Grokking modular arithmetic",
        authors="Gromov",
        claim="A two-layer quadratic net groks modular addition, and its solution has a closed form.",
        unclear="Sizes and training are chosen for speed, not published.",
    ),
    SETTINGS,
    SETTINGS,
    build,
)


PRESETS = ("ci", "paper")
CONTROLS = ("", "random-labels")
_PLAIN = ("experiment", "preset", "seed", "device", "control")


class ConfigurationError(ValueError):
    """An invalid configuration; the message names the key, the expected and the given value."""


@dataclass(frozen=True)
class RunOptions:
    """Execution and storage of a run.

    ``checkpoint_every`` steps lie between two checkpoints, and the newest ``checkpoints`` are kept: a killed
    run trains the steps since the last one again. ``disk_free`` bytes must stay free on the disk; below it,
    the run stores less. ``flush_seconds`` lie between two writes. One of torch's ``threads`` is fastest for
    small models, leaves cores to other runs, and makes sums independent of the machine.
    ``compression`` of arrays is ``gzip`` with a ``level`` of 0 to 9, ``lzf`` or ``none``.
    """

    checkpoint_every: int = 1000
    checkpoints: int = 2
    disk_free: int = 1_000_000_000
    flush_seconds: float = 2.0
    threads: int = 1
    compression: str = "gzip"
    level: int = 1

    def __post_init__(self) -> None:
        for name, least in (("checkpoint_every", 1), ("checkpoints", 1), ("disk_free", 0), ("threads", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"run.{name}={getattr(self, name)}: expected {least} or more")
        if not 0.01 <= self.flush_seconds <= 3600:
            raise ValueError(f"run.flush_seconds={self.flush_seconds}: expected 0.01 to 3600")
        try:
            self.filters()
        except ValueError as error:
            raise ValueError(f"run.{error}") from None

    def filters(self) -> Filters:
        """Return how arrays are compressed; ValueError for an unknown way."""
        return Filters(self.compression, self.level)


@dataclass(frozen=True)
class Configuration:
    """Everything that determines a run: equal configurations on one machine give equal numbers."""

    experiment: str
    settings: Any
    preset: str = "ci"
    seed: int = 0
    device: str = "cpu"
    control: str = ""
    measures: Measures = field(default_factory=Measures)
    run: RunOptions = field(default_factory=RunOptions)

    def as_mapping(self) -> dict[str, Any]:
        """Return the configuration in the form of a file."""
        plain = {key: getattr(self, key) for key in _PLAIN}
        return {
            **plain,
            **codec.plain(self.settings),
            "measures": codec.plain(self.measures),
            "run": codec.plain(self.run),
        }

    def as_yaml(self) -> str:
        """Return the configuration as YAML that :func:`read` accepts."""
        return str(yaml.safe_dump(self.as_mapping(), sort_keys=False, allow_unicode=True))


def check_control(control: str) -> None:
    """Raise ConfigurationError if there is no such control; "" is a run that is none."""
    if control not in CONTROLS:
        names = [name for name in CONTROLS if name]
        raise ConfigurationError(f"control {control!r}: expected {' or '.join(names)}, or none")


def experiment_of(name: str) -> Experiment[Any]:
    """Return the experiment called ``name``; ``oracle`` is the fast oracle, which is not registered."""
    if name == ORACLE.name:
        return ORACLE
    try:
        return EXPERIMENTS[name]
    except UnknownNameError:
        names = [*EXPERIMENTS, ORACLE.name]
        raise ConfigurationError(f"no experiment is called {name!r}{did_you_mean(name, names)}") from None


def preset(name: str, chosen: str = "ci") -> Configuration:
    """Return the configuration of a preset: ``ci`` or the published one, ``paper``."""
    if chosen not in PRESETS:
        raise ConfigurationError(f"preset {chosen!r}: expected {' or '.join(PRESETS)}")
    experiment = experiment_of(name)
    return Configuration(name, experiment.ci if chosen == "ci" else experiment.settings, chosen)


class _Loader(yaml.SafeLoader):
    """Loads plain values without aliases: nine lines of them are a billion values."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias, which is not read; write the value out")
        return super().compose_node(parent, index)


def _loaded(text: str) -> Any:
    """Return the value of a YAML text; a YAMLError if it is none, nests too deeply or has aliases."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("it nests too deeply") from None


def read(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file; a ConfigurationError if it is unreadable or holds no mapping."""
    try:
        mapping = _loaded(read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(mapping, dict):
        raise ConfigurationError(
            f"{path}: expected keys with values, as `backlight grok run --dry-run` prints, "
            f"got {type(mapping).__name__}"
        )
    return mapping


def assigned(items: Iterable[str]) -> dict[str, Any]:
    """Return nested values from ``section.key=value`` items; values are parsed as YAML."""
    out: dict[str, Any] = {}
    for item in items:
        example = "section.key=value, such as training.lr=0.001"
        name, text = assignment(item, "--set", example, ConfigurationError)
        path = name.split(".")
        if not all(path):
            raise ConfigurationError(f"--set {item!r}: expected {example}")
        try:
            value = _loaded(text)
        except yaml.YAMLError:
            raise ConfigurationError(f"--set {item!r}: the value {text!r} is not valid YAML") from None
        section = out
        for part in path[:-1]:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                raise ConfigurationError(f"--set {item!r}: {part!r} has both a value and keys")
        section[path[-1]] = value
    return out


def configure(name: str | None, chosen: str | None, *layers: tuple[str, Mapping[str, Any]]) -> Configuration:
    """Return a preset overridden by ``layers``; the last one wins.

    ``name`` and ``chosen`` are experiment and preset, None for those of the first layer that has them. A
    layer is the source of its values, for messages, and nested values.

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
        raise ConfigurationError("no experiment is named; `backlight grok list` lists them")
    result = preset(str(name), str(chosen or "ci"))
    for where, values in layers:
        result = _overridden(result, values, where)
    check_control(result.control)
    if not -(2**63) <= result.seed < 2**63:
        raise ConfigurationError(f"seed {result.seed}: expected a 64-bit integer")
    for key in ("steps", "log_every", "thorough_every"):
        value = getattr(result.settings.training, key, None)
        if value is not None and value < 1:
            raise ConfigurationError(f"training.{key}={value}: expected 1 or more")
    return result


def _overridden(base: Configuration, values: Mapping[str, Any], where: str) -> Configuration:
    merged = _merged(base.as_mapping(), values, "", where)
    sections = {f.name: getattr(base.settings, f.name) for f in dataclasses.fields(base.settings)}
    settings = {key: _validated(type(section), merged[key], key, where) for key, section in sections.items()}
    changes: dict[str, Any] = {
        "settings": dataclasses.replace(base.settings, **settings),
        "measures": _validated(Measures, merged["measures"], "measures", where),
        "run": _validated(RunOptions, merged["run"], "run", where),
    }
    for key, kind in (("seed", int), ("device", str), ("control", str)):
        changes[key] = _validated(kind, merged[key] if merged[key] is not None else "", key, where)
    return dataclasses.replace(base, **changes)


def _merged(base: Mapping[str, Any], values: Any, path: str, where: str) -> dict[str, Any]:
    """Return nested values, overridden by those of the same keys."""
    if not isinstance(values, Mapping):
        raise ConfigurationError(f"{where}: {path}: expected keys with values, got {values!r}")
    merged = dict(base)
    for key, value in values.items():
        full = f"{path}.{key}" if path else str(key)
        if key not in base:
            hint = did_you_mean(str(key), base, f"{path}." if path else "")
            raise ConfigurationError(f"{where}: unknown key {full!r}{hint}")
        nested = isinstance(base[key], Mapping)
        merged[key] = _merged(base[key], value, full, where) if nested else value
    return merged


def _validated(kind: Any, value: Any, path: str, where: str) -> Any:
    try:
        return codec.convert(value, kind, where, path)
    except SettingError as error:  # what the monitor calls grokking is the section measures of a file
        raise ConfigurationError(error.worded(lambda name: name.replace("grokking.", "measures."))) from None
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
