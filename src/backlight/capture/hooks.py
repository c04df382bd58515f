"""Hooks on torch that report to the hub: backward, clipping, gradient scaling, data loading, optimizer steps.

Each ``install_…`` function replaces attributes of torch for as long as a listener is installed. What is not
captured: a script that imported ``backward`` or ``grad`` by name before watching began, transforms of
``torch.func``, and sources of data other than torch's DataLoader.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import dataloader

from backlight import clock
from backlight.capture.optimizers import is_nested
from backlight.capture.unrecorded import BACKWARDS, NUMBERS, PHASE, PROGRESS, STEPS
from backlight.records import Phase

if TYPE_CHECKING:
    from backlight.capture.hub import Hub


F = TypeVar("F", bound=Callable[..., Any])

FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"
"""Module of the class that clips by a method of its own, since its gradients are parts."""

_GROUP = "_group_tensors_by_device_and_dtype"
_SCALES = "_clip_grads_with_norm_"


def install_clipping(hub: Hub, patches: Patches) -> None:
    """Report clipping by norm and by value to the hub, before the gradients change.

    ``clip_grad_norm_`` looks up two functions of its module at every call, the one that measures the norm and
    the one that scales; ``clip_grad_value_`` looks up the one that groups gradients. Names that were imported
    earlier are caught there too.
    """
    inside_norm = [0]

    def wrap_scale(original: Any) -> Any:
        @functools.wraps(original)
        def scale(
            parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            unrecorded, is_observed = hub.unrecorded, hub.active
            if unrecorded is not None and hub.training.others and hub.training.is_elsewhere:
                unrecorded = None
            if (unrecorded is None and not is_observed) or torch.compiler.is_compiling():
                return original(parameters, max_norm, total_norm, *args, **kwargs)
            if unrecorded is not None:
                unrecorded.scalars.add_norm(total_norm)
            else:
                parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
                hub.emit("clip_begin", "norm", parameters, float(max_norm), total_norm)
            inside_norm[0] += 1
            try:
                return original(parameters, max_norm, total_norm, *args, **kwargs)
            finally:
                inside_norm[0] -= 1
                if is_observed:
                    hub.emit("clip_end")

        return scale

    def wrap_measure(original: Any) -> Any:
        @functools.wraps(original)
        def measure(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if not hub.active or torch.compiler.is_compiling():
                return original(tensors, *args, **kwargs)
            listed = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            hub.emit("norm_begin")
            inside_norm[0] += 1
            try:
                return original(listed, *args, **kwargs)
            except RuntimeError:
                # error_if_nonfinite: the step is about to be lost, but its gradients are here.
                hub.emit("clip_begin", "refused", listed, float("nan"), None)
                hub.emit("clip_end")
                raise
            finally:
                inside_norm[0] -= 1
                hub.emit("norm_end")

        return measure

    def wrap_group(original: Any) -> Any:
        @functools.wraps(original)
        def group(lists: Any, *args: Any, **kwargs: Any) -> Any:
            if not inside_norm[0] and not torch.compiler.is_compiling():
                if hub.active:
                    _report_caller(hub, sys._getframe(1), lists[0])  # the only place that knows the value
                elif hub.unrecorded is not None and not (hub.training.others and hub.training.is_elsewhere):
                    frame = sys._getframe(1)
                    if frame.f_code.co_name == _SCALES:
                        hub.unrecorded.scalars.add_norm(frame.f_locals["total_norm"])
            return original(lists, *args, **kwargs)

        return group

    for name, wrap in (
        (_SCALES, wrap_scale),
        ("_get_total_norm", wrap_measure),
        (_GROUP, wrap_group),
    ):
        patches.replace(clip_grad, name, wrap)


def _report_caller(hub: Hub, frame: FrameType, grads: Any) -> None:
    """Report a clipping function that reached the grouping by a name imported before watching."""
    values = frame.f_locals
    if frame.f_code.co_name == "clip_grad_value_":
        hub.emit("clip_begin", "value", list(grads), float(values["clip_value"]), None)
    elif frame.f_code.co_name == _SCALES:
        # Not its parameters: a generator of them is exhausted by now.
        hub.emit("clip_begin", "norm", list(grads), float(values["max_norm"]), values["total_norm"])
    else:
        return
    hub.emit("clip_end")


def install_fsdp_clipping(hub: Hub, patches: Patches) -> None:
    """Report the clipping of FSDP1, whose norm is known only once the gradients have changed."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def clip_grad_norm_(self: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
            if not hub.active or not _is_sharded(self):  # else torch's own function follows
                return original(self, max_norm, *args, **kwargs)
            parameters = [p for p in self.parameters() if p.grad is not None]
            hub.emit("clip_nears", parameters)
            norm = original(self, max_norm, *args, **kwargs)
            hub.emit("clip_begin", "norm", parameters, float(max_norm), norm.detach())
            hub.emit("clip_end")
            return norm

        return clip_grad_norm_

    patches.replace(sys.modules[FSDP].FullyShardedDataParallel, "clip_grad_norm_", wrap)


