"""Evaluation of a stored run: every rule of its monitors, each with its limits. No torch."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from backlight.findings.limits import Limits, merge_overrides, with_overrides
from backlight.findings.phrases import shorten
from backlight.records import Finding, Made
from backlight.registry import DISPLAYS, RULES, warn
from backlight.store.export.arrow import to_pandas, to_polars
from backlight.store.export.tables import findings_table
from backlight.store.read.run import Frame, Run

FRAMES_KEPT = 6
"""Columns of series kept in memory while the rules run, since several rules read the same ones."""


class RuleFailedWarning(UserWarning):
    """A rule that raised: it is left out, the others are evaluated."""


class Findings(list[Finding]):
    """Findings in order: a list that a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return DISPLAYS["findings"](self)

    def to_pandas(self) -> Any:
        """Return one row per finding as ``pandas.DataFrame``."""
        return to_pandas(findings_table(lambda: self))

    def to_polars(self) -> Any:
        """Return one row per finding as ``polars.DataFrame``."""
        return to_polars(findings_table(lambda: self))


def evaluate_rules(
    run: Run,
    thresholds_by_monitor: Mapping[str, Mapping[str, Any]] | None = None,
    made: Made = Made.READER,
    only: Collection[str] | None = None,
) -> Findings:
    """Evaluate every rule of the monitors that watched the run.

    Parameters
    ----------
    run:
        A stored run. One that names no monitors is evaluated by the rules of all.
    thresholds_by_monitor:
        By monitor and name, limits to change beyond what the run recorded.
    made:
        Who evaluates: the watched process or a reader.
    only:
        Names of rules to evaluate; None for all.

    Returns
    -------
    Findings, the most severe first, then by step, each with the name, monitor and version of its rule and the
    limits that differ from the default. A rule that raises is named in a :class:`RuleFailedWarning`.

    Raises
    ------
    ThresholdError
        If ``thresholds_by_monitor`` holds an unknown name or a value that it cannot take.
    """
    given = dict(thresholds_by_monitor or {})
    overrides_of: dict[str, dict[str, float]] = {}
    remembered = _Remembering(run)
    findings: list[Finding] = []
    for name, rule in RULES.items():
        if only is not None and name not in only:
            continue
        if run.monitors and rule.monitor not in run.monitors:
            continue
        if not all(remembered.has(series) for series in rule.needs):
            continue
        if rule.monitor not in overrides_of:
            overrides_of[rule.monitor] = merge_overrides(
                rule.monitor, run.overrides.get(rule.monitor), given.get(rule.monitor)
            )
        limits = with_overrides(rule.limits or Limits, overrides_of[rule.monitor])
        changed = limits.changed()
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


def findings_of(run: Run, thresholds_by_monitor: Mapping[str, Mapping[str, Any]] | None = None) -> Findings:
    """Evaluate a run now and join the result with the findings that were stored while it ran.

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


def _subject(finding: Finding) -> tuple[str, str | None, str | None]:
    return finding.rule, finding.subject.parameter, finding.subject.module


def _same(fresh: Finding, stored: Finding, among: list[Finding]) -> bool:
    """Return whether a stored finding is about what a fresh one is about."""
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
