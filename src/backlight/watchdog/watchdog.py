"""The watchdog of one machine: observes its ranks and reports stalls. No torch."""

from __future__ import annotations

import contextlib
import select
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from backlight import clock
from backlight.records import DiagnosisKind
from backlight.store.format.schema import ENDED
from backlight.watchdog import reports, runtime_dir
from backlight.watchdog.cause import MIN_PAUSE_S, cause_of, name_function, named_cause
from backlight.watchdog.decision import decide, decide_calls, open_to_unobserved
from backlight.watchdog.diagnosis import Cause, Decision
from backlight.watchdog.observation import Observation, name_reductions, summarize_stacks
from backlight.watchdog.observer import RankObserver
from backlight.watchdog.peers import ANSWERED, DIAGNOSED, LEFT, HostObservation, Peers
from backlight.watchdog.reports import RankReports, ReportLog
from backlight.watchdog.stacks import is_compiling
from backlight.watchdog.timeouts import END_TIMEOUT_S, EXEMPT_PHASES, StallLimits
from backlight.watchdog.words import end_text

if TYPE_CHECKING:
    from backlight.store.write.watchdog import WatchdogWriter

POLL_S = 0.25
CLOSE_POLL_S = 0.15

FIRST_RANK_TIMEOUT_S = 120.0
"""Time that the watchdog waits for the first rank."""

SAMPLES_TIMEOUT_S = 1.5
"""Time beyond a stall timeout in which missing stack samples are waited for."""

PEER_TIMEOUT_SHARE = 0.5
"""Share of the stall timeout that applies to a rank for which others wait."""

SETTLE_S = 1.0
"""Time after the first exception in which other ranks fail because of it."""

CLOSE_LOOK_S = 1.3
"""Duration of a close examination of ranks that were not suspicious."""

SUMMARY_TIMEOUT_S = 10.0
"""That time where it prints the summary of the run: the rules and the report have to be imported."""

MAX_EVIDENCE = 8
"""Ranks of which evidence is kept where no single one is the cause."""


