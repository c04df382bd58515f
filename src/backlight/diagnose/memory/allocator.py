"""What a caching allocator reports beside what tensors take: the memory that it holds in pieces."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Allocator:
    """The caching allocator of CUDA over the recorded steps, in bytes.

    Attributes
    ----------
    allocated, reserved:
        Peaks of what tensors had and of what was taken from the device.
    split:
        Now free inside segments of which other parts are in use.
    retries, failures:
        Times that the cache was emptied for lack of memory, and requests that failed.
    """

    allocated: int
    reserved: int
    split: int
    retries: int
    failures: int

    @property
    def fragmentation(self) -> float:
        """Share of the reserved memory that no tensor had at the peak; the two peaks may lie apart."""
        return 1 - self.allocated / self.reserved if self.reserved else 0.0


def reset_allocator() -> None:
    """Begin new peaks, where CUDA is in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's is untyped
        torch.cuda.reset_peak_memory_stats()


def read_allocator() -> Allocator | None:
    """Return what the allocator reports of the current device; None where CUDA is not in use."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]  # torch's is untyped
        return None
    stats = torch.cuda.memory_stats()
    return Allocator(
        allocated=int(stats.get("allocated_bytes.all.peak", 0)),
        reserved=int(stats.get("reserved_bytes.all.peak", 0)),
        split=int(stats.get("inactive_split_bytes.all.current", 0)),
        retries=int(stats.get("num_alloc_retries", 0)),
        failures=int(stats.get("num_ooms", 0)),
    )
