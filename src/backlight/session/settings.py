"""The settings of a session: from keywords, from a TOML file, checked in one place.

A file looks like this; every key is optional::

    monitors = ["health", "steptime"]
    every = 10
    [groups]
    host = "encoder.*"
    [thresholds.health]
    vanishing_rms = 1e-9
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypedDict, TypeVar, get_type_hints

from backlight import codec
from backlight.findings.limits import declared, merge_overrides
from backlight.monitor import MONITORS, built_in_monitors, check_monitors
from backlight.monitors.grokking.model.measures import Measures
from backlight.monitors.spectra.model.options import SpectraOptions
from backlight.monitors.stalls.trace_monitor import traced_kinds
from backlight.records import Finding
from backlight.redaction import check_patterns
from backlight.registry import RULES
from backlight.session.trackers.base import chosen
from backlight.setting_error import SettingError
from backlight.text import did_you_mean
from backlight.untrusted_files import read_text

P = ParamSpec("P")
R = TypeVar("R")

OnFinding = Callable[[Finding], Any]
"""Called with a finding; what it returns is ignored."""

DEFAULT_MONITORS = ("health", "correctness", "stalls", "steptime")

FOLDERS = ("out", "output", "outdir", "path", "dir", "folder", "log_dir", "logdir", "run_dir", "save_dir")
INTERVALS = ("log_freq", "log_every", "log_every_n_steps", "log_interval", "logging_steps")
ELSEWHERE = {**dict.fromkeys(FOLDERS, "run"), **dict.fromkeys(INTERVALS, "every")}
"""Keywords of other libraries, and of our own command line, with what they are called here."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a session measures and keeps.

    Attributes
    ----------
    monitors:
        Monitors that measure.
    every:
        Record every Nth step; None lets the budget of 1 % of the time decide.
    steps:
        End the run cleanly after so many steps; None for never.
    groups:
        Patterns over parameter names, by the name of the group.
    histogram:
        Record exponent histograms at every recorded step.
    exact_updates:
        Measure updates over all weights, at every Nth recorded step; None for a sample at every 4th.
    per_backward:
        Also record the gradients after every single backward of an accumulation.
    noise_scale:
        Measure the noise scale of the first microbatch of every Nth step; 0 for steps that become rarer as
        the run goes on, None for none.
    decompose:
        Steps whose gradient is decomposed by samples, counted as the run counts them; on an accelerator the
        training process computes their forward passes once more.
    detail:
        Steps recorded in full after a finding.
    stall:
        Seconds after which a step that does not move is looked at; None to follow the run.
    trace:
        What to trace line by line: gradients, modules, buckets; without it the value of BACKLIGHT_TRACE.
    max_disk:
        Bytes that the run may take; None for no limit.
    flush_interval:
        Seconds between two writes; what a kill can lose.
    resume:
        Continue the run that the directory holds, as a new attempt; without it such a directory is refused.
    step_offset:
        Number of the first step, for a resumed run; None continues the run.
    share:
        Open a new run directory to other users, as far as the umask permits; else only its owner enters it.
    redact:
        Regular expressions of secrets: values of arguments whose name matches, and matching parts of others,
        are not stored, besides those that :mod:`backlight.redaction` recognises.
    keep_arguments:
        Store the arguments of the script as they are, secrets included.
    thresholds:
        Overridden thresholds by monitor and name.
    trackers:
        Trackers that get the numbers of the live run: ``NAME`` or ``NAME=TARGET`` of
        :data:`backlight.session.trackers.base.TRACKERS`.
    on_finding:
        Called on rank 0 with each new :class:`backlight.Finding`: during the run on another thread, so that
        training does not wait for it, at the end with the rest. What it raises is reported once.
    stop_on:
        Rules, or a severity and those above it, whose first error or warning ends the run before the next
        step, with exit code 79.
    on_stop:
        Called with that finding before the run is ended, on the training thread: to save a checkpoint.
    quiet:
        Print neither where the run is recorded nor its findings, only what backlight fails to record.
    measures:
        What the monitor grokking measures, and how often.
    spectra:
        What the monitor spectra catches, and how often; fields of
        :class:`backlight.monitors.spectra.model.options.SpectraOptions`.
    """

    monitors: tuple[str, ...] = DEFAULT_MONITORS
    every: int | None = None
    steps: int | None = None
    groups: dict[str, str] = dataclasses.field(default_factory=dict)
    histogram: bool = False
    exact_updates: int | None = None
    per_backward: bool = False
    noise_scale: int | None = None
    decompose: tuple[int, ...] = ()
    detail: int = 20
    stall: float | None = None
    trace: tuple[str, ...] = ()
    max_disk: int | None = None
    flush_interval: float = 1.0
    resume: bool = False
    step_offset: int | None = None
    share: bool = False
    redact: tuple[str, ...] = ()
    keep_arguments: bool = False
    thresholds: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    trackers: tuple[str, ...] = ()
    on_finding: OnFinding | None = None
    stop_on: tuple[str, ...] = ()
    on_stop: OnFinding | None = None
    quiet: bool = False
    measures: Measures = dataclasses.field(default_factory=Measures)
    spectra: SpectraOptions = dataclasses.field(default_factory=SpectraOptions)

    def __post_init__(self) -> None:
        for name, least in (
            ("every", 1),
            ("steps", 1),
            ("exact_updates", 1),
            ("noise_scale", 0),
            ("detail", 0),
            ("max_disk", 1),
            ("flush_interval", 0.01),
            ("stall", 0.5),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise SettingError(name, f"{value}: expected {least} or more")
        if self.decompose and min(self.decompose) < 0:
            raise SettingError("decompose", f"{min(self.decompose)}: expected numbers of steps from 0 on")
        if self.decompose and "health" not in self.monitors:
            raise SettingError("decompose", "needs the monitor health, which decomposes steps, in {monitors}")
        check_patterns(self.redact)
        if not self.monitors:
            raise SettingError("monitors", "expected at least one name, as health")
        for given in self.trackers:
            chosen(given)
        for monitor, values in self.thresholds.items():
            if not declared(monitor):
                raise ValueError(f"thresholds.{monitor}: no monitor of that name has thresholds")
            merge_overrides(monitor, given=values)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Settings:
        """Check keywords; ValueError if a key is unknown or a value has the wrong type or range."""
        return cls._checked(values, "settings")

    @classmethod
    def read(cls, path: Path, values: Mapping[str, Any]) -> Settings:
        """Read a TOML file (ValueError if that fails); ``values`` from the command line win over the file."""
        try:
            found = tomllib.loads(read_text(path))
        except FileNotFoundError:
            raise ValueError(f"{path}: cannot be read: no such file") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: cannot be read: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{path}: not valid TOML: {error}") from None
        except RecursionError:
            raise ValueError(f"{path}: not valid TOML: it nests too deeply") from None
        return cls._checked({**found, **values}, str(path))

    @classmethod
    def _checked(cls, values: Mapping[str, Any], where: str) -> Settings:
        known = [f.name for f in dataclasses.fields(cls)]
        _refuse_unknown(values, known, where)
        prepared = dict(values)
        for key in ("monitors", "stop_on"):
            if isinstance(prepared.get(key), str):
                prepared[key] = tuple(name.strip() for name in prepared[key].split(",") if name.strip())
        if isinstance(prepared.get("decompose"), int):
            prepared["decompose"] = (prepared["decompose"],)
        for key in ("trackers", "redact"):
            if isinstance(prepared.get(key), str):
                prepared[key] = (prepared[key],)
        _known_fields(prepared.get("measures"), Measures, f"{where}: measures")
        _known_fields(prepared.get("spectra"), SpectraOptions, f"{where}: spectra")
        prepared["trace"] = traced_kinds(prepared.get("trace"))
        return codec.convert(prepared, cls, where)

    def check_names(self) -> None:
        """Refuse unknown monitors and rules, without torch: before a script starts.

        Raises
        ------
        SettingError
            If a name is unknown; a monitor that only a plug-in may add is left to the watch.
        """
        if not MONITORS.group_is_extended():
            check_monitors(self.monitors, built_in_monitors())
        if self.stop_on:
            self.stops_on()

    def stops_on(self) -> Callable[[Finding], bool]:
        """Return a predicate that is true of findings that ``stop_on`` names.

        Raises
        ------
        SettingError
            If a name is unknown, or its rule needs a monitor that is not requested.
        """
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


class SettingsKeywords(TypedDict, total=False):
    """The fields of :class:`Settings` as keywords of a call; None stands for the default."""

    monitors: str | Sequence[str]
    every: int | None
    steps: int | None
    groups: Mapping[str, str] | None
    histogram: bool
    exact_updates: int | None
    per_backward: bool
    noise_scale: int | None
    decompose: int | Sequence[int]
    detail: int
    stall: float | None
    trace: str | Sequence[str] | None
    max_disk: int | None
    flush_interval: float
    resume: bool
    step_offset: int | None
    share: bool
    redact: str | Sequence[str]
    keep_arguments: bool
    thresholds: Mapping[str, Mapping[str, float]] | None
    trackers: str | Sequence[str]
    on_finding: OnFinding | None
    stop_on: str | Sequence[str]
    on_stop: OnFinding | None
    quiet: bool
    measures: Mapping[str, Any] | Measures | None
    spectra: Mapping[str, Any] | SpectraOptions | None


def given_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings among the arguments of a call; None stands for the default."""
    names = [field.name for field in dataclasses.fields(Settings)]
    return {name: arguments[name] for name in names if arguments.get(name) is not None}


