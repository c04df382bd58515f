"""Capture of graphs of kernels: while it lasts, nothing of backlight runs on a device.

Nothing is delivered to a listener, and no thread of backlight queries an event: what the training thread
launches would become a part of the graph, and a query by any thread ends a capture in its default mode.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from backlight.devices import GATE, graph_classes

if TYPE_CHECKING:
    from backlight.capture.hooks import Patches
    from backlight.capture.hub import Hub


def install_graph_capture(hub: Hub, patches: Patches) -> None:
    """Deliver no events, and close the gate of the devices, between begin and end of a capture."""
    open_captures: set[int] = set()

    def end(graph: int) -> None:
        if graph in open_captures:
            open_captures.discard(graph)
            hub.own_passes -= 1
            GATE.open()

    def wrap_begin(original: Any) -> Any:
        @functools.wraps(original)
        def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            hub.resume()
            open_captures.add(id(self))
            hub.own_passes += 1
            GATE.close()
            try:
                return original(self, *args, **kwargs)
            except BaseException:
                end(id(self))
                raise

        return capture_begin

    def wrap_end(original: Any) -> Any:
        @functools.wraps(original)
        def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self, *args, **kwargs)
            finally:
                end(id(self))

        return capture_end

    for owner in graph_classes():
        patches.replace(owner, "capture_begin", wrap_begin)
        patches.replace(owner, "capture_end", wrap_end)