class Watchdog:
    """Observes the ranks of one runtime directory."""

    def __init__(
        self,
        directory: Path,
        run: Path,
        attempt_directory: Path,
        limits: StallLimits,
        step_offset: int = 0,
        host: str = "",
        *,
        prints_summary: bool = False,
    ) -> None:
        self._directory = directory
        self._limits = limits
        self._step_offset = step_offset
        self._paths = run, attempt_directory
        self._host, self._prints_summary = host, prints_summary
        self.end_timeout_s = END_TIMEOUT_S
        self._ranks: dict[int, RankObserver] = {}
        self._log = ReportLog()
        self._started = clock.monotonic()
        self._mismatch: Decision | None = None  # as read once, before a second reading confirms it

    @cached_property
    def _writer(self) -> WatchdogWriter:
        # Its imports take half of the start, and few runs stall.
        from backlight.store.write.watchdog import WatchdogWriter  # noqa: PLC0415

        return WatchdogWriter(*self._paths, self._host)

    @cached_property
    def _peers(self) -> Peers:
        return Peers(self._writer)

    def run(self) -> None:
        """Watch until every rank has ended."""
        while self.poll():
            descriptors = [r.pidfd for r in self._ranks.values() if r.pidfd >= 0 and r.end is None]
            is_close = any(r.overdue_s is not None or r.is_examined_closely for r in self._ranks.values())
            with contextlib.suppress(OSError, ValueError):
                select.select(descriptors, [], [], CLOSE_POLL_S if is_close else POLL_S)
        if self._has_peers():
            self._peers.publish(LEFT, self._observe_host(None))  # no answer can come from here any more
        if "_writer" in vars(self):
            self._writer.close()
        first = self._ranks.get(0)
        if self._prints_summary and first is not None and first.died and first.was_terminated:
            self._print_summary()
        runtime_dir.remove(self._directory)
        runtime_dir.remove_abandoned()

    def pids(self) -> list[int]:
        """Return the processes of the ranks that are known so far."""
        return [r.state.pid for r in self._ranks.values() if r.state is not None]

    def poll(self) -> bool:
        """Observe every rank once; return whether there is more to watch."""
        for rank in runtime_dir.ranks_in(self._directory):
            if rank not in self._ranks:
                self._ranks[rank] = RankObserver(self._directory, rank, self._limits)
                self._log.ranks[rank] = RankReports()
        for observer in self._ranks.values():
            observer.poll()
        self._report_resolutions()
        self._report_mismatch()
        for observer in self._ranks.values():
            if observer.start_wait.is_due and not observer.is_done:
                self._report_start(observer)
        due = [r for r in self._ranks.values() if self._is_due(r)]
        if due:
            self._report_stall(due)
        elif self._has_peers():
            timeout_s = self._peers.question_timeout_s()
            if timeout_s is not None:
                self._examine_closely()
                self._peers.publish(ANSWERED, self._observe_host(PEER_TIMEOUT_SHARE * timeout_s))
        if not self._ranks:
            return clock.monotonic() - self._started < FIRST_RANK_TIMEOUT_S and self._directory.exists()
        return self._directory.exists() and not self._all_done()

    def _print_summary(self) -> None:
        """Print what the script would have printed at its end; a signal has ended it before that."""
        self.end_timeout_s = SUMMARY_TIMEOUT_S
        # Its imports take longer than all others, and few runs end so.
        from backlight.report.terminal import summary_text  # noqa: PLC0415

        run, here = self._paths[0], Path.cwd()
        with contextlib.suppress(Exception):
            sys.stderr.write(summary_text(run.relative_to(here) if run.is_relative_to(here) else run))
            sys.stderr.flush()

    # Conditions

    def _all_done(self) -> bool:
        return all(r.is_done for r in self._ranks.values())

    def _world_size(self) -> int:
        return max((r.state.world_size for r in self._ranks.values() if r.state is not None), default=1)

    def _has_peers(self) -> bool:
        """Return whether ranks of the run are on other machines."""
        return self._world_size() > len(self._ranks) > 0

    def _is_due(self, observer: RankObserver) -> bool:
        report = self._log.ranks[observer.rank]
        failed = observer.exit_reason is not None and len(self._ranks) > 1
        if (observer.died or failed) and not report.is_dead:
            # The first to end is the cause; what a launcher ends after it is not.
            return not any(r.is_dead for r in self._log.ranks.values()) and self._has_settled()
        state = observer.state
        if state is None or observer.overdue_s is None:
            return False
        if report.progress == state.progress:
            return report.retry_at is not None and clock.monotonic() >= report.retry_at
        report.retry_at = None
        if report.phase_since == state.phase_since:
            return observer.timeout_s is not None and state.silence_s >= observer.timeout_s
        return True

    def _has_settled(self) -> bool:
        """Return whether the ranks that a failing rank takes with it have had the time to end."""
        ends = [r.exit_reason.at for r in self._ranks.values() if r.exit_reason is not None]
        ends += [r.ended_at for r in self._ranks.values() if r.died and r.was_terminated]
        return not ends or clock.monotonic() - min(ends) > SETTLE_S or self._all_done()

    def _waits_for_exempt_rank(
        self, observations: Sequence[Observation], causes: dict[int, Cause | None]
    ) -> bool:
        """Return whether a rank evaluates, writes a checkpoint or compiles, for which all others wait."""
        open_ = [o for o in observations if causes[o.rank] is None and o.end is None and not o.stopped]
        return any(
            (o.state.phase in EXEMPT_PHASES and not o.state.inside)
            or ((thread := summarize_stacks(o, self._limits).thread) is not None and is_compiling(thread))
            for o in open_
            if o.state is not None
        )

    # Observation

    def _observe(self) -> list[Observation]:
        return name_reductions([r.observe() for _, r in sorted(self._ranks.items())])

    def _observe_host(self, timeout_s: float | None) -> HostObservation:
        """Observe every rank, with its cause by itself and the timeout of another machine."""
        observations = self._observe()
        return HostObservation(tuple(observations), self._causes(observations, timeout_s), self._world_size())

    def _causes(
        self, observations: Sequence[Observation], timeout_s: float | None
    ) -> dict[int, Cause | None]:
        return {o.rank: cause_of(o, self._limits, timeout_s) for o in observations}

    def _examine_closely(self) -> None:
        """Take stack samples and CPU times of all ranks for a bounded time."""
        request = self._directory / "sample"
        with contextlib.suppress(OSError):
            request.touch()
        deadline = clock.monotonic() + CLOSE_LOOK_S
        while clock.monotonic() < deadline:
            clock.sleep(CLOSE_POLL_S)
            for observer in self._ranks.values():
                observer.poll(closely=True)
            if all(r.has_samples for r in self._ranks.values()):
                break
        with contextlib.suppress(OSError):
            request.unlink(missing_ok=True)

    def _decide(self, due: list[RankObserver]) -> tuple[Decision | None, HostObservation, float | None]:
        """Return the decision over all ranks, the observations behind it, and the timeout that passed."""
        others = any(r not in due and not r.is_done for r in self._ranks.values())
        if others or not all(r.has_samples for r in due):
            self._examine_closely()
        observations = self._observe()
        timeout_s = min((r.timeout_s for r in due if r.timeout_s is not None), default=None)
        causes = self._causes(observations, timeout_s if len(observations) > 1 else None)
        enters = False
        if timeout_s is not None:
            share_s = PEER_TIMEOUT_SHARE * timeout_s
            # Until then a rank that is entering what it waits for is given the time to be one that waits.
            is_early = max((r.overdue_s or 0.0 for r in due), default=0.0) < share_s
            enters = self._add_peers(observations, causes, share_s) and is_early
        host = HostObservation(tuple(observations), causes, self._world_size())
        ended = any(o.end is not None or o.exit_reason is not None for o in observations)
        if len(observations) > 1 and not ended and self._waits_for_exempt_rank(observations, causes):
            return None, host, timeout_s
        if enters and not ended:
            return None, host, timeout_s
        return decide(observations, causes, host.world_size), host, timeout_s

    def _add_peers(
        self, observations: Sequence[Observation], causes: dict[int, Cause | None], share_s: float
    ) -> bool:
        """Add causes of ranks that need not be silent for as long as the one that is due.

        They are those that wait, and all where one waits for them. Return whether a rank is about to wait:
        it is in a call that others have to enter, and not for ``share_s`` yet.
        """
        open_ = [o for o in observations if causes[o.rank] is None]
        if len(open_) == len(observations):
            return False
        is_awaited = any(cause is not None and cause.waits for cause in causes.values())
        for obs in open_:
            cause = cause_of(obs, self._limits, share_s)
            if cause is not None and (is_awaited or cause.waits):
                causes[obs.rank] = cause
        entering = (cause_of(o, self._limits, MIN_PAUSE_S) for o in open_ if causes[o.rank] is None)
        return any(cause is not None and cause.waits for cause in entering)

    # Reports

    def _report_mismatch(self) -> None:
        """Report calls of the ranks that do not fit together, also where nothing hangs."""
        states = {rank: r.state for rank, r in sorted(self._ranks.items()) if r.state is not None}
        if self._log.mismatch is not None or len(states) < 2:
            return
        if not any(state.distributed for state in states.values()):
            return
        decision = decide_calls([Observation(rank, snapshots=(state,)) for rank, state in states.items()])
        before, self._mismatch = self._mismatch, decision
        if decision is None or (before != decision and not self._all_done()):
            return  # a second reading confirms it, while one is to come
        observations = self._observe()
        # With the ranks of its group, which the page does not hold.
        decision = open_to_unobserved(
            decide_calls(observations) or decision, observations, self._world_size()
        )
        self._log.is_reported(decision)
        rank = decision.cause.rank
        self._emit(decision, [o for o in observations if rank in {None, o.rank}], observations)

    def _report_resolutions(self) -> None:
        """Report how reported stalls were resolved."""
        for rank, report in self._log.ranks.items():
            observer = self._ranks[rank]
            if observer.state is None or report.stall is None:
                continue
            resolution = reports.find_resolution(
                report.stall, observer.state, end=observer.end, exit_reason=observer.exit_reason
            )
            if resolution is None:
                continue
            event, words = resolution
            seconds = clock.monotonic() - report.stall.began
            report.stall = report.progress = report.retry_at = None
            payload = {"rank": rank, "after": seconds, "how": words}
            self._writer.event(observer.state.step, event, payload)
            if not observer.died or observer.was_terminated:  # other deaths get a diagnosis of their own
                reports.log(f"rank {rank} {words}, {seconds:.0f} s after that diagnosis")

    def _report_stall(self, due: list[RankObserver]) -> None:
        """Decide what keeps the ranks that are due, and report it where that is new."""
        decision, host, timeout_s = self._decide(due)
        if decision is not None and decision.cause.kind is DiagnosisKind.UNKNOWN and not decision.cause.waits:
            if not self._take_native_samples(decision, due):
                return  # on an overloaded machine samples take their time
            decision, host, timeout_s = self._decide(due)
        for observer in due:
            if observer.died or observer.exit_reason is not None:
                self._log.ranks[observer.rank].is_dead = True
        if decision is None:
            return
        decision = self._with_function(decision)
        cause = decision.cause
        blamed = self._ranks.get(cause.rank) if cause.rank is not None else None
        if blamed is not None and blamed.died and blamed.was_terminated and self._all_done():
            # The whole job was ended on purpose.
            step = None if blamed.state is None else blamed.state.step
            how = end_text(blamed.end) if blamed.end is not None else ""
            self._writer.event(step, ENDED, {"rank": blamed.rank, "how": how})
            return
        observations, ranks = host.observations, list(self._ranks.values())
        if not self._log.is_news(decision, due, ranks, observations):
            return
        is_slow = cause.kind is DiagnosisKind.SLOW
        shown = [o for o in observations if o.rank == cause.rank] or observations[:MAX_EVIDENCE]
        self._emit(decision, [] if is_slow else shown, observations)
        if not is_slow and self._has_peers():
            self._peers.publish(DIAGNOSED, host)
            self._peers.ask(timeout_s or 0.0)

    def _report_start(self, observer: RankObserver) -> None:
        """Report a wait with a name of a rank that has not trained yet, and does nothing."""
        self._examine_closely()
        observations = self._observe()
        obs = next(o for o in observations if o.rank == observer.rank)
        if obs.state is None or not observer.start_wait.confirms(obs.cause, obs.state):
            return
        cause = named_cause(obs, self._limits)
        if cause is not None and self._log.is_news(Decision(cause), [observer], [observer], observations):
            self._emit(Decision(cause), [obs], observations)

    def _take_native_samples(self, decision: Decision, due: list[RankObserver]) -> bool:
        """Take native stacks of a rank whose cause is not known, once; return False while its own come in."""
        unclear = [r for r in self._ranks.values() if r.rank == decision.cause.rank]
        overdue_s = max((r.overdue_s or 0.0 for r in due), default=0.0)
        if overdue_s < SAMPLES_TIMEOUT_S and not all(r.has_samples for r in unclear):
            return False
        for observer in unclear:
            if self._log.ranks[observer.rank].retry_at is None:
                observer.take_native_samples()
        return True

    def _with_function(self, decision: Decision) -> Decision:
        """Name the function in C that holds the interpreter lock: from inside nothing can."""
        observer = self._ranks.get(decision.cause.rank) if decision.cause.rank is not None else None
        if observer is None or not decision.cause.holds_interpreter:
            return decision
        return replace(decision, cause=name_function(decision.cause, observer.find_native_function()))

    def _emit(
        self, decision: Decision, shown: Sequence[Observation], observations: Sequence[Observation]
    ) -> None:
        reports.emit(self._writer, decision, observations, shown, step_offset=self._step_offset)
