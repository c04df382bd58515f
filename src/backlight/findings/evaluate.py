"""Evaluation of a stored run: every rule of its monitors, each with its limits. No torch."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backlight.findings.accepted import mark_accepted
from backlight.findings.limits import Limits, merge_overrides, with_overrides
from backlight.findings.phrases import shorten
from backlight.generators import kept_random
from backlight.interrupts import is_interrupt
from backlight.records import Evidence, Finding, FindingKind, Made, Severity
from backlight.registry import DISPLAYS, RULES, warn
from backlight.settings import SettingError
from backlight.store.errors import RunFormatError
from backlight.store.format.schema import REPORTED, STATIC_READING
from backlight.store.read.run import Run
from backlight.text import count, did_you_mean, visible

if TYPE_CHECKING:
    from backlight.store.tables import StoredTable


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """A finding as it was reported, at which step, and why it is withdrawn."""

    severity: Severity
    rule: str
    title: str
    step: int
    reason: str

    @property
    def text(self) -> str:
        """The whole as one sentence."""
        return (
            f"Withdrawn: {self.severity.value} of {visible(self.rule)}, reported at step {self.step:,}: "
            f"{visible(self.title)}. {visible(self.reason)}"
        )


def as_reported(finding: Finding) -> dict[str, Any]:
    """Return the payload of the event about a finding that is reported while the run goes on."""
    return {
        "rule": finding.rule,
        "severity": finding.severity.value,
        "title": finding.title,
        "names": sorted(name for _, name in subjects_of(finding) if name),
        "refuted_if": finding.refuted_if,
    }


def subjects_of(finding: Finding) -> set[tuple[str, str | None]]:
    """Return rule and name of all that a finding is about: it may name another of them first each time."""
    names = (evidence.path.rpartition("/")[2] for evidence in finding.evidence)
    about = finding.subject.parameter or finding.subject.module
    return {(finding.rule, about), *((finding.rule, name) for name in names)}


def withdrawn(run: Run, findings: Sequence[Finding]) -> list[Withdrawn]:
    """Return what the newest attempt reported as an error or a warning, and ``findings`` do not contain."""
    last = run.attempts[-1].index if run.attempts else 0
    events = [event for event in run.events(REPORTED) if event.attempt == last]
    return [
        Withdrawn(severity, str(event.payload["rule"]), str(event.payload["title"]), event.step or 0, reason)
        for event in events
        if (severity := Severity(event.payload["severity"])) is not Severity.INFO
        and (reason := _reason(event.payload, severity, findings, run.last_step() + 1))
    ]


def _reason(reported: Mapping[str, Any], severity: Severity, findings: Sequence[Finding], steps: int) -> str:
    """Return why a reported finding is withdrawn; empty where it holds."""
    alike = list(_alike(reported, findings))
    if not alike:
        return (
            f"Over all {count(steps, 'step')} the rule does not find it. It is refuted if "
            f"{str(reported['refuted_if']).rstrip('.')}."
        )
    if any(finding.accepted for finding in alike):
        return ""
    worst = max((finding.severity for finding in alike), key=lambda finding: finding.rank)
    return "" if worst.rank >= severity.rank else f"Over all {count(steps, 'step')} it is: {worst.value}."


def _alike(reported: Mapping[str, Any], findings: Sequence[Finding]) -> Iterator[Finding]:
    names = set(reported["names"])
    for finding in findings:
        is_alike = finding.rule == reported["rule"] and (
            # A statistic names the worst parameter, which may be another one by now.
            not names
            or finding.kind is FindingKind.STATISTIC
            or bool(names & {name for _, name in subjects_of(finding)})
        )
        if is_alike or reported["rule"] in finding.merged:
            yield finding


class FindingNameError(SettingError):
    """A name, in ``--fail-on`` for instance, that is neither a severity nor a rule."""


class RuleFailedWarning(UserWarning):
    """A rule that raised: it is left out, the others are evaluated."""


class Findings(list[Finding]):
    """Findings of ``run`` in order: a list that prints as ``backlight findings`` does.

    A notebook shows it as a table. Copied or pickled it is a plain list, without the run.
    """

    def __init__(self, findings: Iterable[Finding], run: Run) -> None:
        super().__init__(findings)
        self.run = run

    def __str__(self) -> str:
        with kept_random():
            return DISPLAYS["findings as text"](self)

    def _repr_html_(self) -> str:
        return DISPLAYS["findings"](self)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def to_pandas(self) -> Any:
        """Return one row per finding as ``pandas.DataFrame``."""
        from backlight.store.export import to_pandas  # noqa: PLC0415 - as below

        return to_pandas(self._table())

    def to_polars(self) -> Any:
        """Return one row per finding as ``polars.DataFrame``."""
        from backlight.store.export import to_polars  # noqa: PLC0415 - as below

        return to_polars(self._table())

    def _table(self) -> StoredTable:
        from backlight.store.tables import findings_table  # noqa: PLC0415 - no watched run needs it

        return findings_table(lambda: self)


class NoFindings(Findings):
    """No findings, because nothing was recorded: it prints the reason."""

    def __init__(self, reason: str) -> None:
        list.__init__(self)
        self._reason = reason

    def __str__(self) -> str:
        return self._reason

    def _repr_html_(self) -> str:
        return f"<div>{html.escape(self._reason)}</div>"


def evaluate_rules(
    run: Run,
    thresholds_by_monitor: Mapping[str, Mapping[str, Any]] | None = None,
    made: Made = Made.READER,
    only: Collection[str] | None = None,
    pause: Callable[[], object] = bool,
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
    pause:
        Called before each rule.

    Returns
    -------
    Findings in the order of :func:`in_order`, those of one cause merged, each with the name, monitor and
    version of its rule and the limits that differ from the default. A rule that raises is named in a
    :class:`RuleFailedWarning`.

    Raises
    ------
    ThresholdError
        If ``thresholds_by_monitor`` holds an unknown name or a value that it cannot take.
    """
    thresholds = thresholds_by_monitor or {}
    overrides_of: dict[str, dict[str, float]] = {}
    findings: list[Finding] = []
    for name, rule in RULES.of(run.monitors):
        if (
            (only is not None and name not in only)
            or (run.monitors and rule.monitor not in run.monitors)
            or not all(run.has(series) for series in rule.needs)
        ):
            continue
        if rule.monitor not in overrides_of:
            overrides_of[rule.monitor] = merge_overrides(
                rule.monitor, run.overrides.get(rule.monitor), thresholds.get(rule.monitor)
            )
        pause()
        limits = with_overrides(rule.limits or Limits, overrides_of[rule.monitor])
        changed = limits.changed()
        try:
            for finding in rule.evaluate(run, limits):
                is_statistic = rule.is_statistic and not finding.is_hint
                kind = FindingKind.STATISTIC if is_statistic else finding.kind
                of_rule = dataclasses.replace(
                    finding, rule=rule.name, monitor=rule.monitor, version=rule.version, made=made, kind=kind
                )
                title = shorten(finding.title)
                findings.append(dataclasses.replace(of_rule, title=title, overridden=changed))
        except Exception as error:
            if is_interrupt(error):
                raise
            if isinstance(error, RunFormatError) and made is Made.READER:
                raise  # the run is damaged, not the rule
            plug_in = RULES.origin(name)
            whose = f", which {plug_in.distribution} {plug_in.version} adds," if plug_in else ""
            warn(
                f"backlight: rule {name!r} of monitor {rule.monitor!r}{whose} failed on run "
                f"{run.name or run.path} and is left out, so that what it checks is not covered: "
                f"{type(error).__name__}: {error}",
                RuleFailedWarning,
            )
    return Findings(merge_causes(_with_read_lines(findings, run)), run)


