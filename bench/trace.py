"""Reading and analysing a large trace, against HolisticTraceAnalysis and plain ``json``.

A real trace is repeated to the wished size: each repetition is moved in time and gets ids of its own,
so that it reads as one long recording. Every candidate runs in a process of its own, interleaved; given
are medians of seconds, of processor seconds with those of its processes, and of peak resident memory; the
ratios are of processor seconds and memory to backlight. ``events`` are those that a candidate keeps.
``--decoders`` adds decoders of JSON on their own: what a reader could be built on. HolisticTraceAnalysis
0.5.0 is asked for what it has of these tables: parsing, time by kernel type, overlap of communication, idle
time. Where it is not installed, ``--hta PYTHON`` names an interpreter that has it; otherwise its rows are
left out.

    python bench/trace.py --hta PYTHON --megabytes 240
    python bench/trace.py --hta PYTHON --megabytes 1024 --times 1    # 5.4 GB for HolisticTraceAnalysis

Processor time and memory of HolisticTraceAnalysis over backlight's, with all tables: 12.7 and 6.6 at 250 MB,
21.4 and 7.3 at 1.05 GB; of ``json.load`` over backlight's reading: 3.7 and 7.4, and 3.6 and 11.8.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

TRACE = Path(__file__).parents[2] / "shared" / "data" / "traces" / "training_one_gpu.json.gz"
_SHIFTED = re.compile(
    rb'("ts": )(\d+)\.(\d+)|("(?:correlation|External id|id|Ev Idx|Sequence number)": ?)(\d+)|'
    rb"(ProfilerStep#)(\d+)"
)

READ = """
from backlight.trace.reader import read_trace
trace = read_trace(path)
events = len(trace.events)
"""
FULL = (
    READ
    + """
from backlight.trace.analysis import analyse
analyse([trace])
"""
)
REOPEN = """
from backlight.trace.cache import open_trace
events = len(open_trace(path).events)
"""
JSON = """
import json
events = len(json.load(open(path))["traceEvents"])
"""
DECODERS = {
    "orjson": """
import orjson
events = len(orjson.loads(open(path, "rb").read())["traceEvents"])
""",
    "msgspec, untyped": """
import msgspec
events = len(msgspec.json.decode(open(path, "rb").read())["traceEvents"])
""",
    "msgspec, typed, one shot": """
import gc, msgspec
from backlight.trace.reader import ANY_EVENT
gc.disable()
Whole = msgspec.defstruct("Whole", [("traceEvents", list[ANY_EVENT])])
events = len(msgspec.json.decode(open(path, "rb").read(), type=Whole).traceEvents)
""",
    "simdjson, parsed alone": """
import simdjson
parser = simdjson.Parser()
events = len(parser.parse(open(path, "rb").read())["traceEvents"])
""",
    "pyarrow, into columns": """
import io, pyarrow as pa, pyarrow.json as pj
text = open(path, "rb").read()
start = text.index(b'"traceEvents": [') + 16
body = text[start : text.index(b"\\n  ],", start)].replace(b"},\\n  {", b"}\\n{")
whole = ("External id", "correlation", "Sequence number", "Fwd thread id", "stream", "device", "bytes")
args = pa.struct([(name, pa.int64()) for name in whole])
times = [(name, pa.decimal128(20, 3)) for name in ("ts", "dur")]
words = [(name, pa.string()) for name in ("ph", "cat", "name")]
schema = pa.schema([*words, *times, ("id", pa.int64()), ("args", args)])
parse = pj.ParseOptions(explicit_schema=schema, newlines_in_values=True, unexpected_field_behavior="ignore")
options = pj.ReadOptions(use_threads=False, block_size=4 << 20)
events = pj.read_json(io.BytesIO(body), read_options=options, parse_options=parse).num_rows
""",
}
HTA_READ = """
import logging
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_files={0: path}, trace_dir=folder)
events = len(analysis.t.get_trace(0))
"""
HTA_FULL = (
    HTA_READ
    + """
