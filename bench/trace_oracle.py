"""Numbers of ``backlight trace`` next to those of HolisticTraceAnalysis on real traces.

HolisticTraceAnalysis runs in its own process, since it is no dependency: ``--hta PYTHON`` names an
interpreter that has it (0.5.0). It keeps whole microseconds in some tables, and leaves out kernels without
a launch.

    python bench/trace_oracle.py --hta PYTHON ../shared/data/traces/training_one_gpu.json.gz
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from backlight.trace.analysis import analyse
from backlight.trace.device_queues import FULL_QUEUE
from backlight.trace.reader import read_trace

HTA = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=sys.argv[2])
found = {}
series = analysis.get_queue_length_time_series(ranks=[0])
for rank, frame in series.items():
    for stream, rows in frame.groupby("stream"):
        found[f"longest queue, stream {stream}"] = int(rows.queue_length.max())
full = analysis.get_time_spent_blocked_on_full_queue(series, max_queue_length=int(sys.argv[3]))
if full is not None:
    for _, row in full.iterrows():
        found[f"full queue, stream {int(row.stream)}, us"] = float(row.duration_at_max_queue_length)
bandwidth = analysis.get_memory_bw_summary(ranks=[0])
if bandwidth is not None:
    for (_, name), row in bandwidth["memory_bw_gbps"].iterrows():
        found[f"fastest {name}, GB/s"] = float(row["max"])
launches = analysis.get_cuda_kernel_launch_stats(ranks=[0], visualize=False)[0]
found["longest launch delay, us"] = float(launches.launch_delay.max())
found["longest launch call, us"] = float(launches.cpu_duration.max())
print("RESULT " + json.dumps(found))
"""


def own(path: Path) -> dict[str, float]:
    """Return the same numbers of backlight."""
    found: dict[str, float] = {}
    one = analyse([read_trace(path)]).traces[0]
    for stream in one.streams:
        found[f"longest queue, stream {stream.stream}"] = stream.longest
        if stream.full:
            found[f"full queue, stream {stream.stream}, us"] = stream.full / 1e3
    for rate in one.copy_rates:
        name = rate.name.split(" (")[0]
        found[f"fastest {name}, GB/s"] = max(rate.max, found.get(f"fastest {name}, GB/s", 0.0))
    if one.launches:
        found["longest launch delay, us"] = max(row.delay.max for row in one.launches) / 1e3
        found["longest launch call, us"] = max(row.call.max for row in one.launches) / 1e3
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--hta", default=sys.executable, metavar="PYTHON")
    options = parser.parse_args()
    table = Table("trace", "number", "backlight", "HolisticTraceAnalysis", "differ by")
    for path in options.traces:
        done = subprocess.run(
            [options.hta, "-c", HTA, str(path), str(path.parent), str(FULL_QUEUE)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        result = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not result:
            print(f"{path}: {(done.stderr.strip().splitlines() or ['no result'])[-1]}", file=sys.stderr)
            continue
        theirs, measured = json.loads(result[0].removeprefix("RESULT ")), own(path)
        for name in dict.fromkeys([*measured, *theirs]):
            one, other = measured.get(name), theirs.get(name)
            shown = ["-" if value is None else f"{value:,.6g}" for value in (one, other)]
            apart = f"{abs(one - other) / max(abs(other), 1e-9):.2%}" if one and other else "-"
            table.add_row(path.name, name, *shown, apart)
    Console().print(table)


if __name__ == "__main__":
    main()
