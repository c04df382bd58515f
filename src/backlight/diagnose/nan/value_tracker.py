"""Tracks non-finite values through forward, backward and optimizer, operation by operation.

A dispatch mode checks the output of each operation; only where that is not finite are its inputs checked and
a record kept. The training is not affected: sums are taken of detached values below autograd, and no random
number is drawn.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backlight.capture.batches import tensors_in
from backlight.diagnose.script_observer import OperationRecorder, Origin, next_number
from backlight.interrupts import is_interrupt
from backlight.user_code import SourceLine, library_line, user_line

if TYPE_CHECKING:
    from backlight.capture.calls import ModuleCalls

_UNFILLED = ("empty", "new_empty", "resize", "set_", "_to_copy.out")
"""Operations whose result may hold anything until it is filled."""

_SELECTS = ("where", "masked_fill", "masked_scatter", "nan_to_num", "clamp")
"""Operations that replace values, so that a branch has no part in the result."""

MAX_ORIGINS = 200_000
"""Operations of which lines are kept: a graph may be older than the step."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(eq=False, slots=True)
class NonFiniteRecord:
    """One operation with a non-finite output.

    ``kind`` is ``origin`` (its inputs were finite), ``spread``, ``constant`` (an infinity written by the
    user, as in a mask) or ``input`` (a tensor that was non-finite before).
    """

    index: int
    operation: str
    kind: str
    phase: str  # forward, backward, recomputation, optimizer
    nan: bool
    shape: tuple[int, ...]
    dtype: str
    line: SourceLine | None = None  # of the forward pass
    module: int = 0
    node: str = ""  # class of the autograd node in whose backward it ran
    own_line: SourceLine | None = None  # in the backward of a custom function
    parents: list[NonFiniteRecord] = field(default_factory=list)
    storage: int = 0  # address of an input
    library_line: SourceLine | None = None  # inside of ``line``, where that only calls a library
    replaced_by: str = ""  # operation that leaves the value out of the result of the forward
    replaced_at: SourceLine | None = None
    is_zero_gradient: bool = False  # NaN only where a gradient of 0 met an infinite derivative