def _with_read_lines(findings: Sequence[Finding], run: Run) -> list[Finding]:
    """Give each finding the line of its script that looked like it before the run, where there is one.

    A finding that names a line keeps it.
    """
    last = run.attempts[-1].index if run.attempts else 0
    places: dict[str, list[str]] = {}
    for event in run.events(STATIC_READING):
        if event.attempt == last:
            for rule in event.payload["rules"]:
                places.setdefault(rule, []).append(str(event.payload["place"]))
    lined = []
    for finding in findings:
        of_rule = list(dict.fromkeys(places.get(finding.rule, ())))
        evidence = tuple(Evidence(f"events/{STATIC_READING}", value=place) for place in of_rule)
        line = of_rule[0] if len(of_rule) == 1 and not finding.is_hint else None
        subject = dataclasses.replace(finding.subject, line=finding.subject.line or line)
        lined.append(dataclasses.replace(finding, subject=subject, evidence=finding.evidence + evidence))
    return lined if places else list(findings)


def findings_of(
    run: Run,
    thresholds_by_monitor: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    fresh: Sequence[Finding] | None = None,
) -> Findings:
    """Return the findings of a run: of an evaluation now, and those that were stored while it ran.

    ``fresh`` are those of an evaluation at the end of the run, which then needs no other.
    A stored finding of the same rule about the same parameter and module is replaced by the fresh one,
    which knows more of the run; the fresh one is then marked as made live. Where a rule says several
    things of one subject (spikes), the step tells them apart. What the project accepts is a note.
    """
    stored = run.stored_findings()
    if fresh is None:
        fresh = evaluate_rules(run, thresholds_by_monitor)
    live = [f for f in stored if f.made is Made.LIVE]
    merged = [
        dataclasses.replace(f, made=Made.LIVE) if any(_same(f, other, fresh) for other in live) else f
        for f in fresh
    ]
    subjects = {_subject(f) for f in fresh}
    kept: dict[Any, Finding] = {}
    restated = {finding.rule for finding in fresh if RULES[finding.rule].restates}
    for finding in stored:  # of several stored ones about one subject the last knows most
        if _subject(finding) not in subjects and finding.rule not in restated:
            kept[_subject(finding)] = finding
    return Findings(in_order(mark_accepted(merge_causes([*merged, *kept.values()]))), run)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Sort findings: the most severe first, of those the facts, then by step, those without a step last."""

    def place(finding: Finding) -> tuple[int, bool, float, str, str]:
        step = math.inf if finding.subject.step is None else finding.subject.step
        is_statistic = finding.kind is FindingKind.STATISTIC
        return -finding.severity.rank, is_statistic, step, finding.rule, finding.subject.parameter or ""

    return sorted(findings, key=place)


def separate_hints(findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Return the findings without hints, and the hints, each in the order of :func:`in_order`."""
    ordered = in_order(findings)
    return [f for f in ordered if not f.is_hint], [f for f in ordered if f.is_hint]


