"""Which parameters of a watched training the spectra monitor catches, on which rank, in how much memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.hub import HUB
from backlight.capture.model_state import unsharded
from backlight.capture.parameters import local
from backlight.monitors.spectra.instrument.layers import Selection, choose
from backlight.monitors.spectra.instrument.replicate_buffer import Target, fitting
from backlight.monitors.spectra.instrument.shared_step import owners
from backlight.monitors.spectra.model.errors import SpectraError
from backlight.monitors.spectra.model.recording import describe, leave_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from backlight.capture.parameters import ParameterTable, Scope
    from backlight.monitor import Recorder
    from backlight.monitors.spectra.instrument.rank_exchange import Exchange
    from backlight.monitors.spectra.model.options import Catching
    from backlight.notifier import Notifier

MOMENTA = ("exp_avg", "momentum_buffer")
"""Names under which optimizers keep the momentum of a parameter."""


def selected(catching: Catching, table: ParameterTable) -> Selection:
    """Choose among the parameters of a table.

    Raises
    ------
    SpectraError
        If a pattern matches nothing, or nothing is left to measure.
    """
    shapes = (
        (r.name, torch.empty(r.shape, device="meta", requires_grad=r.requires_grad)) for r in table.records
    )
    return choose(shapes, catching.parts, catching.include, catching.exclude, prefix="spectra.")


class Targets:
    """The parameters that are caught, as the table of a scope has them.

    Parameters
    ----------
    catching
        What is wanted.
    scope
        What is watched.
    recorder
        Takes what is written of layers.
    notifier
        Tells the user.

    Attributes
    ----------
    caught
        Parameters whose gradients are caught on this rank.
    all
        Parameters that any rank measures, in the same order on all ranks.
    mine
        Names of those that this rank measures.
    owner_of
        Rank by name, where ranks share the work.
    moving_size
        Bytes of the copies of weights and momenta.
    """

    def __init__(self, catching: Catching, scope: Scope, recorder: Recorder, notifier: Notifier) -> None:
        self._catching, self._scope, self._recorder, self._notifier = catching, scope, recorder, notifier
        self._table: ParameterTable | None = None
        self._whole: dict[int, torch.Tensor] = {}
        self._lent: set[int] = set()
        self._told: dict[str, str] = {}
        self._described: set[str] = set()
        self.all: tuple[Target, ...] = ()
        self.caught: tuple[Target, ...] = ()
        self.mine: frozenset[str] = frozenset()
        self.owner_of: dict[str, int] = {}
        self.moving_size = 0

    def roots(self) -> list[torch.nn.Module]:
        """Return the outermost modules."""
        return list(self._scope.models) or HUB.seen.roots()

    def look(self) -> None:
        """Have a table, if there is none yet; best between two steps, when FSDP2 has put its shards back."""
        if not self._scope.table.records:
            self._scope.refresh()

    def refresh(self, expected: int, *, spread_over: Exchange | None) -> None:
        """Look at the parameters as they are now, and choose what fits with so many replicates."""
        self.look()
        self._table = table = self._scope.table
        selection = selected(self._catching, table)
        left_out = dict(selection.left_out)
        self._whole = unsharded(self.roots())
        self._lent = {id(whole) for whole in self._whole.values()}
        self.all = tuple(self._possible(table, selection, left_out))
        rank, size = _place()
        spread = spread_over is not None or self._spreads()
        self.owner_of = owners(self.all, size) if spread else {}
        self.mine = frozenset(t.name for t in self.all if self.owner_of.get(t.name, rank) == rank)
        wanted = self.all if spread_over is not None else [t for t in self.all if t.name in self.mine]
        budget = self._catching.memory // (2 if spread_over is not None else 1)
        singles = 1 + len(self._catching.moving)
        expected = min(max(expected, self._catching.split, 3), self._catching.replicates)
        self.caught = fitting(wanted, expected + singles, budget)
        kept = {target.name for target in self.caught}
        for target in wanted:
            if target.name not in kept:
                for layer in target.layers:
                    left_out[layer.parameter] = (
                        f"{expected} replicates of {target.size} bytes do not fit into spectra.memory="
                        f"{self._catching.memory} beside larger layers"
                    )
        self.mine &= kept
        self.moving_size = singles * sum(t.size for t in self.caught if t.name in self.mine)
        self._tell(left_out, told_here=not spread or rank == 0)

    def _possible(
        self, table: ParameterTable, selection: Selection, left_out: dict[str, str]
    ) -> Iterable[Target]:
        by_weight: dict[str, list[Any]] = {}
        for layer in selection.layers:
            by_weight.setdefault(layer.split_of or layer.parameter, []).append(layer)
        for row, record in enumerate(table.records):
            layers = tuple(by_weight.get(record.name, ()))
            tensor = table.tensor(row)
            if not layers or tensor is None:
                continue
            if self._leaf(tensor) is None:
                reason = "sharded: no rank has a whole gradient of it before it is reduced"
                left_out.update({layer.parameter: reason for layer in layers})
                continue
            numel = torch.Size(record.shape).numel()
            yield Target(row, record.name, layers, numel * tensor.element_size(), str(tensor.device))

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return what backward differentiates by, None where that is on several ranks."""
        if id(tensor) in self._lent:
            return None  # its memory is taken away and given back by FSDP2
        if local(tensor) is tensor:
            return tensor
        whole = self._whole.get(id(tensor))
        # Where FSDP2 meets tensor parallelism, what it makes whole is still one rank's part of a layer.
        return whole if whole is not None and local(whole) is whole else None

    def _spreads(self) -> bool:
        if self._catching.ranks != "auto":
            return self._catching.ranks == "spread"
        return bool(self._whole) or any(_replicated(root) for root in (*self.roots(), *HUB.seen.roots()))

    def _tell(self, left_out: dict[str, str], *, told_here: bool) -> None:
        for target in self.caught:
            for layer in target.layers:
                if layer.parameter not in self._described:
                    self._described.add(layer.parameter)
                    describe(self._recorder, layer)
        fresh = {name: reason for name, reason in left_out.items() if self._told.get(name) != reason}
        self._told.update(fresh)
        for name, reason in fresh.items():
            if told_here or "spectra.memory" in reason:
                leave_out(self._recorder, name, reason)
        unfit = [name for name, reason in fresh.items() if "spectra.memory" in reason]
        if unfit:
            more = f" and {len(unfit) - 3} more" if len(unfit) > 3 else ""
            self._notifier.warn(
                "spectra memory",
                f"spectra of {', '.join(unfit[:3])}{more} are not measured: {left_out[unfit[0]]}; raise it, "
                "or choose layers by spectra.include",
            )

    def leaves(self) -> Sequence[tuple[int, torch.Tensor]]:
        """Return key and leaf of each parameter that is caught."""
        found = []
        for target in self.caught:
            tensor = self._tensor(target)
            leaf = None if tensor is None else self._leaf(tensor)
            if leaf is not None:
                found.append((target.key, leaf))
        return found

    def moving(self) -> dict[str, torch.Tensor]:
        """Return the parameters of this rank whose weights are whole here, by name."""
        found = {}
        for target in self.caught:
            tensor = self._tensor(target)
            if target.name in self.mine and tensor is not None and local(tensor) is tensor:
                found[target.name] = tensor
        return found

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters that are caught, by name.

        Raises
        ------
        SpectraError
            If one of the model is sharded, caught here or not: its forward communicates, so that every rank
            would have to take the extra passes.
        """
        held = [] if self._table is None else self._table.tensors()
        if any(local(tensor) is not tensor for tensor in held):
            raise SpectraError("parameters are sharded; accumulate instead")
        tensors = ((target.name, self._tensor(target)) for target in self.caught)
        return {name: tensor for name, tensor in tensors if tensor is not None}

    def alone(self) -> torch.nn.Module:
        """Return the model without a wrapper that communicates.

        Raises
        ------
        SpectraError
            If there are several models, or a module inside communicates.
        """
        roots = list(self._scope.models)
        if len(roots) != 1:
            raise SpectraError(f"{len(roots)} models are watched; samples are of one")
        model = roots[0]
        while _replicated(model):
            model = model.module  # type: ignore[assignment]  # that is what DDP calls it
        for module in model.modules():
            if issubclass(type(module), torch.nn.SyncBatchNorm):
                raise SpectraError("SyncBatchNorm communicates in its forward; accumulate instead")
        return model

    def momentum(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return what an optimizer keeps as the momentum of a parameter, None if nothing."""
        for optimizer in self._scope.optimizers():
            state = optimizer.state.get(parameter)
            for name in MOMENTA:
                held = (state or {}).get(name)
                if isinstance(held, torch.Tensor) and held.shape == parameter.shape:
                    return held
        return None

    def _tensor(self, target: Target) -> torch.Tensor | None:
        return None if self._table is None else self._table.tensor(target.key)


def _place() -> tuple[int, int]:
    import torch.distributed as dist  # noqa: PLC0415 - not every build has it

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def _replicated(module: torch.nn.Module) -> bool:
    """Tell whether a module is the wrapper of DDP."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    return parallel is not None and issubclass(type(module), parallel.DistributedDataParallel)
