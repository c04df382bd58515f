"""Delay the exit of a test's process until the threads of gloo are idle; loaded through PYTHONPATH.

A thread of ProcessGroupGloo releases its last collective, and with it a Python object, some time after the
call. If the interpreter is finalizing by then, Python ends that thread, and C++ aborts the process:
"terminate called without an active exception", watched or not (see pull request 179291 of pytorch/pytorch).
On busy machines this happened in one launch of some hundreds.
"""

import atexit
import pathlib
import time


def wait_until_idle(timeout_s: float = 5.0) -> None:
    """Wait until every gloo thread was asleep in five consecutive samples, at most ``timeout_s``."""
    end, idle_samples = time.monotonic() + timeout_s, 0
    while idle_samples < 5 and time.monotonic() < end:
        states = set()
        for file in pathlib.Path("/proc/self/task").glob("*/stat"):
            try:
                name, _, rest = file.read_text(encoding="utf-8").partition("(")[2].rpartition(")")
            except OSError:  # the thread has ended
                continue
            if name == "pt_gloo_runloop":
                states.add(rest.split()[0])
        if not states:
            return
        idle_samples = idle_samples + 1 if states == {"S"} else 0
        time.sleep(0.002)


atexit.register(wait_until_idle)
