"""The whole parameters that FSDP2 puts in place of its shards while a module computes.

Backward differentiates by those, so a hook on one sees the gradient of this rank's microbatch before it is
reduced and scattered.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from backlight.capture.modules import walk
from backlight.capture.sharding.fsdp2 import wholes


def unsharded(roots: Iterable[torch.nn.Module]) -> dict[int, torch.Tensor]:
    """Return the whole parameter by the ``id`` of the sharded one, as far as they exist.

    Before the first forward of a module, and in a release that names them otherwise, there are none.
    """
    found: dict[int, torch.Tensor] = {}
    for root in roots:
        for _, module in walk(root):
            found.update(wholes(module))
    return found
