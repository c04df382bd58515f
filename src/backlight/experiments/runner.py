"""An experiment from a configuration to a run directory: loop, tracking, store, checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from backlight.capture.fingerprint import take_fingerprint
from backlight.capture.scope import Scope
from backlight.experiments import checkpoints
from backlight.experiments.config import (
    Configuration,
    ConfigurationError,
    configure,
    experiment_of,
    training,
)
from backlight.experiments.data.split import derived_seed
from backlight.experiments.experiment import Task
from backlight.experiments.loop import Loop, Pace, phase
from backlight.monitors.grokking.instrument.probe_batch import Probe
from backlight.monitors.grokking.instrument.tracker import Tracker
from backlight.monitors.grokking.model.disk_guard import DiskWatch, degradation
from backlight.monitors.grokking.model.measures import TIERS, at_tier
from backlight.records import RunStatus, to_json
from backlight.store.errors import RunExistsError
from backlight.store.format.hdf5_filters import Filters
from backlight.store.platform import atomic_json
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter

CONFIGURATION = "configuration.json"

_FREE = (
    "training.steps",
    "keeping.checkpoint_every",
    "keeping.checkpoints",
    "keeping.disk_free",
    "keeping.flush_seconds",
)


@dataclass(frozen=True)
class Progress:
    """How far a run is: steps done and in all, the last evaluation, and the phase in a word."""

    step: int
    steps: int
    values: Mapping[str, float]
    phase: str


def build(configuration: Configuration) -> Task:
    """Make the task of a configuration.

    Raises
    ------
    ConfigurationError
        If the sizes are impossible, or the device is not there.
    """
    try:
        device = torch.device(configuration.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        message = str(error).splitlines()[0]
        raise ConfigurationError(f"device {configuration.device!r} cannot be used here: {message}") from None
    experiment = experiment_of(configuration.experiment)
    try:
        task: Task = experiment.build(
            configuration.settings, configuration.seed, device, configuration.control
        )
    except (RuntimeError, MemoryError, OverflowError, ZeroDivisionError, IndexError) as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigurationError(
            f"{configuration.experiment}: these sizes cannot be built: {message}; "
            "`backlight grok estimate` says what a configuration needs"
        ) from error
    return task


def pace_of(configuration: Configuration) -> Pace:
    """Return how long the loop runs and what it does how often."""
    section = training(configuration)
    log_every = int(getattr(section, "log_every", 10))
    return Pace(
        steps=int(section.steps),
        log_every=log_every,
        thorough_every=int(getattr(section, "thorough_every", log_every)),
        checkpoint_every=configuration.keeping.checkpoint_every,
    )


def tracker_of(
    configuration: Configuration, task: Task, sink: Any, warn: Callable[[str, str], None] | None = None
) -> Tracker:
    """Return the tracker of a task, with its probe batch where anything needs samples."""
    measures = configuration.measures.logged_every(pace_of(configuration).log_every)
    probe = Probe(task.model, task.sample_loss, task.probe, task.inputs) if measures.sampled else None
    return Tracker(measures, sink, probe, warn)


def run_experiment(
    configuration: Configuration,
    path: Path,
    *,
    resume: bool = False,
    tier: str = TIERS[0],
    reason: str = "",
    control_of: str = "",
    on_progress: Callable[[Progress], None] = lambda _progress: None,
    on_warning: Callable[[str], None] = lambda _text: None,
) -> Path:
    """Run an experiment into a folder, from the start or from its newest checkpoint.

    Parameters
    ----------
    resume:
        Go on with the run in ``path``, to the numbers of an uninterrupted one.
    tier, reason:
        What the run keeps from the start on, and why it is less than all.
    control_of:
        The run that this one is the control of.
    on_progress, on_warning:
        Called after each evaluation, and with what went wrong without ending the run.

    Raises
    ------
    ConfigurationError
        If the configuration cannot be run, or is not that of the run to resume.
    RunExistsError
        If ``path`` holds a run already and is not to be resumed, or none and is.
    """
    state = _to_resume(configuration, path) if resume else None
    if not resume:
        refuse_existing(path)
    task = build(configuration)
    pace = pace_of(configuration)
    start = state[0] if state is not None else 0
    measures = configuration.measures
    writer = RunWriter.create(
        path,
        name=path.name,
        script=f"backlight grok run {configuration.experiment}",
        monitors=("grokking",),
        flush_interval=configuration.keeping.flush_seconds,
        step_offset=start,
        on_lost=on_warning,
        filters=Filters(measures.compression, measures.level),
    )
    sink = Sink(writer, start)
    warned: set[str] = set()

    def warn(what: str, why: str) -> None:
        if what not in warned:
            warned.add(what)
            on_warning(f"{what} is not measured: {why}")

    tracker = tracker_of(configuration, task, sink, warn)
    full = tracker.measures
    tracker.measures = at_tier(full, tier)
    disk = DiskWatch(path, configuration.keeping.disk_free, sink, tier)

    def logged(step: int, values: Mapping[str, float]) -> None:
        sink.scalars(step, values, source="user")
        train, test = (values.get(f"{part}_accuracy", math.nan) for part in ("train", "test"))
        on_progress(Progress(step, pace.steps, values, phase(train, test, task.facts.chance)))

    def kept(step: int, state: Mapping[str, Any]) -> None:
        writer.flush()
        try:
            checkpoints.save(
                path / checkpoints.DIRECTORY, step, state, keep=configuration.keeping.checkpoints
            )
        except OSError as error:
            warn("checkpoint", f"{error}; a resumed run starts at the one before")

    def between(step: int) -> None:
        tracker.measures = disk.look(step, tracker.measures)

    loop = Loop(task, pace, tracker, on_log=logged, on_checkpoint=kept, between=between)
    status = RunStatus.FAILED
    flushing = _Flushing(writer, configuration.keeping.flush_seconds)
    try:
        if state is None:
            text = json.dumps(to_json(configuration.as_mapping()), indent=2)
            atomic_json.write_atomically(path / CONFIGURATION, text.encode())
            # Dropout and the like draw from the global state; a resumed training takes it back instead.
            torch.manual_seed(derived_seed(configuration.seed, "training"))
        else:
            loop.resume(start, state[1])
        _say(sink, configuration, task, control_of, start)
        if tier != TIERS[0] and state is None:
            sink.event(start, "degradation", degradation(TIERS[0], tier, reason, full, tracker.measures))
        writer.fingerprint(_fingerprint(task))
        with one_machine(configuration), flushing:
            loop.run()
        status = RunStatus.FINISHED
    finally:
        writer.close(status)
    return path


@contextlib.contextmanager
def one_machine(configuration: Configuration) -> Iterator[None]:
    """Let torch use as many threads as the configuration says, and as many as before after that."""
    before = torch.get_num_threads()
    torch.set_num_threads(configuration.keeping.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Sink:
    """A writer with global steps: an attempt stores its own, counted from where it started."""

    def __init__(self, writer: RunWriter, start: int) -> None:
        self._writer = writer
        self._start = start

    def scalars(self, step: int, values: Mapping[str, float], source: str = "backlight") -> None:
        """Store scalars."""
        self._writer.scalars(step - self._start, values, source)

    def array(
        self,
        name: str,
        step: int,
        values: Any,
        *,
        dims: tuple[str, ...] = (),
        unit: str = "1",
        encoding: str = "plain",
    ) -> None:
        """Store an array."""
        self._writer.array(name, step - self._start, values, dims=dims, unit=unit, encoding=encoding)

    def event(self, step: int | None, kind: str, payload: Mapping[str, Any]) -> None:
        """Store an event."""
        self._writer.event(None if step is None else step - self._start, kind, payload)


class _Flushing:
    """Writes what is buffered every few seconds, from a thread of its own."""

    def __init__(self, writer: RunWriter, interval: float) -> None:
        self._writer, self._interval = writer, interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="backlight-flush", daemon=True)

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            self._writer.flush()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()


def configuration_of(path: Path) -> dict[str, Any]:
    """Return the configuration that a run was started with.

    Raises
    ------
    ConfigurationError
        If the folder holds none.
    """
    try:
        found: dict[str, Any] = json.loads((path / CONFIGURATION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path}: holds no configuration of an experiment ({error}); was it made by `backlight grok run`?"
        ) from None
    return found


def refuse_existing(path: Path) -> None:
    """Refuse a folder that holds a run already.

    Raises
    ------
    RunExistsError
        If it does.
    """
    if (path / "manifest.json").exists():
        raise RunExistsError(
            f"{path}: holds a run already; go on with it by --resume, or choose another --out"
        )


def _to_resume(configuration: Configuration, path: Path) -> tuple[int, dict[str, Any]] | None:
    if not (path / "manifest.json").exists():
        raise RunExistsError(f"{path}: holds no run to resume; leave out --resume to start one")
    open_run(path)
    if not (path / CONFIGURATION).exists():
        return None  # killed before its first moment
    before, now = configuration_of(path), json.loads(json.dumps(to_json(configuration.as_mapping())))
    wrong = [
        f"{name} is {new!r}, was {old!r}" for name, old, new in _differences(before, now) if name not in _FREE
    ]
    if wrong:
        raise ConfigurationError(
            f"{path}: was started with another configuration: {'; '.join(wrong[:3])}. Resume it without "
            "settings of its own, or start anew with another --out"
        )
    return checkpoints.newest(path / checkpoints.DIRECTORY)


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], path: str = ""
) -> list[tuple[str, Any, Any]]:
    out: list[tuple[str, Any, Any]] = []
    for key in dict.fromkeys([*before, *now]):
        old, new, name = before.get(key), now.get(key), f"{path}{key}"
        if isinstance(old, dict) and isinstance(new, dict):
            out += _differences(old, new, f"{name}.")
        elif old != new:
            out.append((name, old, new))
    return out


def _say(sink: Sink, configuration: Configuration, task: Task, control_of: str, start: int) -> None:
    told = configuration.as_mapping()
    probe = task.probe[0] if isinstance(task.probe, (tuple, list)) else task.probe
    sink.event(
        start,
        "grokking",
        {
            "experiment": configuration.experiment,
            "preset": configuration.preset,
            "control": configuration.control,
            "control_of": control_of,
            "chance": task.facts.chance,
            "train_size": task.facts.train_size,
            "test_size": task.facts.test_size,
            "accuracy": task.facts.accuracy,
            "seed": configuration.seed,
            "settings": told,
            "sample_unit": "first dimension of the probe batch",
            "probe_size": len(probe) if hasattr(probe, "__len__") else None,
        },
    )


def _fingerprint(task: Task) -> Any:
    scope = Scope([task.model], [task.optimizer])
    scope.refresh()
    return take_fingerprint(scope, ())


def with_steps(configuration: Configuration, steps: int | None) -> Configuration:
    """Return the configuration with another number of steps."""
    if steps is None:
        return configuration
    section = replace(training(configuration), steps=steps)
    return replace(configuration, settings=replace(configuration.settings, training=section))


def tier_of(path: Path) -> str:
    """Return what the run in ``path`` kept last: a resumed one keeps no more and no less."""
    told = open_run(path).events("degradation")
    return str(told[-1].payload.get("to") or TIERS[0]) if told else TIERS[0]


def finished(path: Path) -> bool:
    """Tell whether ``path`` holds a run of an experiment that came to its end."""
    return (path / CONFIGURATION).exists() and open_run(path).status is RunStatus.FINISHED


def default_folder(configuration: Configuration, root: Path = Path("runs")) -> Path:
    """Return ``runs/NAME-PRESET-seed-N``, with the control's name behind it where it is one."""
    parts = [configuration.experiment, configuration.preset, f"seed-{configuration.seed}"]
    return root / "-".join([*parts, *([configuration.control] if configuration.control else [])])


def resumed(path: Path, *layers: tuple[str, Mapping[str, Any]]) -> Configuration:
    """Return the configuration of the run in ``path``, changed by ``layers``."""
    return configure(None, None, (str(path / CONFIGURATION), configuration_of(path)), *layers)
