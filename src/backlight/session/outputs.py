"""What a watch finds and shows while it goes on: new findings, lines on standard error, a cell, callbacks."""

from __future__ import annotations

import atexit
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self, TextIO

from backlight import clock
from backlight.findings.evaluate import Findings, as_reported, evaluate_rules, separate_hints, subjects_of
from backlight.findings.losses import loss_labels
from backlight.interrupts import is_interrupt, suppressed
from backlight.monitor import Output, RunHandle, StoredStep
from backlight.monitors.correctness.model.facts import CONTRADICTION
from backlight.notebook import notebook_shell
from backlight.records import Finding, Made, Severity
from backlight.registry import RULES
from backlight.session.run_directory import ended_run
from backlight.standard_error import write_text
from backlight.store.format.schema import REPORTED
from backlight.store.read.run import open_run
from backlight.text import as_typed, count, printable, visible
from backlight.threads import PAUSE_S, BackgroundThread

if TYPE_CHECKING:
    from backlight.session.settings import Settings


class CallbackOutput(Output):
    """Calls ``on_finding``; on rank 0 only. What it raises is reported once, and it is called again."""

    name = "on_finding"
    records = "calls of on_finding"

    def __init__(self, on_finding: Callable[[Finding], Any]) -> None:
        self._on_finding = on_finding

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor where the user gave a callback."""
        return None if settings.on_finding is None else cls(settings.on_finding)

    def attach(self, run: RunHandle) -> None:
        """Remember where errors are reported."""
        self._notifier = run.notifier

    def on_new_findings(self, findings: Sequence[Finding]) -> None:
        """Call it with each of them."""
        for finding in findings:
            try:
                self._on_finding(finding)
            except (Exception, SystemExit) as error:
                if is_interrupt(error):
                    raise
                reason = f"{type(error).__name__}: {error}"
                self._notifier.warn(
                    "on_finding", f"on_finding raised {reason}; it is called again with the next finding"
                )


MAX_LINES = 5
"""Lines about findings within :data:`WINDOW_S` at most; what exceeds them is counted."""

WINDOW_S = 60.0
"""Seconds in which :data:`MAX_LINES` may be printed."""


class PrintOutput(Output):
    """Prints one line for each rule that found something new; on rank 0 only.

    The lines go to the standard error that was there when the watch was entered: where the script redirects
    it later, it gets nothing that it did not write.
    """

    name = "print"
    records = "lines about new findings"

    def __init__(self) -> None:
        self._is_script = False
        self._printed: deque[float] = deque()
        self._left = 0
        self._ended = False

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor unless nothing is to be printed, or the cell of a notebook shows it."""
        return None if settings.quiet or notebook_shell() is not None else cls()

    def check_process(self, *, is_script: bool) -> None:
        """Remember whether a command runs the script."""
        self._is_script = is_script

    def attach(self, run: RunHandle) -> None:
        """Print where the run of a script is recorded."""
        self._ended = False
        self._stream, self._path = sys.stderr, run.path
        if self._is_script and not run.rank and self._stream is not None:
            path = visible(as_typed(run.path))
            write_text(f"backlight: recording in {path}; live page: backlight open {path}\n", self._stream)

    def detach(self, error: BaseException | None) -> None:
        """Print nothing more: all findings are printed at the end."""
        self._ended = True

    def on_new_findings(self, findings: Sequence[Finding]) -> None:
        """Print one line for each rule, the worst first, as long as there are not too many."""
        if self._ended:
            return
        shown = [f for f in separate_hints(findings)[0] if not RULES[f.rule].logged]
        for _, same in groupby(shown, key=lambda finding: (finding.severity, finding.rule)):
            first, *others = same
            if self._left or not self._has_room():
                self._left += 1 + len(others)
                continue
            more = f", and {len(others)} more" if others else ""
            self._print(f"{first.label}: {visible(first.title)} ({visible(first.rule)}{more})")
        self.on_flush()

    def on_flush(self) -> None:
        """Count what was not printed, once there is room for a line."""
        if self._left and self._has_room(MAX_LINES + 1):
            left, self._left = self._left, 0
            self._print(f"and {count(left, 'more finding')}: backlight findings {visible(self._path)}")

    def _has_room(self, most: int = MAX_LINES) -> bool:
        while self._printed and self._printed[0] < clock.monotonic() - WINDOW_S:
            self._printed.popleft()
        return len(self._printed) < most

    def _print(self, text: str) -> None:
        self._printed.append(clock.monotonic())
        print_line(text, self._stream)


def print_line(text: str, stream: TextIO | None) -> None:
    """Print a line above the progress bars of tqdm, and on a terminal never within a line of the script.

    A stream that is closed or broken gets nothing.
    """
    if stream is None:  # a process without one, for which print would take standard output
        return
    line = printable(f"backlight: {text}")
    bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with suppressed():  # the script may have put anything there
        if getattr(bars, "_instances", None):
            bars.write(line, file=stream)
            stream.flush()
        else:
            # The script may have printed a part of a line, which cannot be asked for.
            write_text(f"\n{line}\n" if stream.isatty() else f"{line}\n", stream)


