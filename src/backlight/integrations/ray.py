"""Ray Train: ``RunConfig(callbacks=[BacklightCallback()])`` in the driver, ``watch`` in the worker function.

The callback runs in the controller of Ray Train. It gives all workers one run directory below
``RunConfig.storage_path``, and prints what their watchdogs diagnose.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backlight import clock
from backlight.distributed import JOB_SEPARATOR
from backlight.integrations.hosted import FrameworkError, require
from backlight.interrupts import is_interrupt
from backlight.store.errors import RunFormatError
from backlight.store.format.names import safe_name
from backlight.store.write.attempt import own_path
from backlight.terminal import write
from backlight.watchdog.peers import ReportedStall, newest_stall, stall_events
from backlight.watchdog.process import COLLECTED

VERSION = require("ray", "ray")
"""The release of Ray that is here."""

import ray  # noqa: E402 - only once it is known to be recent enough
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

try:  # not where RAY_TRAIN_V2_ENABLED=0 keeps the earlier implementation
    from ray.train import WorkerGroupError
    from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
except ImportError as error:
    raise FrameworkError(
        "backlight.integrations.ray: Ray Train V2 is not there; leave RAY_TRAIN_V2_ENABLED unset, and run: "
        "pip install --upgrade 'backlight[ray]'"
    ) from error

if TYPE_CHECKING:
    from backlight.store.read.run import Event

    Stored = list[tuple[Path, Event]]

OPEN_TIMEOUT_S = 6.0
"""Seconds in which a diagnosis waits for what another machine observes."""

ANSWER_TIMEOUT_S = 2.0
"""Seconds in which workers answer before Ray ends them."""

UPLOAD_TIMEOUT_S = 300.0
"""Seconds in which the run directories of all nodes are copied to a storage that is no file system."""


class HangError(WorkerGroupError):  # type: ignore[misc, unused-ignore]  # without Ray its bases are Any
    """A worker group that hangs; the message is the diagnosis. ``FailureConfig(max_failures=)`` counts it."""


class BacklightCallback(ControllerCallback, WorkerGroupCallback):  # type: ignore[misc, unused-ignore]  # as above
    """Gives the workers of a trainer one run directory, and reports their stalls in the driver.

    ``backlight.watch``, and the callbacks for Lightning and the Hugging Face Trainer, record there what they
    watch in the worker function. Each worker group that Ray starts, also with another number of workers, is
    an attempt of the same run.

    Parameters
    ----------
    run:
        Name of the run directory below ``RunConfig.storage_path``/``RunConfig.name``. Where the storage is no
        file system of the nodes, each attempt is a directory of its own, copied there when the attempt ends.
    fail_after:
        Seconds after a diagnosis at which workers that still do not move are failed with it; None to leave
        that to the timeout of the process group.

    Raises
    ------
    ValueError
        If ``run`` is no plain name, or ``fail_after`` is negative.
    """

    def __init__(self, run: str = "backlight", *, fail_after: float | None = None) -> None:
        if safe_name(run) != run:
            raise ValueError(
                f"BacklightCallback: run={run!r}, expected the name of a directory, as 'backlight'"
            )
        if fail_after is not None and not 0 <= fail_after < float("inf"):
            raise ValueError(f"BacklightCallback: fail_after={fail_after}, expected seconds, or None")
        self._run, self._fail_after = run, fail_after
        self._storage: Any = None
        self._warned: set[str] = set()
        self._workers: list[Any] = []
        self._stalls: _Stalls | None = None

    # Hooks, called by Ray Train in its controller

    def after_controller_start(self, train_run_context: Any) -> None:
        """Remember where results are stored."""
        self._storage = train_run_context.run_config.storage_context

    def after_worker_group_start(self, worker_group: Any) -> None:
        """Give every worker the run directory and its attempt, before the training function starts."""
        with self._shield("the runs are not in RunConfig.storage_path, and stalls are not reported"):
            attempt = worker_group.get_worker_group_context().run_attempt_id
            launch = f"ray-{self._storage.experiment_dir_name}{JOB_SEPARATOR}{attempt}"
            is_shared = self._storage.storage_filesystem.type_name == "local"
            directory = (
                Path(self._storage.experiment_fs_path, self._run)
                if is_shared
                else own_path(Path(self._storage.local_working_directory, self._run), launch)
            )
            self._workers = workers = worker_group.get_workers()
            first = workers[0].metadata.node_id
            environments = [
                {"BACKLIGHT_RUN_ID": launch, "BACKLIGHT_RUN_DIR": str(directory), COLLECTED: "1"}
                # Other nodes do not see the directory of rank 0: they need not wait for it.
                | ({} if is_shared or w.metadata.node_id == first else {"BACKLIGHT_JOIN_TIMEOUT": "1"})
                for w in workers
            ]
            ray.get([w.execute_async(_enter, e) for w, e in zip(workers, environments, strict=True)])
            nodes = () if is_shared else tuple(dict.fromkeys(w.metadata.node_id for w in workers))
            self._stalls = _Stalls(directory, launch, nodes)

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        """Print a new diagnosis; fail the workers where that is asked for."""
        hung = None
        with self._shield("stalls are not reported"):
            if self._stalls is not None:
                hung = self._stalls.poll()
        # Workers that have failed are Ray's to handle.
        if hung is None or self._fail_after is None or worker_group_status.errors:
            return
        stall, seconds = hung
        if seconds >= self._fail_after:
            self._announce_end()
            raise HangError(f"{stall.claim} (for {seconds:.0f} s after this diagnosis)", worker_failures={})

    def before_controller_execute_resize_decision(self, resize_decision: Any) -> None:
        """Note that the workers end because another number of them starts."""
        self._announce_end()

    def before_controller_abort(self) -> None:
        """Note that the workers end because the user has interrupted the driver."""
        self._announce_end()

    def after_worker_group_shutdown(self, worker_group_context: Any) -> None:
        """Copy the run to a storage that is no file system of the nodes."""
        stalls, self._stalls = self._stalls, None
        if stalls is None or not stalls.nodes:
            return
        storage = self._storage
        with self._shield(f"the run is not copied to the storage; it is {stalls.directory} on its node"):
            target = storage.experiment_fs_path
            copies = [
                _on_node(node, _upload, stalls.directory, stalls.launch, storage.storage_filesystem, target)
                for node in stalls.nodes
            ]
            ray.get(copies, timeout=UPLOAD_TIMEOUT_S)

    def _announce_end(self) -> None:
        """Have the watchdogs know that Ray ends the workers, which is no finding."""
        workers, self._workers = self._workers, []
        with self._shield("that Ray ends the workers is reported as a finding"):
            answers = [worker.execute_async(_leave) for worker in workers]
            if answers:  # a worker that hangs may not answer
                ray.wait(answers, num_returns=len(answers), timeout=ANSWER_TIMEOUT_S)

    @contextlib.contextmanager
    def _shield(self, lost: str) -> Iterator[None]:
        """Turn an exception into one warning: Ray Train would end the training run."""
        try:
            yield
        except Exception as error:
            if is_interrupt(error):
                raise
            if lost not in self._warned:
                self._warned.add(lost)
                write(f"backlight: {lost}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


class _Stalls:
    """The stalls of one worker group: printed once each, and how long the newest one lasts.

    ``nodes`` are those whose disks hold a part of the run; empty where the controller reads all of it.
    """

    def __init__(self, directory: Path, launch: str, nodes: tuple[str, ...]) -> None:
        self.directory, self.launch, self.nodes = directory, launch, nodes
        self._events: dict[str, Stored] = {}
        self._requests: dict[str, Any] = {}
        self._since = 0.0
        self._newest: ReportedStall | None = None
        self._printed: ReportedStall | None = None

    def poll(self) -> tuple[ReportedStall, float] | None:
        """Print what is new; return the stall that lasts, with the seconds since it was diagnosed."""
        stored = self._read()
        stall = newest_stall([event for _, event in stored])
        if stall is None:
            return None
        now = clock.monotonic()
        if self._newest is None or stall.time != self._newest.time:
            self._since, self._printed = now, None
        self._newest = stall
        if stall.is_open and not stall.over and now - self._since < OPEN_TIMEOUT_S:
            return None
        closed = replace(stall, is_open=False)
        if closed != self._printed:
            is_first, self._printed = self._printed is None, closed
            words = f"{stall.claim}: {stall.over}" if stall.over else stall.claim
            after = "" if is_first else stall.over and f"after that diagnosis, {stall.over}"
            write(f"backlight: {after or words}", file=sys.stderr, flush=True)
            if is_first:
                run = next(path for path, event in stored if event.time == stall.time)
                write(f"  evidence: backlight findings {run}", file=sys.stderr, flush=True)
        return None if stall.over else (stall, now - self._since)

    def _read(self) -> Stored:
        if not self.nodes:
            self._events["here"] = read_stalls(self.directory, self.launch)
        # The interpreter lock of a hung worker may be held: another process of its node reads the files.
        for node in self.nodes:
            request = self._requests.get(node)
            if request is not None and ray.wait([request], timeout=0)[0]:
                self._events[node] = ray.get(request)
                request = None
            self._requests[node] = request or _on_node(node, read_stalls, self.directory, self.launch)
        return [stall for stored in self._events.values() for stall in stored]


def _enter(environment: dict[str, str]) -> None:
    """Set variables of a worker."""
    os.environ.update(environment)


def _leave() -> None:
    """In a worker: expect the end of this process."""
    if "backlight.monitors.stalls.monitor" in sys.modules:
        sys.modules["backlight.monitors.stalls.monitor"].expect_end("Ray Train")


def _on_node(node: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in another process of a node, which needs no free core for it."""
    where = NodeAffinitySchedulingStrategy(node, soft=False)
    return (
        ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=where).remote(*arguments)
    )


def _parts(directory: Path, launch: str) -> list[Path]:
    """Return the run directory, the part of it that this node keeps for itself, and those of this launch."""
    names = (f"{directory.name}.part-", own_path(directory, launch).name)
    there = directory.parent.iterdir() if directory.parent.is_dir() else ()
    return sorted(path for path in there if path.name == directory.name or path.name.startswith(names))


def read_stalls(directory: Path, launch: str) -> Stored:
    """Return what watchdogs have stored of a launch on this node, in the run directory and next to it."""
    stalls: Stored = []
    for part in _parts(directory, launch):
        with contextlib.suppress(RunFormatError, OSError):  # it is being written
            stalls += [(part, event) for event in stall_events(part, launch)]
    return stalls


def _upload(directory: Path, launch: str, filesystem: Any, target: str) -> None:
    from pyarrow import fs  # noqa: PLC0415 - Ray Train needs it

    for part in _parts(directory, launch):
        filesystem.create_dir(f"{target}/{part.name}")
        fs.copy_files(
            str(part), f"{target}/{part.name}",
            source_filesystem=fs.LocalFileSystem(), destination_filesystem=filesystem,
        )  # fmt: skip
