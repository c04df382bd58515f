"""Calls of functional cross-entropy, ``kl_div``, CTC, dropout and attention while they are observed."""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any

import torch
from torch.nn import functional

from backlight.capture.hooks import Patches, is_transforming
from backlight.capture.hub import HUB
from backlight.devices import is_capturing_graph
from backlight.user_code import SourceLine, user_line


def compiler_has_run() -> bool:
    """Return whether something was compiled in this process, which notices functions that are replaced."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def is_traced() -> bool:
    """Return whether the code that runs is being compiled or traced."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


class LossCalls:
    """Reports the input of each cross-entropy and ``kl_div`` to the hub.

    Compiled code is neither changed nor observed.
    """

    def __init__(self) -> None:
        self._patches = Patches()
        self._is_on = False

    def start(self) -> None:
        """Observe from here on, unless something is compiled in this process, which would notice."""
        if not self._is_on and not compiler_has_run():
            self._is_on = self._patches.replace(torch._C._nn, "cross_entropy_loss", _wrapped)
            self._patches.replace(torch, "kl_div", _wrapped)

    def stop(self) -> None:
        """Observe no longer."""
        if self._is_on:
            self._is_on = False
            self._patches.undo()


def _wrapped(original: Any) -> Any:
    name = original.__name__

    @functools.wraps(original)
    def loss(input: Any, *args: Any, **kwargs: Any) -> Any:
        is_plain = not (is_traced() or is_transforming() or is_capturing_graph())
        if is_plain and isinstance(input, torch.Tensor) and input.requires_grad:
            HUB.emit("loss_given", name, input)
        return original(input, *args, **kwargs)

    return loss


class CtcCalls:
    """Reports each call of ``ctc_loss`` with a target that has more labels than frames to the hub.

    Lengths on a device are not read.
    """

    def __init__(self) -> None:
        self._patches = Patches()
        self.is_on = False

    def start(self) -> None:
        """Observe from here on, at every step, unless something is compiled in this process."""
        if not self.is_on and not compiler_has_run():
            self.is_on = self._patches.replace(torch, "ctc_loss", _wrapped_ctc)

    def stop(self) -> None:
        """Observe no longer."""
        if self.is_on:
            self.is_on = False
            self._patches.undo()


def _wrapped_ctc(original: Any) -> Any:
    @functools.wraps(original)
    def ctc_loss(log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *rest: Any) -> Any:
        ignores_infinity = len(rest) > 2 and rest[2]
        if not ignores_infinity and not is_traced() and getattr(log_probs, "requires_grad", False):
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # the loss itself reports them
                too_long = _too_long(targets, input_lengths, target_lengths)
                if too_long is not None:
                    if HUB.unrecorded is not None:
                        HUB.resume()
                    HUB.emit("targets_too_long", *too_long)
        return original(log_probs, targets, input_lengths, target_lengths, *rest)

    return ctc_loss


def _too_long(targets: Any, input_lengths: Any, target_lengths: Any) -> tuple[int, int, int, int] | None:
    """Return frames that a target needs, those that it has, and how many of how many targets are too long.

    Two equal labels in a row need a frame between them. None where each target has its frames.
    """
    if any(isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in (input_lengths, target_lengths)):
        return None
    frames, needed = torch.as_tensor(input_lengths), torch.as_tensor(target_lengths)
    if not bool((2 * needed > frames).any()):
        return None
    if targets.ndim == 2 and targets.device.type == "cpu":
        is_label = torch.arange(1, targets.shape[1]) < needed.reshape(-1, 1)
        needed = needed + ((targets[:, 1:] == targets[:, :-1]) & is_label).sum(1)
    is_long = needed > frames
    if not bool(is_long.any()):
        return None
    worst = int((needed - frames).argmax())
    return int(needed.reshape(-1)[worst]), int(frames.reshape(-1)[worst]), int(is_long.sum()), is_long.numel()


Shapes = tuple[tuple[int, ...], tuple[int, ...]]


class ViewCalls:
    """Notes the line of the user's code at which a tensor of one shape is viewed as another one.

    Used for one forward of a script in which such a view is a mistake. Compiled code is not observed.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.lines: dict[Shapes, SourceLine | None] = {}
        self._wanted: set[Shapes] = set()
        self._wrappers: dict[str, Any] = {}

    def start(self, wanted: set[Shapes]) -> None:
        """Observe from here on, unless something is compiled in this process, which would notice."""
        self.is_on, self._wanted = True, wanted
        if not compiler_has_run():
            for name in ("view", "reshape", "flatten"):
                if name not in vars(torch.Tensor):  # but in its base class, whose method this hides
                    self._wrappers[name] = self._wrapped(getattr(torch.Tensor, name))
                    setattr(torch.Tensor, name, self._wrappers[name])

    def stop(self) -> None:
        """Observe no longer."""
        self.is_on = False
        while self._wrappers:
            name, wrapper = self._wrappers.popitem()
            if vars(torch.Tensor).get(name) is wrapper:
                delattr(torch.Tensor, name)

    def _wrapped(self, original: Any) -> Any:
        @functools.wraps(original)
        def view(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(tensor, *args, **kwargs)
            if self.is_on and not torch.compiler.is_compiling():
                shapes = tuple(tensor.shape), tuple(getattr(result, "shape", ()))
                if shapes in self._wanted and shapes not in self.lines:
                    self.lines[shapes] = user_line(sys._getframe(1))
            return result

        return view


class DropoutCalls:
    """Notes calls that drop values although no argument says that this is training.

    ``rows`` has function, probability and line of each. ``F.dropout`` with ``training=True`` written out is
    meant, and left out. Compiled code is neither changed nor observed.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, SourceLine | None]] = []
        self._patches = Patches()

    def start(self) -> bool:
        """Observe from here on; False where something is compiled in this process, which would notice."""
        if compiler_has_run():
            return False
        self._patches.replace(functional, "dropout", self._wrap_dropout)
        self._patches.replace(functional, "scaled_dot_product_attention", self._wrap_attention)
        return True

    def stop(self) -> None:
        """Observe no longer."""
        self._patches.undo()

    def _wrap_dropout(self, original: Any) -> Any:
        @functools.wraps(original)
        def dropout(input: Any, p: float = 0.5, *args: Any, **kwargs: Any) -> Any:
            if p > 0 and not args and "training" not in kwargs:
                self._note("dropout", p)
            return original(input, p, *args, **kwargs)

        return dropout

    def _wrap_attention(self, original: Any) -> Any:
        @functools.wraps(original)
        def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
            p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            if p:
                self._note("scaled_dot_product_attention", float(p))
            return original(*args, **kwargs)

        return scaled_dot_product_attention

    def _note(self, name: str, p: float) -> None:
        if not torch.compiler.is_compiling():
            self.rows.append((name, p, user_line(sys._getframe(2))))