CELL_PERIOD_S = 1.0
"""Seconds between two updates of the cell at least."""


class NotebookOutput(Output):
    """Shows the run below the cell that watches it; nothing is sent but display messages of the kernel."""

    name = "notebook"
    records = "the live output of the cell"

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor in a notebook, unless nothing is to be printed."""
        return None if settings.quiet or notebook_shell() is None else cls()

    def attach(self, run: RunHandle) -> None:
        """Show the run."""
        self._run = run
        self._scalars: dict[str, tuple[int, float]] = {}
        self._findings: tuple[Finding, ...] = ()
        self._state, self._shown = "running", clock.monotonic()
        self._display: Any = None
        self._cell, self._is_cleared, self._lacks = "", False, ""
        if run.rank:
            return
        import IPython.display  # noqa: PLC0415 - imported by the notebook

        make: Any = IPython.display.DisplayHandle
        self._publisher = notebook_shell().display_pub
        self._publisher.register_hook(self._follow)
        self._display = make()
        self._show()

    def detach(self, error: BaseException | None) -> None:
        """Note how the run ended."""
        if isinstance(error, KeyboardInterrupt):
            self._state = "interrupted"
        elif error is not None:
            self._state = f"failed with {type(error).__name__}"
        else:
            self._state = "finished"

    def on_step_stored(self, step: StoredStep) -> None:
        """Remember losses and norm of the newest step."""
        self._scalars.pop("losses", None)
        self.on_step_scalars(step.step, step.scalars)

    def on_step_scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Remember the losses of a step that is not recorded."""
        for name, value in values.items():
            if name in {"total_norm", "losses"} or name.partition("/")[0] == "loss":
                self._scalars[name] = step, value

    def on_flush(self) -> None:
        """Update the cell, now and then."""
        if clock.monotonic() - self._shown >= CELL_PERIOD_S:
            self._update()

    def on_new_findings(self, findings: Sequence[Finding]) -> None:
        """Show new findings at once."""
        self._findings = (*self._findings, *findings)
        self._update()

    def on_run_end(self, findings: Sequence[Finding], *, failed: bool) -> None:
        """Show the result."""
        from backlight.report.verdict import lacking  # noqa: PLC0415 - no script needs it

        self._findings = tuple(findings)
        self._lacks = lacking(ended_run(self._run.writer, failed=failed))
        if self._is_cleared:
            self._show()
        self._update()
        if self._display is not None:
            self._publisher.unregister_hook(self._follow)

    def _follow(self, message: dict[str, Any]) -> dict[str, Any]:
        """Show the run anew where the user's code has cleared its output, which drops all updates.

        A front end may wait with clearing until the next output. That has to be one of the user's code.
        """
        kind, cell = message["header"]["msg_type"], message["parent_header"].get("msg_id", "")
        if kind == "display_data":
            if message["content"]["transient"].get("display_id") == self._display.display_id:
                self._cell, self._is_cleared = cell, False
            elif self._is_cleared and cell == self._cell:
                with self._run.notifier.shield():
                    self._show()
        elif kind == "clear_output" and cell == self._cell:
            self._is_cleared = True
        return message

    def _show(self) -> None:
        self._display.display(self._content(), raw=True)

    def _update(self) -> None:
        self._shown = clock.monotonic()
        if self._display is not None:
            self._display.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        from backlight.report.notebook import live_cell  # noqa: PLC0415 - no script needs it

        steps = max(self._run.clock.done, 0)
        return live_cell(self._run.path, self._state, steps, self._figures(), self._findings, self._lacks)

    def _figures(self) -> dict[str, tuple[int, float]]:
        """Return losses and gradient norm by what they are called, each with its step."""
        scalars = dict(self._scalars)
        losses = scalars.pop("losses", None)
        labels = {"loss": "loss" if losses is None else f"sum of {losses[1]:.0f} losses"}
        loss_names = [name for name in scalars if name.startswith("loss/")]
        if len(loss_names) > 1:
            scope = self._run.scope
            kinds = [type(optimizer).__name__ for optimizer in scope.optimizers()]
            labels = dict(loss_labels(loss_names, scope.table.records, kinds))
        labels["total_norm"] = "gradient norm"
        return {label: scalars[name] for name, label in labels.items() if name in scalars}


# Evaluation of the rules while the run goes on: each new finding is delivered to all monitors once.
#
# Rank 0 reads its run directory, on a thread of its own; the training thread never waits for it. The rule
# that reads a fact (a parameter in no optimizer) is evaluated as soon as that is recorded, the rule of an
# alarm (a gradient that is not finite, a spike) as soon as its step is, all rules every few seconds, and
# less often where that takes long.

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
        except Exception as error:
            if is_interrupt(error):
                raise
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
