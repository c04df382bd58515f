"""Spectra of a recipe's model over its checkpoints: replicates, owners of layers, results in a run directory.

Every rank goes through the same stages. In a sweep each computes the gradients of its replicates, keeping the
layers of that sweep; they travel to the owners of those layers; the owners measure, write and forget them.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from backlight.diagnose.spectra.checkpoint import CheckpointWork
from backlight.diagnose.spectra.checkpoint_files import Checkpoint, find_checkpoints
from backlight.diagnose.spectra.options import Asked, Stage
from backlight.diagnose.spectra.replicate_data import ReplicateData, check_data
from backlight.diagnose.spectra.resume import (
    CHECKPOINT,
    CONFIGURATION,
    Earlier,
    check_checkpoint,
    read_earlier,
)
from backlight.launch.recipe import Recipe, read_recipe
from backlight.monitors.spectra.instrument.batches import of_weights
from backlight.monitors.spectra.instrument.layers import Selection, select
from backlight.monitors.spectra.instrument.rank_group import Team, assembled, replicates_of
from backlight.monitors.spectra.instrument.replicate_gradient import seed_by
from backlight.monitors.spectra.model.errors import SpectraError
from backlight.monitors.spectra.model.recording import describe, leave_out
from backlight.records import RunStatus
from backlight.store.write.attempt import default_path
from backlight.store.write.writer import RunWriter


@dataclass(frozen=True)
class Outcome:
    """What was done.

    Attributes
    ----------
    path
        The run directory.
    rank, world_size
        Which of how many processes this is.
    checkpoints
        What was measured.
    layers, left_out
        Matrices that are measured, and parameters that are not.
    measured, there
        Layers, counted at each checkpoint, that were measured now and before.
    sweeps
        Backward passes of every replicate at a checkpoint, at most.
    batch
        Samples of a replicate.
    """

    path: Path
    rank: int
    world_size: int
    checkpoints: tuple[Checkpoint, ...]
    layers: int
    left_out: Mapping[str, str]
    measured: int
    there: int
    sweeps: int
    batch: float


def measure_spectra(asked: Asked, on_stage: Callable[[Stage], None] = lambda _: None) -> Outcome:
    """Measure the spectra that are asked for, on all ranks that the launcher started.

    Parameters
    ----------
    asked
        What is to be measured.
    on_stage
        Told how far it is, on rank 0.

    Raises
    ------
    SpectraError
        If something cannot be measured: the same on every rank, whichever of them met it.
    """
    with assembled() as team:
        return _Measurement(team, asked, on_stage).run()


class _Measurement:
    """One rank's part; every method that meets the others is called by all ranks in the same order."""

    def __init__(self, team: Team, asked: Asked, on_stage: Callable[[Stage], None]) -> None:
        self.team, self.asked = team, asked
        self.on_stage = on_stage if team.leads else lambda _: None
        self.device: torch.device | None = None
        self.recipe: Recipe = team.together(lambda: read_recipe(asked.recipe, asked.settings))
        self.writer: RunWriter | None = None
        self.measured = self.there = self.sweeps = 0
        self.selection: Selection | None = None

    def run(self) -> Outcome:
        team, asked = self.team, self.asked
        team.together(asked.check)
        self.device = team.together(asked.find_device)
        checkpoints = team.shared(team.together(lambda: find_checkpoints(asked.checkpoints)))
        path = team.shared(asked.out or default_path(str(asked.recipe)))
        data = team.together(
            lambda: ReplicateData(
                self.recipe,
                asked.replicates,
                replicates_of(team.rank, team.size, asked.replicates),
                seed=asked.seed,
                budget=asked.budget,
            )
        )
        batch, known = check_data(team, self.recipe, data)
        configuration = self._configuration(known)
        earlier = team.shared(
            team.together(lambda: read_earlier(path, configuration) if team.leads else Earlier())
        )
        status = RunStatus.FAILED
        try:
            for number, checkpoint in enumerate(checkpoints):
                self._checkpoint(
                    path, configuration, earlier, data, batch, checkpoint, number, len(checkpoints)
                )
            status = RunStatus.FINISHED
        finally:
            if self.writer is not None:
                self.writer.close(status)
        assert self.selection is not None  # there is a checkpoint
        return Outcome(
            path=path,
            rank=team.rank,
            world_size=team.size,
            checkpoints=checkpoints,
            layers=len(self.selection.layers),
            left_out=self.selection.left_out,
            measured=self.measured,
            there=self.there,
            sweeps=self.sweeps,
            batch=batch,
        )

    def _configuration(self, data: str) -> dict[str, Any]:
        """Return what decides the numbers; how the work is spread does not."""
        asked = self.asked
        return {
            "recipe": hashlib.sha256(self.recipe.path.read_bytes()).hexdigest()[:16],
            "settings": {name: repr(value) for name, value in sorted(self.recipe.settings.items())},
            "replicates": asked.replicates,
            "method": asked.method,
            "max_directions": asked.max_directions,
            "device": "" if self.device is None else self.device.type,
            "dtype": asked.dtype or "",
            "seed": asked.seed,
            "data": hashlib.sha256(data.encode()).hexdigest()[:16] if data else "",
        }

    def _model(self, checkpoint: Checkpoint, number: int) -> nn.Module:
        def build() -> nn.Module:
            seed_by(self.asked.seed, "model")
            model = self.recipe.build_model()
            if checkpoint.path is not None:
                self.recipe.load(model, checkpoint.path)
            return model.to(device=self.device, dtype=self.asked.torch_dtype)

        return self.team.together(build, number)

    def _check_model(self, path: Path, earlier: Earlier, checkpoint: Checkpoint, model: nn.Module) -> str:
        """Return the digest of the weights, which all ranks and all attempts must share.

        Raises
        ------
        SpectraError
            If they do not.
        """
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        weights = self.team.together(lambda: of_weights(state))
        theirs = self.team.everywhere(weights)
        if len(set(theirs)) > 1:
            rank = next(i for i, other in enumerate(theirs) if other != theirs[0])
            raise SpectraError(
                f"{self.recipe.path}: rank {rank} has other weights than rank 0 for {checkpoint}; "
                "build_model and load must give every rank the same"
            )
        self.team.together(lambda: check_checkpoint(path, earlier, checkpoint.step, str(checkpoint), weights))
        return weights

    def _select(self, model: nn.Module, checkpoint: Checkpoint) -> Selection:
        selection = select(model, self.recipe.split, self.asked.include, self.asked.exclude)
        if self.selection is not None and self.selection.layers != selection.layers:
            raise SpectraError(f"{checkpoint}: has other layers than the checkpoint before it")
        self.selection = selection
        return selection

    def _checkpoint(
        self,
        path: Path,
        configuration: Mapping[str, Any],
        earlier: Earlier,
        data: ReplicateData,
        batch: float,
        checkpoint: Checkpoint,
        number: int,
        count: int,
    ) -> None:
        team = self.team
        model = self._model(checkpoint, number)
        weights = self._check_model(path, earlier, checkpoint, model)
        selection = team.together(lambda: self._select(model, checkpoint))
        todo = [layer for layer in selection.layers if (checkpoint.step, layer.parameter) not in earlier.done]
        self.there += len(selection.layers) - len(todo)
        if not todo:
            return
        writer = self._open(path, configuration, selection, batch)
        if team.leads:
            file = "" if checkpoint.path is None else str(checkpoint.path)
            writer.event(checkpoint.step, CHECKPOINT, {"path": file, "weights": weights})
            writer.flush()  # before any rank states that it has measured a layer
        work = CheckpointWork(
            team, self.asked, self.recipe, self.device, data, batch, writer, checkpoint.step, model
        )
        total = count * len(selection.layers)

        def say(text: str) -> None:
            self.on_stage(Stage(self.there + self.measured, total, f"step {checkpoint.step}: {text}"))

        planned = work.plan(todo)
        self.sweeps = max(self.sweeps, len(planned))
        for sweep in planned:
            work.sweep(todo, sweep, say)
            self.measured += len(sweep.layers)
            say("written")

    def _open(
        self, path: Path, configuration: Mapping[str, Any], selection: Selection, batch: float
    ) -> RunWriter:
        """Return the writer of this rank; the first call opens the attempt, rank 0 before the others."""
        if self.writer is not None:
            return self.writer
        launch = self.team.shared(uuid.uuid4().hex)

        def enter() -> None:
            self.writer = RunWriter.create(
                path,
                name=path.name,
                rank=self.team.rank,
                world_size=self.team.size,
                run_id=launch,
                script=f"backlight spectra {self.asked.recipe}",
                monitors=("spectra",),
                step_offset=0,
            )

        self.team.together(lambda: enter() if self.team.leads else None)
        self.team.together(lambda: None if self.team.leads else enter())
        writer = self._entered()
        if self.team.leads:
            writer.event(None, CONFIGURATION, {**configuration, "batch": batch, "version": 1})
            for layer in selection.layers:
                describe(writer, layer)
            for parameter, reason in selection.left_out.items():
                leave_out(writer, parameter, reason)
        return writer

    def _entered(self) -> RunWriter:
        assert self.writer is not None
        return self.writer
