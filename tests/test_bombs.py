"""Small files that once took gigabytes or minutes: one line within 500 MB and 5 s of processor time."""

from __future__ import annotations

import contextlib
import gzip
import json
import pickle
import sqlite3
import subprocess
import sys
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from backlight.store.format.schema import TABLES
from backlight.store.read.run import open_run
from backlight.store.write.database import PAGE_BYTES
from backlight.store.write.writer import RunWriter
from run_builder import build_run

pytestmark = pytest.mark.slow

MAX_BYTES = 500 * 2**20
MAX_CPU_S = 5.0

_LEAF = 0x0D
"""First byte of a page of SQLite that holds rows of a table."""


# Linux counts the memory of the process that forked it as that of a child: this one is small.
_MEASURE = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([done.returncode, done.stderr, used.ru_maxrss * 1024, used.ru_utime + used.ru_stime]))
"""


def measured(*arguments: object) -> tuple[int, str, int, float]:
    """Return exit code, standard error, peak bytes of memory and CPU seconds of a Python process."""
    command = [sys.executable, "-c", _MEASURE, sys.executable, *map(str, arguments)]
    code, errors, peak, seconds = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return code, errors, peak, seconds


def check_bounds(*arguments: object) -> tuple[int, str]:
    code, errors, peak, seconds = measured("-m", "backlight", *arguments)
    assert "Traceback" not in errors
    print(f"{arguments[0]}: {peak / 1e6:.0f} MB, {seconds:.1f} s")  # the figures of docs/security.md
    assert peak < MAX_BYTES, errors
    assert seconds < MAX_CPU_S, errors
    return code, errors


@pytest.mark.parametrize("content", ["spaces", "events"])
def test_trace_of_5_mb(tmp_path: Path, content: str) -> None:
    text = b" " * 2**24 if content == "spaces" else b'{"ph":"X","ts":1,"dur":1,"name":"a"},' * 2**21
    packed = gzip.compress(text, 9)
    path = tmp_path / "trace.json.gz"
    head = gzip.compress(b'{"schemaVersion": 1, "traceEvents": [')
    path.write_bytes(head + packed * (5_000_000 // len(packed)))  # a gzip file may have several members
    assert len(text) * (5_000_000 // len(packed)) > 2**30
    code, errors = check_bounds("trace", path)
    assert (code, errors.count("\n")) == (2, 1)
    assert str(path) in errors


def test_export_of_2_5_mb(tmp_path: Path) -> None:
    """Chunks of zeros behind the filter gzip, 1,000 times smaller than what they hold."""
    with RunWriter.create(tmp_path / "run") as writer:
        writer.scalar(0, "loss", 1.0)
        writer.array("w", 0, np.zeros((4, 2**20), np.float32), dims=("a", "b"))
    (piece,) = (tmp_path / "run/attempt-000/arrays").glob("*.h5")
    chunk = zlib.compress(bytes(2**22), 9)
    chunks = 2_500_000 // len(chunk)
    with h5py.File(piece, "a") as file:
        group = file["a0"]
        del group["values"], group["steps"]
        group["steps"] = np.arange(chunks)
        values = group.create_dataset(
            "values", (chunks, 1, 2**20), np.float32, chunks=(1, 1, 2**20), compression="gzip"
        )
        for index in range(chunks):
            values.id.write_direct_chunk((index, 0, 0), chunk)
    assert chunks * 2**22 > 2 * 2**30
    assert piece.stat().st_size < 3_000_000
    code, _ = check_bounds("export", tmp_path / "run", tmp_path / "out.csv", "--table", "all")
    assert code == 0
    run = open_run(tmp_path / "run")
    assert run.array("w")[1] == []
    assert any(f"states {chunks * 2**22} bytes for" in loss for loss in run.losses), run.losses


def nested(leaf: object, kind: type) -> object:
    for _ in range(12):
        leaf = kind([leaf] * 10)
    return leaf


BOMB_FIELDS = {
    "operation": {"profiling_name": nested("A", list)},
    "group": {"process_group": (nested("A", tuple), "default_pg")},
    "state": {"state": nested("A", list)},
    "number": {"collective_seq_id": nested(1, list)},
    "sizes": {"input_sizes": [[1] * 20_000] * 20_000},
    "types": {"input_dtypes": [nested("Float", list)]},
    "frames": {"frames": [{"filename": "a", "line": 1, "name": "f"}] * 20_000},
    "long name": {"profiling_name": "A" * 1_000_000},
    "key": {"other": {}},
    "set": {"other": frozenset([1])},
}


@pytest.mark.parametrize("field", BOMB_FIELDS)
def test_flight_recorder_dump_that_repeats_one_object(tmp_path: Path, field: str) -> None:
    recorded = {
        "record_id": 0, "process_group": ("0", "default_pg"), "profiling_name": "nccl:all_reduce",
        "state": "scheduled", "collective_seq_id": 1, "input_sizes": [[4]], "output_sizes": [[4]],
        "input_dtypes": ["Float"], "output_dtypes": ["Float"], "frames": [], "time_created_ns": 1,
        **BOMB_FIELDS[field],
    }  # fmt: skip
    data = pickle.dumps({"entries": [recorded] * 200, "pg_config": {"0": {"ranks": [0, 1]}}})
    if field == "key":  # the hash of such a key takes hours: it is put in as an opcode
        key = pickle.dumps(nested(1, tuple), 2).removeprefix(b"\x80\x02").removesuffix(b".")
        data = b"\x80\x02}" + key + b"K\x01s."
    for rank in range(2):
        (tmp_path / f"dump_{rank}").write_bytes(data)
    code, errors = check_bounds("attach", "--flight-recorder", tmp_path)
    if field in {"long name", "sizes", "frames"}:
        assert code == 0, errors
    else:
        assert code == 2, errors
        assert len(errors.splitlines()) == 1
        assert len(errors) < 1000


def test_flight_recorder_dump_with_many_groups_of_one_list(tmp_path: Path) -> None:
    ranks = list(range(50_000))
    data = {"entries": [], "pg_config": {str(i): {"ranks": ranks} for i in range(5_000)}}
    (tmp_path / "dump_0").write_bytes(pickle.dumps(data))
    code, errors = check_bounds("attach", "--flight-recorder", tmp_path)
    assert code == 2
    assert "more than 4000000 ranks in its groups" in errors


def test_damaged_database_of_360_kb(tmp_path: Path) -> None:
    """Only the last page of each table can be read, so that halving the rest finds no end."""
    build_run(
        tmp_path / "run", events=[(step, "mark", {}) for step in range(3000)],
        scalars={step: dict.fromkeys("abc", float(step)) for step in range(3000)},
    )  # fmt: skip
    path = tmp_path / "run/attempt-000/rank-00000.db"
    data = bytearray(path.read_bytes())
    assert 360_000 < len(data) < 800_000
    leaves = [at for at in range(len(TABLES) * PAGE_BYTES, len(data), PAGE_BYTES) if data[at] == _LEAF]
    assert len(leaves) > 5
    for at in leaves:
        data[at] = 0
        path.write_bytes(data)
        with contextlib.closing(sqlite3.connect(path)) as connection:
            try:
                connection.execute(
                    "SELECT max(id) FROM scalar UNION ALL SELECT max(id) FROM event"
                ).fetchall()
            except sqlite3.DatabaseError:
                data[at] = _LEAF
    path.write_bytes(data)
    code, errors = check_bounds("findings", tmp_path / "run")
    assert code == 0, errors
    run = open_run(tmp_path / "run")
    assert 0 < len(run.scalar("a").steps) < 3000
    assert any("of table scalar are damaged" in loss for loss in run.losses), run.losses
