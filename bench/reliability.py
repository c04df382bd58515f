"""What a run survives: kills, failures of the system around it, damaged and hostile files.

Four parts. A writer of run directories is killed (``bench/kills.py``); ``backlight run`` is killed while a
script trains; every failure of ``bench/failures.py`` is injected once; mutated inputs of ``tests/fuzz`` are
answered. ``--write`` writes ``docs/reliability.md``.

    python bench/reliability.py [--write] [--kills 500] [--runs 20] [--inputs 850]
    python bench/reliability.py --kinds manifest forged
    python bench/reliability.py --only training_killed stuck_watchdog
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
if str(HERE) not in sys.path:
    sys.path.append(str(HERE))

from failures import FAILURES, Outcome, Training, inject  # noqa: E402 - in this directory

# Without this directory, whose report.py hides the folder of that name in the tests.
sys.path[:] = [str(HERE.parent / "tests"), *(path for path in sys.path if path != str(HERE))]

from backlight.records import RunStatus  # noqa: E402 - see above
from backlight.store.errors import RunFormatError  # noqa: E402 - see above
from backlight.store.read.run import open_run  # noqa: E402 - see above
from fuzz.targets import TARGETS, write_seeds  # noqa: E402 - in the tests
from fuzz.test_fuzz import MEMORY_BYTES, TIMEOUT_S, fuzz  # noqa: E402 - in the tests

PAGE = HERE.parent / "docs" / "reliability.md"

LONGEST_S = 8.0
"""A training run is killed at most so long after its first step."""

DONE = """
import os
file = os.open("done", os.O_WRONLY | os.O_CREAT)
def at(step):
    os.pwrite(file, b"%9d" % (step - 1), 0)
"""
"""Fault module of a script that notes its last complete step."""


@dataclass
class Kills:
    """Kills of one kind; ``lost`` are the steps that were complete and are not in the run, one per kill."""

    count: int
    failures: list[str]
    lost: list[int]
    before_a_run: int = 0


def kill_writers(count: int) -> Kills:
    """Kill processes that write run directories."""
    command = [sys.executable, str(HERE / "kills.py"), "--kills", str(count), "--json"]
    found: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout)
    return Kills(count, found["failures"], [int(found["most steps lost"])])


def kill_runs(count: int, seed: int = 0) -> Kills:
    """Kill ``backlight run``, at random moments after the first step of its script."""
    source, kills = random.Random(seed), Kills(count, [], [])
    for number in range(count):
        with tempfile.TemporaryDirectory(prefix="backlight-kill-", ignore_cleanup_errors=True) as base:
            training = Training(Path(base), DONE, steps=100_000)
            process = training.start()
            noted = training.folder / "done"
            while not (noted.exists() and noted.read_text()) and process.poll() is None:
                time.sleep(0.02)
            time.sleep(source.uniform(0.0, LONGEST_S))
            process.kill()
            process.communicate()
            done = int(noted.read_text())
            try:
                run = open_run(training.folder / "run")
            except RunFormatError as error:
                kills.failures.append(f"kill {number}: {error}")
                continue
            stored = max(run.series_steps("gradient").tolist(), default=-1)
            kills.lost.append(max(0, done - stored))
            if run.status is not RunStatus.KILLED or not any("was killed" in loss for loss in run.losses):
                kills.failures.append(f"kill {number}: status {run.status.value}, {run.losses}")
    return kills


def answer_inputs(names: Sequence[str], count: int, folder: Path) -> dict[str, tuple[int, int, str]]:
    """Answer mutated inputs of each kind; return how many, how many were refused, and what failed."""
    (folder / "seeds").mkdir()
    seeds = write_seeds(folder / "seeds")
    answered = {}
    for name in names:
        try:
            said = fuzz(name, seeds, range(count))
            answered[name] = (len(said), sum(line != "answered" for line in said), "")
        except AssertionError as error:
            answered[name] = (count, 0, str(error)[:2000])
        sys.stderr.write(f"{name}: {answered[name]}\n")
    return answered


def inject_failures(names: Sequence[str]) -> list[Outcome]:
    """Inject each failure once."""
    outcomes = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="backlight-failure-", ignore_cleanup_errors=True) as base:
            outcomes.append(inject(name, Path(base)))
        sys.stderr.write(
            f"{outcomes[-1].name}: {outcomes[-1].problems or outcomes[-1].skipped or 'survived'}\n"
        )
    return outcomes


def page(
    writers: Kills, runs: Kills, inputs: dict[str, tuple[int, int, str]], outcomes: list[Outcome]
) -> str:
    """Return the page of the documentation."""
    tried = sum(count for count, _, _ in inputs.values())
    refused = sum(number for _, number, _ in inputs.values())
    survived = sum(not o.problems and not o.skipped for o in outcomes)
    skipped = sum(bool(o.skipped) for o in outcomes)
    rows = [
        ("writers of run directories killed", str(writers.count), _failed(writers.failures)),
        ("most steps lost by one of them", str(max(writers.lost, default=0)), "within one flush interval"),
        ("training runs killed (`backlight run`, 1 s between flushes)", str(runs.count),
         _failed(runs.failures)),
        ("most steps lost by one of them, of .02 s each", str(max(runs.lost, default=0)), "stated"),
        ("mutated inputs tried", str(tried), f"{tried - refused} answered, {refused} refused in one line; "
         + _failed([problem for _, _, problem in inputs.values() if problem])),
        ("failures injected", str(len(outcomes) - skipped), f"{survived} survived"),
    ]  # fmt: skip
    figures = "\n".join(f"| {what} | {number} | {result} |" for what, number, result in rows)
    kinds = "\n".join(f"| {name} | {count} | {number} |" for name, (count, number, _) in inputs.items())
    failures = "\n".join(
        f"| {o.said.rstrip('.').replace('``', '`')} | "
        f"{f'not tried: {o.skipped}' if o.skipped else 'no: ' + o.problems[0] if o.problems else 'yes'} |"
        for o in outcomes
    )
    return f"""# Reliability

