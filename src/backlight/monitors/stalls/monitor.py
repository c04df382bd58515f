"""The watchdog of a live run: shared state, heartbeat, a stack sampler, and the watchdog process.

Parts that the system refuses (no shared memory, no second process) are left out with a warning; training goes
on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import backlight
from backlight import clock, processes
from backlight.capture import sharding
from backlight.capture.fingerprint import take_fingerprint
from backlight.capture.hub import HUB
from backlight.distributed import WATCHDOG, launch_id, local_rank
from backlight.interrupts import suppressed
from backlight.monitor import Monitor, RunHandle
from backlight.monitors.stalls.instrument.collectives import Collectives, CollectiveTrace
from backlight.monitors.stalls.instrument.ddp_buckets import assignment, wrappers
from backlight.monitors.stalls.instrument.heartbeat import Heartbeat
from backlight.monitors.stalls.instrument.line_counts import LineCounts
from backlight.monitors.stalls.instrument.stack_sampler import StackSampler
from backlight.monitors.stalls.settings import StallsSettings
from backlight.store.format.schema import SAMPLED_LINES
from backlight.store.write.watchdog import host_name
from backlight.watchdog import runtime_dir
from backlight.watchdog.observation import ExitReason, exit_reason_of
from backlight.watchdog.process import hand_over
from backlight.watchdog.shared_state import RankStatus, SharedState, Slot
from backlight.watchdog.stacks import DUMP_SIGNAL
from backlight.watchdog.timeouts import StallLimits

if TYPE_CHECKING:
    from backlight.session.settings import Settings

_CHECK_PERIODS = 20
"""Periods of the stack sampler between two checks that the watchdog process lives."""

BUCKET_BACKWARDS = 8
"""Backwards at whose begin the buckets of DDP are read: they are final after the second one that reduces."""

WATCHDOG_START_S = 3.0
"""Seconds that the end of a run waits, at most, for a watchdog process that is just starting."""


_starting: list[subprocess.Popen[bytes]] = []
"""Processes that a busy machine has not started in time: they are reaped later, not forgotten."""


_attached: weakref.WeakSet[StallMonitor] = weakref.WeakSet()


def expect_end(launcher: str) -> None:
    """Report that ``launcher`` ends this process on purpose: its end, and what it causes, is no finding."""
    for monitor in list(_attached):
        monitor.expect_end(launcher)


class StallMonitor(Monitor):
    """Publishes the progress of this rank, and starts the watchdog process that reads it."""

    name = "stalls"
    records = "stalls"

    def __init__(self, stall_s: float | None = None, thresholds: Mapping[str, float] | None = None) -> None:
        self._stall_s = stall_s
        self._thresholds = dict(thresholds or {})
        self._groups: dict[int, list[int]] = {}
        self._dump = -1
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._watchdog_pid = 0
        self._periods = 0
        self._bucket_reads = 0
        self._buckets: dict[str, list[Any]] = {}
        self._is_ended = self._is_script = False
        self.heartbeat: Heartbeat | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Self | None:
        """Return the monitor with ``stall`` and the thresholds of the settings."""
        if "stalls" not in settings.monitors:
            return None
        return cls(StallsSettings.of(settings).after, settings.thresholds.get("stalls", {}))

    def check_process(self, *, is_script: bool) -> None:
        """Remember whether a command runs the script."""
        self._is_script = is_script

    def attach(self, run: RunHandle) -> None:
        """Create the shared state and start the threads; what the system refuses is recorded and left out."""
        self._run, self._scope = run, run.scope
        self._writer = run.writer
        self._first_on_host = local_rank() == 0
        launch = f"{launch_id() or os.getpid()}@{host_name()}"
        run.follow_forwards()
        directory = None
        try:
            directory = runtime_dir.runtime_directory(run.writer.path, run.writer.attempt, launch)
            runtime_dir.create(directory)
            shared_state = SharedState(runtime_dir.state_path(directory, run.rank))
        except OSError as error:
            where = "" if directory is None else f" in {directory}"
            self._lose(f"no shared state{where}: {error.strerror or error}")
            if self._first_on_host and directory is not None:
                runtime_dir.remove(directory)
            return
        self._directory = directory
        # The first backward corrects it where another thread trains.
        trains = threading.current_thread()
        self.heartbeat = Heartbeat(shared_state, run.scope, self._store_names, self._store_buckets)
        trace = CollectiveTrace(self._document("collectives"))
        self._collectives = Collectives(shared_state, self._store_group, trace.follow)
        self._register_dump()
        self._sampler = StackSampler(
            self.heartbeat,
            StallLimits().override(self._thresholds),
            self._document("stacks"),
            self._document("graph"),
            self._chores,
            trace.write,
            LineCounts(functools.partial(run.notifier.event, SAMPLED_LINES)),
        )
        shared_state.open(
            rank=run.rank,
            world_size=run.world_size,
            main_ident=trains.ident or 0,
            main_tid=trains.native_id or 0,
            timeout_s=self._stall_s,
        )
        self.resume()
        run.account(self._sampler)
        self._sampler.start()
        _attached.add(self)

    def detach(self, error: BaseException | None) -> None:
        """Remove everything, and leave the watchdog process word of how this rank has ended."""
        if self.heartbeat is None:
            return
        _attached.discard(self)
        if error is not None and not self._is_ended:
            # A third-party exception may fail to be printed.
            with suppressed():
                runtime_dir.write_document(self._document("exit"), dataclasses.asdict(exit_reason_of(error)))
        self.pause()
        self._check_watchdog()
        # Before anything waits: a thread that gets no core is joined for seconds.
        self.heartbeat.shared_state.close(RankStatus.FINISHED if error is None else RankStatus.FAILED)
        self._sampler.stop()
        self._unregister_dump()
        if self._watchdog is not None:
            # Its first half exits as soon as the second is there; a run that is so short waits for it.
            try:
                self._watchdog.wait(WATCHDOG_START_S)
            except subprocess.TimeoutExpired:
                _starting.append(self._watchdog)
            self._watchdog = None
        _starting[:] = [process for process in _starting if process.poll() is None]
        if self._first_on_host and not self._watchdog_lives():
            runtime_dir.remove(self._directory)

    def expect_end(self, launcher: str) -> None:
        """Report that this process is ended on purpose; from any thread."""
        if self.heartbeat is not None:
            self._is_ended = True
            self._write(
                "exit", dataclasses.asdict(ExitReason(launcher, "", clock.monotonic(), interrupted=True))
            )
            self.heartbeat.shared_state.slots[Slot.STATUS] = RankStatus.FAILED

    def resume(self) -> None:
        """Install the hooks of the heartbeat."""
        if self.heartbeat is not None:
            self._run.listen(self.heartbeat)
            self.heartbeat.attach()
            self._collectives.attach()

    def pause(self) -> None:
        """Remove the hooks of the heartbeat; the threads go on."""
        if self.heartbeat is not None:
            HUB.remove(self.heartbeat)
            self.heartbeat.detach()
            self._collectives.detach()

    def _unmeasured(self, what: str, reason: str) -> None:
        self._run.notifier.unmeasured(what, reason)

    def _lose(self, reason: str) -> None:
        """Record that stalls are not detected, and warn about it once on each machine."""
        self._unmeasured("stalls", reason)
        if self._first_on_host:
            self._run.notifier.warn("stalls", f"a stall is not detected: {reason}")

    # Documents

    def _store_names(self, names: tuple[str, ...]) -> None:
        self._write("names", list(names))
        # The first backward may never return: what this run is has to be on disk before it.
        self._writer.fingerprint(take_fingerprint(self._scope, self._run.arguments))

    def _store_buckets(self) -> bool:
        """Write which parameters travel together, while that may change; return whether to ask again."""
        self._bucket_reads += 1
        if self._run.world_size == 1 or self._bucket_reads > BUCKET_BACKWARDS:
            return False
        roots = self._scope.roots()
        table = self._scope.table
        tensors = {row: tensor for row in range(len(table)) if (tensor := table.tensor(row)) is not None}
        rows = {id(tensor): row for row, tensor in tensors.items()}
        ids = [bucket for model in wrappers(roots) for bucket in assignment(model).ids]
        buckets = [[rows[key] for key in bucket if key in rows] for bucket in ids]
        modules = dict.fromkeys(module for root in roots for module in root.modules())
        groups_of = [group for module in modules for group in sharding.groups(module)]
        groups = [group for group in groups_of if all(id(handle.sharded_param) in rows for handle in group)]
        document: dict[str, list[Any]] = {
            "rows": buckets,
            "numels": [sum(tensors[row].numel() for row in bucket) for bucket in buckets],
            "shard_rows": [[rows[id(handle.sharded_param)] for handle in group] for group in groups],
            "shard_numels": [sum(handle.padded_sharded_param_size.numel() for handle in g) for g in groups],
        }
        if document != self._buckets:
            self._buckets = document
            self._write("buckets", document)
        return True

    def _store_group(self, key: int, ranks: list[int]) -> None:
        self._groups[key] = ranks
        self._write("groups", self._groups)

    def _write(self, kind: str, content: Any) -> None:
        with contextlib.suppress(OSError):
            runtime_dir.write_document(self._document(kind), content)

    def _document(self, kind: str) -> Path:
        return runtime_dir.document_path(self._directory, self._run.rank, kind)

    # The other process

    def _register_dump(self) -> None:
        """Let Python's C handler write the stack of a thread on backlight's signal, unless it is in use."""
        if not DUMP_SIGNAL:
            return
        try:
            import signal  # noqa: PLC0415 - only where there are signals

            if signal.getsignal(DUMP_SIGNAL) not in {signal.SIG_DFL, None}:
                self._unmeasured("stacks by signal", f"signal {DUMP_SIGNAL} has a handler already")
                return
            path = runtime_dir.dump_path(self._directory, self._run.rank)
            self._dump = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
            self._dump_file = processes.HeldFiles(path)
            faulthandler.register(DUMP_SIGNAL, file=self._dump, all_threads=False, chain=False)
        except (OSError, ValueError, RuntimeError) as error:
            self._unmeasured("stacks by signal", str(error))

    def _unregister_dump(self) -> None:
        if self._dump >= 0:
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                faulthandler.unregister(DUMP_SIGNAL)
            if self._dump_file.release():  # else the number may be that of a file of the script
                os.close(self._dump)
            self._dump = -1

    def _chores(self) -> None:
        """In the stack sampler's thread: start the watchdog process, and check now and then that it lives."""
        if self._periods == 0 and self._first_on_host:
            self._start_watchdog()
        self._periods += 1
        if self._dump >= 0 and not self._dump_file.are_open():
            self._unregister_dump()
            self._unmeasured("stacks by signal", "the script has closed the file for them")
        if self._watchdog is not None and (code := self._watchdog.poll()) is not None:
            self._watchdog = None
            if not runtime_dir.watchdog_pid(self._directory):
                self._watchdog_pid = -1
                self._lose(f"the watchdog process has not started (exit code {code})")
        if not self._watchdog_pid:
            self._watchdog_pid = runtime_dir.watchdog_pid(self._directory)
            if self._watchdog_pid:
                processes.allow_tracing(self._watchdog_pid)
        elif self._periods % _CHECK_PERIODS == 0:
            self._check_watchdog()

    def _check_watchdog(self) -> None:
        if self._watchdog_pid > 0 and not self._is_ended and not processes.is_alive(self._watchdog_pid):
            self._watchdog_pid = -1
            error = runtime_dir.read_document(
                self._directory / runtime_dir.WATCHDOG, lambda d: d.get("error")
            )
            self._lose(f"the watchdog process has ended{f': {error}' if isinstance(error, str) else ''}")

    def _watchdog_lives(self) -> bool:
        """Return whether a watchdog process is there to tidy up."""
        pid = runtime_dir.watchdog_pid(self._directory)
        return pid > 0 and processes.is_alive(pid)

    def _start_watchdog(self) -> None:
        source = Path(backlight.__file__).parents[1]
        paths = [str(source), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        folder = self._writer.path.absolute() / f"attempt-{self._writer.attempt:03d}"
        stderr, stream = hand_over()
        try:
            # It forks once more and exits, so that it is no child of this process: a script that waits for
            # its children would wait for it.
            self._watchdog = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    WATCHDOG,
                    str(self._directory),
                    str(self._writer.path.absolute()),
                    str(folder),
                    str(self._writer.step_offset),
                    json.dumps(self._thresholds),
                    str(os.getpid()),
                    stream,
                    "summary" if self._is_script and not self._run.settings.quiet else "",
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=environment,
            )
        except OSError as error:
            self._watchdog_pid = -1
            self._lose(f"no watchdog process: {error}")
