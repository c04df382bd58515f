"""Activation-checkpointed regions: their hooks, and the state that a run of a region reads.

A region runs in the forward and again in the backward. Nothing is attached to one that is not observed.
Not captured: what ``torch.compile`` traces, and checkpointing of other libraries.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from backlight import devices
from backlight.capture.batches import tensors_in
from backlight.capture.hooks import not_compiled, skipped_by_compiler
from backlight.capture.loss_graph import below_shapes

if TYPE_CHECKING:
    from backlight.capture.hooks import Patches
    from backlight.capture.hub import Hub

_PLAIN_VALUES = (bool, int, float, str, type(None))


@dataclass(eq=False)
class CheckpointedRegion:
    """One call of ``checkpoint``; a listener sets ``record`` to follow its tensors and recomputations.

    It also sets ``line``, that of the call, which the stack sampler reads in a recomputation that waits.
    The tensors are those that a run saves for backward; of a re-entrant region, whose forward saves none,
    those that it returns.
    """

    function: Any
    preserves_random: bool
    is_reentrant: bool
    record: Any = None
    line: str = ""


def install_recomputation(hub: Hub, patches: Patches) -> None:
    """Report checkpointed regions, whatever name a script imported ``checkpoint`` by."""
    # From torch 2.15 on, a function of its own takes the options by name.
    name = "_checkpoint_without_reentrant_generator"
    by_name = hasattr(torch.utils.checkpoint, f"{name}_impl")

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
            if (
                not hub.delivers("region_begin")
                or torch.compiler.is_compiling()
                or not torch.is_grad_enabled()
            ):
                yield from original(*args, **kwargs)
                return
            preserves = kwargs.get("preserve_rng_state", True) if by_name else args[1]
            region = CheckpointedRegion(args[0], preserves, is_reentrant=False)
            hub.emit("region_begin", region)
            if region.record is not None:
                args = (_recomputing(hub, region), *args[1:])
            run = original(*args, **kwargs)
            next(run)
            try:
                with _saved_by(hub, region):
                    yield
            except BaseException as error:  # of the region
                run.throw(error)
                raise
            hub.emit("region_end", region)
            yield from run

        return generator

    def wrap_reentrant(original: Any) -> Any:
        function = original.__func__ if isinstance(original, staticmethod) else original

        @functools.wraps(function)
        def forward(ctx: Any, run_function: Any, preserve_rng_state: bool, *args: Any) -> Any:
            is_trained = any(isinstance(t, Tensor) and t.requires_grad for t in args)
            if not is_trained or not hub.delivers("region_begin") or torch.compiler.is_compiling():
                return function(ctx, run_function, preserve_rng_state, *args)
            region = CheckpointedRegion(run_function, preserve_rng_state, is_reentrant=True)
            hub.emit("region_begin", region)
            if region.record is not None:
                run_function = _running_twice(hub, region)
            result = function(ctx, run_function, preserve_rng_state, *args)
            hub.emit("region_end", region)
            return result

        return staticmethod(forward)

    patches.replace(torch.utils.checkpoint, f"{name}_impl" if by_name else name, wrap)
    patches.replace(torch.utils.checkpoint.CheckpointFunction, "forward", wrap_reentrant)


@contextlib.contextmanager
def _saved_by(hub: Hub, region: CheckpointedRegion) -> Iterator[None]:
    """Report each tensor that a run of a region saves, and pass it on to the hooks of ``checkpoint``."""
    top: Callable[[bool], Any] | None
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = None if top is None or region.record is None else top(True)
    if hooks is None:
        yield
        return
    pack, unpack = hooks

    @skipped_by_compiler  # called while compiled code runs
    def report(tensor: Tensor) -> Any:
        _emit(hub, "region_tensor", region, tensor)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(report, unpack):
        yield


@not_compiled
def _emit(hub: Hub, event: str, *args: Any) -> None:
    hub.emit(event, *args)


def _recomputing(hub: Hub, region: CheckpointedRegion) -> Any:
    """Return what reports each run of the region's function as a recomputation."""
    function = region.function

    @functools.wraps(function, updated=())
    def recompute(*args: Any, **kwargs: Any) -> Any:
        _emit(hub, "recomputation_begin", region)
        try:
            with _saved_by(hub, region):
                return function(*args, **kwargs)
        finally:  # a recomputation that has what it needs ends by an exception
            _emit(hub, "recomputation_end", region)

    return recompute


def _running_twice(hub: Hub, region: CheckpointedRegion) -> Any:
    """Return what reports what the first run returns, and each further one as a recomputation."""
    function, has_run = region.function, False

    @functools.wraps(function, updated=())
    def run(*args: Any) -> Any:
        nonlocal has_run
        if is_again := has_run:
            _emit(hub, "recomputation_begin", region)
        has_run = True
        result = function(*args)
        for tensor in tensors_in(result):
            _emit(hub, "region_tensor", region, tensor)
        if is_again:
            _emit(hub, "recomputation_end", region)
        return result

    return run


def parameter_of(tensor: Tensor) -> Tensor | None:
    """Return the parameter that has the values of ``tensor``, in this or another shape or type."""
    if tensor.is_leaf:
        return tensor if tensor.requires_grad else None
    variable: Tensor | None = getattr(below_shapes(tensor.grad_fn), "variable", None)
    return variable


def other_modules(number: int, forward: str, again: str) -> str:
    """Write which modules a recomputation ran, of two parameters that were used at the same place."""
    ran, reran = (name.split(".") for name in (forward, again))
    while len(ran) > 1 and len(reran) > 1 and ran[-1] == reran[-1]:
        ran, reran = ran[:-1], reran[:-1]
    return f"region {number} recomputed {'.'.join(reran)}, forward ran {'.'.join(ran)}"


