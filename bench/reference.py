"""`compare --against`: what it says of sound repeats of a run, and of runs with an injected error.

For each error of `tests/faults/silent/` two runs without it are the good ones. A third run without it, with
another seed, must contradict none of their facts; the run with the error should contradict one. Facts that
rest on the findings of backlight's own rules are left out. `--public` compares runs of public programs, in
the folders of stored runs that are given: each is held against the others of its folder.

    python bench/reference.py
    python bench/reference.py --public build/repeats
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

import backlight
from backlight.analysis.reference import compare_with
from backlight.store.read.run import Run

if str(Path(__file__).parent) in sys.path:  # it has another `ranks`
    sys.path.remove(str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from faults.silent_runs import expected_faults

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


def compare_folder(folder: Path) -> tuple[int, int]:
    """Print what runs of one program contradict in the others; return how many did, and of how many."""
    runs = [backlight.open_run(path) for path in sorted(folder.iterdir()) if path.is_dir()]
    wrong = 0
    for run in runs:
        facts = contradicted([each for each in runs if each is not run], run)
        wrong += bool(facts)
        if facts:
            print(f"{folder.name} {run.name}: {'; '.join(facts)}")
    return wrong, len(runs)


def main() -> None:
    """Print one line for each error, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="errors whose names contain this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--public", type=Path, help="folder of a folder of runs for each public program")
    options = parser.parse_args()
    if options.public is not None:
        counts = [compare_folder(path) for path in sorted(options.public.iterdir()) if path.is_dir()]
        print(f"false: {sum(c[0] for c in counts)} of {sum(c[1] for c in counts)} runs")
        return
    names = [name for name in expected_faults() if options.only in name]
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
