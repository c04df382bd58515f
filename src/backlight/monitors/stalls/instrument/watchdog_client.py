"""Connects a watch with the board, the helper thread and the sidecar of the monitor ``stalls``.

Whatever of it cannot be had (no shared memory, no second process) is left out with a notice; a training is
never refused or disturbed for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import backlight
from backlight import processes
from backlight.capture.hub import HUB
from backlight.capture.process_group import launch_id, local_rank, place
from backlight.monitors.stalls.instrument.collectives import Collectives
from backlight.monitors.stalls.instrument.ddp_buckets import assignment, wrappers
from backlight.monitors.stalls.instrument.heartbeat import Heartbeat
from backlight.monitors.stalls.instrument.ptrace import allow_tracing
from backlight.monitors.stalls.instrument.stack_sampler import StackSampler
from backlight.monitors.stalls.model import runtime_dir
from backlight.monitors.stalls.model.exit_reason import describe
from backlight.monitors.stalls.model.shared_state import SharedState, State
from backlight.monitors.stalls.model.stack_dumps import SIGNAL
from backlight.monitors.stalls.model.thresholds import Thresholds
from backlight.store.write.watchdog import host_name

if TYPE_CHECKING:
    import torch

    from backlight.capture.scope import Scope
    from backlight.store.write.writer import RunWriter

_CHECK_EVERY = 20
BACKWARDS = 8
"""Backwards at whose begin the buckets of DDP are read: they are final after the second one that reduces."""

SIDECAR_START = 3.0
"""Seconds that the end of a training waits, at most, for a sidecar that is just starting."""


class Stalling:
    """What the monitor ``stalls`` attaches to one watch.

    Parameters
    ----------
    writer, scope:
        The run of this rank, and what is watched.
    stall:
        Seconds that the user allows, None to follow the run.
    thresholds:
        Overrides of the monitor's thresholds.
    notice:
        Takes events, such as what cannot be measured.
    parameters_changed:
        Called when looking for parameters has found another table.
    names_known:
        Called at the begin of the first backward, and when there are other parameters.
    """

    def __init__(
        self,
        writer: RunWriter,
        scope: Scope,
        *,
        stall: float | None,
        thresholds: Mapping[str, float],
        notice: Callable[[str, Mapping[str, Any], int | None], None],
        parameters_changed: Callable[[], None],
        names_known: Callable[[], None],
    ) -> None:
        self._writer = writer
        self._scope = scope
        self._stall = stall
        self._thresholds = dict(thresholds)
        self._notice = notice
        self._parameters_changed = parameters_changed
        self._names_known = names_known
        self._names: tuple[Any, tuple[str, ...]] = ((), ())
        self._groups: dict[int, list[int]] = {}
        self._dump: IO[bytes] | None = None
        self._sidecar: subprocess.Popen[bytes] | None = None
        self._sidecar_pid = 0
        self._turns = 0
        self._asked = 0
        self._buckets: list[list[int]] = []
        self._first_here = local_rank() == 0
        self._world = place()[1]
        launch = f"{launch_id() or os.getpid()}@{host_name()}"
        self._place = runtime_dir.runtime_directory(writer.path, writer.attempt, launch)
        self.heartbeats: Heartbeat | None = None

    def start(self) -> None:
        """Attach; what the system refuses is noted and left out."""
        try:
            runtime_dir.prepare(self._place)
            board = SharedState(runtime_dir.state_path(self._place, self._writer.rank))
        except OSError as error:
            reason = f"no board in {self._place}: {error.strerror or error}"
            self._notice("unmeasured", {"what": "stalls", "reason": reason}, None)
            if self._first_here:
                runtime_dir.leave(self._place)
            return
        main = threading.main_thread()
        self.heartbeats = Heartbeat(
            board,
            self._parameters,
            self._store_names,
            self._dropped,
            self._store_buckets,
        )
        self._collectives = Collectives(board, self._store_group)
        self._register_dump()
        self._sampler = StackSampler(
            self.heartbeats,
            board.path,
            Thresholds().override(self._thresholds),
            self._document("stacks"),
            self._document("graph"),
            self._chores,
        )
        board.open(
            rank=self._writer.rank,
            world=self._world,
            main_ident=main.ident or 0,
            main_tid=main.native_id or 0,
            stall=self._stall,
        )
        self._attach()
        self._sampler.start()

    def stop(self, error: BaseException | None) -> None:
        """Take everything off, and tell the sidecar how this rank has ended."""
        if self.heartbeats is None:
            return
        if error is not None:
            # An exception of somebody else's making may refuse to be printed.
            with contextlib.suppress(Exception):
                runtime_dir.write_document(self._document("ended"), describe(error))
        state = State.FINISHED if error is None else State.FAILED
        self._detach()
        self._sampler.stop()
        self.heartbeats.board.close(state)
        if self._dump is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                faulthandler.unregister(SIGNAL)
            self._dump.close()
            self._dump = None
        if self._sidecar is not None:
            # Its first half leaves as soon as the second is there; a training that short waits for it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._sidecar.wait(SIDECAR_START)
            self._sidecar = None
        if self._first_here and not self._sidecar_lives():
            runtime_dir.leave(self._place)

    @property
    def spent(self) -> float:
        """Host seconds that all this has taken."""
        return self.heartbeats.spent + self._sampler.spent if self.heartbeats is not None else 0.0

    def _attach(self) -> None:
        if self.heartbeats is not None:
            HUB.add(self.heartbeats)
            self.heartbeats.attach()
            self._collectives.attach()

    def _detach(self) -> None:
        if self.heartbeats is not None:
            HUB.remove(self.heartbeats)
            self.heartbeats.detach()
            self._names = ((), ())
            self._collectives.detach()

    def _dropped(self, error: Exception) -> None:
        self._detach()
        if self.heartbeats is not None:
            self.heartbeats.board.close(State.FINISHED)
        reason = f"{type(error).__name__}: {error}"
        self._notice("unmeasured", {"what": "stalls from here on", "reason": reason}, None)

    # What the beats ask for

    def _parameters(self) -> tuple[tuple[str, ...], Sequence[torch.Tensor | None]]:
        table = self._scope.table
        if not table.records and self._scope.refresh():
            table = self._scope.table
            self._parameters_changed()
        if self._names[0] is not table:
            self._names = (table, tuple(record.name for record in table.records))
        return self._names[1], [table.tensor(row) for row in range(len(table))]

    def _store_names(self, names: tuple[str, ...]) -> None:
        with contextlib.suppress(OSError):
            runtime_dir.write_document(self._document("names"), list(names))
        self._names_known()

    def _store_buckets(self) -> bool:
        """Write which parameters DDP reduces together, while that may change; tell whether to ask again."""
        self._asked += 1
        if self._world == 1 or self._asked > BACKWARDS:
            return False
        models = wrappers(self._scope.models or HUB.seen.roots())
        table = self._scope.table
        rows = {id(tensor): row for row in range(len(table)) if (tensor := table.tensor(row)) is not None}
        found = [[rows[key] for key in bucket if key in rows] for m in models for bucket in assignment(m).ids]
        if found != self._buckets:
            self._buckets = found
            with contextlib.suppress(OSError):
                runtime_dir.write_document(self._document("buckets"), found)
        return True

    def _store_group(self, key: int, ranks: list[int]) -> None:
        self._groups[key] = ranks
        with contextlib.suppress(OSError):
            runtime_dir.write_document(self._document("groups"), self._groups)

    def _document(self, kind: str) -> Path:
        return runtime_dir.document_path(self._place, self._writer.rank, kind)

    # The other process

    def _register_dump(self) -> None:
        """Let the C handler of Python write all stacks on our signal, unless somebody has taken it."""
        if not SIGNAL:
            return
        try:
            import signal  # noqa: PLC0415 - only where there are signals

            if signal.getsignal(SIGNAL) not in {signal.SIG_DFL, None}:
                self._notice(
                    "unmeasured",
                    {"what": "stacks by signal", "reason": f"signal {SIGNAL} has a handler already"},
                    None,
                )
                return
            path = runtime_dir.dump_path(self._place, self._writer.rank)
            self._dump = path.open("ab", buffering=0)
            faulthandler.register(SIGNAL, file=self._dump, all_threads=True, chain=False)
        except (OSError, ValueError, RuntimeError) as error:
            self._notice("unmeasured", {"what": "stacks by signal", "reason": str(error)}, None)

    def _chores(self) -> None:
        """In the helper thread: start the sidecar, and see now and then whether it lives."""
        if self._turns == 0 and self._first_here:
            self._start_sidecar()
        self._turns += 1
        if self._sidecar is not None and self._sidecar.poll() is not None:
            self._sidecar = None
        if not self._sidecar_pid:
            found = runtime_dir.read_document(self._place / "sidecar.json")
            if found:
                self._sidecar_pid = int(found["pid"])
                allow_tracing(self._sidecar_pid)
        elif (
            self._sidecar_pid > 0
            and self._turns % _CHECK_EVERY == 0
            and not processes.alive(self._sidecar_pid)
        ):
            self._sidecar_pid = -1
            reason = "the sidecar has ended; a stall is no longer seen"
            self._notice("unmeasured", {"what": "stalls", "reason": reason}, None)

    def _sidecar_lives(self) -> bool:
        """Tell whether a sidecar is there to tidy up."""
        found = runtime_dir.read_document(self._place / "sidecar.json")
        return bool(found) and processes.alive(int(found["pid"]))

    def _start_sidecar(self) -> None:
        house = Path(backlight.__file__).parents[1]
        paths = [str(house), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        folder = self._writer.path.absolute() / f"attempt-{self._writer.attempt:03d}"
        try:
            # It forks once more and leaves: it is to be nobody's child, or a script that waits for its
            # children would wait for ours.
            self._sidecar = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "backlight.monitors.stalls.model.watchdog",
                    str(self._place),
                    str(self._writer.path.absolute()),
                    str(folder),
                    str(self._writer.step_offset),
                    json.dumps(self._thresholds),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
            )
        except OSError as error:
            self._notice("unmeasured", {"what": "stalls", "reason": f"no sidecar: {error}"}, None)
