"""One checkpoint: gradients of the replicates, their way to the owners of layers, and what those measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from backlight.diagnose.spectra.options import Asked
from backlight.diagnose.spectra.replicate_data import ReplicateData
from backlight.launch.recipe import Recipe
from backlight.measure.spectra.measurement import spectral_echo
from backlight.measure.spectra.replicates import promoted
from backlight.measure.spectra.spectrum import stable_rank
from backlight.monitors.spectra.instrument.batches import moved
from backlight.monitors.spectra.instrument.layers import matrices
from backlight.monitors.spectra.instrument.rank_group import Team, replicates_of
from backlight.monitors.spectra.instrument.replicate_gradient import gradients, seed_by
from backlight.monitors.spectra.model.errors import SpectraError
from backlight.monitors.spectra.model.ownership import Sweep, cost, sweeps
from backlight.monitors.spectra.model.recording import record_arrays, state_measured
from backlight.store.format.spectra import Layer
from backlight.store.write.writer import RunWriter


class CheckpointWork:
    """One rank's work on a checkpoint; every public method is called by all ranks.

    Parameters
    ----------
    team, asked, recipe, device
        Who measures, and what.
    data
        The batches of this rank's replicates, and ``batch`` the samples of each.
    writer
        Where this rank's layers go.
    step, model
        Of the checkpoint.
    """

    def __init__(
        self,
        team: Team,
        asked: Asked,
        recipe: Recipe,
        device: torch.device | None,
        data: ReplicateData,
        batch: float,
        writer: RunWriter,
        step: int,
        model: nn.Module,
    ) -> None:
        self.team, self.asked, self.recipe, self.device = team, asked, recipe, device
        self.data, self.batch, self.writer, self.step, self.model = data, batch, writer, step, model

    def plan(self, layers: Sequence[Layer]) -> tuple[Sweep, ...]:
        """Return the sweeps in which the layers are measured, and by whom."""
        types = self._types(layers)
        return sweeps(
            [cost(layer.rows, layer.columns) for layer in layers],
            [layer.rows * layer.columns * types[layer.parameter].itemsize for layer in layers],
            replicates=self.asked.replicates,
            ranks=self.team.size,
            budget=self.asked.budget,
        )

    def sweep(self, layers: Sequence[Layer], sweep: Sweep, say: Callable[[str], None]) -> None:
        """Measure the layers of a sweep; afterwards they are written and forgotten.

        Parameters
        ----------
        layers
            Those that were planned.
        sweep
            Which of them.
        say
            Told what is being done.

        Raises
        ------
        SpectraError
            If one cannot be measured, on every rank alike.
        """
        team, asked = self.team, self.asked
        held = self._gradients([layers[i].parameter for i in sweep.layers], say)
        types = self._types(layers)
        say("replicates travel")
        owned: dict[int, list[Tensor]] = {}
        for index, owner in zip(sweep.layers, sweep.owners, strict=True):
            layer = layers[index]
            arrived = team.gathered(
                held.pop(layer.parameter),
                owner,
                replicates=asked.replicates,
                shape=(layer.rows, layer.columns),
                dtype=types[layer.parameter],
                chunk=asked.chunk,
            )
            if owner == team.rank:
                owned[index] = arrived
        problem: tuple[int, Exception] | None = None
        count = len(owned)
        for number, index in enumerate(sorted(owned)):
            layer = layers[index]
            say(f"{layer.parameter}, {number + 1} of {count}")
            try:
                self._layer(layer, owned.pop(index))
            except Exception as error:  # noqa: BLE001 - the others must hear of it, whatever it is
                problem = (layer.index, error)
                break
        team.agree(problem)

    def _gradients(self, names: Sequence[str], say: Callable[[str], None]) -> dict[str, dict[int, Tensor]]:
        """Return this rank's replicates of some layers, by layer and number."""
        team, asked = self.team, self.asked
        device = self.device or next(self.model.parameters()).device
        held: dict[str, dict[int, Tensor]] = {name: {} for name in names}
        problem: tuple[int, Exception] | None = None
        mine = replicates_of(team.rank, team.size, asked.replicates)
        for count, replicate in enumerate(mine):
            say(f"gradient {count + 1} of {len(mine)}")
            try:
                batch = moved(self.data.batch(replicate), device, asked.torch_dtype)
                seed_by(asked.seed, "loss", replicate)
                found = gradients(
                    self.model, self.recipe.loss, batch, set(names), self.recipe.split, replicate=replicate
                )
            except SpectraError as error:
                problem = (replicate, error)
                break
            except Exception as error:  # noqa: BLE001 - a user's loss; the others must hear of it
                said = f"replicate {replicate}: loss or backward failed: {type(error).__name__}: {error}"
                told = SpectraError(said)
                told.__cause__ = error
                problem = (replicate, told)
                break
            for name, matrix in found.items():
                held[name][replicate] = matrix
        team.agree(problem)
        return held

    def _layer(self, layer: Layer, replicates: list[Tensor]) -> None:
        asked, writer, name = self.asked, self.writer, layer.parameter
        found = spectral_echo(
            replicates,
            layer=name,
            method=asked.method,
            max_directions=asked.max_directions,
            device=self.device,
            seed=asked.seed,
        )
        mean = torch.zeros(replicates[0].shape, dtype=torch.float64)
        for replicate in replicates:
            mean += replicate / len(replicates)
        ranks = {
            "weight": stable_rank(self._weight(layer), layer=name),
            "gradient": stable_rank(mean.to(self.device or "cpu", promoted(replicates[0]).dtype), layer=name),
        }
        record_arrays(writer, self.step, name, found)
        # Only then is it said that the layer was measured: a kill between the two measures it again.
        writer.flush()
        state_measured(writer, self.step, name, found, batch=self.batch, stable_ranks=ranks)
        writer.flush()
        if writer.lost is not None:
            raise SpectraError(f"{writer.lost}; run the same command again once that is mended")

    def _weight(self, layer: Layer) -> Tensor:
        whole = layer.split_of or layer.parameter
        weight = self.model.get_parameter(whole).detach()
        return matrices(whole, self.recipe.split(whole, weight))[layer.parameter]

    def _types(self, layers: Sequence[Layer]) -> Mapping[str, torch.dtype]:
        """Return the type of each layer's gradient, which is that of its weight."""
        return {
            layer.parameter: self.model.get_parameter(layer.split_of or layer.parameter).dtype
            for layer in layers
        }
