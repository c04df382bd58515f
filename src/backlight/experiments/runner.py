"""Run an experiment: from a configuration to a run directory, with tracking and checkpoints."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backlight import atomic_files, codec, untrusted_files
from backlight.capture.fingerprint import take_fingerprint
from backlight.capture.parameters import Scope
from backlight.experiments import checkpoints
from backlight.experiments.config import (
    Configuration,
    ConfigurationError,
    configure,
    experiment_of,
)
from backlight.experiments.data.split import derived_seed
from backlight.experiments.experiment import Duration
from backlight.experiments.task import Task
from backlight.monitors.grokking.instrument.probe_batch import ProbedModel
from backlight.monitors.grokking.instrument.tracker import MeasureTracker
from backlight.monitors.grokking.model.measures import TIERS, DiskGuard, at_tier, degradation
from backlight.monitors.grokking.settings import Measures
from backlight.records import RunStatus
from backlight.store.errors import RunExistsError
from backlight.store.read.run import open_run
from backlight.store.write.writer import RunWriter
from backlight.threads import BackgroundThread

CONFIGURATION = "configuration.json"

MEMORISED_ACCURACY = 0.99
GENERALISED_ACCURACY = 0.95

_CHANGEABLE_ON_RESUME = (
    "training.steps",
    "run.checkpoint_every",
    "run.checkpoints",
    "run.disk_free",
    "run.flush_seconds",
)


@dataclass(frozen=True)
class TrainingProgress:
    """Steps done and in total, the last evaluation, and the learning phase."""

    step: int
    steps: int
    values: Mapping[str, float]
    phase: str


def learning_phase(train: float, test: float, chance: float) -> str:
    """Return the phase that two accuracies suggest: a label for a progress bar, no verdict."""
    if not (math.isfinite(train) and math.isfinite(test)):
        return "no accuracies"
    if test >= GENERALISED_ACCURACY:
        return "generalised"
    if test >= chance + 0.5 * (GENERALISED_ACCURACY - chance):
        return "generalising"
    return "memorised" if train >= MEMORISED_ACCURACY else "memorising"


@dataclass
class Loop:
    """One training run, from ``start`` (above 0 in a resumed run) to the end of its duration.

    ``on_log`` gets step and values of each evaluation, of the weights before the step; ``on_checkpoint`` step
    and the state that continuing there needs; ``before_log`` each logged step.
    """

    task: Task
    duration: Duration
    tracker: MeasureTracker
    on_log: Callable[[int, Mapping[str, float]], None]
    on_checkpoint: Callable[[int, Mapping[str, Any]], None]
    before_log: Callable[[int], None] = lambda _step: None
    checkpoint_every: int = 1000
    start: int = 0

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Continue at ``step`` from the state that ``on_checkpoint`` got."""
        checkpoints.restore(self.task, state["training"])
        self.tracker.load_state(state["tracker"])
        self.start = step

    def run(self) -> None:
        """Train to the end; the last log is after the last step."""
        steps = self.duration.steps
        for step in range(self.start, steps):
            if step > self.start and step % self.checkpoint_every == 0:
                self.on_checkpoint(step, self.state())
            self.step(step)
        self.on_log(steps, self.task.evaluate(thorough=True))
        self.on_checkpoint(steps, self.state())

    def step(self, step: int) -> None:
        """Log what is due before ``step``, and train it."""
        self.task.before_step(step)
        if step % self.duration.log_every == 0:
            self.before_log(step)
            self.on_log(step, self.task.evaluate(thorough=step % self.duration.thorough_every == 0))
        # Before the optimizer step: the samples must see the weights that the gradient was taken at.
        self.task.train_step(step, lambda: self.tracker.measure(step, named_gradients(self.task.model)))

    def state(self) -> dict[str, Any]:
        """Return all that continuing here needs."""
        return {"training": checkpoints.training_state(self.task), "tracker": self.tracker.state()}


def named_gradients(model: nn.Module) -> list[tuple[str, torch.Tensor | None]]:
    """Return the gradients of a model by parameter name; a tied parameter has its first name."""
    return [(name, parameter.grad) for name, parameter in model.named_parameters()]


def build(configuration: Configuration) -> Task:
    """Build the task of a configuration; a ConfigurationError if a size or the device is impossible."""
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
            "`backlight grok run --dry-run` prints what a configuration needs"
        ) from error
    return task