def _is_sharded(model: Any) -> bool:
    handles = getattr(model, "_all_handles", None) or ()
    return any(getattr(handle, "uses_sharded_strategy", False) for handle in handles)


_DATA, _BACKWARD, _OPTIMIZER = NUMBERS[Phase.DATA], NUMBERS[Phase.BACKWARD], NUMBERS[Phase.OPTIMIZER]
_EVALUATION, _OTHER = NUMBERS[Phase.EVALUATION], NUMBERS[Phase.OTHER]

_transforms: Callable[[], Any] | None = getattr(torch._C._functorch, "peek_interpreter_stack", None)

_AHEAD = "accelerate.data_loader"


def is_transforming() -> bool:
    """Return whether a transform of ``torch.func`` runs, whose tensors have no memory; True where unknown."""
    return _transforms is None or bool(_transforms())


@dataclass
class Patches:
    """Attributes that were replaced, and how to put them back.

    A replacement that third-party code has wrapped since cannot be taken out without losing theirs:
    it stays, and its wrapper must then pass every call straight through.
    """

    _replaced: list[tuple[Any, str, Any, Any]] = field(default_factory=list)

    def replace(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> bool:
        """Replace ``owner.name`` by ``wrap(original)``; False where there is no such attribute.

        A function that a module has from another one is replaced there as well: pickle looks for it under the
        name with which it was defined, and refuses another object.
        """
        original = vars(owner).get(name)
        if original is None:
            return False
        replacement = uncounted(wrap(original))
        places = [(owner, name)]
        home = sys.modules.get(getattr(original, "__module__", None) or "")
        at_home = getattr(original, "__qualname__", "")
        is_elsewhere = isinstance(owner, ModuleType) and home is not owner
        if is_elsewhere and home is not None and vars(home).get(at_home) is original:
            places.append((home, at_home))
        for place, at in places:
            setattr(place, at, replacement)
            self._replaced.append((place, at, original, replacement))
        return True

    def undo(self) -> list[str]:
        """Put the originals back, last first; return the names of those that had to stay."""
        stayed = []
        while self._replaced:
            owner, name, original, replacement = self._replaced.pop()
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
            else:
                stayed.append(f"{getattr(owner, '__name__', owner)}.{name}")
        return stayed


def uncounted(replacement: Any) -> Any:
    """Return a replacement whose frame warnings do not count: ``stacklevel=2`` is the script's line.

    Python skips the frames of its import system, which it recognises by these words in the name of the file.
    """
    code = getattr(replacement, "__code__", None)
    if isinstance(code, CodeType):
        replacement.__code__ = code.replace(co_filename=f"{code.co_filename} (importlib._bootstrap)")
    return replacement


def install_backward(hub: Hub, patches: Patches) -> None:
    """Report every outermost backward, and every outermost computation of gradients, to the hub."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            unrecorded = hub.unrecorded
            is_counted = not hub.backward_depth and not (hub.training.others and hub.training.is_elsewhere)
            if unrecorded is not None and is_counted and not torch.compiler.is_compiling():
                board = unrecorded.board
                board[PHASE] = _BACKWARD
                tensors, roots = (tensors, (tensors,)) if type(tensors) is torch.Tensor else _kept(tensors)
                unrecorded.scalars.add_losses(roots)
                hub.backward_depth = 1
                try:
                    original(tensors, *args, **kwargs)
                except BaseException:
                    unrecorded.scalars.drop_losses()
                    raise
                finally:
                    hub.backward_depth = 0
                    board[PHASE] = _OTHER
                    board[BACKWARDS] += 1
                    unrecorded.scalars.after_backward()
                return
            if not hub.active or torch.compiler.is_compiling():
                if hub.captured is not None and not torch.compiler.is_compiling():
                    tensors, roots = _kept(tensors)
                    hub.captured.add_backward(roots)
                original(tensors, *args, **kwargs)
                return
            tensors, roots = _kept(tensors)
            if hub.backward_depth or hub.grad_depth:
                # Re-entrant checkpointing calls this inside a backward: only the outermost counts.
                hub.emit("nested_begin")
                original(tensors, *args, **kwargs)
                return
            hub.meet_engines()
            hub.emit("backward_begin", roots)
            hub.backward_depth += 1
            try:
                original(tensors, *args, **kwargs)
            except BaseException as error:
                hub.emit("backward_raised", error)
                raise
            finally:
                hub.backward_depth -= 1
                hub.emit("backward_end")

        return backward

    def wrap_grad(original: Any) -> Any:
        @functools.wraps(original)
        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not hub.active or torch.compiler.is_compiling() or is_transforming():
                return original(outputs, inputs, *args, **kwargs)
            outputs, roots = _kept(outputs)
            if hub.backward_depth or hub.grad_depth:
                hub.emit("nested_begin")
                return original(outputs, inputs, *args, **kwargs)
            hub.emit("grad_begin", roots)
            hub.grad_depth += 1
            try:
                return original(outputs, inputs, *args, **kwargs)
            except BaseException as error:
                hub.emit("backward_raised", error)
                raise
            finally:
                hub.grad_depth -= 1
                hub.emit("grad_end")

        return grad

    patches.replace(torch.autograd, "backward", wrap)
    patches.replace(torch.autograd, "grad", wrap_grad)


def _kept(argument: Any) -> tuple[Any, Sequence[torch.Tensor]]:
    """Return what was given, an iterator read into a tuple, and the tensors in it."""
    if isinstance(argument, torch.Tensor):
        return argument, (argument,)
    if isinstance(argument, Iterator):
        argument = tuple(argument)
    # type() first: an edge of a graph is a named tuple.
    listed = argument if type(argument) in {list, tuple} else ()
    return argument, tuple(edge for edge in listed if isinstance(edge, torch.Tensor))


def install_grad_scaler(hub: Hub, patches: Patches) -> None:
    """Report ``scale``, ``unscale_`` and ``step`` of every gradient scaler to the hub.

    With a fused optimizer the gradients are still scaled inside ``step``, and whether the step is skipped is
    decided on the device: both are tensors on the optimizer, read late.
    """

    def wrap_scale(original: Any) -> Any:
        @functools.wraps(original)
        def scale(self: Any, outputs: Any) -> Any:
            result = original(self, outputs)
            if hub.unrecorded is not None and self.is_enabled():
                hub.resume()
            if hub.active and self.is_enabled() and isinstance(outputs, torch.Tensor):
                hub.emit("scaled", self, outputs, result)
            return result

        return scale

    def wrap_unscale(original: Any) -> Any:
        @functools.wraps(original)
        def unscale_(self: Any, optimizer: Any) -> None:
            original(self, optimizer)
            if hub.unrecorded is not None and self.is_enabled():
                hub.resume()
            if hub.active and self.is_enabled():
                hub.optimizers.use(optimizer)
                hub.emit("unscaled", self, optimizer)

        return unscale_

    def wrap_step(original: Any) -> Any:
        @functools.wraps(original)
        def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if hub.unrecorded is not None and self.is_enabled():
                hub.resume()
            if not hub.active or not self.is_enabled():
                return original(self, optimizer, *args, **kwargs)
            hub.optimizers.use(optimizer)
            steps: list[Any] = []
            handle = optimizer.register_step_post_hook(lambda *call: steps.append(call))
            hub.emit("scaler_begin", self, optimizer)
            try:
                return original(self, optimizer, *args, **kwargs)
            finally:
                handle.remove()
                hub.emit("scaler_end", self, optimizer, stepped=bool(steps))

        return step

    scaler = torch.amp.grad_scaler.GradScaler
    patches.replace(scaler, "scale", wrap_scale)
    patches.replace(scaler, "unscale_", wrap_unscale)
    patches.replace(scaler, "step", wrap_step)


def scale_of(scaler: Any) -> torch.Tensor | None:
    """Return the scaler's scale tensor, or None where a release hides it."""
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None


def install_dataloader(hub: Hub, patches: Patches) -> None:
    """Report every batch of every DataLoader to the hub, where torch has the class we know."""
    base = getattr(dataloader, "_BaseDataLoaderIter", None)
    if base is None:
        return

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def __next__(self: Any) -> Any:  # noqa: N807
            unrecorded = hub.unrecorded
            is_first = unrecorded is not None and getattr(self, "_num_yielded", 1) == 0
            if unrecorded is not None and not (is_first and hub.ends_for_epoch()):
                board = unrecorded.board
                board[PROGRESS] += 1
                if board[PHASE] != _EVALUATION:
                    board[PHASE] = _DATA
                item = original(self)
                if board[PHASE] == _DATA:
                    board[PHASE] = _OTHER
                return item
            if not hub.active:
                return original(self)
            hub.loader_workers = max(hub.loader_workers or 0, getattr(self, "_num_workers", 0) or 0)
            hub.emit("batch_begin", id(getattr(self, "_dataset", None)))
            caller = sys._getframe(1)
            # Accelerate, and so the Trainer, holds a batch back and gives the one before.
            ahead = caller.f_code.co_name == "__iter__" and caller.f_globals.get("__name__") == _AHEAD
            begin = clock.perf_counter()
            try:
                item = original(self)
            except BaseException as error:
                last = int(getattr(self, "_num_yielded", 0)) - 1
                if not isinstance(error, StopIteration):
                    hub.emit("batch_raised", error)
                elif ahead and last >= 0:
                    hub.emit("batch", last, clock.perf_counter() - begin)  # the one that was held back
                else:
                    hub.emit("batch_missing")
                raise
            index = int(getattr(self, "_num_yielded", 0)) - 1 - ahead
            if index < 0:
                hub.emit("batch_missing")  # the loop gets none of this call
            else:
                hub.emit("batch", index, clock.perf_counter() - begin)
                hub.emit("batch_given", self, index, item)
            return item

        return __next__

    patches.replace(base, "__next__", wrap)


# Both keep a function out of compiled code; the public one imports the compiler at once, which reads the
# environment that the script may still set.
not_compiled: Callable[[Any], Any] = getattr(torch, "_disable_dynamo", torch.compiler.disable)


def skipped_by_compiler(function: F, *, with_calls: bool = False) -> F:
    """Keep a function out of compiled code, and ``with_calls`` what it calls, without a wrapper.

    As ``torch._dynamo.skip`` does, without the import of the compiler.
    """
    frames: Any = torch._C._dynamo.eval_frame
    try:
        calls = frames._FrameAction.SKIP if with_calls else frames._FrameAction.DEFAULT
        skip = frames._FrameExecStrategy(frames._FrameAction.SKIP, calls)
        frames.set_code_exec_strategy(function.__code__, skip)
    except (AttributeError, TypeError):  # not in this release of torch
        skipped: F = not_compiled(function)
        return skipped
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


def install_optimizers(hub: Hub, patches: Patches) -> list[Any]:
    """Report optimizer steps to the hub; return the handles that remove the hooks.

    With a closure (L-BFGS) the gradients appear inside ``step``: the pre-hook replaces the closure by one
    that reports after each evaluation.
    """

    def wrap_init(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(self, *args, **kwargs)
            if hub.unrecorded is not None:
                hub.resume()
            if hub.active:
                hub.optimizers.use(self)
                hub.emit("optimizer_made", self)

        return __init__

    patches.replace(torch.optim.Optimizer, "__init__", wrap_init)

    @skipped_by_compiler
    def begin(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unrecorded = hub.unrecorded
        if (
            unrecorded is not None
            and unrecorded.optimizer == id(optimizer)
            and len(args) == 1
            and not kwargs
            and not unrecorded.may_nest
        ):
            unrecorded.board[PHASE] = _OPTIMIZER
            unrecorded.scalars.add_rates(unrecorded.number, optimizer.param_groups)
            return None
        return observed_begin(optimizer, args, kwargs)

    @skipped_by_compiler
    def end(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        unrecorded = hub.unrecorded
        if hub.training.others and hub.training.is_elsewhere:
            return
        if unrecorded is None or (unrecorded.may_nest and is_nested(optimizer)):
            observed_end(optimizer)
            return
        board = unrecorded.board
        unrecorded.closed = board[BACKWARDS]
        board[PHASE] = _OTHER
        board[PROGRESS] += 1
        board[STEPS] += 1
        unrecorded.scalars.close(unrecorded.first + unrecorded.done)
        unrecorded.done += 1
        if unrecorded.done >= unrecorded.steps:
            hub.resume()

    @not_compiled
    def observed_begin(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if hub.in_engine or is_nested(optimizer):
            return None
        # Inside a backward it may be any thread of autograd.
        is_known = hub.training.ident == threading.get_ident() and id(optimizer) in hub.training.optimizers
        is_asked = not (is_known or hub.backward_depth) and bool(hub.listeners)
        if is_asked and not hub.training.steps_here(optimizer):
            hub.optimizers.set_aside(optimizer)
            return None
        unrecorded = hub.unrecorded
        if unrecorded is not None:
            if len(args) == 1 and not kwargs and unrecorded.optimizer == id(optimizer):
                unrecorded.board[PHASE] = _OPTIMIZER
                unrecorded.scalars.add_rates(unrecorded.number, optimizer.param_groups)
                return None
            hub.resume()
        if not hub.active:
            return None
        hub.optimizers.use(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            hub.emit("optimizer_begin", optimizer, has_closure=False)
            return None
        hub.optimizers.goes_on = _goes_on(closure)
        hub.emit("optimizer_begin", optimizer, has_closure=True)

        @functools.wraps(closure)
        def reporting() -> Any:
            loss = closure()
            if hub.active:
                hub.emit("closure_end", optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": reporting}
        return (args[0], reporting, *args[2:]), kwargs

    @not_compiled
    def observed_end(optimizer: Any) -> None:
        if (hub.captured is None and not hub.active) or is_nested(optimizer):
            return
        if hub.captured is not None:
            hub.captured.add_step(optimizer)
        elif not hub.in_engine:
            hub.emit("optimizer_end", optimizer)

    return [register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)]


def _goes_on(closure: Any) -> bool:
    """Return whether the backward in ``closure`` belongs to those before the step, as Lightning's does.

    Its loop runs the last backward of an accumulation inside the step. Elsewhere gradients that are there
    when a step with a closure begins are whole, and the closure is for other weights (SAM).
    """
    inner = getattr(closure, "func", closure)  # a partial
    return (getattr(inner, "__module__", None) or "").startswith(("lightning.", "pytorch_lightning."))
