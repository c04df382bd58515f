"""Activation-checkpointed regions: remarks, operations of each run, and the state that a run reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from backlight.capture.batches import tensors_in
from backlight.capture.calls import NO_COMPUTATION, operation_name, written_in_place
from backlight.capture.checkpoint_regions import RegionState, checksum, near
from backlight.diagnose.script_observer import Pausable
from backlight.user_code import SourceLine, user_line

MAX_REMARKS = 20
"""Remarks of one kind that are kept for a region."""


REMARK_KINDS = (
    "in-place on input", "in-place", "unused", "no gradient", "boundary", "attention", "state", "random",
    "recomputation",
)  # fmt: skip
"""What a remark may be about."""


@dataclass(frozen=True)
class Remark:
    """A remark on a region; ``kind`` groups remarks, ``number`` is that of the region in its forward."""

    kind: str
    text: str
    line: SourceLine | None = None
    number: int = 0


@dataclass
class Region:
    """A line that calls ``checkpoint``, with all calls; ``reentrant`` is None where it is not given."""

    line: SourceLine | None
    function: str
    reentrant: bool | None
    preserves: bool
    calls: int = 0
    recomputations: int = 0
    remarks: list[Remark] = field(default_factory=list)

    def remark(self, kind: str, text: str, line: SourceLine | None = None, number: int = 0) -> None:
        """Add a remark once."""
        remark = Remark(kind, text, line, number)
        if remark not in self.remarks and sum(r.kind == kind for r in self.remarks) < MAX_REMARKS:
            self.remarks.append(remark)

    @property
    def mode(self) -> str:
        """The mode in words."""
        if self.reentrant is None:
            return "re-entrant (by default: use_reentrant is not given)"
        return "re-entrant" if self.reentrant else "not re-entrant"


@dataclass(frozen=True, slots=True)
class RegionStep:
    """One operation of a run: name, shapes and sums of its outputs; ``ended`` unless it raised.

    ``parameters`` are the ``id`` of those among its inputs.
    """

    name: str
    line: SourceLine | None
    shapes: tuple[tuple[int, ...], ...]
    sums: tuple[float, ...]
    exact: bool
    ended: bool = True
    parameters: tuple[int, ...] = ()


@dataclass
class RegionRun:
    """One run of a region's function, forward or recomputed."""

    begin: RegionState
    end: RegionState | None = None
    steps: list[RegionStep] = field(default_factory=list)


class RegionMode(TorchFunctionMode):
    """Records the operations of one run of a region.

    ``inputs`` and ``buffers`` are addresses of storages: of its arguments, and of what is reported as state.
    """

    def __init__(
        self, region: Region, run: RegionRun, inputs: set[int], buffers: set[int], *, first: bool
    ) -> None:
        super().__init__()
        self._region = region
        self._run = run
        self._inputs = inputs
        self._buffers = buffers
        self._first = first

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` and record the operation."""
        kwargs = kwargs or {}
        name = operation_name(func)
        try:
            result = func(*args, **kwargs)
        except BaseException:
            # A recomputation ends in the operation that saves the last tensor needed by backward.
            self._run.steps.append(RegionStep(name, user_line(), (), (), exact=False, ended=False))
            raise
        if name and name not in NO_COMPUTATION:
            self._note(name, tensors_in((args, kwargs)), kwargs, tensors_in(result))
        return result

    def _note(self, name: str, inputs: list[Tensor], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        line = user_line()
        changed = written_in_place(name, inputs, kwargs)
        if any(storage(tensor) in self._buffers for tensor in changed):
            return  # reported as state
        for tensor in changed if self._first else ():
            if storage(tensor) in self._inputs:
                text = f"{name} writes into an input of the region: recomputation starts from changed values"
                self._region.remark("in-place on input", text, line)
            else:
                self._region.remark("in-place", f"{name} works in place on a value of the region", line)
        if outputs:
            shapes = tuple(tuple(t.shape) for t in outputs)
            exact = all(t.device.type == "cpu" for t in outputs)
            used = tuple(id(tensor) for tensor in inputs if type(tensor) is nn.Parameter)
            sums = tuple(map(checksum, outputs))
            self._run.steps.append(RegionStep(name, line, shapes, sums, exact, parameters=used))


def storage(tensor: Tensor) -> int:
    """Return the address of the storage behind ``tensor``; its ``id`` where it has none."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def other_parameters(forward: list[RegionStep], again: list[RegionStep]) -> tuple[int, int] | None:
    """Return the ``id`` of the first two parameters that differ in one place, None where none do."""
    for step, two in zip(forward, again, strict=False):
        if step.name != two.name:
            return None
        for used, now in zip(step.parameters, two.parameters, strict=False):
            if used != now:
                return used, now
    return None


def first_difference(forward: list[RegionStep], again: list[RegionStep]) -> Remark | None:
    """Return where a recomputation departs from the forward, None as far as it went."""
    for s, two in zip(forward, again, strict=False):
        if s.name != two.name or (two.ended and s.shapes != two.shapes):
            text = (
                f"the recomputation runs another operation: {_shown(two)} at {two.line} "
                f"where the forward ran {_shown(s)}"
            )
            return Remark("recomputation", text, s.line)
        if not two.ended:
            return None
        limit = 1e-9 if s.exact else 1e-3
        if not all(near(a, b, limit) for a, b in zip(s.sums, two.sums, strict=True)):
            return Remark(
                "recomputation", f"the recomputation computes other values from here on: {s.name}", s.line
            )
    if len(again) > len(forward):
        more = again[len(forward)]
        text = f"the recomputation continues where the forward had ended: {_shown(more)}"
        return Remark("recomputation", text, more.line)
    return None


def _shown(step: RegionStep) -> str:
    return f"{step.name} -> {', '.join('x'.join(map(str, s)) or 'scalar' for s in step.shapes) or '?'}"


class ParameterUsage(Pausable, TorchFunctionMode):
    """Records which region uses which parameter in a forward pass; region 0 is outside of all."""

    def __init__(self) -> None:
        super().__init__()
        self.current: list[int] = []
        self.used: dict[int, dict[int, tuple[str, SourceLine | None]]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` and record the parameters among its arguments."""
        kwargs = kwargs or {}
        if not self.paused and (self.current or torch.is_grad_enabled()):
            name = operation_name(func)
            if name and name not in NO_COMPUTATION and not name.endswith((".get", ".set")):
                inputs = tensors_in((args, kwargs))
                parameters = [t for t in inputs if type(t) is nn.Parameter and t.requires_grad]
                if parameters and not written_in_place(name, inputs, kwargs):
                    region = self.current[-1] if self.current else 0
                    for parameter in parameters:
                        regions = self.used.setdefault(id(parameter), {})
                        if region not in regions:
                            regions[region] = (name, user_line())
        return func(*args, **kwargs)
