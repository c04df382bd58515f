"""What a trace can be refused for."""

from __future__ import annotations


class TraceError(ValueError):
    """A file is no trace of torch.profiler, is damaged, or does not fit the others given with it."""
