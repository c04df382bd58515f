"""The settings of a session: from keywords, from a TOML file, from the command line, checked in one place.

A file looks like this; every key is optional::

    monitors = ["health", "steptime"]
    every = 10
    [groups]
    host = "encoder.*"
    [thresholds.health]
    vanishing_rms = 1e-9
    [health]
    exact_updates = 8
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

from backlight import codec
from backlight.findings.limits import declared, merge_overrides
from backlight.monitor import MONITORS, built_in_monitors, check_monitors
from backlight.records import Finding
from backlight.redaction import check_patterns
from backlight.registry import RULES
from backlight.session.trackers.base import chosen
from backlight.settings import (
    MONITOR_SETTINGS,
    MonitorSettings,
    Option,
    SettingError,
    built_in_settings,
    check_bounds,
    options_of,
    refuse_unknown,
    type_of,
)
from backlight.text import did_you_mean, parse_size
from backlight.untrusted_files import read_text


def listed(value: Any, what: str, expected: str, attribute: str) -> list[Any]:
    """Return one object or several as a list; ValueError where one lacks the attribute of ``expected``."""
    if value is None:
        return []
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    for item in items:
        if not hasattr(item, attribute):
            raise ValueError(f"watch: {what} is {type(item).__name__}, expected {expected} or a list of them")
    return items


def check_samples(samples: Any, models: Sequence[Any]) -> None:
    """Refuse samples that are no pair of a loss function and a batch, or not of a single model."""
    if not isinstance(samples, tuple) or len(samples) not in {2, 3} or not callable(samples[0]):
        raise ValueError(
            "watch: samples must be (loss_fn, batch): loss_fn(model, batch) returns the loss summed over "
            "the samples, batch is a fixed probe batch or a callable that gives one; or (loss_fn, batch, "
            "held_out) with a held-out batch; got "
            f"{type(samples).__name__}"
        )
    if len(models) != 1:
        raise ValueError(
            f"watch: samples are of one model, got {len(models)}; call watch(model, optimizer, ...)"
        )


def loggable(values: Mapping[str, Any] | None, scalars: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a mapping and of keywords: floats, and copies of tensors to read later."""
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(
            "watch.log: expected numbers by name, as in watch.log({'accuracy': 0.9}), got "
            f"{type(values).__name__}"
        )
    return {str(name): _number(str(name), value) for name, value in {**(values or {}), **scalars}.items()}


def _number(name: str, value: Any) -> Any:
    try:
        if hasattr(value, "detach") and value.numel() == 1:
            return value.detach().reshape(()).clone()
        return float(value)
    except (TypeError, ValueError, AttributeError):
        kind = type(value).__name__
        raise TypeError(
            f"watch.log: {name}: expected a number or a tensor with one element, got {kind}"
        ) from None


P = ParamSpec("P")
R = TypeVar("R")

OnFinding = Callable[[Finding], Any]
"""Called with a finding; what it returns is ignored."""

DEFAULT_MONITORS = ("health", "correctness", "stalls", "steptime")

FOLDERS = ("out", "output", "outdir", "path", "dir", "folder", "log_dir", "logdir", "run_dir", "save_dir")
INTERVALS = ("log_freq", "log_every", "log_every_n_steps", "log_interval", "logging_steps")
ELSEWHERE = {**dict.fromkeys(FOLDERS, "run"), **dict.fromkeys(INTERVALS, "every")}
"""Keywords of other libraries, and of our own command line, with what they are called here."""