def suggest_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with a TypeError that suggests a keyword in place of one that it does not have."""
    signature = explicit(inspect.signature(function))
    known = list(signature.parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in kwargs.items():
            if name not in known:
                ours = ELSEWHERE.get(name)
                hint = f"; here it is {ours}={value!r}" if ours else did_you_mean(name, known)
                raise TypeError(f"{function.__qualname__}() has no parameter {name!r}{hint}")
        return function(*args, **kwargs)

    call.__signature__ = signature  # type: ignore[attr-defined]  # what completion and help read
    return call


def explicit(signature: inspect.Signature) -> inspect.Signature:
    """Return ``signature`` with each field of the settings in place of ``**settings``."""
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(own) == len(signature.parameters):
        return signature
    types = get_type_hints(SettingsKeywords)
    fields = (
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if field.default is dataclasses.MISSING else field.default,
            annotation=types[field.name],
        )
        for field in dataclasses.fields(Settings)
    )
    return signature.replace(parameters=[*own, *fields])


def _refuse_unknown(values: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in values:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}{did_you_mean(key, known)}")


def _known_fields(values: Any, kind: type[Measures | SpectraOptions], where: str) -> None:
    if isinstance(values, Mapping):
        _refuse_unknown(values, [f.name for f in dataclasses.fields(kind)], where)
