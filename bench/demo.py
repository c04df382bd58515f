"""Time of `backlight demo`: the whole command, and each of its two runs from its start to its end.

python bench/demo.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time

AIM_S = 15.0
"""Longest time of both runs together that a new user should wait."""


def main() -> int:
    """Print medians; 1 where the runs take longer than the aim."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    commands, runs = [], []
    for _ in range(parser.parse_args().rounds):
        with tempfile.TemporaryDirectory(prefix="demo-") as folder:
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", "backlight", "demo", "--out", f"{folder}/demo"],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            commands.append(time.perf_counter() - start)
        took = [float(seconds) for seconds in re.findall(r"took ([\d.]+) s\b", done.stderr)]
        if len(took) != 2:
            raise RuntimeError(f"expected the durations of two runs, got {took}: {done.stderr[-500:]}")
        runs.append(took)
    bug, fixed = (statistics.median(column) for column in zip(*runs, strict=True))
    print(f"run with the bug {bug:.1f} s, with the fix {fixed:.1f} s (aim: {AIM_S:.0f} s together)")
    print(f"the whole command {statistics.median(commands):.1f} s, medians of {len(commands)}")
    return int(bug + fixed > AIM_S)


if __name__ == "__main__":
    sys.exit(main())