def measures_of(configuration: Configuration) -> Measures:
    """Return the measures of a run; those without a spacing of their own are logged with the evaluations."""
    return configuration.measures.logged_every(configuration.settings.training.log_every)


def probe_of(task: Task, measures: Measures) -> ProbedModel | None:
    """Return the probe batch of a task, None if no measure needs samples."""
    if not measures.sampled:
        return None
    held_out = task.held_out if len(task.held_out[0]) else None
    return ProbedModel(
        task.model,
        task.sample_loss,
        task.probe,
        task.inputs,
        held_out=held_out,
        optimizers=lambda: [task.optimizer],
    )


def run_experiment(
    configuration: Configuration,
    path: Path,
    *,
    resume: bool = False,
    tier: str = TIERS[0],
    reason: str = "",
    control_of: str = "",
    on_progress: Callable[[TrainingProgress], None] = lambda _progress: None,
    on_warning: Callable[[str], None] = lambda _text: None,
) -> Path:
    """Run an experiment into a run directory, from the start or from its newest checkpoint.

    Parameters
    ----------
    resume:
        Continue the run in ``path``; the numbers are those of an uninterrupted one.
    tier, reason:
        What is stored from the start on, and why it is less than everything.
    control_of:
        The run that this one is the control of.
    on_progress, on_warning:
        Called after each evaluation, and with each failure that does not end the run.

    Raises
    ------
    ConfigurationError
        If the configuration is invalid, or differs from that of the run to resume.
    RunExistsError
        If ``path`` holds a run and ``resume`` is not set, or holds none and it is set.
    """
    state = _to_resume(configuration, path) if resume else None
    if not resume:
        refuse_existing(path)
    task = build(configuration)
    duration: Duration = configuration.settings.training
    start = state[0] if state is not None else 0
    writer = RunWriter.create(
        path,
        resume=resume,
        name=path.name,
        script=f"backlight grok run {configuration.experiment}",
        monitors=("grokking",),
        flush_interval=configuration.run.flush_seconds,
        step_offset=start,
        on_lost=on_warning,
        filters=configuration.run.filters(),
    )
    recorder = OffsetRecorder(writer, start)
    warned: set[str] = set()

    def warn(what: str, why: str) -> None:
        if what not in warned:
            warned.add(what)
            on_warning(f"{what} is not measured: {why}")

    full = measures_of(configuration)
    tracker = MeasureTracker(full, recorder, probe_of(task, full), warn)
    tracker.measures = at_tier(full, tier)
    disk = DiskGuard(path, configuration.run.disk_free, recorder, on_warning, tier)

    def logged(step: int, values: Mapping[str, float]) -> None:
        recorder.scalars(step, values, source="user")
        train, test = (values.get(f"{part}_accuracy", math.nan) for part in ("train", "test"))
        on_progress(TrainingProgress(step, duration.steps, values, learning_phase(train, test, task.chance)))

    def checkpoint(step: int, state: Mapping[str, Any]) -> None:
        writer.flush()
        try:
            checkpoints.save(path / checkpoints.DIRECTORY, step, state, keep=configuration.run.checkpoints)
        except OSError as error:
            warn("checkpoint", f"{error}; a resumed run starts at the one before")

    def guard_disk(step: int) -> None:
        tracker.measures = disk.cheaper_if_full(step, tracker.measures)

    loop = Loop(task, duration, tracker, logged, checkpoint, guard_disk, configuration.run.checkpoint_every)
    status = RunStatus.FAILED
    try:
        if state is None:
            text = codec.encode(configuration.as_mapping(), indent=2)
            atomic_files.write(path / CONFIGURATION, text.encode())
            # Dropout draws from the global random state; a resumed run restores that state instead.
            torch.manual_seed(derived_seed(configuration.seed, "training"))
        else:
            loop.resume(start, state[1])
        recorder.event(start, "grokking", _facts(configuration, task, control_of))
        if tier != TIERS[0] and state is None:
            recorder.event(start, "degradation", degradation(TIERS[0], tier, reason, full, tracker.measures))
        scope = Scope([task.model], [task.optimizer])
        scope.refresh()
        writer.fingerprint(take_fingerprint(scope, ()))
        with torch_threads(configuration.run.threads), _flushed(writer, configuration.run.flush_seconds):
            loop.run()
        status = RunStatus.FINISHED
    finally:
        writer.close(status)
    return path


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Limit torch to ``count`` threads, and restore the previous number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class OffsetRecorder:
    """A recorder of global steps: an attempt of a run stores steps counted from its start."""

    def __init__(self, writer: RunWriter, start: int) -> None:
        self._writer = writer
        self._start = start

    def scalars(self, step: int, values: Mapping[str, float], source: str = "backlight") -> None:
        """Store scalars."""
        self._writer.scalars(step - self._start, values, source)

    def array(self, name: str, step: int, values: Any, **options: Any) -> None:
        """Store an array."""
        self._writer.array(name, step - self._start, values, **options)

    def event(self, step: int | None, kind: str, payload: Mapping[str, Any]) -> None:
        """Store an event."""
        self._writer.event(None if step is None else step - self._start, kind, payload)


