"""What a file is that is no trace of torch.profiler, or no longer a whole one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from backlight.trace.errors import TraceError
from backlight.trace.events import COMPLETE, Events

_EXPECTED = "expected the JSON that torch.profiler's export_chrome_trace writes"
_OWN = frozenset({
    "cpu_op", "operator", "kernel", "gpu_memcpy", "memcpy", "gpu_memset", "memset", "cuda_runtime",
    "runtime", "cuda_driver", "user_annotation", "gpu_user_annotation", "python_function", "trace",
    "privateuse1_runtime",
    "xpu_runtime", "mtia_runtime", "hip_runtime", "overhead", "cuda_sync", "cpu_instant_event",
})  # fmt: skip
"""Categories of events that torch.profiler writes, in lower case."""


def refusal(path: Path, text: bytes, *, whole: bool) -> TraceError:
    """Return why a file without an array of events is refused; ``whole`` if ``text`` is all of it."""
    start = text.lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start:
        return TraceError(f"{path}: the file is empty; {_EXPECTED}")
    if start.startswith(b"SQLite format 3"):
        return TraceError(
            f"{path}: an SQLite file, as Nsight Systems exports it; {_EXPECTED}. "
            "Record with torch.profiler.profile(...) and prof.export_chrome_trace(path)"
        )
    if start[:1] != b"{":
        return TraceError(f"{path}: is not JSON (it starts with {start[:24]!r}); {_EXPECTED}")
    first = start.split(b"\n", 1)[0]
    if b'"CudaEvent"' in text[:65536] or b'"TraceProcessEvent"' in text[:65536] or b'"StringTable"' in first:
        return TraceError(
            f"{path}: JSON of Nsight Systems (nsys export), not of torch.profiler; {_EXPECTED}. "
            "Record with torch.profiler.profile(...) and prof.export_chrome_trace(path)"
        )
    if not whole:
        return TraceError(f"{path}: no array traceEvents in the first {len(text) // 2**20} MiB; {_EXPECTED}")
    try:
        found = msgspec.json.decode(start)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return broken(path, error, b"")
    keys = ", ".join(map(repr, list(found)[:6])) or "none"
    return TraceError(f"{path}: JSON without an array traceEvents at its top (keys: {keys}); {_EXPECTED}")


def broken(path: Path, error: Exception, prefix: bytes) -> TraceError:
    """Return why text that does not parse to its end is refused."""
    if "truncated" in str(error):
        after = "inside traceEvents" if prefix else "before traceEvents"
        return TraceError(
            f"{path}: the JSON ends {after}: the file is truncated, most likely because the training ended "
            "while it was written. Copy it again, or take the trace again"
        )
    return TraceError(f"{path}: is not valid JSON ({error}); {_EXPECTED}")


def check(path: Path, events: Events, metadata: Mapping[str, Any]) -> None:
    """Refuse a Chrome trace that another tool wrote.

    Raises
    ------
    TraceError
        If no event has a category of torch.profiler.
    """
    known = np.array([word.lower() in _OWN for word in events.words["category"]], dtype=bool)
    if bool((events.where("category", known) & (events["kind"] == COMPLETE)).any()):
        return
    categories = [word for word in events.words["category"] if word]
    tool = ""
    if any("devtools" in word or "v8" in word or word == "__metadata" for word in categories):
        tool = "of Chrome's developer tools, "
    elif "viztracer_metadata" in metadata:
        tool = "of VizTracer, "
    elif any("jax" in str(key) or "xla" in word.lower() for key in metadata for word in categories):
        tool = "of JAX or XLA, "
    if not len(events):
        raise TraceError(f"{path}: traceEvents is empty: the profiler recorded no step; {_EXPECTED}")
    shown = ", ".join(map(repr, categories[:5])) or "none"
    raise TraceError(
        f"{path}: a Chrome trace {tool}not of torch.profiler: none of its {len(events):,} events "
        f"has a category such as cpu_op or kernel (categories: {shown}); {_EXPECTED}"
    )