What a run survives, measured by `python bench/reliability.py --write`, which wrote this page. The tests
try each of it with fewer kills and inputs; `make test-full` tries 850 inputs of each kind.

| | number | result |
|---|---|---|
{figures}

A killed run opens, holds every flushed step with its right values, and states that it was killed and what may
be missing: at most one flush interval, 1 s by default.

Commands that write are killed as well, each at 100 random moments (`bench/command_kills.py --kills 100`):
`join`, `export` to three formats, `report`, its bundle, `compact` and `run --resume`. What they read is
unchanged, what they wrote is whole or absent, and a second try completes it: none of 800 failed, of which
637 were killed before their end. One kill of `run --resume` came before the first flush, and the run
states so.

## Failures

Each is injected into `backlight run` of a script, once. It is survived where exit code and final weights are
those of the script alone, no traceback is printed, at most one line names what is no longer measured, and the
run directory states the same.

| failure | survived |
|---|---|
{failures}

The watchdog waits 1 s for the ends of other ranks, and ends at most 1 s after the last of them,
whatever blocks it; time in which it runs, or waits for a core, is not counted, since it may be writing
what it found. It holds no descriptor of the script.

What is lost is not recovered: after a full disk or closed descriptors the run has the steps before, and says
so: its verdict is `Incomplete: recording stopped at step 256 of 2,500`, without a tick, in every output. A
run that is interrupted (Ctrl-C), a job of torchrun as well, has the exit code that it has alone and the
verdict `Interrupted at step 91` (`tests/ranks/test_interrupt.py`). A script that closes all descriptors may
close files of backlight; nothing is written to a number that the script has opened since, and the recording
ends.

## Signals

Python calls a signal handler of the script between two instructions of the main thread, also of backlight's.
What it raises reaches the training loop; `tests/test_interrupts.py` interrupts a recorded step at each call
of backlight. `OMP_NUM_THREADS=1 python bench/alarms.py --alarms 4000 --short 160`:

