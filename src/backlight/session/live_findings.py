"""Evaluation of the rules while the run goes on: each new finding is delivered to all monitors once.

Rank 0 reads its own run directory, on a thread of its own; the training thread never waits for it. The rule
that reads a fact (a parameter in no optimizer) is evaluated as soon as that is recorded, the rule of an alarm
(a gradient that is not finite, a spike) as soon as its step is, all rules every few seconds, and less often
where that takes long.
"""

from __future__ import annotations

import atexit
import re
import threading
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Self

from backlight import clock
from backlight.findings.evaluate import Findings, as_reported, evaluate_rules, subjects_of
from backlight.monitor import Output, RunHandle
from backlight.monitors.correctness.model.facts import CONTRADICTION
from backlight.records import Finding, Made, Severity
from backlight.registry import RULES
from backlight.store.format.schema import REPORTED
from backlight.store.read.run import open_run
from backlight.threads import PAUSE_S, BackgroundThread

if TYPE_CHECKING:
    from backlight.session.settings import Settings

PERIOD_S = 5.0
"""Seconds between two evaluations of all rules at least, and before the first one."""

REST_FACTOR = 200.0
"""Times what an evaluation took that pass before the next one of its kind."""

END_TIMEOUT_S = 10.0
"""Seconds that the end of a run waits for an evaluation, and for what is done with its findings."""

FACT_PATH = f"events/{CONTRADICTION}"
"""Evidence of a finding on a fact of the training loop."""

_Key = tuple[str, str | None]