def _names(names_option: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of ``"health,steptime"``, or those of a list."""
    names = names_option.split(",") if isinstance(names_option, str) else names_option
    return tuple(stripped for name in names if (stripped := name.strip()))


def _monitors(names_option: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of monitors; those of ``"+activations"`` are added to the default ones."""
    names = _names(names_option)
    added = [name.removeprefix("+") for name in names if name.startswith("+")]
    if added and len(added) < len(names):
        problem = f"expected a + before every name, or before none, got {','.join(names)}"
        raise SettingError("monitors", problem)
    return tuple(dict.fromkeys((*DEFAULT_MONITORS, *added))) if added else names


def _texts(option: str | Iterable[str]) -> tuple[str, ...]:
    return (option,) if isinstance(option, str) else tuple(option)


def _bytes(option: int | str) -> int:
    return parse_size(option, "--max-disk") if isinstance(option, str) else option


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a session measures and keeps; ``of_monitors`` are settings that monitors declare, by monitor."""

    monitors: Annotated[
        tuple[str, ...],
        Option(
            "Monitors, as health,steptime; +activations adds to the default ones.",
            flags=("--monitors",), metavar="NAME,...", parse=_monitors,
        ),
    ] = DEFAULT_MONITORS  # fmt: skip
    every: Annotated[
        int | None,
        Option(
            "Record every Nth step (default: adapt to stay within 1 % overhead).",
            flags=("--every",), metavar="N", at_least=1,
        ),
    ] = None  # fmt: skip
    steps: Annotated[
        int | None,
        Option(
            "Optimizer steps after which the script is ended.", flags=("--steps",), metavar="N", at_least=1
        ),
    ] = None
    groups: Annotated[
        dict[str, str], Option("Groups of parameters, each a pattern over their names, as `groups.host`.")
    ] = dataclasses.field(default_factory=dict)
    detail: Annotated[int, Option("Steps recorded in full after a finding.", at_least=0)] = 20
    trackers: Annotated[
        tuple[str, ...],
        Option(
            "Tracker that gets the numbers, as tensorboard=logs.",
            flags=("--tracker",), metavar="NAME[=TARGET]",
            repeatable=True, parse=_texts,
        ),
    ] = ()  # fmt: skip
    max_disk: Annotated[
        int | None,
        Option(
            "Maximum size of the run directory, as 500M.",
            flags=("--max-disk",), metavar="SIZE", at_least=1, parse=_bytes,
        ),
    ] = None  # fmt: skip
    flush_interval: Annotated[
        float, Option("Seconds between two writes: what a kill can lose.", at_least=0.01)
    ] = 1.0
    resume: Annotated[
        bool, Option("Continue the run in the directory as a new attempt.", flags=("--resume",))
    ] = False
    step_offset: Annotated[
        int | None, Option("Number of the first step of a resumed run (default: continue its count).")
    ] = None
    share: Annotated[bool, Option("Let other users of the machine read the run directory.")] = False
    redact: Annotated[
        tuple[str, ...], Option("Regular expression of secrets to leave out of the run.", parse=_texts)
    ] = ()
    keep_arguments: Annotated[bool, Option("Store the script's arguments unredacted.")] = False
    thresholds: Annotated[
        dict[str, dict[str, float]], Option("Limits of rules that differ from their defaults, by monitor.")
    ] = dataclasses.field(default_factory=dict)
    on_finding: Annotated[
        Any,  # msgspec cannot check that it is an OnFinding
        Option(
            "Called on rank 0 with each new finding: on another thread while the run goes on, so that "
            "training does not wait for it, and at the end with the rest. What it raises is reported once."
        ),
    ] = None
    stop_on: Annotated[
        tuple[str, ...],
        Option(
            "Rules, or a severity, that end the run: exit code 79.",
            flags=("--stop-on",), metavar="RULE,...", parse=_names,
        ),
    ] = ()  # fmt: skip
    on_stop: Annotated[
        Any,  # msgspec cannot check that it is an OnFinding
        Option(
            "Called with that finding on the training thread before the run is ended: to save a checkpoint."
        ),
    ] = None
    quiet: Annotated[bool, Option("Print nothing unless backlight fails.", flags=("--quiet", "-q"))] = False
    of_monitors: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("on_finding", "on_stop"):
            if (value := getattr(self, name)) is not None and not callable(value):
                raise SettingError(name, f"expected a function of a finding, got {value!r}")
        check_patterns(self.redact)
        if not self.monitors:
            raise SettingError("monitors", "expected at least one name, as health")
        for name in self.trackers:
            chosen(name)
        for monitor, values in self.thresholds.items():
            if not declared(monitor):
                raise ValueError(f"thresholds.{monitor}: no monitor of that name has thresholds")
            merge_overrides(monitor, overrides=values)
        for part in self.of_monitors.values():
            part.check_requested(self.monitors)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """Check keywords; ValueError if a key is unknown or a value has the wrong type or range."""
        return cls._checked(values, "settings")

    @classmethod
    def read(cls, path: Path, values: Mapping[str, Any]) -> Settings:
        """Read a TOML file (ValueError if that fails); ``values`` from the command line win over the file."""
        try:
            table = tomllib.loads(read_text(path))
        except FileNotFoundError:
            raise ValueError(f"{path}: cannot be read: no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: cannot be read: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: not valid TOML: {error}") from None
        except RecursionError:
            raise ValueError(f"{path}: not valid TOML: it nests too deeply") from None
        return cls._checked({**table, **values}, str(path))

    @classmethod
    def _checked(cls, values: Mapping[str, Any], where: str) -> Settings:
        parts = {name: kind for name, kind in MONITOR_SETTINGS.items() if name in values}
        general = {name: value for name, value in values.items() if name not in parts}
        names = list(options_of(cls))
        refuse_unknown(general, names if set(general) <= set(names) else [*names, *MONITOR_SETTINGS], where)
        of_monitors = {name: _part(kind, values[name], where) for name, kind in parts.items()}
        settings = codec.convert(parsed(cls, general), cls, where)
        return dataclasses.replace(settings, of_monitors=of_monitors)

    def check_names(self) -> None:
        """Raise a SettingError for unknown monitors and rules, but where plug-ins may add some; no torch."""
        if not MONITORS.group_is_extended():
            check_monitors(self.monitors, built_in_monitors())
        if self.stop_on:
            self.stops_on()

    def stops_on(self) -> Callable[[Finding], bool]:
        """Return a predicate of findings by ``stop_on``; SettingError for what does not exist."""
        # With it comes numpy, which no script without torch may find loaded.
        from backlight.findings.evaluate import named_findings  # noqa: PLC0415

        is_named = named_findings(self.stop_on, "stop_on")
        for name in self.stop_on:
            if name in RULES and RULES[name].monitor not in self.monitors:
                needed = f"the rule {name!r} needs the monitor {RULES[name].monitor!r}"
                raise SettingError("stop_on", f"{needed}; add it to {{monitors}}")
        return is_named

    def overrides(self) -> dict[str, dict[str, float]]:
        """Return the thresholds that differ from their defaults, by monitor."""
        return {monitor: dict(values) for monitor, values in self.thresholds.items() if values}


def parsed(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for fields of ``kind``, as their options read them; ValueError where one cannot."""
    options = options_of(kind)
    return {name: _read(options[name], value) for name, value in values.items()}


def _read(option: Option, value: Any) -> Any:
    """Return a value as its option reads it; one of a type that it cannot read as it is, to be refused."""
    if option.parse is None:
        return value
    try:
        return option.parse(value)
    except (TypeError, AttributeError):
        return value


def _part(kind: type[MonitorSettings], value: Any, where: str) -> MonitorSettings:
    """Return the settings of a monitor, from a mapping or as they are."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise SettingError(kind.name, f"expected {kind.__name__} or a mapping, got {type(value).__name__}")
    names = list(options_of(kind))
    refuse_unknown(value, names, f"{where}: {kind.name}")
    return codec.convert(parsed(kind, value), kind, where, kind.name)


def given_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings among the arguments of a call; None stands for the default."""
    names = {*options_of(Settings), *MONITOR_SETTINGS}
    return {name: value for name, value in arguments.items() if name in names and value is not None}


def suggest_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with a TypeError that suggests a keyword in place of one that it does not have."""
    signature = explicit(inspect.signature(function))
    parameters = list(signature.parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in kwargs.items():
            if name not in parameters and name not in MONITOR_SETTINGS:
                ours = ELSEWHERE.get(name)
                hint = f"; here it is {ours}={value!r}" if ours else did_you_mean(name, parameters)
                raise TypeError(f"{function.__qualname__}() has no parameter {name!r}{hint}")
        return function(*args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]  # what completion and help read
    return call


def explicit(signature: inspect.Signature) -> inspect.Signature:
    """Return ``signature`` with each setting, and each monitor that has some, in place of ``**settings``."""
    stated_parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(stated_parameters) == len(signature.parameters):
        return signature
    stated = {parameter.name for parameter in stated_parameters}
    options = options_of(Settings)
    fields = [f for f in dataclasses.fields(Settings) if f.name in options and f.name not in stated]
    keywords = [
        *(
            (f.name, None if f.default is dataclasses.MISSING else f.default, type_of(Settings, f.name))
            for f in fields
        ),
        *((name, None, "Mapping[str, Any] | MonitorSettings | None") for name in built_in_settings()),
    ]
    more = (
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        for name, default, hint in keywords
    )
    return signature.replace(parameters=[*stated_parameters, *more])