@contextlib.contextmanager
def _flushed(writer: RunWriter, interval: float) -> Iterator[None]:
    """Flush the writer every ``interval`` seconds, in a background thread."""
    stopped = threading.Event()

    def flush() -> None:
        while not stopped.wait(interval):
            writer.flush()

    thread = BackgroundThread(target=flush, name="backlight-flush")
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def configuration_of(path: Path) -> dict[str, Any]:
    """Return the configuration that a run was started with; a ConfigurationError if there is none."""
    try:
        configuration: dict[str, Any] = codec.decode(untrusted_files.read(path / CONFIGURATION).decode())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path}: holds no configuration of an experiment ({error}); was it written by "
            "`backlight grok run`?"
        ) from None
    return configuration


def refuse_existing(path: Path) -> None:
    """Raise a RunExistsError if ``path`` already holds a run."""
    if (path / "manifest.json").exists():
        raise RunExistsError(
            f"{path}: holds a run already; continue it with --resume, or choose another --out"
        )


def _to_resume(configuration: Configuration, path: Path) -> tuple[int, dict[str, Any]] | None:
    if not (path / "manifest.json").exists():
        raise RunExistsError(f"{path}: holds no run to resume; leave out --resume to start one")
    open_run(path)
    if not (path / CONFIGURATION).exists():
        return None  # killed before the configuration was written
    before, now = configuration_of(path), codec.decode(codec.encode(configuration.as_mapping()))
    wrong = [
        f"{name} is {new!r}, was {old!r}"
        for name, old, new in _differences(before, now)
        if name not in _CHANGEABLE_ON_RESUME
    ]
    if wrong:
        raise ConfigurationError(
            f"{path}: was started with another configuration: {'; '.join(wrong[:3])}. Resume it without "
            "other settings, or start again with another --out"
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


def _facts(configuration: Configuration, task: Task, control_of: str) -> dict[str, Any]:
    return {
        "experiment": configuration.experiment,
        "preset": configuration.preset,
        "control": configuration.control,
        "control_of": control_of,
        "chance": task.chance,
        "train_size": len(task.split.train_inputs),
        "test_size": len(task.split.test_inputs),
        "accuracy": task.accuracy,
        "seed": configuration.seed,
        "settings": configuration.as_mapping(),
        "sample_unit": "first dimension of the probe batch",
        "probe_size": len(task.probe[0]),
        "probe_rows": task.probe_rows,
    }


def tier_of(path: Path) -> str:
    """Return the last tier of the run in ``path``, with which a resumed run continues."""
    events = open_run(path).events("degradation")
    return str(events[-1].payload.get("to") or TIERS[0]) if events else TIERS[0]


def degradations(path: Path) -> list[str]:
    """Return what the run in ``path`` stored less of than was requested: from which step, and why."""
    return [
        f"from step {event.step}: {event.payload.get('to')} instead of {event.payload.get('from')}, since "
        f"{event.payload.get('reason')}"
        for event in open_run(path).events("degradation")
    ]


def finished(path: Path) -> bool:
    """Return whether ``path`` holds a finished run of an experiment."""
    return (path / CONFIGURATION).exists() and open_run(path).status is RunStatus.FINISHED


def default_directory(configuration: Configuration, root: Path = Path("runs")) -> Path:
    """Return ``runs/NAME-PRESET-seed-N``, followed by the name of the control if it is one."""
    parts = [configuration.experiment, configuration.preset, f"seed-{configuration.seed}"]
    return root / "-".join([*parts, *([configuration.control] if configuration.control else [])])


def resumed(path: Path, *layers: tuple[str, Mapping[str, Any]]) -> Configuration:
    """Return the configuration of the run in ``path``, changed by ``layers``."""
    return configure(None, None, (str(path / CONFIGURATION), configuration_of(path)), *layers)
