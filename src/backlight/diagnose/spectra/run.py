"""Spectra of a recipe's model over its checkpoints, measured by all ranks and written into a run directory.

Every rank goes through the same stages. In a sweep each computes the gradients of its replicates and keeps
the layers of that sweep; they are sent to the owners of those layers, which measure, write and free them.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from backlight.answer import Answer, Table
from backlight.capture.batches import digest_of_weights
from backlight.diagnose.spectra.checkpoint_measurement import (
    CheckpointMeasurement,
    ReplicateData,
    check_data,
)
from backlight.diagnose.spectra.options import (
    CHECKPOINT,
    CONFIGURATION,
    Checkpoint,
    Earlier,
    SpectraProgress,
    SpectraRequest,
    find_checkpoints,
    read_earlier,
)
from backlight.launch.recipe import Recipe, read_recipe
from backlight.measure.noise_scale import NoiseScale
from backlight.monitors.spectra.instrument.layers import Selection, select_layers
from backlight.monitors.spectra.instrument.rank_group import RankGroup, launched_ranks
from backlight.monitors.spectra.instrument.replicate_gradient import seed_by
from backlight.monitors.spectra.model.echo_records import (
    LayerHistory,
    bounds,
    by_signal,
    joint_noise_scale,
    layer_histories,
    layer_table,
    record_layer,
    record_left_out,
)
from backlight.monitors.spectra.model.kept import kept_of, kept_table
from backlight.monitors.spectra.settings import SpectraError
from backlight.records import RunStatus
from backlight.store.read.run import Run
from backlight.store.spectra import Layer, Measurement, tables
from backlight.store.write.attempt import default_path
from backlight.store.write.writer import RunWriter
from backlight.text import listed


@dataclass(frozen=True)
class SpectraResult:
    """Measured layers and steps, and the run directory."""

    path: Path
    rank: int
    world_size: int
    checkpoints: tuple[Checkpoint, ...]
    layers: int
    left_out: Mapping[str, str]
    """Parameters that are not measured, with the reason."""
    measured: int
    """Layers, counted at each checkpoint, that were measured by this call; ``resumed`` before it."""
    resumed: int
    sweeps: int
    """Most backward passes of a replicate at a checkpoint."""
    batch: float
    """Samples of a replicate."""


def measure_spectra(
    options: SpectraRequest, on_progress: Callable[[SpectraProgress], None] = lambda _: None
) -> SpectraResult:
    """Measure the requested spectra, on all ranks that the launcher started.

    ``on_progress`` is called on rank 0. What cannot be measured raises SpectraError, the same on every rank,
    whichever rank met it.
    """
    with launched_ranks() as group:
        return _Measurement(group, options, on_progress).run()


class _Measurement:
    """One rank's work; every method that communicates is called by all ranks in the same order."""

    def __init__(
        self, group: RankGroup, options: SpectraRequest, on_progress: Callable[[SpectraProgress], None]
    ) -> None:
        self.group, self.options = group, options
        self.on_progress = on_progress if group.is_leader else lambda _: None
        self.recipe: Recipe = group.run(lambda: read_recipe(options.recipe, options.settings))
        group.run(options.check)
        self.device = group.run(options.find_device)
        self.checkpoints = group.broadcast(group.run(lambda: find_checkpoints(options.checkpoints)))
        self.path = group.broadcast(options.out or default_path(str(options.recipe)))
        self.data = group.run(lambda: ReplicateData(self.recipe, options, group))
        self.batch, digest = check_data(group, self.recipe, self.data)
        self.configuration = self._configuration(digest)
        self.earlier = group.broadcast(
            group.run(lambda: read_earlier(self.path, self.configuration) if group.is_leader else Earlier())
        )
        self.writer: RunWriter | None = None
        self.selection: Selection | None = None
        self.measured = self.resumed = self.sweeps = 0

    def run(self) -> SpectraResult:
        status = RunStatus.FAILED
        try:
            for number, checkpoint in enumerate(self.checkpoints):
                self._checkpoint(checkpoint, number)
            status = RunStatus.FINISHED
        finally:
            if self.writer is not None:
                self.writer.close(status)
        assert self.selection is not None  # there is a checkpoint
        return SpectraResult(
            path=self.path,
            rank=self.group.rank,
            world_size=self.group.size,
            checkpoints=self.checkpoints,
            layers=len(self.selection.layers),
            left_out=self.selection.left_out,
            measured=self.measured,
            resumed=self.resumed,
            sweeps=self.sweeps,
            batch=self.batch,
        )

    def _configuration(self, data: str) -> dict[str, Any]:
        """Return the options that determine the numbers; how the work is spread does not."""
        options = self.options
        return {
            "recipe": hashlib.sha256(self.recipe.path.read_bytes()).hexdigest()[:16],
            "settings": {name: repr(value) for name, value in sorted(self.recipe.settings.items())},
            "replicates": options.replicates,
            "method": options.method,
            "max_directions": options.max_directions,
            "device": "" if self.device is None else self.device.type,
            "dtype": options.dtype or "",
            "seed": options.seed,
            "data": hashlib.sha256(data.encode()).hexdigest()[:16] if data else "",
        }

    def _model(self, checkpoint: Checkpoint) -> nn.Module:
        seed_by(self.options.seed, "model")
        model = self.recipe.build_model()
        if checkpoint.path is not None:
            self.recipe.load(model, checkpoint.path)
        return model.to(device=self.device, dtype=self.options.torch_dtype)

    def _check_weights(self, checkpoint: Checkpoint, model: nn.Module) -> str:
        """Return the digest of the weights; raise SpectraError if a rank or an earlier attempt has others."""
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        weights = self.group.run(lambda: digest_of_weights(state))
        digests = self.group.all_gather(weights)
        if len(set(digests)) > 1:
            rank = next(i for i, other in enumerate(digests) if other != digests[0])
            raise SpectraError(
                f"{self.recipe.path}: rank {rank} has other weights than rank 0 for {checkpoint}; "
                "build_model and load must give every rank the same"
            )
        before, digest = self.earlier.checkpoints.get(checkpoint.step, ("", weights))
        if digest != weights:
            raise SpectraError(
                f"{self.path}: step {checkpoint.step} was measured on other weights ({before}) than those of "
                f"{checkpoint}; choose another --out"
            )
        return weights

    def _select(self, model: nn.Module, checkpoint: Checkpoint) -> Selection:
        include, exclude = self.options.include, self.options.exclude
        selection = select_layers(model.named_parameters(), self.recipe.split, include, exclude, prefix="--")
        if self.selection is not None and self.selection.layers != selection.layers:
            raise SpectraError(f"{checkpoint}: has other layers than the checkpoint before it")
        self.selection = selection
        return selection

    def _checkpoint(self, checkpoint: Checkpoint, number: int) -> None:
        group, step = self.group, checkpoint.step
        model = group.run(lambda: self._model(checkpoint), number)
        weights = self._check_weights(checkpoint, model)
        selection = group.run(lambda: self._select(model, checkpoint))
        todo = [layer for layer in selection.layers if (step, layer.parameter) not in self.earlier.done]
        self.resumed += len(selection.layers) - len(todo)
        if not todo:
            return
        if self.writer is None:
            self.writer = self._open(selection)
        if group.is_leader:
            file = "" if checkpoint.path is None else str(checkpoint.path)
            self.writer.event(step, CHECKPOINT, {"path": file, "weights": weights})
            self.writer.flush()  # before any rank marks a layer as measured
        work = CheckpointMeasurement(
            group, self.options, self.recipe, self.device, self.data, self.batch, self.writer, step, model
        )
        total = len(self.checkpoints) * len(selection.layers)

        def report(text: str) -> None:
            self.on_progress(SpectraProgress(self.resumed + self.measured, total, f"step {step}: {text}"))

        planned = work.plan(todo)
        self.sweeps = max(self.sweeps, len(planned))
        for sweep in planned:
            work.sweep(todo, sweep, report)
            self.measured += len(sweep.layers)
            report("written")

    def _open(self, selection: Selection) -> RunWriter:
        """Open the attempt, rank 0 before the others, and return the writer of this rank."""
        group, launch = self.group, self.group.broadcast(uuid.uuid4().hex)

        def create() -> RunWriter:
            return RunWriter.create(
                self.path,
                name=self.path.name,
                rank=group.rank,
                world_size=group.size,
                run_id=launch,
                resume=True,
                script=f"backlight spectra {self.options.recipe}",
                monitors=("spectra",),
                step_offset=0,
            )

        first = group.run(lambda: create() if group.is_leader else None)
        writer = group.run(lambda: first or create())
        if group.is_leader:
            writer.event(None, CONFIGURATION, {**self.configuration, "batch": self.batch, "version": 1})
            for layer in selection.layers:
                record_layer(writer, layer)
            for parameter, reason in selection.left_out.items():
                record_left_out(writer, parameter, reason)
        return writer


