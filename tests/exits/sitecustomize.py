"""Ends the interpreter of a test's process only when gloo's threads rest; found through PYTHONPATH.

A thread of ProcessGroupGloo frees its last collective some time after the training has gone on, and with it
a Python object. If the interpreter is being finalised by then, Python ends that thread, and C++ the process:
"terminate called without an active exception", SIGABRT, watched or not (pull request 179291 of
pytorch/pytorch tells of it). On busy machines this befell one launch in some hundreds.
"""

import atexit
import pathlib
import time


def rest(patience: float = 5.0) -> None:
    """Return when every thread of gloo has slept at five looks in a row, or after ``patience`` seconds."""
    end, looks = time.monotonic() + patience, 0
    while looks < 5 and time.monotonic() < end:
        states = []
        for file in pathlib.Path("/proc/self/task").glob("*/stat"):
            try:
                name, _, after = file.read_text().partition("(")[2].rpartition(")")
            except OSError:  # the thread has ended
                continue
            if name == "pt_gloo_runloop":
                states.append(after.split()[0])
        if not states:
            return
        looks = looks + 1 if set(states) == {"S"} else 0
        time.sleep(0.002)


atexit.register(rest)
