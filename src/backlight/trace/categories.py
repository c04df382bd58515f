"""What the categories of a trace mean, over the versions of the profiler and the makers of devices."""

from __future__ import annotations

import numpy as np

from backlight.trace.events import COMPLETE, Events, Mask

KERNEL = frozenset({"kernel", "concurrent_kernel"})
MEMCPY = frozenset({"gpu_memcpy", "memcpy"})
MEMSET = frozenset({"gpu_memset", "memset"})
DEVICE = KERNEL | MEMCPY | MEMSET
"""Work on a device. Annotations and synchronisation on the device's rows are no work."""

OPERATOR = frozenset({"cpu_op", "operator"})
RUNTIME = frozenset({
    "cuda_runtime", "cuda_driver", "runtime", "hip_runtime", "hip_driver", "xpu_runtime", "mtia_runtime",
    "privateuse1_runtime", "privateuse1_driver",
})  # fmt: skip
ANNOTATION = frozenset({"user_annotation"})
PYTHON = frozenset({"python_function"})
HOST = OPERATOR | RUNTIME | ANNOTATION | PYTHON
"""What stands in a host thread's tree of calls."""


def rows(events: Events, categories: frozenset[str]) -> Mask:
    """Return the complete events whose category, in lower case, is one of ``categories``."""
    accept = np.array([word.lower() in categories for word in events.words["category"]], dtype=bool)
    mask: Mask = events.where("category", accept) & (events["kind"] == COMPLETE)
    return mask


def named(events: Events, accept: list[bool]) -> Mask:
    """Return the rows whose name is accepted; ``accept`` is one answer per word of the names."""
    return events.where("name", np.array(accept, dtype=bool))