| | alarms | reached the loop | lost | loop broken | gradient mode left off |
|---|---|---|---|---|---|
| no watch | 4000 | 4000 | 0 | 0 | 8 |
| one watch, every step | 4000 | 4000 | 0 | 0 | 2 |
| one watch, default | 4000 | 4000 | 0 | 0 | 7 |
| a watch each, every step | 160 | 159 | 1 | 0 | 0 |

PyTorch itself leaves gradient mode off where an alarm meets the end of `optimizer.step`. Known limitation: an
alarm that meets a finalizer of a reader of the run (`weakref.finalize`) is printed by Python and lost;
without a watch the same happens in weak references of PyTorch.

Threads of backlight block all signals, and `threading.enumerate()` lists none of them
(`tests/test_threads.py`): a signal that the script blocks while it saves waits, as without backlight.

## Forks

A fork of the script waits while another thread is inside of a call of SQLite that is backlight's, for 5 s
at most: a child never inherits a lock of SQLite's allocator that no thread would release
(`tests/store/test_connections.py`). Locks are held for a call, never for a transaction. The same
holds for HDF5. With a thread that reads the run meanwhile, `pytest tests/exits/test_forks.py` forks 100
children that use SQLite, with `-m full` 5,000: none was stuck, and 3 of 38 were before.

Known limitation: what a signal handler raises while a fork waits is printed by Python and lost, as in every
function that is registered with `os.register_at_fork`.

## Objects

A watch keeps no model, optimizer, parameter, batch or loader of the script alive: what is deleted is
freed at the same moment, with its memory, and `__del__`, `weakref` callbacks and functions at exit run
in the order in which they run without a watch. `pytest tests/exits/test_objects.py` compares 14 scripts
with plain Python, under `backlight run` and `backlight.watch`, by what they print and write. What was
recorded of a model that is gone stays in the run under its names; gradients of its last step are
measured only if that step was one of the recorded ones.

Known limitations: on a host without an accelerator a batch exists from its backward pass to the step of
the optimizer, since a leap of the loss is explained by its samples. Where no step comes it is dropped at the
forward pass that is one more than the two steps before had; without an optimizer it is never kept. The norm
of a clipping exists until the next step; a `Watch` keeps the `samples` that it was given.

## Inputs

Mutated bytes, numbers, names, tables, links and sizes. Each is answered, or refused in one line, within
{TIMEOUT_S:g} s of CPU time and {MEMORY_BYTES >> 20} MiB more memory, without a traceback. What is
returned of a changed database, manifest, rank document or array are the stored values, and what is missing is
stated. The kind `forged` has checksums that fit, so its values may differ.

| kind | inputs | refused |
|---|---|---|
{kinds}
"""


def _failed(failures: Sequence[str]) -> str:
    return f"{len(failures)} failed: {failures[0]}" if failures else "none failed"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--inputs", type=int, default=850, help="of each kind")
    parser.add_argument("--only", nargs="*", choices=FAILURES, help="only inject these, and print JSON")
    parser.add_argument("--kinds", nargs="*", choices=TARGETS, help="only answer these, and print JSON")
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warnings.simplefilter("ignore")
    if options.only is not None:
        outcomes = inject_failures(options.only)
        sys.stdout.write(json.dumps([asdict(outcome) for outcome in outcomes]) + "\n")
        return int(any(outcome.problems for outcome in outcomes))
    with tempfile.TemporaryDirectory(prefix="backlight-inputs-") as folder:
        inputs = answer_inputs(options.kinds or list(TARGETS), options.inputs, Path(folder))
    if options.kinds is not None:
        sys.stdout.write(json.dumps(inputs) + "\n")
        return int(any(problem for _, _, problem in inputs.values()))
    writers, runs = kill_writers(options.kills), kill_runs(options.runs)
    outcomes = inject_failures(list(FAILURES))
    text = page(writers, runs, inputs, outcomes)
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    problems = [*writers.failures, *runs.failures, *(p for o in outcomes for p in o.problems)]
    return int(bool(problems) or any(problem for _, _, problem in inputs.values()))


if __name__ == "__main__":
    sys.exit(main())
