"""Thinning of the per-parameter series as a run nears the disk space that it may use."""

from __future__ import annotations

from backlight.store.write.database import CHECKPOINT_PAGES, PAGE_BYTES

MAX_STRIDE = 4**10
"""Beyond it no series is stored any more."""


class DiskBudget:
    """Thins series so that a run of any length fits: the sparser, the less is left.

    Up to half of the limit every recorded step is stored, up to three quarters every 4th, up to seven
    eighths every 16th, and so on: each halving of what is left lasts twice as long as the one before.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.stride = 1
        self.used = 0
        self._ordinal = -1
        self._step: int | None = None

    def log_pages(self) -> int:
        """Return how many pages a write-ahead log may have, so that it is a small part of the limit."""
        if self.limit is None:
            return CHECKPOINT_PAGES
        return max(4, min(CHECKPOINT_PAGES, self.limit // (32 * PAGE_BYTES)))

    def keeps(self, step: int) -> bool:
        """Return whether the series of this step are stored; all series and parts of a step agree."""
        if step != self._step:
            self._step = step
            self._ordinal += 1
        return self.stride > 0 and self._ordinal % self.stride == 0

    def fits(self, size: int) -> bool:
        """Return whether ``size`` further bytes are within the limit."""
        return self.limit is None or self.used + size <= self.limit

    def update(self, used: int) -> bool:
        """Set the bytes in use; return whether the stride changed."""
        self.used = used
        before = self.stride
        while self.limit is not None and self.stride and used >= self.limit * (1 - 0.5 / self.stride**0.5):
            self.stride = self.stride * 4 if self.stride < MAX_STRIDE else 0
        return self.stride != before
