"""Kill a writing process at random moments, again and again, and look at what its run directory still says.

Each victim opens attempts of one run, records, flushes, closes and compacts in a loop, so that a
kill may fall anywhere: before the folder is there, in the middle of a transaction, between two renames. After
each kill the folder must open, hold every flushed step with its right values, say that the process
was killed, and be unchanged by the reading.

    python bench/kills.py --kills 1000
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from backlight.records import Evidence, Finding, ParameterRecord, RunStatus, Severity, Subject
from backlight.store.errors import RunFormatError
from backlight.store.read.run import Run, open_run
from backlight.store.write.compact import compact
from backlight.store.write.writer import RunWriter

P = 40
FLUSH_INTERVAL = 0.01
TABLE = tuple(
    ParameterRecord(f"layer{i}.weight", (i + 1, 3), "float32", "cpu", 3 * (i + 1)) for i in range(P)
)
FINDING = Finding(
    rule="vanishing",
    severity=Severity.INFO,
    title="title",
    detail="detail",
    subject=Subject(step=1),
    evidence=(Evidence("series"),),
    fix="fix",
    refuted_if="never",
)
SHARED = struct.Struct("<qqqq")
"""Attempt, and its last step that was appended, that a flush began with, and that a flush ended with."""


def floats_at(step: int) -> np.ndarray:
    """Return the numbers that step ``step`` must hold, computable by victim and check."""
    return (np.arange(P * 3, dtype=np.float64).reshape(P, 3) + 1.0) * np.sqrt(step + 2.0)


def victim(path: Path, shared: mmap.mmap, seed: int) -> None:
    """Record until killed."""
    source = random.Random(seed)
    ints = np.zeros((P, 5), dtype=np.int64)
    ints[:, 0], ints[:, 1] = 1, [p.numel for p in TABLE]

    def tell(*values: int) -> None:
        shared[: SHARED.size] = SHARED.pack(*values)

    while True:
        writer = RunWriter.create(path, name="victim", flush_interval=FLUSH_INTERVAL, resume=True)
        table = writer.parameter_table(TABLE)
        began, done, last = -1, -1, time.monotonic()
        tell(writer.attempt, -1, -1, -1)
        for step in range(source.randrange(20, 400)):
            writer.append("gradient", step, table, floats_at(step), ints)
            writer.scalar(step, "loss", 1.0 / (step + 1))
            if step % 25 == 7:
                writer.array("gram", step, floats_at(step), dims=("a", "b"))
                writer.event(step, "sampling", {"every": 1})
            if step % 60 == 11:
                writer.finding(FINDING)
            if step % 90 == 13:
                writer.evidence("../stack.txt", b"x" * 3000)
            tell(writer.attempt, step, began, done)
            if time.monotonic() - last > FLUSH_INTERVAL:
                began = step
                tell(writer.attempt, step, began, done)
                writer.flush()
                done, last = step, time.monotonic()
                tell(writer.attempt, step, began, done)
        writer.close(RunStatus.FINISHED)
        if source.random() < 0.3:
            compact(path)


def digest(path: Path) -> dict[str, str]:
    """Return every file below ``path`` with a hash of its bytes."""
    return {
        p.relative_to(path).as_posix(): hashlib.blake2b(p.read_bytes()).hexdigest()
        for p in sorted(path.rglob("*"))
        if p.is_file()
    }


def check(path: Path, attempt: int, done: int, appended: int) -> tuple[list[str], int, int]:
    """Return what is wrong with a run after a kill, the steps lost, and the steps after the last flush."""
    wrong: list[str] = []
    before = digest(path)
    run = open_run(path)
    for known in run.attempts:
        wrong += _judge_attempt(run, known.index)
    newest = run.attempts[-1]
    lost = 0
    if newest.index == attempt:
        steps = run.frame("gradient", "norm", attempt=attempt).steps - newest.step_offset
        last = int(steps[-1]) if len(steps) else -1
        lost = max(0, appended - last)
        if last < done:
            wrong.append(f"steps up to {done} were flushed, found {last}")
    if newest.status is RunStatus.KILLED and not any("was killed" in loss for loss in run.losses):
        wrong.append(f"the loss is not stated: {run.losses}")
    if newest.status not in {RunStatus.KILLED, RunStatus.FINISHED}:
        wrong.append(f"status {newest.status}")
    surprising = [loss for loss in run.losses if "was killed" not in loss and "left no data" not in loss]
    if surprising:
        wrong.append(f"unexpected losses: {surprising}")
    if digest(path) != before:
        wrong.append("reading changed the folder")
    return wrong, lost, max(0, appended - done)


def _judge_attempt(run: Run, index: int) -> list[str]:
    offset = next(a.step_offset for a in run.attempts if a.index == index)
    frame = run.frame("gradient", "norm", attempt=index)
    steps = frame.steps - offset
    wrong = []
    if not np.array_equal(steps, np.arange(len(steps))):
        wrong.append(f"attempt {index} has gaps")
    elif not all(np.array_equal(frame.values[s], floats_at(s)[:, 0]) for s in range(len(steps))):
        wrong.append(f"attempt {index} holds wrong values")
    scalar = run.scalar("loss", attempt=index)
    if not np.array_equal(scalar.values, 1.0 / (scalar.steps - offset + 1)):
        wrong.append(f"attempt {index} holds wrong scalars")
    if len(scalar.steps) != len(steps):
        wrong.append(f"attempt {index} has {len(scalar.steps)} losses for {len(steps)} steps")
    is_stored = "gram" in run.array_names()  # a kill before the first flush leaves none
    at, arrays = run.array("gram", attempt=index) if is_stored else ((), [])
    if any(not np.array_equal(a, floats_at(int(s) - offset)) for s, a in zip(at, arrays, strict=True)):
        wrong.append(f"attempt {index} holds wrong arrays")
    return wrong


def orphan(path: Path, base: Path) -> list[str]:
    """Copy a killed run without its logs: whatever the manifest knows to be missing must be said."""
    copy = base / "orphan"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*-wal", "*-shm"))
    entry = json.loads((copy / "manifest.json").read_text())["attempts"][-1]
    stated = entry["progress"]["files"].get(f"attempt-{entry['index']:03d}/rank-00000.db", {})
    run = open_run(copy)
    found = len(run.frame("gradient", "norm", attempt=entry["index"]).steps)
    short = found < stated.get("series_gradient", 0)
    said = any("holds only" in loss or "lost are" in loss for loss in run.losses)
    return (
        [f"without its log the run has {found} rows of {stated}, says {run.losses}"] if short != said else []
    )


def kill_once(base: Path, seed: int, longest: float) -> tuple[str, list[str], int, int]:
    """Start a victim, kill it after a random time, check; return where it fell and what was found."""
    source = random.Random(seed)
    path = base / f"run-{seed}"
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    shared[: SHARED.size] = SHARED.pack(-1, -1, -1, -1)
    child = os.fork()
    if child == 0:
        try:
            victim(path, shared, seed)
        except Exception as error:  # noqa: BLE001 - whatever ends a victim is a failure to report
            sys.stderr.write(f"victim: {type(error).__name__}: {error}\n")
        finally:
            os._exit(1)
    time.sleep(source.uniform(0.0, longest))
    os.kill(child, signal.SIGKILL)
    _, how = os.waitpid(child, 0)
    attempt, appended, _, done = SHARED.unpack(shared[: SHARED.size])
    try:
        if not os.WIFSIGNALED(how):
            return "died by itself", ["the victim ended with an error"], 0, 0
        if not path.exists():
            return "before the folder", [], 0, 0
        try:
            wrong, lost, late = check(path, attempt, done, appended)
        except RunFormatError as error:
            empty = not any(p.is_file() and not p.name.startswith(".") for p in path.rglob("*"))
            return "before the manifest", [] if empty else [str(error)], 0, 0
        finished = open_run(path).status is RunStatus.FINISHED
        if source.random() < 0.3:
            wrong += orphan(path, base)
        if source.random() < 0.3:
            compact(path)
            wrong += [f"after compaction: {text}" for text in check(path, attempt, done, appended)[0]]
        if source.random() < 0.3:
            writer = RunWriter.create(path, resume=True)
            writer.close()
            wrong += [f"after a restart: {text}" for text in check(path, -1, -1, -1)[0]]
        return ("between attempts" if finished else "while recording"), wrong, lost, late
    finally:
        shutil.rmtree(path, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--longest", type=float, default=0.3, help="seconds that a victim lives at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    failures: list[str] = []
    lost_steps, late_steps = [], []
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        base = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="backlight-kills-")))
        for i in range(options.kills):
            where, wrong, lost, late = kill_once(base, options.seed + i, options.longest)
            counts[where] += 1
            failures += [f"kill {options.seed + i}: {text}" for text in wrong]
            if where == "while recording":
                lost_steps.append(lost)
                late_steps.append(late)
    beyond = sum(lost > late for lost, late in zip(lost_steps, late_steps, strict=True))
    result = {
        "kills": options.kills,
        "where": dict(counts),
        "failures": failures,
        "median steps lost": float(np.median(lost_steps)) if lost_steps else 0.0,
        "most steps lost": max(lost_steps, default=0),
        "lost more than one flush interval": beyond,
        "seconds": time.monotonic() - began,
    }
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        _print(result)
    return 1 if failures or beyond else 0


def _print(result: dict[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{result['kills']} times SIGKILL")
    table.add_column("what")
    table.add_column("count", justify="right")
    where = result["where"]
    if isinstance(where, dict):
        for key, count in sorted(where.items()):
            table.add_row(f"killed {key}", str(count))
    failures = result["failures"]
    table.add_row("folders that fail a check", str(len(failures) if isinstance(failures, list) else failures))
    for key in ("lost more than one flush interval", "median steps lost", "most steps lost"):
        table.add_row(key, f"{result[key]:g}")
    table.add_row("seconds", f"{result['seconds']:.1f}")
    Console().print(table)
    if isinstance(failures, list):
        for failure in failures[:20]:
            Console().print(failure, markup=False)


if __name__ == "__main__":
    sys.exit(main())
