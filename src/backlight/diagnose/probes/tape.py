"""A tape of one step: the calls of modules, and the operations after them, that lead to its loss.

It is replayed with other weights, inputs or targets, without the script's code that made the batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks_with_kwargs, register_module_forward_hook
from torch.overrides import TorchFunctionMode

from backlight import devices
from backlight.capture.batches import tensors_in
from backlight.capture.calls import (
    LEAVES_TORCH,
    NO_COMPUTATION,
    ModuleCalls,
    operation_name,
    written_in_place,
)
from backlight.diagnose.script_observer import Pausable
from backlight.user_code import SourceLine, user_line


class TapeError(RuntimeError):
    """The step cannot be replayed; the message says why."""


@dataclass(frozen=True, slots=True)
class Call:
    """A module or an operation that was called outside of all modules, and what it returned."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    autocast: tuple[tuple[str, torch.dtype], ...]
    writes_input: bool


class StepTape(Pausable, TorchFunctionMode):
    """Records the calls of outermost modules that return a gradient, and what is computed from them."""

    def __init__(self, calls: ModuleCalls) -> None:
        super().__init__()
        self._calls = calls
        self._taped: list[Call] = []
        self._live: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> StepTape:
        """Start to record."""
        hook = register_module_forward_hook(self._on_call, with_kwargs=True)  # after that of the calls
        self._handles = [hook]
        super().__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(self, *exception: Any) -> None:
        """Stop."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]  # torch's
        for handle in self._handles:
            handle.remove()
            # torch forgets this entry, and warns of hooks where a module is compiled later.
            _global_forward_hooks_with_kwargs.pop(handle.id, None)

    def clear(self) -> None:
        """Begin another step."""
        self._taped.clear()
        self._live.clear()

    def leading_to(self, root: Tensor) -> list[Call]:
        """Return the calls that ``root`` was computed by, in order.

        Raises
        ------
        TapeError
            If it was computed by something that is not recorded, such as a custom autograd function.
        """
        needed, calls = {id(root)}, []
        if id(root) not in self._live:
            raise TapeError("the loss does not come from a module by operations of torch")
        for call in reversed(self._taped):
            if any(id(tensor) in needed for tensor in tensors_in(call.result)):
                calls.append(call)
                needed |= {id(tensor) for tensor in tensors_in((call.args, call.kwargs))}
        return calls[::-1]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` and record it if it computes with what a module returned."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.paused and not self._calls.stack and self._live:
            inputs = tensors_in((args, kwargs))
            name = operation_name(func)
            if name not in NO_COMPUTATION | LEAVES_TORCH and any(id(t) in self._live for t in inputs):
                writes = bool(written_in_place(name, inputs, kwargs))
                self._add(func, args, kwargs, result, writes_input=writes)
        return result

    def _on_call(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self.paused and not self._calls.stack and torch.is_grad_enabled():
            self._add(module, args, kwargs, output, writes_input=False)

    def _add(self, function: Any, args: Any, kwargs: Any, result: Any, *, writes_input: bool) -> None:
        made = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
        if made:
            self._live.update((id(tensor), tensor) for tensor in made)
            self._taped.append(Call(function, args, dict(kwargs), result, _autocast(), writes_input))


@dataclass(frozen=True)
class TapedStep:
    """A step that can be replayed; ``root`` is the loss whose backward was about to begin."""

    calls: Sequence[Call]
    root: Tensor
    line: SourceLine | None

    @classmethod
    def of(cls, tape: StepTape, roots: Sequence[Tensor]) -> TapedStep:
        """Return the step that leads to the one root of a backward.

        Raises
        ------
        TapeError
            If there are several roots, or the root cannot be replayed.
        """
        if len(roots) != 1 or roots[0].numel() != 1:
            raise TapeError("backward does not start from one loss")
        return cls(tape.leading_to(roots[0]), roots[0], user_line())

    def modules(self) -> list[nn.Module]:
        """Return the modules that were called, each once."""
        called = (call.function for call in self.calls if isinstance(call.function, nn.Module))
        return list({id(module): module for module in called}.values())

    def inputs(self) -> list[Tensor]:
        """Return the tensors that the first module was given."""
        first = next(call for call in self.calls if isinstance(call.function, nn.Module))
        return tensors_in((first.args, first.kwargs))

    def replay(
        self, instead: Mapping[int, Tensor] | None = None, *, keeps_random: bool = True
    ) -> list[Tensor]:
        """Compute the step again and return what its calls return, the loss last.

        ``instead`` are other tensors, by the ``id`` of an input. ``keeps_random`` puts the random numbers
        back, so that the next replay draws the same ones.

        Raises
        ------
        TapeError
            If a call returns another number of tensors than before.
        """
        with torch.random.fork_rng(_devices_of(self.modules()), enabled=keeps_random):
            return self._replay(dict(instead or {}))

    def _replay(self, replaced: dict[int, Tensor]) -> list[Tensor]:
        made: list[Tensor] = []
        for call in self.calls:
            args, kwargs = _mapped(call.args, replaced), _mapped(call.kwargs, replaced)
            if call.writes_input:
                args = _with_copies(args, call.args)
            with contextlib.ExitStack() as contexts:
                for device, dtype in call.autocast:
                    contexts.enter_context(torch.autocast(device, dtype))
                result = call.function(*args, **kwargs)
            old, new = tensors_in(call.result), tensors_in(result)
            if len(old) != len(new):
                raise TapeError(f"{operation_name(call.function)} returns something else when it runs again")
            replaced.update((id(before), other) for before, other in zip(old, new, strict=True))
            made += new
        return [*made, replaced[id(self.root)]]


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    return tuple(
        (device, torch.get_autocast_dtype(device))
        for device in devices.types()
        if torch.is_autocast_enabled(device)
    )


def _mapped(value: Any, replaced: Mapping[int, Tensor]) -> Any:
    """Return nested lists, tuples and dicts with the tensors that have taken the place of others."""
    if isinstance(value, Tensor):
        return replaced.get(id(value), value)
    if type(value) in {list, tuple}:
        return type(value)(_mapped(part, replaced) for part in value)
    if type(value) is dict:
        return {key: _mapped(part, replaced) for key, part in value.items()}
    return value


def _with_copies(args: tuple[Any, ...], originals: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments whose first one may be written: a tensor of the script is copied."""
    first = args[0].clone() if args and args[0] is originals[0] and isinstance(args[0], Tensor) else None
    return args if first is None else (first, *args[1:])


def _devices_of(modules: Sequence[nn.Module]) -> list[int]:
    parameters = (parameter for module in modules for parameter in module.parameters())
    return sorted({p.device.index or 0 for p in parameters if devices.is_accelerator(p.device)})


@contextlib.contextmanager
def restored_state(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restore weights, buffers and the random numbers of torch afterwards."""
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    copies = [tensor.detach().clone() for tensor in tensors]
    try:
        with torch.random.fork_rng(_devices_of(modules)):
            yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
