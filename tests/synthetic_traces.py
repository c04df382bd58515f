"""Synthetic traces: events with known times, in the layouts that tools write."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

from backlight.trace.events import COLUMNS, MISSING, Events

REAL = Path(__file__).parents[2] / "shared" / "data" / "traces"
SKIP_REASON = "the real traces (../shared/data/traces next to the clone) are missing"

Plain = dict[str, Any]


def kineto(event: Plain) -> str:
    """Write one event over several lines, as Kineto does."""
    outer = {key: value for key, value in event.items() if key != "args"}
    text = ", ".join(f"{json.dumps(key)}: {_number(value)}" for key, value in outer.items())
    if "args" not in event:
        return "  {\n    " + text + "\n  }"
    return "  {\n    " + text + ',\n    "args": {\n      ' + json.dumps(event["args"])[1:-1] + "\n    }\n  }"


def _number(value: Any) -> str:
    return str(value) if isinstance(value, Decimal) else json.dumps(value)


def text_of(events: list[Plain], layout: str = "kineto", **top: Any) -> str:
    """Return a trace in the layout ``kineto``, ``compact``, ``pretty``, ``ascii``, ``first`` or ``array``."""
    if layout == "kineto":
        head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in top.items())
        body = ",\n".join(map(kineto, events))
        return "\n{\n" + head + '  "traceEvents": [\n' + body + '\n  ],\n  "traceName": "made.json"\n}\n'
    events = [{k: float(v) if isinstance(v, Decimal) else v for k, v in e.items()} for e in events]
    if layout == "array":
        return json.dumps(events)
    if layout == "first":
        return json.dumps({"traceEvents": events, **top}, ensure_ascii=False)
    document = {**top, "traceEvents": events}
    if layout == "pretty":
        return json.dumps(document, indent=4, ensure_ascii=False)
    if layout == "ascii":
        return json.dumps(document, ensure_ascii=True, separators=(",", ":"))
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


_LISTS = ("types", "shapes", "values", "strides", "group", "group_name", "dtype")
"""Columns whose values are kept as their JSON text."""

LAYOUTS = ("kineto", "compact", "pretty", "ascii", "first", "array")


def write(path: Path, events: list[Plain], layout: str = "kineto", **top: Any) -> Path:
    """Write a trace, gzipped if the name ends so."""
    data = text_of(events, layout, **top).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def rows_of(events: Events) -> list[Plain]:
    """Return every event as a dictionary of the columns."""
    return [
        {
            name: events.word(name, row) if kept.coded else int(events[name][row])
            for name, kept in COLUMNS.items()
        }
        for row in range(len(events))
    ]


def reference(text: str) -> list[Plain]:
    """Read the complete events with the json module into the columns of :func:`rows_of`."""
    document = json.loads(text, parse_float=Decimal)
    events = document if isinstance(document, list) else document["traceEvents"]
    return [_row(event) for event in events if event["ph"] == "X"]


def _row(event: Plain) -> Plain:
    args = event.get("args", {})
    row: Plain = {}
    for name, kept in COLUMNS.items():
        key = kept.key.removeprefix("args.")
        value = args.get(key) if kept.key.startswith("args.") else event.get(key)
        if name == "start":
            row[name] = int((Decimal(str(value)) * 1000).to_integral_value()) if value is not None else 0
        elif name == "duration":
            row[name] = (
                int((Decimal(str(value)) * 1000).to_integral_value()) if value is not None else MISSING
            )
        elif name == "counters":
            row[name] = json.dumps(args) if event.get("cat") == "cuda_profiler_range" else ""
        elif name in _LISTS:
            row[name] = [] if value is None else value
        elif kept.coded:
            row[name] = "" if value is None else str(value)
        else:
            row[name] = _whole(value)
    return row


def _whole(value: Any) -> int:
    if value is None:
        return MISSING
    try:
        return int(value, 0) if isinstance(value, str) else int(value)
    except ValueError:
        return MISSING


def comparable(row: Plain) -> Plain:
    """Return a row whose lists, stored as text, are parsed: equal in all layouts."""
    lists = {name: json.loads(row[name]) if row[name] else [] for name in _LISTS}
    return {**row, **lists}


class TraceBuilder:
    """Builds the events of a trace; times are microseconds since its start."""

    def __init__(self, rank: int = 0, shift: float = 0.0) -> None:
        self.events: list[Plain] = []
        self.rank = rank
        self.shift = shift
        self._next = 100

    def add(
        self,
        category: str,
        name: str,
        start: float,
        duration: float,
        *,
        tid: int = 1,
        pid: int = 10,
        **args: Any,
    ) -> None:
        """Add one complete event."""
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid,
             "ts": 1_000_000 + start + self.shift, "dur": duration, "args": args}
        )  # fmt: skip

    def step(self, number: int, start: float, duration: float) -> None:
        """Add a step."""
        self.add("user_annotation", f"ProfilerStep#{number}", start, duration)

    def operator(self, name: str, start: float, duration: float, *, tid: int = 1, **args: Any) -> None:
        """Add an operator."""
        self.add("cpu_op", name, start, duration, tid=tid, **args)

    def kernel(
        self, name: str, launch: float, start: float, duration: float, *, stream: int = 7, tid: int = 1,
        category: str = "kernel", call: str = "cudaLaunchKernel", took: float = 5.0, **args: Any,
    ) -> None:  # fmt: skip
        """Add a device event and the call that launched it."""
        self._next += 1
        self.add("cuda_runtime", call, launch, took, tid=tid, correlation=self._next)
        self.add(
            category, name, start, duration, pid=0, tid=stream, device=0, stream=stream,
            correlation=self._next, **args,
        )  # fmt: skip

    def write(self, path: Path, **top: Any) -> Path:
        """Write the trace with its rank."""
        metadata = {"distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": 2}, **top}
        return write(path, self.events, **metadata)
