"""Judging a stored run: every rule of its monitors, with the thresholds that hold for it. No torch.

The thresholds of a monitor are found by convention: ``Thresholds`` in
``backlight.monitors.<monitor>.model.thresholds`` is a frozen dataclass whose
``override(mapping)`` returns a changed copy and refuses unknown names, and whose class method
``recorded(mapping)`` returns thresholds with what it had to leave out, in words.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from backlight.findings.wording import shorten
from backlight.records import Finding, Made
from backlight.registry import DISPLAYS, RULES, Rule, warn
from backlight.store.export import dataframes
from backlight.store.export.arrow import to_arrow
from backlight.store.export.tables import findings_table
from backlight.store.read.run import Frame, Run

FRAMES_KEPT = 6
"""Columns of series kept in memory while the rules run, since several rules read the same ones."""


class RuleFailedWarning(UserWarning):
    """A rule that raised: it is left out, the others are judged."""


class Findings(list[Finding]):
    """Findings in order: a list that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return DISPLAYS["findings"](self)

    def to_pandas(self) -> Any:
        """Return one row per finding as ``pandas.DataFrame``."""
        return dataframes.as_pandas(to_arrow(findings_table(lambda: self)))

    def to_polars(self) -> Any:
        """Return one row per finding as ``polars.DataFrame``."""
        return dataframes.as_polars(to_arrow(findings_table(lambda: self)))


def evaluate_rules(
    run: Run,
    thresholds_by_monitor: Mapping[str, Any] | None = None,
    made: Made = Made.READER,
    only: Collection[str] | None = None,
) -> Findings:
    """Evaluate every rule of the monitors that watched the run.

    Parameters
    ----------
    run:
        A stored run. One that names no monitors is judged by all of them.
    thresholds_by_monitor:
        By monitor, a mapping of thresholds to change beyond what the run recorded, or a whole ``Thresholds``
        that replaces both.
    made:
        Who judges: the watched process or a reader.
    only:
        Names of rules; the others are not asked. None asks all.

    Returns
    -------
    Findings, the most severe first, then by step, each with its rule's version and with those of its
    thresholds that differ from the default. A rule that raises is named in a :class:`RuleFailedWarning`.
    Thresholds that a caller may not set raise what the monitor's ``override`` raises.
    """
    given = dict(thresholds_by_monitor or {})
    limits_of: dict[str, Any] = {}
    remembered = _Remembering(run)
    findings: list[Finding] = []
    for name, rule in RULES.items():
        if only is not None and name not in only:
            continue
        if run.monitors and rule.monitor not in run.monitors:
            continue
        if not all(remembered.has(series) for series in rule.needs):
            continue
        if rule.monitor not in limits_of:
            limits_of[rule.monitor] = thresholds(
                rule.monitor, run.overrides.get(rule.monitor), given.get(rule.monitor)
            )
        limits = limits_of[rule.monitor]
        changed = _changed(rule, limits)
        try:
            for finding in rule.evaluate(remembered, limits):
                findings.append(
                    dataclasses.replace(
                        finding,
                        rule=rule.name,
                        monitor=rule.monitor,
                        version=rule.version,
                        title=shorten(finding.title),
                        made=made,
                        overridden=changed,
                    )
                )
        except Exception as error:  # noqa: BLE001 - one broken rule must not hide what the others found
            plug_in = RULES.origin(name)
            whose = f", which {plug_in.distribution} {plug_in.version} adds," if plug_in else ""
            warn(
                f"backlight: rule {name!r} of monitor {rule.monitor!r}{whose} failed on run "
                f"{run.name or run.path} and is left out, so that nothing is known of what it looks for: "
                f"{type(error).__name__}: {error}",
                RuleFailedWarning,
            )
    return in_order(findings)