analysis.get_gpu_kernel_breakdown(visualize=False)
analysis.get_comm_comp_overlap(visualize=False)
analysis.get_idle_time_breakdown(ranks=[0], visualize=False)
"""
)

TIMED = """
import sys, time, json as _json, resource
path, folder = sys.argv[1], sys.argv[2]
start, used = time.perf_counter(), time.process_time()
{body}
seconds = time.perf_counter() - start
children = resource.getrusage(resource.RUSAGE_CHILDREN)
processor = time.process_time() - used + children.ru_utime + children.ru_stime
own = int([l for l in open("/proc/self/status") if l.startswith("VmHWM")][0].split()[1])
sys.stdout.flush()
print("\\nRESULT " + _json.dumps([seconds, processor, max(own, children.ru_maxrss) / 1024, events]))
"""


def repeated(source: Path, target: Path, megabytes: float) -> int:
    """Write ``source`` again and again, moved in time, until it has the size; return the repetitions."""
    with gzip.open(source) as file:
        text = file.read()
    start = text.index(b'"traceEvents": [') + len(b'"traceEvents": [')
    stop = text.index(b"\n  ],", start)
    events = text[start:stop].strip()
    plain = json.loads(text)["traceEvents"]
    times = [event["ts"] for event in plain if event.get("ph") == "X" and event.get("cat") != "Trace"]
    ends = [e["ts"] + e["dur"] for e in plain if e.get("ph") == "X" and e.get("cat") != "Trace"]
    period = int(max(ends) - min(times)) + 1000
    ids = 10 ** len(str(max(int(e.get("args", {}).get("correlation", 0) or 0) for e in plain)))
    count = max(1, -(-int(megabytes * 1e6) // len(text)))
    with target.open("wb") as file:
        file.write(text[:start])
        for turn in range(count):
            file.write(b",\n  " if turn else b"\n  ")
            file.write(_moved(events, turn, period, ids))
        file.write(text[stop:])
    return count


def _moved(events: bytes, turn: int, period: int, ids: int) -> bytes:
    if not turn:
        return events

    def change(found: re.Match[bytes]) -> bytes:
        if found[1]:
            return b"%s%d.%s" % (found[1], int(found[2]) + turn * period, found[3])
        if found[4]:
            return b"%s%d" % (found[4], int(found[5]) + turn * ids)
        return b"%s%d" % (found[6], int(found[7]) + 1000 * turn)

    return _SHIFTED.sub(change, events)


def timed(python: str, body: str, path: Path) -> tuple[float, float, float, int] | str:
    """Return seconds, processor seconds, peak megabytes and events of one candidate, or what went wrong."""
    program = TIMED.format(body=body)
    done = subprocess.run(
        [python, "-c", program, str(path), str(path.parent)], capture_output=True, text=True, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            seconds, processor, megabytes, events = json.loads(line.removeprefix("RESULT "))
            return seconds, processor, megabytes, events
    return (done.stderr.strip().splitlines() or ["no result"])[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--megabytes", type=float, default=210)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--decoders", action="store_true", help="decoders of JSON on their own as well")
    parser.add_argument("--hta", default=sys.executable, metavar="PYTHON")
    options = parser.parse_args()
    if not options.trace.exists():
        sys.exit(f"{options.trace} is not there: name a trace with --trace")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.json"
        count = repeated(options.trace, path, options.megabytes)
        cached = Path(folder) / "cached" / "large.json"
        cached.parent.mkdir()
        shutil.copy(path, cached)
        start = time.perf_counter()
        timed(sys.executable, REOPEN.replace("(path)", "(path, cache=True)"), cached)
        writing = time.perf_counter() - start
        candidates = {
            "backlight, read": (sys.executable, READ, path),
            "backlight, reopened from Parquet": (sys.executable, REOPEN, cached),
            "backlight, read and all tables": (sys.executable, FULL, path),
            "json.load": (sys.executable, JSON, path),
            "HolisticTraceAnalysis, read": (options.hta, HTA_READ, path),
            "HolisticTraceAnalysis, read and its tables": (options.hta, HTA_FULL, path),
        }
        if options.decoders:
            candidates |= {name: (sys.executable, body, path) for name, body in DECODERS.items()}
        results: dict[str, list[tuple[float, float, float, int]]] = {}
        for _ in range(options.times):
            for name, (python, body, file) in candidates.items():
                result = timed(python, body, file)
                if isinstance(result, str):
                    print(f"{name}: left out ({result})", file=sys.stderr)
                else:
                    results.setdefault(name, []).append(result)
        size = path.stat().st_size / 1e6
    _print(results, f"{size:,.0f} MB, {count} x {options.trace.name}, median of {options.times}")
    print(f"first reading with the Parquet written: {writing:.1f} s, start of Python included")


def _print(results: dict[str, list[tuple[float, float, float, int]]], title: str) -> None:
    table = Table(title=title)
    table.add_column("candidate")
    for column in ("seconds", "processor s", "x", "peak MB", "x", "events"):
        table.add_column(column, justify="right")
    reference = {}
    for name, runs in results.items():
        seconds = statistics.median(run[0] for run in runs)
        processor = statistics.median(run[1] for run in runs)
        memory = statistics.median(run[2] for run in runs)
        reference[name] = (processor, memory)
        base = reference["backlight, read and all tables" if "tables" in name else "backlight, read"]
        table.add_row(
            name, f"{seconds:.2f}", f"{processor:.2f}", f"{processor / base[0]:.2f}",
            f"{memory:,.0f}", f"{memory / base[1]:.2f}", f"{runs[0][3]:,}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