class ValueTracker(OperationRecorder, TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's is untyped
    """Checks every operation of the thread that enters it, and of backward."""

    def __init__(self, calls: ModuleCalls, on_error: Callable[[Exception], None]) -> None:
        super().__init__(calls, on_error)
        self._last = next_number()
        self._bad: dict[int, NonFiniteRecord] = {}
        self._count = 0
        self._selection: Origin | None = None  # the last operation of _SELECTS that backward has run
        self.records: list[NonFiniteRecord] = []
        self.phase = "forward"
        self.operations = 0

    def clear(self) -> None:
        """Forget the records of a step, but not the non-finite tensors and the lines of older graphs."""
        self.records.clear()
        self._selection = None
        self.origins.trim(MAX_ORIGINS)

    def forget(self) -> None:
        """Forget the non-finite tensors as well, after a step that was skipped on purpose."""
        self.clear()
        self._bad.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` and check its output."""
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name, written, views = _known_schema(func)
        before: list[torch.Tensor] = []
        if written:
            before = [t for t in _into(written, args, kwargs) if is_non_finite(t)]
        result = func(*args, **kwargs)
        try:
            self._record_origin(name)
            if not views:
                self._check(name, args, kwargs, result, written, before)
        except Exception as error:
            if is_interrupt(error):
                raise
            self._drop(error)
        return result

    def _record_origin(self, name: str) -> None:
        """Record the line of the nodes that were made since the last operation."""
        self.operations += 1
        number = next_number()
        if number > self._last:
            self.origins.add(self._last, number, Origin(name, user_line(), self._module(), library_line()))
            self._last = number

    def _check(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        written: tuple[tuple[int, str], ...],
        before: list[torch.Tensor],
    ) -> None:
        if name.startswith(_UNFILLED):
            return
        outputs = tensors_in(result)
        if written:
            outputs += [t for t in _into(written, args, kwargs) if all(t is not o for o in outputs)]
        bad = [t for t in outputs if is_non_finite(t)]
        if name.startswith(_SELECTS):
            self._note_selection(name, args, kwargs, is_finite=not bad)
        if not bad:
            return
        record = self._record(name, args, kwargs, bad, before, {id(t) for t in _into(written, args, kwargs)})
        for tensor in bad:
            self._bad[storage_of(tensor)] = record

    def _note_selection(self, name: str, args: Any, kwargs: Any, *, is_finite: bool) -> None:
        """Note which values an operation leaves out, in forward, or which gradients it sets to 0."""
        if self.phase == "backward":
            node = torch._C._current_autograd_node()
            self._selection = None if node is None else self.origins.of(node._sequence_nr())
        elif is_finite and self._bad:
            for tensor in tensors_in((args, kwargs)):
                record = self._record_of(tensor)
                if record is not None and not record.replaced_by and is_non_finite(tensor):
                    record.replaced_by, record.replaced_at = name.partition(".")[0], user_line()

    def _note_zero_gradient(self, record: NonFiniteRecord) -> None:
        record.is_zero_gradient = True
        if self._selection is not None:
            record.replaced_by = self._selection.operation.partition(".")[0]
            record.replaced_at = self._selection.line

    def _record(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        bad: list[torch.Tensor],
        before: list[torch.Tensor],
        changed: set[int],
    ) -> NonFiniteRecord:
        record = self._new(name, "origin", self.phase, bad[0], nan=_any_nan(bad))
        record.module = self._module()
        self._locate(record)
        inputs = tensors_in((args, kwargs))
        were_bad = [t for t in inputs if id(t) not in changed and is_non_finite(t)] + before
        for tensor in were_bad:
            record.parents.append(self._record_of(tensor) or self._input(tensor, record))
        # Where an earlier node made an infinite gradient, a derivative may be what is 0.
        is_first_node = bool(record.node) and all(p.node in {"", record.node} for p in record.parents)
        if record.nan and is_first_node and _is_zero_at_nan(bad, inputs):
            self._note_zero_gradient(record)
        if record.parents:
            from_constants = all(p.kind == "constant" for p in record.parents)
            # Masks hold infinities on purpose; a NaN made of them is an error.
            is_new_nan = record.nan and not any(p.nan for p in record.parents)
            record.kind = (
                "origin" if from_constants and is_new_nan else "constant" if from_constants else "spread"
            )
        elif not inputs or _literal((args, kwargs)) == "nan" or (_literal((args, kwargs)) and not record.nan):
            record.kind = "constant"
        self.records.append(record)
        return record

    def _new(
        self, operation: str, kind: str, phase: str, tensor: torch.Tensor, *, nan: bool
    ) -> NonFiniteRecord:
        self._count += 1
        dtype = str(tensor.dtype).removeprefix("torch.")
        return NonFiniteRecord(self._count, operation, kind, phase, nan, tuple(tensor.shape), dtype)

    def _locate(self, record: NonFiniteRecord) -> None:
        node = torch._C._current_autograd_node()  # the public API needs a hook on every node
        user_code_line = user_line()
        if node is None or self.phase != "backward":
            record.line, record.library_line = user_code_line, library_line()
            return
        record.node = node.name().rpartition("::")[2]
        origin = self.origins.of(node._sequence_nr()) if record.node != "AccumulateGrad" else None
        if origin is not None:
            record.line, record.library_line = origin.line, origin.library_line
            record.module = origin.module
        inside = self._calls.current()
        if inside is not None:
            record.phase, record.line, record.module = "recomputation", user_code_line, id(inside)
        elif record.node.endswith("Backward"):
            record.own_line = user_code_line  # the backward of a custom function has its own lines

    def _record_of(self, tensor: torch.Tensor) -> NonFiniteRecord | None:
        return self._bad.get(storage_of(tensor))

    def _input(self, tensor: torch.Tensor, consumer: NonFiniteRecord) -> NonFiniteRecord:
        # A single infinity is a constant such as torch.tensor(-inf) for a mask.
        nan = _any_nan([tensor])
        kind = "constant" if tensor.numel() == 1 and not nan else "input"
        record = self._new(consumer.operation, kind, consumer.phase, tensor, nan=nan)
        record.line, record.module, record.node = consumer.line, consumer.module, consumer.node
        record.storage = storage_of(tensor)
        self._bad[record.storage] = record
        self.records.append(record)
        return record

    def from_other_rank(self, parameter: torch.Tensor) -> NonFiniteRecord:
        """Return a record for a gradient that no operation of this process made non-finite."""
        grads = [] if parameter.grad is None else [parameter.grad]
        return self._new("", "input", "backward", parameter, nan=_any_nan(grads))

    def record_of(self, tensor: torch.Tensor) -> NonFiniteRecord | None:
        """Return the operation that made ``tensor`` non-finite; None if it is finite or that is not known."""
        return self._record_of(tensor) if is_non_finite(tensor) else None


def _is_zero_at_nan(bad: list[torch.Tensor], inputs: list[torch.Tensor]) -> bool:
    """Return whether a NaN is made only where one input, the gradient, is exactly 0."""
    values = _values(bad[0])
    if values is None:
        return False
    is_nan = values.isnan()
    return any(
        tensor.shape == values.shape and tensor.is_floating_point() and bool((tensor[is_nan] == 0).all())
        for tensor in inputs
    )


_Schema = tuple[str, tuple[tuple[int, str], ...], bool]
_schemas: dict[Any, _Schema] = {}


def _known_schema(func: Any) -> _Schema:
    """Return the name, position and name of the arguments written into, and whether it only returns views."""
    entry = _schemas.get(func)
    if entry is None:
        schema = func._schema
        written = tuple(
            (position, argument.name)
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        views = not written and any(r.alias_info is not None for r in schema.returns)
        entry = _schemas[func] = (str(func).removeprefix("aten."), written, views)
    return entry


def _into(
    written: tuple[tuple[int, str], ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for position, name in written:
        value = kwargs[name] if name in kwargs else args[position] if position < len(args) else None
        tensors += tensors_in(value)
    return tensors


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the local values to check, None where there are none."""
    part = getattr(tensor, "_local_tensor", None)
    tensor = tensor if part is None else part
    if type(tensor) not in _PLAIN or tensor.device.type == "meta":
        return None
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided or tensor.is_quantized or tensor.element_size() < 2:
        return None
    return tensor if tensor.numel() else None


def is_non_finite(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` holds a NaN or an infinity; waits for its device."""
    values = _values(tensor)
    if values is None:
        return False
    # A finite sum proves it in one pass; an overflowing one does not disprove it.
    if cmath.isfinite(values.sum().item()):
        return False
    return not bool(torch.isfinite(values).all())


def _any_nan(tensors: list[torch.Tensor]) -> bool:
    return any(v is not None and bool(torch.isnan(v).any()) for v in map(_values, tensors))


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address that identifies a tensor and its views."""
    values = _values(tensor)
    return id(tensor) if values is None else values.untyped_storage().data_ptr()


def _literal(arguments: Any) -> str:
    """Return ``nan`` or ``inf`` if one of the arguments is such a number, else an empty text."""
    if isinstance(arguments, dict):
        arguments = tuple(arguments.values())
    if isinstance(arguments, (tuple, list)):
        kinds = {_literal(argument) for argument in arguments}
        return "nan" if "nan" in kinds else "inf" if "inf" in kinds else ""
    if isinstance(arguments, (float, complex)) and not cmath.isfinite(arguments):
        return "nan" if cmath.isnan(arguments) else "inf"
    return ""
