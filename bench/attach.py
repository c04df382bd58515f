"""Time until `backlight attach PID` prints the stacks of a process, next to `py-spy dump`.

    python bench/attach.py [--runs 9]

The process is stuck in a lock with 8 more threads. Both commands are started in turn and timed until their
first line; the page on stalls shows the medians and their ratio.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

STUCK = """
import threading
lock = threading.Lock()
lock.acquire()
for _ in range(8):
    threading.Thread(target=lock.acquire, daemon=True).start()
print("stuck", flush=True)
lock.acquire()
"""


def first_line_s(command: list[str], part: str) -> float:
    """Return the seconds until a command prints a line with ``part``."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if part in line:
                seconds = time.perf_counter() - began
                process.kill()
                return seconds
    raise SystemExit(f"{command[0]} printed no line with {part!r}")


def main() -> None:
    """Print medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9, help="starts of each command")
    runs = parser.parse_args().runs
    here = str(Path(sys.executable).parent)
    py_spy = shutil.which("py-spy", path=here) or shutil.which("py-spy")
    if py_spy is None:
        raise SystemExit("py-spy is not installed (pip install 'backlight[stalls]')")
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True) as stuck:
        assert stuck.stdout is not None
        stuck.stdout.readline()
        commands = {
            "backlight attach": [sys.executable, "-m", "backlight", "attach", str(stuck.pid)],
            "py-spy dump": [py_spy, "dump", "--pid", str(stuck.pid)],
            "python -c pass": [sys.executable, "-c", "print('<module>')"],
        }
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(runs):
            for name, command in commands.items():
                seconds[name].append(first_line_s(command, "<module>"))
        stuck.kill()
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        times = seconds[name]
        print(f"{name}: first stack after {median:.3f} s ({min(times):.3f} to {max(times):.3f})")
    print(f"ratio to py-spy: {medians['backlight attach'] / medians['py-spy dump']:.1f}")


if __name__ == "__main__":
    main()