@dataclass
class RegionState:
    """State that a region reads besides its arguments, by name; values compare by equality."""

    variables: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, tuple[int, float]] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    random: str = ""


def checksum(tensor: Tensor) -> float:
    """Return the sum of magnitudes in fp64, 0 for a tensor without values."""
    values = getattr(tensor, "_local_tensor", tensor).detach()
    if values.layout is not torch.strided or values.device.type == "meta" or not values.numel():
        return 0.0
    if values.is_complex():
        values = values.abs()
    return float(values.double().abs().sum())


def random_state() -> str:
    """Return a digest of the random states that checkpointing restores."""
    digest = hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=8)
    if devices.is_in_use():
        for state in devices.accelerator_random_states():
            digest.update(state.numpy().tobytes())
    return digest.hexdigest()


def region_state(
    function: Any, modules: Iterable[nn.Module], names: dict[int, str], *, reads_values: bool
) -> RegionState:
    """Return the present state of the variables of ``function``, and of ``modules``.

    ``reads_values``: with the values of buffers and the random state, which waits for a device.
    """
    state = RegionState(random=random_state() if reads_values else "")
    for key, value in variables_of(function):
        if isinstance(value, nn.Module):
            state.variables[key] = _ModuleName(names.get(id(value), type(value).__name__))
        elif type(value) in _PLAIN_VALUES:
            state.variables[key] = value
    for module in modules:
        name = names.get(id(module), type(module).__name__)
        for key, buffer in (vars(module).get("_buffers") or {}).items():
            if buffer is not None:
                state.buffers[f"{name}.{key}"] = buffer._version, checksum(buffer) if reads_values else 0.0
        for key, parameter in (vars(module).get("_parameters") or {}).items():
            if parameter is not None:
                state.parameters[f"{name}.{key}"] = parameter._version
        for key, value in vars(module).items():
            # type() first: equality of third-party objects may do anything.
            if type(value) in _PLAIN_VALUES and (not key.startswith("_") or key == "training"):
                state.attributes[f"{name}.{key}"] = value
    return state


class _ModuleName(str):
    """The name of a module, which stands for it."""

    __slots__ = ()
    __repr__ = str.__str__


def other_variable(forward: RegionState, again: RegionState) -> tuple[str, str] | None:
    """Return the names of two modules that one variable was bound to, None where there is none such."""
    for name, value in forward.variables.items():
        now = again.variables.get(name, value)
        if isinstance(value, _ModuleName) and isinstance(now, _ModuleName) and now != value:
            return str(value), str(now)
    return None


def differences(forward: RegionState, again: RegionState, after: RegionState) -> list[str]:
    """Return in words what differed between the begin of the forward and the begin of the recomputation.

    ``after`` is the state at the end of the recomputation.
    """
    lines = []
    for name, (version, total) in forward.buffers.items():
        now = again.buffers.get(name)
        if now is None or (now[0] == version and near(now[1], total, 0.0)):
            continue
        later = after.buffers.get(name, now)
        twice = "; the recomputation updates it a second time" if later != now else ""
        lines.append(f"buffer {name} is updated between forward and recomputation{twice}")
    for name, version in forward.parameters.items():
        if again.parameters.get(name, version) != version:
            lines.append(f"parameter {name} was changed before the recomputation, as by an optimizer step")
    return lines + _changes("attribute", forward.attributes, again.attributes)


def variable_differences(forward: RegionState, again: RegionState) -> list[str]:
    """Return in words which variables of a function differed; they matter where values do."""
    return _changes("variable", forward.variables, again.variables)


def _changes(kind: str, forward: dict[str, Any], again: dict[str, Any]) -> list[str]:
    return [
        f"{kind} {name} was {value!r} in forward and is {again[name]!r} in the recomputation"
        for name, value in forward.items()
        if again.get(name, value) != value
    ]


def near(value: float, other: float, limit: float) -> bool:
    """Return whether two values agree to a relative ``limit``, or are both NaN."""
    return math.isclose(value, other, rel_tol=limit) or (math.isnan(value) and math.isnan(other))


def variables_of(function: Any) -> list[tuple[str, Any]]:
    """Return name and value of what a function is bound to: closure, defaults, globals that it names."""
    if isinstance(function, functools.partial):
        bound = [(f"argument {number}", value) for number, value in enumerate(function.args)]
        return [*bound, *function.keywords.items(), *variables_of(function.func)]
    code = getattr(function, "__code__", None)
    if code is None:
        return []
    variables = []
    for name, cell in zip(code.co_freevars, getattr(function, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # a cell that is not filled yet
            variables.append((name, cell.cell_contents))
    defaults = getattr(function, "__defaults__", None) or ()
    arguments = code.co_varnames[: code.co_argcount]
    variables += zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True)
    variables += (getattr(function, "__kwdefaults__", None) or {}).items()
    namespace = getattr(function, "__globals__", {})
    return [*variables, *((name, namespace[name]) for name in code.co_names if name in namespace)]


def modules_of(function: Any) -> list[nn.Module]:
    """Return the modules whose state a region may read: itself, its object, those that it is bound to."""
    roots = [function, getattr(function, "__self__", None)]
    roots += [value for _, value in variables_of(function)]
    modules: dict[int, nn.Module] = {}
    for root in roots:
        owner = getattr(root, "__self__", root) if callable(root) else root
        if isinstance(owner, nn.Module):
            modules.update((id(module), module) for module in owner.modules())
    return list(modules.values())
