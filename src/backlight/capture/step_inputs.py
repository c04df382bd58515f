"""The forward passes of the open step: what each was given, by reference, and the gradient of its outputs.

From these the step can be computed again without its loss function: with the gradients of its outputs, a
forward and backward pass give what it contributed to the gradient of the step. Nothing is copied but the
random state, and everything is dropped when the step is over. How long a model exists is up to the script;
what it was given exists as long as the graph of its outputs, or from a backward to the step of an optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from backlight.capture.batches import indices_of, tensors_in
from backlight.capture.hooks import is_transforming, scale_of
from backlight.capture.hub import HUB, Listener
from backlight.capture.loss_graph import single_losses
from backlight.capture.modules import unwrapped
from backlight.capture.training_threads import count_modes, outside_modes
from backlight.devices import is_accelerator, is_capturing_graph, random_states
from backlight.interrupts import is_interrupt

HELD_BYTES = 256 << 20
"""Most bytes of gradients of outputs that are held until the step is over."""

LOADERS = 8
"""Batches that are remembered between two forward passes."""


@dataclass(eq=False)
class _Given:
    """What exists as long as the arguments of a call: hooks of its outputs refer to it.

    ``random`` is the random state of the host, then of devices, ``deltas`` are the gradients of its outputs.
    """

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    random: Sequence[Tensor] = ()
    deltas: dict[int, Tensor] = field(default_factory=dict)


_GONE = _Given()


@dataclass(eq=False)
class ForwardCall:
    """One call of an outermost module in a step, with weak references to that and what it was given.

    ``batch`` is the number of the batch of its loader, ``indices`` are the dataset indices of its samples,
    None where not known. ``losses`` are those of its samples, where a loss function of torch has them.
    """

    _module: weakref.ref[nn.Module]
    _arguments: weakref.ref[_Given]
    devices: Sequence[torch.device]
    autocast: tuple[bool, torch.dtype]
    versions: list[int]
    batch: int | None = None
    indices: Sequence[int] | None = None
    losses: Tensor | None = None
    trouble: str = ""
    _kept: _Given | None = None

    @property
    def module(self) -> Any:
        """The module, None where it is gone."""
        return self._module()

    @property
    def args(self) -> Sequence[Any]:
        """Its arguments by position; empty where they are gone."""
        return (self._arguments() or _GONE).args

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Its arguments by name; empty where they are gone."""
        return (self._arguments() or _GONE).kwargs

    @property
    def random(self) -> Sequence[Tensor]:
        """The random state of the host, then of ``devices``; empty where the arguments are gone."""
        return (self._arguments() or _GONE).random

    @property
    def deltas(self) -> Mapping[int, Tensor]:
        """The gradients of its outputs, by their number among the tensors that it returned."""
        return (self._arguments() or _GONE).deltas

    def is_gone(self) -> bool:
        """Return whether the module or its arguments are gone."""
        return self._module() is None or self._arguments() is None

    def keep(self) -> None:
        """Keep the arguments alive: their gradient is being computed."""
        self._kept = self._arguments()

    def release(self) -> None:
        """Keep them no longer: an optimizer has changed the weights, or none is about to."""
        self._kept = None

    def inputs(self) -> list[Tensor]:
        """Return the tensors that it was given."""
        return tensors_in((tuple(self.args), dict(self.kwargs)))

    def was_changed(self) -> bool:
        """Return whether a tensor that it was given has been written to since."""
        return self.versions != [x._version for x in self.inputs()]

    def forget(self) -> None:
        """Drop every reference; hooks on its outputs may outlive the step."""
        if (arguments := self._arguments()) is not None:
            arguments.args, arguments.kwargs, arguments.random, arguments.deltas = (), {}, (), {}
        self._kept = self.losses = None


