"""Dumps of torch's flight recorder, as torch 2.8 and later write them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

FLOAT = "float32"


def entry(
    operation: str = "all_reduce",
    number: int = 1,
    inputs: Any = ((4, 4),),
    outputs: Any = None,
    *,
    state: str = "completed",
    group: str = "0",
    dtype: str = FLOAT,
    record: int = 0,
    frames: Any = (),
) -> dict[str, Any]:
    """An entry with the fields of version 2.8 and later."""
    return {
        "record_id": record, "process_group": (group, "default_pg" if group == "0" else "pair"),
        "collective_seq_id": number, "p2p_seq_id": 0, "profiling_name": f"nccl:{operation}", "is_p2p": False,
        "input_sizes": [list(s) for s in inputs],
        "output_sizes": [list(s) for s in (inputs if outputs is None else outputs)],
        "input_dtypes": [dtype], "output_dtypes": [dtype], "state": state, "frames": list(frames),
        "time_created_ns": 1000 * number, "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None, "retired": state == "completed", "timeout_ms": 600000,
    }  # fmt: skip


def dumped(*entries: dict[str, Any], world: int = 2) -> dict[str, Any]:
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))},
        "1": {"name": "1", "desc": "pair", "ranks": "[0, 1]"},
    }
    for record, one in enumerate(entries):
        one["record_id"] = record
    return {"version": "2.8", "pg_config": config, "entries": list(entries)}


def write(directory: Path, rank: int, data: Any, *, as_json: bool = False) -> Path:
    path = directory / f"nccl_trace_rank_{rank}"
    path.write_bytes(json.dumps(data).encode() if as_json else pickle.dumps(data, protocol=2))
    return path
