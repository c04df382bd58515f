"""Activation-checkpointed regions: what they are, and what is noticed inside each run of one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from backlight.capture.operations import QUIET, operation_name, tensors_in, written
from backlight.diagnose.checkpointing.region_state import Snapshot, checksum
from backlight.user_code import SourceLine, user_line

if TYPE_CHECKING:
    from backlight.capture.module_calls import ModuleCalls

REMARKS = 20
"""Remarks of one kind that are kept for a region."""


@dataclass(frozen=True)
class Remark:
    """Something worth knowing about a region; ``kind`` groups what belongs together."""

    kind: str
    text: str
    line: SourceLine | None = None


@dataclass
class Region:
    """A place where ``checkpoint`` is called, with all of its calls.

    ``reentrant`` is None where the caller left the choice to torch.
    """

    line: SourceLine | None
    function: str
    reentrant: bool | None
    preserves: bool
    calls: int = 0
    recomputations: int = 0
    remarks: list[Remark] = field(default_factory=list)

    def remark(self, kind: str, text: str, line: SourceLine | None = None) -> None:
        """Note something once."""
        remark = Remark(kind, text, line)
        if remark not in self.remarks and sum(r.kind == kind for r in self.remarks) < REMARKS:
            self.remarks.append(remark)

    @property
    def mode(self) -> str:
        """The mode in words."""
        if self.reentrant is None:
            return "re-entrant (by default: use_reentrant is not given)"
        return "re-entrant" if self.reentrant else "not re-entrant"


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a run: name, shapes of what it gave, and their sums; ``ended`` unless it raised."""

    name: str
    line: SourceLine | None
    shapes: tuple[tuple[int, ...], ...]
    sums: tuple[float, ...]
    exact: bool
    ended: bool = True


@dataclass
class Run:
    """One run of a region's function, forward or recomputed."""

    begin: Snapshot
    end: Snapshot | None = None
    steps: list[Step] = field(default_factory=list)


class RegionMode(TorchFunctionMode):
    """Writes down the operations of one run of a region.

    Parameters
    ----------
    region, run:
        Where remarks and operations go.
    inputs:
        Addresses of the storages that were handed in.
    buffers:
        Addresses of the storages of buffers, whose changes are told as state.
    first:
        Whether this is the forward, of which in-place operations are told.
    """

    def __init__(self, region: Region, run: Run, inputs: set[int], buffers: set[int], *, first: bool) -> None:
        super().__init__()
        self._region = region
        self._run = run
        self._inputs = inputs
        self._buffers = buffers
        self._first = first

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` and note what it did."""
        kwargs = kwargs or {}
        name = operation_name(func)
        try:
            result = func(*args, **kwargs)
        except BaseException:
            # A recomputation ends in the operation that saves the last tensor that backward needs.
            self._run.steps.append(Step(name, user_line(), (), (), exact=False, ended=False))
            raise
        if name and name not in QUIET:
            self._note(name, tensors_in(kwargs, tensors_in(args)), kwargs, tensors_in(result))
        return result

    def _note(self, name: str, inputs: list[Tensor], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        line = user_line()
        changed = written(name, inputs, kwargs)
        if any(storage(tensor) in self._buffers for tensor in changed):
            return  # told as state
        for tensor in changed if self._first else ():
            if storage(tensor) in self._inputs:
                text = f"{name} writes into an input of the region: recomputation starts from changed values"
                self._region.remark("in-place on input", text, line)
            else:
                self._region.remark("in-place", f"{name} works in place on a value of the region", line)
        if outputs:
            shapes = tuple(tuple(t.shape) for t in outputs)
            exact = all(t.device.type == "cpu" for t in outputs)
            self._run.steps.append(Step(name, line, shapes, tuple(map(checksum, outputs)), exact))


def storage(tensor: Tensor) -> int:
    """Return the address of the storage behind ``tensor``; its ``id`` where it has none."""
    part = getattr(tensor, "_local_tensor", None)
    tensor = tensor if part is None else part
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def first_difference(forward: list[Step], again: list[Step]) -> Remark | None:
    """Return where a recomputation departs from the forward, or None as far as it went.

    A recomputation may stop early, when all that backward needs is there.
    """
    for one, two in zip(forward, again, strict=False):
        if one.name != two.name or (two.ended and one.shapes != two.shapes):
            text = (
                f"the recomputation runs another operation: {_shown(two)} at {two.line} "
                f"where the forward ran {_shown(one)}"
            )
            return Remark("recomputation", text, one.line)
        if not two.ended:
            return None
        limit = 1e-9 if one.exact else 1e-3
        if not all(_near(a, b, limit) for a, b in zip(one.sums, two.sums, strict=True)):
            return Remark(
                "recomputation", f"the recomputation gives other values from here on: {one.name}", one.line
            )
    if len(again) > len(forward):
        more = again[len(forward)]
        text = f"the recomputation goes on where the forward had ended: {_shown(more)}"
        return Remark("recomputation", text, more.line)
    return None


def _shown(step: Step) -> str:
    return f"{step.name} -> {', '.join('x'.join(map(str, s)) or 'scalar' for s in step.shapes) or '?'}"


def _near(one: float, two: float, limit: float) -> bool:
    if math.isnan(one) or math.isnan(two):
        return math.isnan(one) and math.isnan(two)
    return one == two or abs(one - two) <= limit * max(abs(one), abs(two))


class Usage(TorchFunctionMode):
    """Which region uses which parameter in a forward pass; outside of all is region 0.

    Parameters
    ----------
    calls:
        Tells which module runs.
    """

    def __init__(self, calls: ModuleCalls) -> None:
        super().__init__()
        self._calls = calls
        self.paused = False
        self.current: list[int] = []
        self.used: dict[int, dict[int, tuple[str, SourceLine | None]]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``; note the parameters among its arguments."""
        kwargs = kwargs or {}
        if not self.paused and (self.current or torch.is_grad_enabled()):
            name = operation_name(func)
            if name and name not in QUIET and not name.endswith((".get", ".set")):
                inputs = tensors_in(kwargs, tensors_in(args))
                parameters = [t for t in inputs if type(t) is nn.Parameter and t.requires_grad]
                if parameters and not written(name, inputs, kwargs):
                    place = self.current[-1] if self.current else 0
                    for parameter in parameters:
                        places = self.used.setdefault(id(parameter), {})
                        if place not in places:
                            places[place] = (name, user_line())
        return func(*args, **kwargs)

    def shared(self) -> Iterator[tuple[int, dict[int, tuple[str, SourceLine | None]]]]:
        """Yield the ``id`` of each parameter that a boundary cuts, with its uses by region."""
        for key, places in self.used.items():
            if len(places) > 1:
                yield key, places
