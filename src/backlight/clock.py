"""The clocks of this process, as they were when backlight was loaded.

A watched script may replace the functions of :mod:`time`, and the system clock may be set while it runs:
neither changes what is recorded. Seconds throughout.
"""

from __future__ import annotations

import time

monotonic = time.monotonic
monotonic_ns = time.monotonic_ns
perf_counter = time.perf_counter
perf_counter_ns = time.perf_counter_ns
thread_time = time.thread_time
process_time = time.process_time
sleep = time.sleep
system_time = time.time
"""Unix time as the system says now: to compare with other hosts, and with the times of files."""

_START = time.time() - time.monotonic()


def unix_time() -> float:
    """Return the Unix time by the system clock of the start and the monotonic clock since."""
    return _START + monotonic()