def merge_causes(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings into those that name their cause, and return what is left, in order.

    The cause is that of a rule in ``explained_by``, no hint, explained by none itself, and does not begin
    later; it begins earlier than a fact that it explains. Its detail names what it explains, and its severity
    is that of the worst.
    """
    ordered = in_order(findings)
    causes = [_causes(finding, ordered) for finding in ordered]
    explained: dict[int, list[Finding]] = {}
    for finding, positions in zip(ordered, causes, strict=True):
        root = next((position for position in positions if not causes[position]), -1)
        explained.setdefault(root, []).append(finding)
    unexplained = explained.pop(-1, [])
    return in_order(_with_explained(f, explained.get(ordered.index(f), ())) for f in unexplained)


def _causes(finding: Finding, among: Sequence[Finding]) -> list[int]:
    """Return the positions of the findings that may explain another."""
    rules = RULES[finding.rule].explained_by if finding.rule in RULES else ()
    step = math.inf if finding.subject.step is None else finding.subject.step
    is_statistic = finding.kind is not FindingKind.FACT
    return [
        position
        for position, other in enumerate(among)
        if other.rule in rules
        and not other.is_hint
        and ((begin := other.subject.step or 0) < step or (begin == step and is_statistic))
    ]


def _with_explained(cause: Finding, explained: Sequence[Finding]) -> Finding:
    """Return a finding that names what it explains; hints are absorbed without a word."""
    texts = [f"{finding.title} ({finding.rule})" for finding in explained if not finding.is_hint]
    named = "; ".join(text for text in dict.fromkeys(texts) if text not in cause.detail)
    return dataclasses.replace(
        cause,
        severity=max((cause.severity, *(finding.severity for finding in explained)), key=lambda s: s.rank),
        detail=f"{cause.detail} This explains: {named}." if named else cause.detail,
        merged=tuple(dict.fromkeys((*cause.merged, *(finding.rule for finding in explained)))),
    )


def _subject(finding: Finding) -> tuple[str, str | None, str | None]:
    return finding.rule, finding.subject.parameter, finding.subject.module


def _same(fresh: Finding, stored: Finding, among: Sequence[Finding]) -> bool:
    """Return whether a stored finding is about what a fresh one is about."""
    if _subject(fresh) != _subject(stored):
        return False
    alone = sum(_subject(f) == _subject(fresh) for f in among) == 1
    return alone or fresh.subject.step == stored.subject.step


def parse_fail_on(text: str) -> Callable[[Finding], bool]:
    """Return a predicate that is true of findings that ``text`` names, the value of ``--fail-on``.

    Names are separated by commas; see :func:`named_findings`.
    """
    return named_findings([name.strip() for name in text.split(",") if name.strip()], "--fail-on")


def named_findings(names: Collection[str], option: str) -> Callable[[Finding], bool]:
    """Return a predicate that is true of findings that ``names`` name; ``option`` is where they come from.

    They are severities (``"warning"``: that severity and above), rules, or both. What is accepted is named
    by none.

    Raises
    ------
    FindingNameError
        If a name is unknown, or there is none.
    """
    choices = [*(severity.value for severity in Severity), *RULES]
    if not names:
        example = "such as 'warning' or 'spike'"
        raise FindingNameError(option, f"expected a severity or names of rules, {example}")
    for name in names:
        if name not in choices:
            problem = f"no severity or rule is called {name!r}{did_you_mean(name, choices)}"
            raise FindingNameError(option, problem)
    ranks = [severity.rank for severity in Severity if severity.value in names]
    return lambda finding: (
        not finding.accepted
        and (finding.rule in names or any(finding.severity.rank >= rank for rank in ranks))
    )
