"""Graphs of kernels: nothing of backlight runs while one is captured, and replayed steps are counted.

During a capture nothing is delivered to a listener, and no thread of backlight queries an event: what the
training thread launches would become a part of the graph, and a query by any thread ends a capture in its
default mode. A replay calls no hook, so that what a graph holds is noted as it is captured: the losses of its
backward passes, which hold new values after each replay, and the optimizers that have stepped.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from backlight.devices import GATE, graph_classes

if TYPE_CHECKING:
    from backlight.capture.hooks import Patches
    from backlight.capture.hub import Hub


class CapturedWork:
    """What a graph holds of steps; weak, since the script owns its tensors and optimizers."""

    def __init__(self) -> None:
        self._losses: list[weakref.ref[torch.Tensor]] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self.backwards = 0

    def add_backward(self, roots: Sequence[torch.Tensor]) -> None:
        """Note an outermost backward pass."""
        self.backwards += 1
        self._losses += [weakref.ref(root) for root in roots]

    def add_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the step of an optimizer."""
        self._optimizers.append(weakref.ref(optimizer))

    @property
    def losses(self) -> list[torch.Tensor]:
        """The losses that the script still holds: the memory of others may serve another purpose by now."""
        return [loss.detach() for reference in self._losses if (loss := reference()) is not None]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have stepped, in that order."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]


def install_graph_capture(hub: Hub, patches: Patches) -> None:
    """Deliver no events, and close the gate of the devices, between begin and end of a capture."""
    open_captures: dict[int, CapturedWork | None] = {}
    captured: weakref.WeakKeyDictionary[Any, CapturedWork] = weakref.WeakKeyDictionary()

    def end(graph: Any) -> None:
        if id(graph) not in open_captures:
            return
        if hub.captured is not None and hub.captured.backwards:
            captured[graph] = hub.captured
        hub.captured = open_captures.pop(id(graph))
        hub.own_passes -= 1
        GATE.open()

    def wrap_begin(original: Any) -> Any:
        @functools.wraps(original)
        def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            hub.resume()
            open_captures[id(self)], hub.captured = hub.captured, CapturedWork()
            hub.own_passes += 1
            GATE.close()
            try:
                return original(self, *args, **kwargs)
            except BaseException:
                hub.captured = CapturedWork()
                end(self)
                raise

        return capture_begin

    def wrap_end(original: Any) -> Any:
        @functools.wraps(original)
        def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self, *args, **kwargs)
            finally:
                end(self)

        return capture_end

    def wrap_replay(original: Any) -> Any:
        @functools.wraps(original)
        def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            if (work := captured.get(self)) is not None:
                hub.resume()
                hub.emit("replayed", work)
            return result

        return replay

    for owner in graph_classes():
        patches.replace(owner, "capture_begin", wrap_begin)
        patches.replace(owner, "capture_end", wrap_end)
        patches.replace(owner, "replay", wrap_replay)
