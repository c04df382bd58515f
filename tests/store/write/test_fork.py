"""Forked children of a training process inherit a writer and must not write with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from backlight.store.read.run import open_run

pytestmark = pytest.mark.slow

PARENT = """
import os, sys, threading
import numpy as np
from backlight.records import ParameterRecord, Finding, Severity, Subject, RunStatus
from backlight.store.write.writer import RunWriter

writer = RunWriter.create(sys.argv[1], flush_interval=0.0)
table = writer.parameter_table((ParameterRecord("w", (1,), "float32", "cpu", 1),))

def record(start, steps):
    for step in range(start, start + steps):
        writer.append("gradient", step, table, [[1.0, 1.0, 1.0]], [[1, 1, 0, 0, 0]])
        writer.array("x", step, np.zeros(2))

record(0, 10)
writer.flush()
record(10, 5)
{hold}
child = os.fork()
if child == 0:
    record(100, 5)
    writer.scalar(100, "loss", 1.0)
    writer.event(100, "child", {{}})
    finding = Finding(
        rule="r", severity=Severity.INFO, title="t", detail="d", subject=Subject(), evidence=(), fix="f",
        refuted_if="r",
    )  # fmt: skip
    writer.finding(finding)
    writer.evidence("child", b"x")
    assert writer.parameter_table(()) == 0
    writer.flush()
    writer.close(RunStatus.FAILED)
    {leave}
{release}
_, status = os.waitpid(child, 0)
assert status == 0, status
assert os.path.exists(os.path.join(sys.argv[1], "attempt-000", "rank-00000.db-wal"))
record(15, 5)
writer.flush()
record(20, 5)
writer.close()
"""

HOLD = """
held, done = threading.Event(), threading.Event()
def hold():
    with writer._buffers, writer._disk:
        held.set(); done.wait()
thread = threading.Thread(target=hold); thread.start(); held.wait()
"""


@pytest.mark.parametrize(
    ("leave", "hold", "release"),
    [
        ("import gc; del writer; gc.collect(); sys.exit(0)", "", ""),
        ("os._exit(0)", "", ""),
        ("os._exit(0)", HOLD, "done.set(); thread.join()"),
    ],
    ids=["normal exit", "os._exit", "forked during a write"],
)
def test_forked_child_writes_nothing_and_does_not_hang(
    tmp_path: Path, leave: str, hold: str, release: str
) -> None:
    code = PARENT.format(leave=leave, hold=hold, release=release)
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True, timeout=60)
    run = open_run(tmp_path / "run")
    assert run.losses == ()
    assert run.series_steps("gradient").tolist() == list(range(25))
    assert run.array("x")[0].tolist() == list(range(25))
    assert (run.events(), run.stored_findings(), run.scalar_names(), run.evidence()) == ((), (), (), ())
