"""The parameters of a watched run that are captured, on which rank, within which memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from backlight.capture.hub import HUB
from backlight.capture.model_state import unsharded
from backlight.capture.parameters import local
from backlight.distributed import rank_and_size
from backlight.monitors.spectra.instrument.layers import Selection, select_layers
from backlight.monitors.spectra.instrument.replicate_buffer import Target, fitting
from backlight.monitors.spectra.instrument.worker_thread import owners
from backlight.monitors.spectra.model.echo_records import record_layer, record_left_out
from backlight.monitors.spectra.settings import SpectraError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from backlight.capture.parameters import ParameterTable, Scope
    from backlight.monitor import Recorder
    from backlight.monitors.spectra.instrument.rank_group import RankGroup
    from backlight.monitors.spectra.settings import SpectraSettings
    from backlight.notifier import Notifier

_SHARDED = "sharded: no rank has a whole gradient of it before it is reduced"
_CUT = "its engine keeps a part of it on each rank, and no gradient of a single backward"

MOMENTA = ("exp_avg", "momentum_buffer")
"""Names under which optimizers keep the momentum of a parameter."""


def select(options: SpectraSettings, table: ParameterTable) -> Selection:
    """Select among the parameters of a table; SpectraError if nothing is left or a pattern is unmatched."""
    shapes = (
        (r.name, torch.empty(r.shape, device="meta", requires_grad=r.requires_grad)) for r in table.records
    )
    return select_layers(shapes, options.parts, options.include, options.exclude, prefix="spectra.")


class LayerSelection:
    """The captured parameters, from the table of a scope."""

    def __init__(
        self, options: SpectraSettings, scope: Scope, recorder: Recorder, notifier: Notifier
    ) -> None:
        self._options, self._scope, self._recorder, self._notifier = options, scope, recorder, notifier
        self._table: ParameterTable | None = None
        self._whole: dict[int, torch.Tensor] = {}
        self._unsharded_ids: set[int] = set()
        self._reported: dict[str, str] = {}
        self._described: set[str] = set()
        self.captured: tuple[Target, ...] = ()  # those whose gradients are captured on this rank
        self.mine: frozenset[str] = frozenset()  # names of those that this rank measures
        self.owner_of: dict[str, int] = {}  # rank by name, where ranks share the work
        self.states_size = 0  # bytes of the copies of weights and momenta

    def roots(self) -> list[torch.nn.Module]:
        """Return the outermost modules."""
        return self._scope.roots()

    def ensure_table(self) -> None:
        """Read the parameters if that has not happened; best between steps, when FSDP2 has resharded."""
        if not self._scope.table.records:
            self._scope.refresh()

    def refresh(self, expected: int, *, group: RankGroup | None) -> None:
        """Read the current parameters, and select those that fit with so many replicates."""
        self.ensure_table()
        self._table = table = self._scope.table
        selection = select(self._options, table)
        left_out = dict(selection.left_out)
        self._whole = unsharded(self.roots())
        self._unsharded_ids = {id(whole) for whole in self._whole.values()}
        everything = tuple(self._possible(table, selection, left_out))  # in the same order on all ranks
        rank, size = rank_and_size()
        spread = group is not None or self._spreads()
        self.owner_of = owners(everything, size) if spread else {}
        self.mine = frozenset(t.name for t in everything if self.owner_of.get(t.name, rank) == rank)
        wanted = everything if group is not None else [t for t in everything if t.name in self.mine]
        budget = self._options.memory // (2 if group is not None else 1)
        singles = 1 + len(self._options.states)
        expected = min(max(expected, self._options.split, 3), self._options.replicates)
        self.captured = fitting(wanted, expected + singles, budget)
        kept = {target.name for target in self.captured}
        for target in wanted:
            if target.name not in kept:
                for layer in target.layers:
                    left_out[layer.parameter] = (
                        f"{expected} replicates of {target.size} bytes do not fit into spectra.memory="
                        f"{self._options.memory} next to larger layers"
                    )
        self.mine &= kept
        self.states_size = singles * sum(t.size for t in self.captured if t.name in self.mine)
        self._report(left_out, report_here=not spread or rank == 0)

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
            leaf = self._leaf(tensor)
            if leaf is None or leaf.ndim != len(record.shape):
                reason = _SHARDED if leaf is None else _CUT
                left_out.update({layer.parameter: reason for layer in layers})
                continue
            numel = torch.Size(record.shape).numel()
            yield Target(row, record.name, layers, numel * tensor.element_size(), str(tensor.device))

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the leaf that backward differentiates; None where it is spread over several ranks."""
        if id(tensor) in self._unsharded_ids:
            return None  # FSDP2 frees and reallocates its memory
        if local(tensor) is tensor:
            return tensor
        whole = self._whole.get(id(tensor))
        # With FSDP2 and tensor parallelism, the unsharded parameter is still one rank's part of a layer.
        return whole if whole is not None and local(whole) is whole else None

    def _spreads(self) -> bool:
        if self._options.ranks != "auto":
            return self._options.ranks == "spread"
        return bool(self._whole) or any(_replicated(root) for root in (*self.roots(), *HUB.seen.roots()))

    def _report(self, left_out: dict[str, str], *, report_here: bool) -> None:
        for target in self.captured:
            for layer in target.layers:
                if layer.parameter not in self._described:
                    self._described.add(layer.parameter)
                    record_layer(self._recorder, layer)
        fresh = {name: reason for name, reason in left_out.items() if self._reported.get(name) != reason}
        self._reported.update(fresh)
        for name, reason in fresh.items():
            if report_here or "spectra.memory" in reason:
                record_left_out(self._recorder, name, reason)
        for about, fix in (("spectra.memory", "; raise it, or choose layers by spectra.include"), (_CUT, "")):
            unfit = [name for name, reason in fresh.items() if about in reason]
            if unfit:
                more = f" and {len(unfit) - 3} more" if len(unfit) > 3 else ""
                which = f"spectra of {', '.join(unfit[:3])}{more}"
                self._notifier.warn(about, f"{which} are not measured: {left_out[unfit[0]]}{fix}")

    def leaves(self) -> Sequence[tuple[int, torch.Tensor]]:
        """Return key and leaf of each parameter that is captured."""
        leaves = ((target.key, self._leaf(tensor)) for target, tensor in self._tensors())
        return [(key, leaf) for key, leaf in leaves if leaf is not None]

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the parameters of this rank whose weights are whole here, by name."""
        return {
            target.name: tensor
            for target, tensor in self._tensors()
            if target.name in self.mine and local(tensor) is tensor
        }

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the captured parameters by name; SpectraError if any of the model is sharded."""
        tensors = [] if self._table is None else self._table.tensors()
        if any(local(tensor) is not tensor for tensor in tensors):
            # Their forward communicates: every rank would have to run the extra passes.
            raise SpectraError("parameters are sharded; accumulate instead")
        return {target.name: tensor for target, tensor in self._tensors()}

    def unwrapped_model(self) -> torch.nn.Module:
        """Return the model without a wrapper that communicates; SpectraError if there is no such one."""
        roots = self._scope.models
        if len(roots) != 1:
            raise SpectraError(f"{len(roots)} models are watched; samples belong to one")
        model = roots[0]
        while _replicated(model):
            model = model.module  # type: ignore[assignment]  # that is what DDP calls it
        for module in model.modules():
            if issubclass(type(module), torch.nn.SyncBatchNorm):
                raise SpectraError("SyncBatchNorm communicates in its forward; accumulate instead")
        return model

    def momentum(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the momentum that an optimizer keeps of a parameter, None if there is none."""
        for optimizer in self._scope.optimizers():
            state = optimizer.state.get(parameter)
            for name in MOMENTA:
                momentum = (state or {}).get(name)
                if isinstance(momentum, torch.Tensor) and momentum.shape == parameter.shape:
                    return momentum
        return None

    def _tensors(self) -> Iterator[tuple[Target, torch.Tensor]]:
        """Yield the captured parameters that still exist."""
        for target in self.captured:
            tensor = None if self._table is None else self._table.tensor(target.key)
            if tensor is not None:
                yield target, tensor


def _replicated(module: torch.nn.Module) -> bool:
    """Return whether a module is the wrapper of DDP."""
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    return parallel is not None and issubclass(type(module), parallel.DistributedDataParallel)