class StepInputs(Listener):
    """Holds the forward passes of the open step, ``calls`` in order.

    ``scaler`` refers to the one in use, ``loss`` what the last backward began with, under its scale.

    With ``keeps`` False only dataset indices are noted. With ``is_requested`` arguments are kept whatever the
    number of forward passes is: the step is known to come.
    """

    every_step = False

    def __init__(self, *, keeps: bool = True) -> None:
        self.keeps = keeps
        self.is_requested = False
        self.calls: list[ForwardCall] = []
        self.scaler: Callable[[], Any] | None = None
        self.loss: Tensor | None = None
        self._inside: tuple[ForwardCall, _Given] | None = None
        self._batches: list[tuple[int, Sequence[int] | None]] = []
        self._bytes = 0
        self._unseen = 0
        self._last = self._most = 1  # forward passes of the step before, and of two: some loops alternate

    def restart(self) -> None:
        """Drop what is held: a step begins, or nothing more is wanted of this one."""
        for call in self.calls:
            call.forget()
        if self.calls:
            self._most, self._last = max(self._last, len(self.calls)), len(self.calls)
        self.calls, self._inside = [], None
        self._bytes = self._unseen = 0
        self.scaler = self.loss = None

    def unrecorded_begin(self) -> None:
        """Drop what is held: its step ends unseen."""
        self.restart()
        self._batches = []

    def batch_given(self, iterator: Any, index: int, batch: Any) -> None:
        """Note the dataset indices of a batch."""
        self._batches = [*self._batches[1 - LOADERS :], (index, indices_of(iterator, index))]

    def forward_begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note a call with gradients."""
        if HUB.forward_depth > 1 or HUB.backward_depth:
            return
        indices, self._batches = self._batches, []
        if not torch.is_grad_enabled() or is_transforming() or is_capturing_graph():
            return
        batch = indices[0] if len(indices) == 1 else (None, None)  # of several, no one knows which
        arguments = _Given(args, kwargs)
        where = weakref.ref(unwrapped(module)), weakref.ref(arguments)
        if not self.keeps:
            self.calls.append(ForwardCall(*where, (), (False, torch.float32), [], *batch))
            return
        inputs = tensors_in((tuple(args), dict(kwargs)))
        device = inputs[0].device.type if inputs else "cpu"
        autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        versions: list[int] = []
        places: dict[torch.device, None] = {}
        for x in inputs:
            versions.append(x._version)
            places[x.device] = None
        for parameter in islice(module.parameters(), 1):  # of a model that moves its inputs
            places[parameter.device] = None
        devices = [where for where in places if where.type != "cpu" and is_accelerator(where)]
        arguments.random = random_states(devices)
        call = ForwardCall(*where, devices, autocast, versions, *batch)
        self.calls.append(call)
        self._inside = call, arguments
        if len(self.calls) > self._most and not self.is_requested:
            self._release()

    def forward_end(self, module: nn.Module, result: Any) -> None:
        """Wait for the gradients of what the outermost call returned.

        A model that returns its loss computes it from the other outputs, whose gradients would count twice.
        """
        if HUB.forward_depth > 1 or self._inside is None:
            return
        (call, args), self._inside = self._inside, None
        outputs = [(number, x) for number, x in enumerate(tensors_in(result)) if x.requires_grad]
        scalars = [(number, x) for number, x in outputs if x.numel() == 1]
        for number, output in scalars or outputs:
            self._bytes += output.nbytes
            if self._bytes > HELD_BYTES:
                call.trouble = "the outputs of its forward passes are too large to hold their gradients"
                return
            output.register_hook(partial(_arrived, args, number))  # type: ignore[no-untyped-call]  # torch's

    def backward_begin(self, roots: Sequence[Tensor]) -> None:
        """Take the losses of single samples, if one forward belongs to this backward."""
        self.loss = roots[0].detach() if len(roots) == 1 and roots[0].numel() == 1 else None
        new, self._unseen = self.calls[self._unseen :], len(self.calls)
        # A script that computes gradients for something else may never make a step.
        if self.is_requested or (len(self.calls) <= self._most and HUB.optimizers.is_any_alive()):
            for call in new:
                call.keep()
        if self.keeps and len(new) == len(roots) == 1:
            try:
                new[0].losses = single_losses(roots[0].grad_fn)
            except (RuntimeError, AttributeError) as error:  # a release that saves them otherwise
                if is_interrupt(error):
                    raise
                new[0].losses = None

    def optimizer_end(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave it to the script how long the batch exists; another optimizer may follow."""
        if self.calls:
            self._release()

    def _release(self) -> None:
        for call in self.calls:
            call.release()

    def scaled(self, scaler: Any, loss: Tensor, result: Tensor) -> None:
        """Remember whose scale the gradients contain."""
        self.scaler = weakref.ref(scaler)

    def scale(self) -> float:
        """Return the loss scale of this step, 1 without a scaler."""
        scale = None if self.scaler is None else scale_of(self.scaler())
        return 1.0 if scale is None else float(scale)


def _arrived(arguments: _Given, number: int, delta: Tensor) -> None:
    if torch.compiler.is_compiling():
        return
    if count_modes():
        with outside_modes():
            _arrived(arguments, number, delta)
        return
    kept = arguments.deltas.get(number)
    arguments.deltas[number] = delta.detach() if kept is None else kept + delta.detach()