def findings_of(run: Run, thresholds_by_monitor: Mapping[str, Any] | None = None) -> Findings:
    """Judge a run now and join the result with the findings that were stored while it ran.

    A stored finding of the same rule about the same parameter and module is replaced by the fresh one,
    which knows more of the run; the fresh one is then marked as made live. Where a rule says several
    things of one subject (spikes), the step tells them apart.
    """
    stored = run.stored_findings()
    fresh = evaluate_rules(run, thresholds_by_monitor)
    live = [f for f in stored if f.made is Made.LIVE]
    merged = [
        dataclasses.replace(f, made=Made.LIVE) if any(_same(f, other, fresh) for other in live) else f
        for f in fresh
    ]
    subjects = {_subject(f) for f in fresh}
    kept: dict[Any, Finding] = {}
    restated = {name for name, rule in RULES.items() if rule.restates and any(f.rule == name for f in fresh)}
    for finding in stored:  # of several stored ones about one subject the last knows most
        if _subject(finding) not in subjects and finding.rule not in restated:
            kept[_subject(finding)] = finding
    return in_order([*merged, *kept.values()])


def in_order(findings: Iterable[Finding]) -> Findings:
    """Sort findings: the most severe first, then by step, those without a step last."""

    def place(finding: Finding) -> tuple[int, float, str, str]:
        step = finding.subject.step
        return (
            -finding.severity.rank,
            float("inf") if step is None else step,
            finding.rule,
            finding.subject.parameter or "",
        )

    return Findings(sorted(findings, key=place))


def thresholds(monitor: str, recorded: Mapping[str, float] | None = None, given: Any = None) -> Any:
    """Return the thresholds of a monitor: defaults, changed by what the run recorded and by the caller.

    What a run recorded but this release does not know (a newer or older backlight wrote it) is named in
    a warning and left out; what the caller gives must be right. None for a monitor without thresholds.
    """
    if given is not None and not isinstance(given, Mapping):
        return given
    if importlib.util.find_spec(f"backlight.monitors.{monitor}") is None:
        return None
    name = f"backlight.monitors.{monitor}.model.thresholds"
    if importlib.util.find_spec(name) is None:
        return None
    module = importlib.import_module(name)
    limits, problems = module.Thresholds.recorded(recorded or {})
    for problem in problems:
        warnings.warn(
            f"backlight: the run recorded a threshold that is left out here: {problem}", stacklevel=3
        )
    return limits.override(given) if given else limits


def _changed(rule: Rule, limits: Any) -> dict[str, float]:
    """Return those thresholds of a rule that differ from the default."""
    if not dataclasses.is_dataclass(limits):
        return {}
    defaults = {f.name: f.default for f in dataclasses.fields(limits)}
    return {
        name: getattr(limits, name)
        for name in rule.thresholds
        if name in defaults and getattr(limits, name) != defaults[name]
    }


def _subject(finding: Finding) -> tuple[str, str | None, str | None]:
    return finding.rule, finding.subject.parameter, finding.subject.module


def _same(fresh: Finding, stored: Finding, among: list[Finding]) -> bool:
    """Tell whether a stored finding is about what a fresh one is about."""
    if _subject(fresh) != _subject(stored):
        return False
    alone = sum(_subject(f) == _subject(fresh) for f in among) == 1
    return alone or fresh.subject.step == stored.subject.step


class _Remembering:
    """A run that keeps what was just read: rules share columns, and reading one decodes every step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._frames: OrderedDict[Any, Frame] = OrderedDict()
        self._answers: dict[Any, Any] = {}

    def frame(self, series: str, column: str, **where: Any) -> Frame:
        key = (series, column, tuple(sorted(where.items())))
        if key not in self._frames:
            self._frames[key] = self._run.frame(series, column, **where)
            if len(self._frames) > FRAMES_KEPT:
                self._frames.popitem(last=False)
        self._frames.move_to_end(key)
        return self._frames[key]

    def _once(self, question: str, *arguments: Any, **where: Any) -> Any:
        key = (question, arguments, tuple(sorted(where.items())))
        if key not in self._answers:
            self._answers[key] = getattr(self._run, question)(*arguments, **where)
        return self._answers[key]

    def scalar(self, name: str, source: str = "backlight", **where: Any) -> Any:
        return self._once("scalar", name, source, **where)

    def has(self, series: str) -> Any:
        return self._once("has", series)

    def series_steps(self, series: str) -> Any:
        return self._once("series_steps", series)

    def parameters(self) -> Any:
        return self._once("parameters")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)