# Answer of ``spectra``: the layers of the last step, and the noise scale of all of them.


SHOWN = 20
"""Layers that are printed; --json has them all."""


@dataclass(frozen=True)
class SpectraRecord:
    """What was measured now and before; ``noise_scale`` is that of the layers of the last step together."""

    run: SpectraResult
    layers: tuple[Layer, ...]
    measurements: tuple[Measurement, ...]
    noise_scale: NoiseScale | None


def answer(outcome: SpectraResult, run: Run) -> Answer:
    """Return the answer: the layers of the last step, the largest share of signal first."""
    histories = layer_histories(run)
    together = _together(histories)
    steps = sorted({entry.step for history in histories for entry in history.measured})
    last = [history for history in histories if history.last.step == steps[-1]]
    many = f", {len(steps)} steps, here the last: {steps[-1]}" if len(steps) > 1 else ""
    replicates = last[0].last.replicates if last else 0
    facts = []
    if together is not None:
        within = bounds(*together.interval)
        value = "no signal" if math.isinf(together.value) else f"{together.value:.3g}"
        facts.append(f"noise scale of the layers together: {value} samples (95 %: {within})")
    return Answer(
        f"{len(last)} layers, {replicates} replicates of {_batch(outcome.batch)}{many}",
        SpectraRecord(
            outcome,
            tuple(history.layer for history in histories),
            tuple(entry for history in histories for entry in history.measured),
            together,
        ),
        tuple(facts),
        tuple(_tables(run, by_signal(last))),
        (*_notes(outcome), f"next: backlight report {outcome.path}"),
    )


