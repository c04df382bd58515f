"""`compare --against`: what it says of sound repeats of a run, and of runs with an injected error.

For each error of `tests/faults/silent/` two runs without it are the good ones. A third run without it, with
another seed, must contradict none of their facts; the run with the error should contradict one. Facts that
rest on the findings of backlight's own rules are left out. With `--public` each of the programs of
`bench/healthy.py` runs three times, and each run is held against the two others.

    python bench/reference.py
    python bench/reference.py --public ~/clones
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from healthy.programs import PROGRAMS, Program
from healthy.running import environment_of, execute, prepared

import backlight
from backlight.analysis.reference import FIRST_STEPS, compare_with
from backlight.store.errors import StoreError
from backlight.store.read.run import Run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults.silent_runs import expected_faults

REPEATS = 3
"""Runs of each public program."""

MONITORS = ("health", "correctness", "steptime")


def recorded(folder: Path, name: str, seed: int, *, is_wrong: bool) -> Run:
    """Return the run of a training loop with or without its error."""
    torch.manual_seed(seed)
    # Some errors end in an exception.
    with (
        contextlib.suppress(Exception),
        backlight.watch(run=folder, every=1, monitors=MONITORS, quiet=True),
    ):
        expected_faults()[name].train(is_wrong)
    return backlight.open_run(folder)


def contradicted(good: Sequence[Run], run: Run) -> list[str]:
    """Return the names of the facts that a run contradicts, but for findings."""
    return [fact.name for fact in compare_with(good, run).contradicted if fact.name != "findings"]


def tried(name: str) -> tuple[str, list[str], list[str]]:
    """Return what a sound repeat, and the run with the error, contradict."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        runs = [recorded(Path(folder) / str(seed), name, seed, is_wrong=False) for seed in range(3)]
        wrong = recorded(Path(folder) / "wrong", name, 3, is_wrong=True)
        try:
            return name, contradicted(runs[:2], runs[2]), contradicted(runs[:2], wrong)
        except ValueError as error:
            return name, [], [f"not compared: {error}"]


def repeats(program: Program, clones: Path, work: Path, seconds: float) -> list[Run]:
    """Return runs of a public program, each for some processor time."""
    runs = []
    for repeat in range(REPEATS):
        folder, script = prepared(program, clones, work / str(repeat))
        out = folder / "backlight-run"
        starter = [sys.executable, "-m", "backlight", "run", "--out", str(out), str(script)]
        execute([*starter, *shlex.split(program.arguments)], folder, environment_of(folder), seconds)
        with contextlib.suppress(OSError, StoreError):
            runs.append(backlight.open_run(out))
    return [run for run in runs if run.last_step() >= FIRST_STEPS]


def compare_public(clones: Path, work: Path, seconds: float, only: str) -> None:
    """Print what runs of public programs contradict in their repeats, each of which holds the others good."""
    false = compared = 0
    for program in (each for each in PROGRAMS if any(part in each.name for part in only.split(","))):
        try:
            runs = repeats(program, clones, work, seconds)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{program.name}: not started: {error}")
            continue
        if len(runs) < REPEATS:
            print(f"{program.name}: not compared")
            continue
        for run in runs:
            facts = contradicted([each for each in runs if each is not run], run)
            false, compared = false + bool(facts), compared + 1
            print(f"{program.name}: {'; '.join(facts) or '-'}", flush=True)
    print(f"false: {false} of {compared} runs")


def main() -> None:
    """Print one line for each error, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names that contain this, or one of several parts")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--public", type=Path, help="folder of clones: compare runs of public programs")
    parser.add_argument("--work", type=Path, default=Path("build/repeats"), help="folder of their runs")
    parser.add_argument("--seconds", type=float, default=20.0, help="processor time of each of these runs")
    options = parser.parse_args()
    if options.public is not None:
        # A shell starts what runs in the background with SIGINT ignored, and programs inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        compare_public(options.public.resolve(), options.work.resolve(), options.seconds, options.only)
        return
    parts = options.only.split(",")
    names = [name for name in expected_faults() if any(part in name for part in parts)]
    false = named = compared = 0
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for name, of_repeat, of_error in pool.map(tried, names):
            is_compared = not of_error[:1] or not of_error[0].startswith("not compared")
            compared += is_compared
            false += bool(of_repeat)
            named += bool(of_error) and is_compared
            print(f"{name}: repeat {'; '.join(of_repeat) or '-'} | error {'; '.join(of_error) or '-'}")
    print(f"of {compared}: errors that contradict a fact {named}, sound repeats that do {false}")


if __name__ == "__main__":
    main()