class NewFindings:
    """Separates new findings from those that were there before.

    An error, and what rests on a fact, counts at once; a warning or a note once two evaluations in a row
    report it, since more steps may refute it. A finding about several parameters may name another of them
    each time: it is known if an earlier one of that rule has evidence on its subject. Facts of one rule are
    told apart by their titles without numbers and names. One that has become more severe is new again.
    """

    def __init__(self) -> None:
        self._severities: dict[_Key, int] = {}
        self._unconfirmed: set[_Key] = set()

    def take(
        self, findings: Iterable[Finding], only: Collection[str] | None = None, facts: Collection[str] = ()
    ) -> list[Finding]:
        """Return what no earlier call returned, of the findings of all rules or ``only`` some.

        ``facts`` are the rules that read a fact.
        """
        fresh = self.rest(findings)
        confirmed = [
            f
            for f in fresh
            if f.severity is Severity.ERROR or f.rule in facts or _key(f) in self._unconfirmed
        ]
        others = {key for key in self._unconfirmed if only is not None and key[0] not in only}
        self._unconfirmed = others | {_key(f) for f in fresh}
        self.know(confirmed)
        return confirmed

    def rest(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings of the last evaluation that no earlier call returned."""
        return [f for f in findings if f.severity.rank > self._severities.get(_key(f), -1)]

    def know(self, findings: Iterable[Finding]) -> None:
        """Take findings as known, so that no later call returns them."""
        for finding in findings:
            for key in {_key(finding), *subjects_of(finding)}:
                self._severities[key] = max(finding.severity.rank, self._severities.get(key, -1))

    def knows(self, rule: str) -> bool:
        """Return whether a finding of a rule is known."""
        return any(key[0] == rule for key in self._severities)


def _key(finding: Finding) -> _Key:
    about = finding.subject.parameter or finding.subject.module
    if any(evidence.path == FACT_PATH for evidence in finding.evidence):
        return finding.rule, f"{about}: {re.sub(r'`[^`]*`|[0-9,.]+', '', finding.title)}"
    return finding.rule, about


class LiveFindings(Output):
    """Evaluates the rules while the run goes on; on rank 0 only."""

    name = "findings"
    records = "findings before the end of the run"

    def __init__(self) -> None:
        self._new = NewFindings()
        self._thread: BackgroundThread | None = None
        self._alarms: set[str] = set()
        self._facts: set[str] = set()
        self._kinds: set[tuple[str, str]] = set()
        self._due: deque[str] = deque()
        self._ended, self._is_late = threading.Event(), False
        self._evaluations = _Evaluations()

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor."""
        return cls()

    def attach(self, run: RunHandle) -> None:
        """Begin to wait for the first evaluation."""
        # numpy.median does it, and would hold up a step for as long: an import has no pause.
        import_module("numpy.ma")
        self._run = run
        self._ended.clear()
        self._is_late = False
        # What earlier attempts left is known; it is read at once, before this attempt has added to it.
        self._is_resumed = run.writer.attempt > 0
        self._all_from = 0.0 if self._is_resumed else clock.monotonic() + PERIOD_S
        self._alarms_from = 0.0
        run.account(self._evaluations)

    def detach(self, error: BaseException | None) -> None:
        """Start no more evaluations."""
        self._ended.set()
        if self._thread is not None and self._thread.is_alive():
            # A run that is not kept waits for nothing. What the interpreter ends under a thread that is in
            # native code, such as a database or a library that is being loaded, may crash the process.
            atexit.register(self._thread.join, END_TIMEOUT_S)

    def on_alarm(self, step: int, cause: str) -> None:
        """Note the rule that is to be evaluated once the step is on disk."""
        if not self._new.knows(cause):
            self._alarms.add(cause)

    def on_fact(self, rule: str, kind: str = "") -> None:
        """Note the rule that is to be evaluated once the fact is on disk, for each kind until it reports."""
        if (rule, kind) not in self._kinds or not self._new.knows(rule):
            self._kinds.add((rule, kind))
            self._due.append(rule)

    def on_flush(self) -> None:
        """Start an evaluation if one is due."""
        is_busy = self._thread is not None and self._thread.is_alive()
        if self._run.rank or self._ended.is_set() or is_busy:
            return
        now = clock.monotonic()
        due = {self._due.popleft() for _ in range(len(self._due))}
        self._facts |= due
        if now >= self._all_from:
            only = None
        elif due or (self._alarms and now >= self._alarms_from):
            only = frozenset(due | self._alarms)
        else:
            return
        self._alarms.clear()
        self._thread = BackgroundThread(target=self._evaluate, args=(only,), name="backlight-findings")
        self._thread.start()

    def on_all_stored(self, *, failed: bool) -> None:
        """Wait for an evaluation in progress."""
        if self._thread is not None:
            self._thread.join(END_TIMEOUT_S)
            atexit.unregister(self._thread.join)
            self._is_late = self._thread.is_alive()

    def on_run_end(self, findings: Sequence[Finding], *, failed: bool) -> None:
        """Deliver what was found only now, unless something still hangs on what was found before."""
        if self._is_late:
            reason = f"what is done with new findings did not come to an end within {END_TIMEOUT_S:.0f} s"
            self._run.notifier.warn("findings", reason)
        elif rest := self._new.rest(findings):
            self._run.deliver(rest)

    def _evaluate(self, only: Collection[str] | None) -> None:
        if self._ended.is_set():
            return  # between its start and this line
        begin = clock.thread_time()
        try:
            # Imports them, which is no part of the time from which the rest follows.
            RULES.of(self._run.settings.monitors, self._pause)
            imported = clock.thread_time()
            findings = self._evaluated(only)
        except Exception as error:  # noqa: BLE001 - a thread of its own: the training run goes on
            self._run.notifier.trouble(error, self.records, is_data=False)
            self._all_from = self._alarms_from = clock.monotonic() + PERIOD_S
            return
        ended, now = clock.thread_time(), clock.monotonic()
        self._evaluations.spent += ended - begin
        self._alarms_from = now + REST_FACTOR * (ended - imported)
        if only is None:
            self._all_from = max(self._alarms_from, now + PERIOD_S)
        if self._is_resumed:
            self._is_resumed = False
            self._new.know(findings)
        if self._ended.is_set():
            return  # what is new is delivered by the end
        new = self._new.take(findings, only, self._facts)
        if new:
            for finding in new:
                self._run.writer.event(self._run.clock.index, REPORTED, as_reported(finding))
            self._run.deliver(new)

    def _evaluated(self, only: Collection[str] | None) -> Findings:
        evaluate = partial(evaluate_rules, made=Made.LIVE, only=only, pause=self._pause)
        try:
            return evaluate(open_run(self._run.path))
        except SystemError:
            # Another thread has listed all objects (gc.get_objects), and holds a tuple that was being built.
            return evaluate(open_run(self._run.path))

    def _pause(self) -> None:
        self._ended.wait(PAUSE_S)


class _Evaluations:
    """Processor seconds of the evaluations, a cost of the watch."""

    spent = 0.0