def _tables(run: Run, last: Sequence[LayerHistory]) -> Iterator[Table]:
    if last:
        yield layer_table(last, SHOWN)
    if rows := kept_of(last, (tables(run, history.name) for history in last)):
        yield kept_table(rows, SHOWN)


def _together(histories: Sequence[LayerHistory]) -> NoiseScale | None:
    """Return the noise scale of the layers that were measured last; None where batches have no known size."""
    last = [history for history in histories if not math.isnan(history.last["noise_scale"])]
    step = max((history.last.step for history in last), default=0)
    return joint_noise_scale([history for history in last if history.last.step == step]) if last else None


def _notes(outcome: SpectraResult) -> list[str]:
    """Return the notes below the table."""
    notes = []
    if outcome.resumed:
        notes.append(f"{outcome.resumed} layers were there already, {outcome.measured} were measured now")
    if outcome.left_out:
        by_reason: dict[str, list[str]] = {}
        for name, reason in outcome.left_out.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            notes.append(f"left out, {reason}: {listed(names)}")
    if outcome.sweeps > 1:
        notes.append(
            f"every backward ran {outcome.sweeps} times, because replicates of all layers at once do not fit "
            "into --budget"
        )
    if math.isnan(outcome.batch):
        notes.append("the batches hold no tensor: their size is not known, and with it no noise scale")
    return notes


def _batch(batch: float) -> str:
    return "batches" if math.isnan(batch) else f"{batch:g} samples"
